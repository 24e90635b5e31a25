"""nnU-Net folders: the network, its preprocessing and its maps, against computations by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("dynamic_network_architectures")
nibabel = pytest.importorskip("nibabel")

from camscope import GradCAM, HiResCAM, explain_sliding_windows, load_model, read_scan, to_nifti  # noqa: E402 - skipped without the package
from camscope.errors import ImageError, InputError, ModelError, TargetError, WeightsError  # noqa: E402 - skipped without the package
from camscope.images.scans.scan import Scan  # noqa: E402 - skipped without the package
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata  # noqa: E402 - skipped without the package
from camscope.medical.explain_sliding_windows import compute_gaussian_weights  # noqa: E402 - skipped without the package
from camscope.targets import Region  # noqa: E402 - skipped without the package
from tests import nnunet_folders  # noqa: E402 - skipped without the package
from tests.zoo import of_medical  # noqa: E402 - skipped without the package

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
pytestmark = pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")


def block(x, state, name, stride=1):
    """Convolution, instance norm and leaky ReLU by hand."""
    x = F.conv3d(x, state[f"{name}.conv.weight"], state[f"{name}.conv.bias"], stride=stride, padding=1)
    mean, variance = x.mean((2, 3, 4), keepdim=True), x.var((2, 3, 4), keepdim=True, correction=0)
    scale, shift = (state[f"{name}.norm.{part}"][None, :, None, None, None] for part in ("weight", "bias"))
    x = (x - mean) / (variance + 1e-5).sqrt() * scale + shift
    return torch.where(x > 0, x, 0.01 * x)


def by_hand(x, state):
    """The logits and the bottleneck of a U-Net of three stages, from its weights alone."""
    first = block(x, state, "encoder.stages.0.0.convs.0")
    second = block(first, state, "encoder.stages.1.0.convs.0", 2)
    bottleneck = block(second, state, "encoder.stages.2.0.convs.0", 2)
    x = bottleneck
    for stage, skip in enumerate((second, first)):
        name = f"decoder.transpconvs.{stage}"
        x = F.conv_transpose3d(x, state[f"{name}.weight"], state[f"{name}.bias"], stride=2)
        x = block(torch.cat([x, skip], 1), state, f"decoder.stages.{stage}.convs.0")
    return F.conv3d(x, state["decoder.seg_layers.1.weight"], state["decoder.seg_layers.1.bias"]), bottleneck


def gauss(size):
    """nnU-Net's weights of a patch, by SciPy's filter as nnU-Net computes them."""
    from scipy.ndimage import gaussian_filter

    weights = np.zeros(size)
    weights[tuple(side // 2 for side in size)] = 1
    weights = gaussian_filter(weights, [side / 8 for side in size], mode="constant")
    weights /= weights.max()
    weights[weights == 0] = weights[weights > 0].min()
    return torch.from_numpy(weights)


@pytest.mark.parametrize("size", [(8, 16, 12), (7, 9), (1, 5, 3)])
def test_gaussian_weights_are_those_of_a_filtered_point(size):
    np.testing.assert_allclose(compute_gaussian_weights(size), gauss(size).numpy(), rtol=1e-9)


def test_the_network_of_the_plans_has_the_weights_of_the_checkpoint(tmp_path):
    network = nnunet_folders.write_folder(tmp_path / "model")
    model, x = load_model(f"nnunet:{tmp_path}/model"), torch.rand(2, 1, 8, 16, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(x), by_hand(x, network.state_dict())[0], rtol=1e-4, atol=1e-4)
    card = get_loaded_model_metadata(model)
    assert card.class_names == ("background", "liver", "tumor")
    assert card.layer == "encoder.stages.2"
    assert card.preprocess.patch_size == (8, 16, 12)


@pytest.mark.parametrize("changes", [{}, {"features": (4, 6), "strides": ((1, 1), (2, 2))}])
def test_residual_encoders_are_built(tmp_path, changes):
    sizes = {"patch_size": [8, 12], "spacing": [1.0, 1.0]} if changes else {}
    built = nnunet_folders.architecture("ResidualEncoderUNet", **changes)
    network = nnunet_folders.write_folder(tmp_path, architecture=built, **sizes)
    network.decoder.deep_supervision = False
    x = torch.rand(1, 1, *(sizes.get("patch_size") or (8, 16, 12)))
    with torch.no_grad():
        torch.testing.assert_close(load_model(f"nnunet:{tmp_path}")(x), network(x))


def test_plans_of_older_versions_describe_the_same_network(tmp_path):
    network = nnunet_folders.write_folder(tmp_path, architecture=nnunet_folders.architecture(features=(4, 8, 12)))
    content = json.loads((tmp_path / "plans.json").read_text())
    described = content["configurations"]["3d_fullres"]
    del described["architecture"]
    described |= {
        "UNet_class_name": "PlainConvUNet",
        "UNet_base_num_features": 4,
        "unet_max_num_features": 12,
        "n_conv_per_stage_encoder": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "pool_op_kernel_sizes": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
        "conv_kernel_sizes": [[3, 3, 3]] * 3,
    }
    (tmp_path / "plans.json").write_text(json.dumps(content))
    x = torch.rand(1, 1, 8, 16, 12)
    with torch.no_grad():
        logits = load_model(f"nnunet:{tmp_path}")(x)
        torch.testing.assert_close(logits, by_hand(x, network.state_dict())[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", of_medical.ROWS, ids=lambda row: f"{row.name} {len(row.patch)}-D")
def test_the_page_of_models_has_the_layers_and_grids(tmp_path, row):
    rank = len(row.patch)
    built = nnunet_folders.architecture(row.name, strides=((1,) * rank, (2,) * rank, (2,) * rank))
    sizes = {"patch_size": list(row.patch), "spacing": [1.0] * rank}
    nnunet_folders.write_folder(tmp_path, architecture=built, **sizes)
    region = Region("liver", mask=np.ones(row.patch, bool))
    explanation = GradCAM(load_model(f"nnunet:{tmp_path}")).explain(torch.rand(1, *row.patch), region)
    assert (explanation.layer, explanation.grid) == (row.layer, row.grid)
    assert of_medical.section() in PAGE.read_text("utf-8")


def maps_by_hand(x, network, weigh, region_class):
    """Score, region and merged map of all patches: predictions and Grad-CAM by autograd, patch by patch."""
    size = (8, 16, 12)
    state = {name: value.clone().requires_grad_(True) for name, value in network.state_dict().items()}
    weights, total = gauss(size), torch.zeros(x.shape[1:], dtype=torch.float64)
    logits = torch.zeros(3, *x.shape[1:], dtype=torch.float64)
    starts = [
        (a, b, c) for a in (0, 4, 8) for b in (0, 6) for c in (0, 5)
    ]  # 16 = 8 + 2 * 4; 22 = 16 + 6; 17 = 12 + 5, and steps are at most half a patch
    parts = [tuple(slice(s, s + n) for s, n in zip(start, size, strict=True)) for start in starts]
    for part in parts:
        out = by_hand(x[(slice(None), *part)][None], state)[0][0].double()
        logits[(slice(None), *part)] += out.detach() * weights
        total[part] += weights
    logits /= total
    region = logits.argmax(0) == region_class
    score = logits[region_class][region].mean()
    merged = torch.zeros_like(total)
    for part in parts:
        out, bottleneck = by_hand(x[(slice(None), *part)][None], state)
        share = (weights * region[part] / total[part] / region.sum()).float()
        gradient = torch.autograd.grad((out[0, region_class] * share).sum(), bottleneck)[0]
        weighted = gradient.mean((2, 3, 4), keepdim=True) * bottleneck if weigh == "gradcam" else gradient * bottleneck
        cam = weighted.sum(1, keepdim=True)
        cam = F.relu(cam) if weigh == "gradcam" else cam  # HiResCAM is signed
        merged[part] += F.interpolate(cam, size=size, mode="trilinear", align_corners=False)[0, 0].double() * weights
    return float(score), region, (merged / total).detach()


@pytest.mark.parametrize("method", [GradCAM, HiResCAM])
def test_maps_of_patches_are_those_by_hand(tmp_path, method):
    network = nnunet_folders.write_folder(tmp_path)
    model, x = load_model(f"nnunet:{tmp_path}"), torch.randn(1, 16, 22, 17, generator=torch.Generator().manual_seed(3))
    explanation = explain_sliding_windows(method(model), x, "tumor")
    score, region, expected = maps_by_hand(x, network, method.name, 2)
    assert region.any()
    assert explanation.score == pytest.approx(score, rel=1e-4)
    assert explanation.layer == "encoder.stages.2"
    assert explanation.label == "tumor where it is predicted"
    np.testing.assert_allclose(explanation.attribution, expected.numpy(), atol=1e-4 * float(expected.max()))
    assert expected.max() > 0


def test_a_mask_is_the_region(tmp_path):
    nnunet_folders.write_folder(tmp_path)
    model, x = load_model(f"nnunet:{tmp_path}"), torch.randn(1, 16, 22, 17)
    mask = np.zeros((16, 22, 17), bool)
    mask[:3, :4, :2] = True  # only the first patch along each axis reaches it
    explanation = explain_sliding_windows(GradCAM(model), x, Region("liver", mask=mask))
    assert explanation.label == "liver in a region"
    assert not explanation.attribution[12:].any()
    assert explanation.attribution[:8].any()
    assert "2 of them reach the region" in explanation.notes[-1] or "1 of them reach" in explanation.notes[-1]


def test_regions_that_overlap_are_where_the_logit_is_positive(tmp_path):
    labels = {"background": 0, "organ": [1, 2], "tumor": 2}
    nnunet_folders.write_folder(tmp_path, labels=labels, n_classes=2)
    model, x = load_model(f"nnunet:{tmp_path}"), torch.randn(1, 8, 16, 12)
    assert get_loaded_model_metadata(model).class_names == ("organ", "tumor")
    with torch.no_grad():
        model.decoder.seg_layers[-1].bias -= model(x[None])[0].mean((1, 2, 3))
        logits = by_hand(x[None], model.state_dict())[0][0, 0]
    explanation = explain_sliding_windows(HiResCAM(model), x, "organ")
    assert explanation.label == "organ where it is predicted"
    assert explanation.score == pytest.approx(float(logits[logits > 0].mean()), rel=1e-3)


def test_a_class_that_is_not_predicted_is_one_error(tmp_path):
    network = nnunet_folders.write_folder(tmp_path)
    state = network.state_dict()
    state["decoder.seg_layers.1.bias"][:] = torch.tensor([100.0, 0.0, 0.0])
    torch.save(state, tmp_path / "weights.pt")
    model = load_model(f"nnunet:{tmp_path}", weights=tmp_path / "weights.pt")
    with pytest.raises(TargetError, match="no pixel predicted"):
        explain_sliding_windows(GradCAM(model), torch.rand(1, 8, 16, 12), "tumor")


def test_slices_of_a_2d_configuration_are_explained_one_by_one(tmp_path):
    flat = nnunet_folders.architecture(features=(4, 6), strides=((1, 1), (2, 2)))
    nnunet_folders.write_folder(tmp_path, architecture=flat, patch_size=[8, 12], spacing=[1.0, 1.0])
    model, x = load_model(f"nnunet:{tmp_path}"), torch.randn(1, 3, 8, 12)
    mask = np.zeros((3, 8, 12), bool)
    mask[1, 2:6, 2:6] = True
    explanation = explain_sliding_windows(HiResCAM(model), x, Region(1, mask=mask))
    single = HiResCAM(model).explain(x[:, 1], Region(1, mask=mask[1]))
    assert explanation.score == pytest.approx(single.score, rel=1e-4)
    expected = F.interpolate(torch.from_numpy(single.attribution)[None, None], size=(8, 12), mode="bilinear")[0, 0]
    np.testing.assert_allclose(explanation.attribution[1], expected.numpy(), atol=1e-5)
    assert not explanation.attribution[[0, 2]].any()


# Preprocessing


def volume(shape=(14, 18, 10), seed=0):
    values = np.random.default_rng(seed).normal(60, 50, shape).astype(np.float32)
    values[:2], values[:, -3:] = 0, 0
    return values


def write_scan(path, values, sides=(1.0, 1.5, 3.0), offset=(10.0, -20.0, 5.0)):
    affine = np.diag([*sides, 1.0])
    affine[:3, 3] = offset
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


def test_z_score_crop_and_resampling_are_those_of_scikit_image(tmp_path):
    """The steps of nnU-Net's DefaultPreprocessor, written with scikit-image as nnU-Net itself does."""
    from skimage.transform import resize

    nnunet_folders.write_folder(tmp_path / "model", use_mask_for_norm=[True], spacing=[2.0, 1.2, 1.1])
    model, path = load_model(f"nnunet:{tmp_path}/model"), write_scan(tmp_path / "scan.nii.gz", volume())
    x, placement = get_loaded_model_metadata(model).preprocess(read_scan(path))
    values = volume().transpose(2, 1, 0)[:, :15, 2:]  # the axes of ITK, without the planes of zeros
    mask = values != 0
    values[mask] = (values[mask] - values[mask].mean()) / values[mask].std()
    size = (round(10 * 3.0 / 2.0), round(15 * 1.5 / 1.2), round(12 * 1.0 / 1.1))
    expected = resize(values.astype(float), size, 3, mode="edge", anti_aliasing=False)
    expected = np.pad(expected, [(0, 0), (0, 0), (0, 1)])  # 11 of 12 voxels of the patch
    np.testing.assert_allclose(x[0].numpy(), expected, atol=1e-5)
    # the corner of the input is the corner of the crop: voxel (2, 0, 0) of the file
    np.testing.assert_allclose(placement.to_image([[0.0, 0.0, 0.0]]), [[2.0, 0.0, 0.0]], atol=1e-9)


