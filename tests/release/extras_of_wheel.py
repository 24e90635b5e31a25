"""One test of each extra, for an installed wheel. `try_wheel.py` copies this file out of the checkout and runs it there."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import camscope
from camscope import GradCAM, load_model
from camscope.phantom import draw_radiograph

ROOT = Path(camscope.__file__).parent


@pytest.fixture(scope="module")
def model():
    assert "site-packages" in str(ROOT), "this is a test of an installed wheel"
    return load_model("phantom")


@pytest.fixture(scope="module")
def scan():
    return draw_radiograph(seed=11, finding="nodule")


@pytest.fixture
def photos(tmp_path, scan):
    for seed in range(3):
        Image.fromarray(draw_radiograph(seed=seed, finding="nodule").image).save(tmp_path / f"{seed}.png")
    return tmp_path


def assert_map(explanation):
    assert np.isfinite(explanation.attribution).all()
    assert explanation.attribution.any()


def test_batch_extra(model, photos, tmp_path):
    from camscope.batch import BatchRun, run_batch

    run_batch(GradCAM(model), photos, tmp_path / "run")
    run = BatchRun(tmp_path / "run")
    assert (len(run.table()), run.n_failed_rows) == (3, 0)
    run.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_ray_extra(model, photos, tmp_path):
    import ray

    from camscope.batch import BatchOptions, BatchRun, run_batch

    run_batch(GradCAM(model), photos, tmp_path / "run", options=BatchOptions(engine="ray"))
    ray.shutdown()
    assert len(BatchRun(tmp_path / "run").table()) == 3


def test_segments_extra(model, scan):
    assert_map(camscope.SegmentAblation(model).explain(scan.image, "nodule"))


def test_metrics_extra(model, photos, tmp_path):
    from typer.testing import CliRunner

    from camscope.cli import app

    command = [
        "compare",
        str(photos),
        "--model",
        "phantom",
        "--methods",
        "gradcam,layercam",
        "-o",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "out").glob("*.png"))


def test_audit_extra(tmp_path):
    from camscope import audit
    from camscope.audit.core.config import Config
    from camscope.audit.demo_dataset_and_model import write_demo_study

    plain = write_demo_study(tmp_path / "study", n_images=40).model_dump()
    plain["skip"] = ("faithfulness", "robustness", "sanity")
    run = audit.run_audit(Config.from_source(plain), tmp_path / "audit")
    assert run.report_path.is_file()
    assert run.verdicts


def test_quantus_extra():
    import quantus

    assert quantus.PixelFlipping


def test_medical_extra(tmp_path, scan):
    import nibabel

    from camscope import read_scan

    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 9, 10), np.int16), np.eye(4)), tmp_path / "a.nii.gz")
    assert read_scan(tmp_path / "a.nii.gz").shape


def test_itk_extra(tmp_path):
    import SimpleITK

    from camscope import read_scan

    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(np.zeros((4, 5, 6), np.int16)), str(tmp_path / "a.nrrd"))
    assert read_scan(tmp_path / "a.nrrd").shape


def test_codecs_gpl_extra():
    import libjpeg

    assert libjpeg.decode


def test_captum_extra(model, scan):
    assert_map(camscope.DeepLIFT(model).explain(scan.image, "nodule"))


def test_lrp_extra(model, scan):
    assert_map(camscope.LRP(model).explain(scan.image, "nodule"))


def test_hub_extra(scan):
    model = load_model("timm:resnet10t", weights="random")
    assert GradCAM(model).explain(scan.image, 3).attribution.ndim == 2


def test_yolo_extra(scan):
    """A model of random weights: its map need not show anything."""
    model = load_model("yolo:yolo11n.yaml")
    explanation = camscope.EigenCAM(model).explain(np.stack([scan.image] * 3, -1))
    assert explanation.layer == "neck"
    assert np.isfinite(explanation.attribution).all()


def test_nnunet_extra(tmp_path):
    import json

    import torch
    from dynamic_network_architectures.architectures.unet import PlainConvUNet
    from torch import nn

    sizes = {"n_stages": 2, "features_per_stage": [2, 4], "kernel_sizes": [[3] * 3] * 2, "strides": [[1] * 3, [2] * 3]}
    sizes |= {"n_conv_per_stage": [1, 1], "n_conv_per_stage_decoder": [1]}
    weights = PlainConvUNet(1, num_classes=2, conv_op=nn.Conv3d, **sizes).state_dict()
    described = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": sizes | {"conv_op": "torch.nn.Conv3d"},
        "_kw_requires_import": ["conv_op"],
    }
    configuration = {
        "patch_size": [8, 8, 8],
        "spacing": [1.0, 1.0, 1.0],
        "normalization_schemes": ["NoNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {"order": 3, "order_z": 0},
        "architecture": described,
    }
    plans = {"transpose_forward": [0, 1, 2], "configurations": {"3d_fullres": configuration}}
    (tmp_path / "fold_0").mkdir()
    (tmp_path / "plans.json").write_text(json.dumps(plans))
    dataset = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "a": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps(dataset))
    torch.save({"network_weights": weights}, tmp_path / "fold_0" / "checkpoint_final.pth")
    assert load_model(f"nnunet:{tmp_path}")(torch.rand(1, 1, 8, 8, 8)).shape == (1, 2, 8, 8, 8)


def test_monai_extra(tmp_path):
    import torch

    (tmp_path / "configs").mkdir()
    sizes = "spatial_dims: 2, in_channels: 1, out_channels: 2, channels: [2, 4], strides: [2]"
    (tmp_path / "configs" / "inference.yaml").write_text(f"network_def: {{_target_: UNet, {sizes}}}")
    assert load_model(f"bundle:{tmp_path}", weights="random")(torch.rand(1, 1, 8, 8)).shape == (1, 2, 8, 8)


def test_pathology_extra(tmp_path):
    import openslide

    from camscope.errors import ImageError
    from camscope.medical import read_slide_tiles

    assert openslide.__library_version__
    (tmp_path / "a.svs").write_bytes(b"no slide")
    with pytest.raises(ImageError):
        read_slide_tiles(tmp_path / "a.svs")


def test_onnx_extra(tmp_path, scan):
    import torch
    from onnx_files import write_network
    from torch import nn

    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = load_model(f"onnx:{write_network(tmp_path / 'net.onnx', network, (1, 'h', 'w'))}")
    assert_map(camscope.Occlusion(model).explain(torch.from_numpy(np.asarray(scan.image, np.float32))[None] / 255, 1))


def test_mcp_extra(model, photos):
    import anyio
    from mcp.client import Client

    from camscope.integrations.mcp_server import build_server
    from camscope.integrations.mcp_workspace import Workspace

    async def explain():
        async with Client(build_server(Workspace({"phantom": model}, [photos]))) as client:
            return await client.call_tool("explain", {"image": "0.png"})

    reply = anyio.run(explain)
    assert reply.structured_content["map"]["status"] == "ok"
    assert [block.type for block in reply.content] == ["text", "image"]


def test_lightning_extra(model, scan):
    from camscope.integrations.lightning import MapLogger

    pictures = []

    class Writer:
        def add_image(self, tag, image, step, dataformats):
            pictures.append(tag)

    MapLogger([scan.image], layer="layer4").maps.log(model, [Writer()], 0, first=True)
    assert pictures == ["maps/gradcam/0"]


def test_bench_extra():
    import captum
    import pytorch_grad_cam
    import torchcam

    assert captum
    assert pytorch_grad_cam
    assert torchcam
