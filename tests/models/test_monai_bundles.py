"""MONAI bundles: the network that the config describes, with the weights of the bundle."""

import json

import pytest
import torch

pytest.importorskip("monai")

from monai.networks.nets import SegResNet, UNet

from camscope import GradCAM, explain_sliding_windows, load_model
from camscope.errors import ModelError, WeightsError
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.targets import Region
from tests.bundles import UNET, write_bundle

pytestmark = pytest.mark.filterwarnings(
    "default::camscope.errors.CamscopeWarning"
)  # maps of random weights may be flagged


def network(seed=0):
    torch.manual_seed(seed)
    return UNet(**{key: value for key, value in UNET.items() if key != "_target_"}).eval()


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("target", ["UNet", "monai.networks.nets.UNet", "monai.networks.nets.unet.UNet"])
def test_a_bundle_has_the_network_and_the_weights(tmp_path, suffix, target):
    expected = network()
    write_bundle(tmp_path, expected.state_dict(), suffix=suffix, network_def=UNET | {"_target_": target})
    model, x = load_model(f"bundle:{tmp_path}"), torch.rand(1, 1, 16, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected(x))
    assert get_loaded_model_metadata(model).class_names == ("background", "spleen")
    assert not model.training


def test_references_are_resolved(tmp_path):
    definition = UNET | {"channels": "@sizes::widths", "strides": ["@sizes#step"], "out_channels": "@n"}
    config = {"n": 2, "sizes": {"widths": [4, 8], "step": "@two"}, "two": 2}
    write_bundle(tmp_path, network().state_dict(), network_def=definition, **config)
    x = torch.rand(1, 1, 16, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(load_model(f"bundle:{tmp_path}")(x), network()(x))


def test_a_definition_may_hold_layers_of_pytorch(tmp_path):
    layer = {"_target_": "torch.nn.Conv3d", "in_channels": 1, "out_channels": 2, "kernel_size": 1}
    write_bundle(tmp_path / "conv", torch.nn.Conv3d(1, 2, 1).state_dict(), network_def=layer)
    assert isinstance(load_model(f"bundle:{tmp_path}/conv"), torch.nn.Conv3d)


def test_other_expressions_of_the_config_are_ignored(tmp_path):
    expressions = {
        "imports": ["$import os"],
        "device": "$torch.device('cuda:0')",
        "network": "$@network_def.to(@device)",
    }
    write_bundle(tmp_path, network().state_dict(), **expressions)
    assert isinstance(load_model(f"bundle:{tmp_path}"), UNet)


def test_maps_are_those_of_the_network(tmp_path):
    write_bundle(tmp_path, network().state_dict())
    model, x = load_model(f"bundle:{tmp_path}"), torch.rand(1, 16, 16, 16)
    mask = torch.zeros(16, 16, 16, dtype=torch.bool)
    mask[4:9, 4:9, 4:9] = True
    explanation = GradCAM(model).explain(x, Region("spleen", mask=mask))
    kept = {}
    reference = network()
    layer = reference.get_submodule(explanation.layer)
    layer.register_forward_hook(lambda module, args, output: kept.update(activation=output))
    score = reference(x[None])[0, 1][mask].mean()
    gradient = torch.autograd.grad(score, kept["activation"])[0]
    cam = (gradient.mean((2, 3, 4), keepdim=True) * kept["activation"]).sum(1).relu()[0].detach()
    torch.testing.assert_close(torch.from_numpy(explanation.attribution), cam, rtol=1e-4, atol=1e-7)
    windows = explain_sliding_windows(GradCAM(model), x, Region("spleen", mask=mask), patch_size=(8, 8, 8))
    assert windows.grid == (16, 16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network_def": UNET | {"channels": "@missing"}}, r"network_def::channels refers to '@missing'"),
        ({"network_def": UNET | {"channels": "%other.json::channels"}}, "other files"),
        ({"network_def": UNET | {"in_channels": "@a"}, "a": "@b", "b": "@a"}, "refers to itself"),
        ({"network_def": UNET | {"_mode_": "callable"}}, "_mode_"),
        ({"network_def": UNET | {"channels": 3}}, "MONAI cannot build"),
        ({"network_def": {"spatial_dims": 3}}, "has no _target_"),
        ({"network_def": None}, "has no network_def"),
        ({"network_def": {"_target_": "ResNet", "pretrained": True}}, "would load other weights"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_error(tmp_path, changes, message):
    write_bundle(tmp_path, network().state_dict(), **changes)
    with pytest.raises(ModelError, match=message):
        load_model(f"bundle:{tmp_path}")


def test_files_that_are_missing_or_of_another_network_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"no configs/inference\.json"):
        load_model(f"bundle:{tmp_path}")
    write_bundle(tmp_path, network().state_dict())
    (tmp_path / "models" / "model.pt").unlink()
    with pytest.raises(ModelError, match=r"no models/model\.pt"):
        load_model(f"bundle:{tmp_path}")
    assert isinstance(load_model(f"bundle:{tmp_path}", weights="random"), UNet)
    write_bundle(tmp_path / "other", SegResNet(spatial_dims=3, init_filters=8).state_dict())
    with pytest.raises(WeightsError, match="does not fit"):
        load_model(f"bundle:{tmp_path}/other")
    large = UNET | {"channels": [4, 10**7]}
    write_bundle(tmp_path / "large", network().state_dict(), network_def=large)
    with pytest.raises(WeightsError, match="describes"):
        load_model(f"bundle:{tmp_path}/large")


def test_trust_evaluates_the_expressions_and_says_so(tmp_path):
    mark = tmp_path / "mark"
    definition = UNET | {"out_channels": f"$open({str(mark)!r}, 'w').close() or 2"}
    write_bundle(tmp_path, network().state_dict(), network_def=definition)
    with pytest.warns(match="code in its config and its weights is executed"):
        model = load_model(f"bundle:{tmp_path}", trust_code=True)
    assert mark.exists()
    x = torch.rand(1, 1, 16, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), network()(x))


def test_a_broken_metadata_file_leaves_the_names_unknown(tmp_path):
    write_bundle(tmp_path, network().state_dict())
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps({"network_data_format": []}))
    assert get_loaded_model_metadata(load_model(f"bundle:{tmp_path}")).class_names is None