def test_long_voxels_are_resampled_slice_by_slice(tmp_path):
    from skimage.transform import resize

    nnunet_folders.write_folder(tmp_path / "model", spacing=[5.0, 1.2, 1.1], patch_size=[4, 8, 8])
    values = volume()
    values[values == 0] = 1
    path = write_scan(tmp_path / "scan.nii.gz", values, (1.0, 1.5, 4.0))
    x, _ = get_loaded_model_metadata(load_model(f"nnunet:{tmp_path}/model")).preprocess(read_scan(path))
    values = values.transpose(2, 1, 0)
    values = (values - values.mean()) / values.std()
    slices = np.stack([resize(part.astype(float), (22, 13), 3, mode="edge", anti_aliasing=False) for part in values])
    nearest = [int(np.floor((i + 0.5) * 10 / 8)) for i in range(8)]
    np.testing.assert_allclose(x[0].numpy(), slices[nearest], atol=1e-4)


def test_ct_is_clipped_and_scaled_by_the_training_data(tmp_path):
    nnunet_folders.write_folder(
        tmp_path / "model", normalization_schemes=["CTNormalization"], spacing=[3.0, 1.5, 1.0], patch_size=[4, 4, 4]
    )
    path = write_scan(tmp_path / "scan.nii.gz", volume())
    x, _ = get_loaded_model_metadata(load_model(f"nnunet:{tmp_path}/model")).preprocess(read_scan(path))
    expected = (np.clip(volume(), -60, 180).transpose(2, 1, 0)[:, :15, 2:] - 50) / 40
    np.testing.assert_allclose(x[0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "scheme", ["ZScoreNormalization", "CTNormalization", "RescaleTo01Normalization", "NoNormalization"]
)
@pytest.mark.parametrize("sides", [(1.0, 1.5, 3.0), (1.0, 1.2, 5.0), (0.9, 0.8, 0.75)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_inputs_equal_those_of_nnunet_itself(tmp_path, scheme, sides, order):
    """nnU-Net's own preprocessor, where the package is installed."""
    module = pytest.importorskip("nnunetv2.preprocessing.preprocessors.default_preprocessor")
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    masked = [scheme == "ZScoreNormalization"]
    nnunet_folders.write_folder(tmp_path / "model", normalization_schemes=[scheme], use_mask_for_norm=masked)
    content = nnunet_folders.plans(normalization_schemes=[scheme], use_mask_for_norm=masked)
    content["transpose_forward"] = list(order)
    content["transpose_backward"] = np.argsort(order).tolist()
    (tmp_path / "model" / "plans.json").write_text(json.dumps(content))
    path = write_scan(tmp_path / "scan.nii.gz", volume(), sides)
    x, placement = get_loaded_model_metadata(load_model(f"nnunet:{tmp_path}/model")).preprocess(read_scan(path))
    manager = PlansManager(content)
    data, _, _ = module.DefaultPreprocessor(verbose=False).run_case_npy(
        volume().transpose(2, 1, 0)[None], None, {"spacing": list(sides[::-1])}, manager,
        manager.get_configuration("3d_fullres"), nnunet_folders.dataset(),
    )  # fmt: skip
    missing = [max(0, n - side) for n, side in zip((8, 16, 12), data.shape[1:], strict=True)]
    expected = np.pad(data[0], [(n // 2, n - n // 2) for n in missing])
    np.testing.assert_allclose(x[0].numpy(), expected, atol=1e-4)
    assert placement.image_size == (14, 18, 10)


def test_channels_are_a_list_of_files(tmp_path):
    nnunet_folders.write_folder(
        tmp_path / "model",
        channels=("T1", "T2"),
        normalization_schemes=["ZScoreNormalization", "NoNormalization"],
        use_mask_for_norm=[False, False],
        spacing=[3.0, 1.5, 1.0],
    )
    files = [write_scan(tmp_path / f"case_000{i}.nii.gz", volume(seed=i)) for i in range(2)]
    model = load_model(f"nnunet:{tmp_path}/model")
    x, _ = get_loaded_model_metadata(model).preprocess.combine_channels([read_scan(file) for file in files])
    np.testing.assert_allclose(
        x[1].numpy()[:, :15, :], volume(seed=1).transpose(2, 1, 0)[:, :15, 2:][:, :, :], atol=1e-5
    )
    mask = volume() != 0
    explanation = explain_sliding_windows(GradCAM(model), files, Region("liver", mask=mask))
    assert explanation.heatmap("image", scale=None).shape == (14, 18, 10)
    np.testing.assert_allclose(explanation.affine, nibabel.load(files[0]).affine)
    with pytest.raises(ImageError, match="1 channel for a model with 2"):
        explain_sliding_windows(GradCAM(model), files[0], "liver")
    other = write_scan(tmp_path / "moved.nii.gz", volume(), offset=(0.0, 0.0, 0.0))
    with pytest.raises(ImageError, match="different positions"):
        explain_sliding_windows(GradCAM(model), [files[0], other], "liver")


@pytest.mark.parametrize("corner", [(4, 6, 2), (20, 12, 5)])
def test_a_shifted_cube_lands_in_the_file_within_one_voxel(tmp_path, corner):
    """A network whose logit is the value itself: its map in the file must lie where the cube lies in the file."""
    from camscope import InputXGradient

    values = np.random.default_rng(1).uniform(0.5, 1.5, (32, 28, 12)).astype(np.float32)
    block_ = tuple(slice(first, first + n) for first, n in zip(corner, (5, 5, 3), strict=True))
    values[block_] += 40
    path = write_scan(tmp_path / "scan.nii.gz", values, (0.8, 1.1, 2.5))
    nnunet_folders.write_folder(
        tmp_path / "model",
        normalization_schemes=["NoNormalization"],
        spacing=[2.0, 0.9, 1.0],
        patch_size=[8, 16, 16],
        architecture=nnunet_folders.architecture(),
    )
    model = load_model(f"nnunet:{tmp_path}/model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.forward = lambda x: torch.cat([20 - x, x, -x], 1)  # class 1 is predicted where the value is above 10
    explanation = explain_sliding_windows(InputXGradient(model), path, "liver")
    heat = explanation.heatmap("image", scale=None)
    assert heat.shape == values.shape
    inside = np.zeros(values.shape, bool)
    inside[block_] = True
    center = np.array([(indices * heat).sum() / heat.sum() for indices in np.indices(heat.shape)])
    expected = np.array([first + (n - 1) / 2 for first, n in zip(corner, (5, 5, 3), strict=True)])
    assert np.abs(center - expected).max() < 0.5
    above = np.argwhere(heat > heat.max() / 2)
    for axis, (first, n) in enumerate(zip(corner, (5, 5, 3), strict=True)):
        assert abs(above[:, axis].min() - first) <= 1
        assert abs(above[:, axis].max() - (first + n - 1)) <= 1
    to_nifti(explanation, tmp_path / "map.nii.gz", source=path)
    written = nibabel.load(tmp_path / "map.nii.gz")
    np.testing.assert_allclose(written.affine, nibabel.load(path).affine)
    np.testing.assert_allclose(written.get_fdata(), heat, atol=1e-5)


# Errors


def test_incomplete_folders_are_one_error(tmp_path):
    with pytest.raises(ModelError, match=r"no plans\.json and no dataset\.json"):
        load_model(f"nnunet:{tmp_path}")
    nnunet_folders.write_folder(tmp_path, fold="fold_1")
    assert load_model(f"nnunet:{tmp_path}")  # the only fold
    assert load_model(f"nnunet:{tmp_path}/fold_1")
    assert load_model(f"nnunet:{tmp_path}/fold_1/checkpoint_final.pth")
    (tmp_path / "fold_2").mkdir()
    with pytest.raises(ModelError, match="no fold_0"):
        load_model(f"nnunet:{tmp_path}")
    with pytest.raises(ModelError, match="fold_2 has no checkpoint_final"):
        load_model(f"nnunet:{tmp_path}/fold_2")
    assert load_model(f"nnunet:{tmp_path}", weights="random")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization_schemes": ["OtherNormalization"]}, "normalization 'OtherNormalization'"),
        ({"resampling_fn_data": "resample_torch_simple"}, "resampling 'resample_torch_simple'"),
        ({"preprocessor_name": "Mine"}, "preprocessor 'Mine'"),
        ({"previous_stage": "3d_lowres"}, "cascade"),
        ({"patch_size": None}, "no model can be built"),
        ({"architecture": {}}, "there is no 'network_class_name'"),
    ],
)
def test_plans_that_are_not_supported_are_one_error(tmp_path, changes, message):
    nnunet_folders.write_folder(tmp_path)
    content = nnunet_folders.plans(**changes)
    (tmp_path / "plans.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        load_model(f"nnunet:{tmp_path}")


def test_a_network_larger_than_its_checkpoint_is_not_built(tmp_path):
    nnunet_folders.write_folder(tmp_path)
    content = nnunet_folders.plans(architecture=nnunet_folders.architecture(features=(10**4, 10**5, 10**6)))
    (tmp_path / "plans.json").write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="describes"):
        load_model(f"nnunet:{tmp_path}")


def test_a_volume_needs_the_size_of_patches():
    model = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1))
    with pytest.raises(InputError, match="patch_size="):
        explain_sliding_windows(GradCAM(model, "0"), torch.rand(1, 8, 8, 8), 1)
    with pytest.raises(InputError, match="do not fit"):
        explain_sliding_windows(GradCAM(model, "0"), torch.rand(1, 8, 8, 8), 1, patch_size=(9, 8, 8))
    with pytest.raises(InputError, match="overlap"):
        explain_sliding_windows(GradCAM(model, "0"), torch.rand(1, 8, 8, 8), 1, patch_size=(8, 8, 8), overlap=1)


def test_a_color_scan_is_rejected(tmp_path):
    nnunet_folders.write_folder(tmp_path)
    scan = Scan(np.zeros((4, 4, 4, 3), np.uint8), "colors", is_color=True)
    with pytest.raises(ImageError, match="gray values"):
        GradCAM(load_model(f"nnunet:{tmp_path}")).prepare_input(scan)
