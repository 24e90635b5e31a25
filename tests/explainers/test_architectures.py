"""Every method, unchanged, on small forms of the architectures that people have: no glue, and maps that say something."""

from functools import partial

import pytest
import torch
from torch import nn

from camscope.errors import InputError, LayerError, ModelError
from camscope.explainers import METHODS, GradCAM, LayerExplainer
from tests.refusals import ATTENTION, NO_RELU, RECTIFIED
from tests.tools import REPRESENTATIVES, by_family_with

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
    )
    nn.init.normal_(model.heads.head.weight)
    return model, torch.randn(2, 3, 32, 32), (4, 4)


def swin():
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=5
    )
    return model, torch.randn(2, 3, 32, 48), (4, 6)


def convnext():
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    model = ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], layer_scale=1.0, num_classes=5)
    return model, torch.randn(2, 3, 32, 48), (4, 6)


def densenet():
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=5)
    return model, torch.randn(2, 3, 32, 48), (4, 6)


def video():
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    model = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=5)
    return model, torch.randn(1, 3, 8, 32, 32), (1, 2, 2)


ARCHITECTURES = [vit, swin, convnext, densenet, video]
REFUSES_ATTENTION = {
    swin: "computes attention within windows",
    **dict.fromkeys((convnext, densenet, video), "no self-attention ran"),
}
NOT_LINEAR_BEHIND = {vit, convnext, densenet}  # attention, a norm, a ReLU: the original CAM has no map there

NO_RELUS = {vit, swin, convnext}
NO_RULE_OF_LRP = {vit, swin, convnext}
NO_RULE = {vit, convnext}  # attention, and a layer norm behind the last layer


@pytest.fixture(scope="module")
def built():
    def build(make):
        torch.manual_seed(2)
        model, x, grid = make()
        return model.eval().requires_grad_(False), x, grid

    known = {make: build(make) for make in ARCHITECTURES}
    return known.get


def small(method):
    """Constructor of a method with few samples, steps and copies: the question is whether it works at all."""
    few = {
        "n_samples": 2,
        "n_steps": 2,
        "n_groups": 4,
        "n_channels": 6,
        "grid_size": 2,
        "window": 999,
        "segments": 4,
        "areas": (0.5,),
    }
    few |= (
        {"n_samples": 20, "segments": None} if method in ("lime", "kernelshap") else {}
    )  # a few for each of four cells
    fields = METHODS[method].__dataclass_fields__
    return partial(METHODS[method], **{name: value for name, value in few.items() if name in fields})


@pytest.mark.parametrize(
    ("method", "make"),
    [
        *((method, vit) for method in METHODS),
        *by_family_with(METHODS, densenet),
        *((method, make) for make in (swin, convnext, video) for method in REPRESENTATIVES),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.one_in(5)
def test_a_map_of_the_right_size_without_any_glue(built, make, method):
    model, x, grid = built(make)
    if method == "cam" and make in NOT_LINEAR_BEHIND:
        with pytest.raises(ModelError, match="an operation between them is not linear"):
            small(method)(model).attribute(x, 1)
        return
    if method in ATTENTION and make in REFUSES_ATTENTION:
        with pytest.raises(LayerError, match=REFUSES_ATTENTION[make]):
            small(method)(model).attribute(x, 1)
        return
    if method in RECTIFIED and make in NO_RELUS:
        with pytest.raises(NO_RELU[0], match=NO_RELU[1] + "gelu x"):
            small(method)(model).attribute(x, 1)
        return
    if method == "excitationbackprop" and make in NO_RULE:
        with pytest.raises(ModelError, match=r"no rule for .*NativeLayerNorm x"):
            small(method)(model).attribute(x, 1)
        return
    if method == "lrp" and make in NO_RULE_OF_LRP:
        with pytest.raises(ModelError, match="lrp has no rule for these operations of"):
            small(method)(model).attribute(x, 1)
        return
    if method == "xrai" and x.ndim != 4:
        with pytest.raises(InputError, match="xrai segments images"):
            small(method)(model).attribute(x, 1)
        return
    heat = small(method)(model).attribute(x, 1)
    assert heat.shape[0] == len(x)
    if "layers" in METHODS[method].__dataclass_fields__:
        sizes = zip(grid, heat.shape[1:], x.shape[2:], strict=True)
        assert all(cells <= own <= pixels for cells, own, pixels in sizes), "the grid of that layer or an earlier one"
    else:
        assert heat.shape[1:] in (grid, x.shape[2:]), "the grid of the layer that was chosen, or the input's own"
    if issubclass(METHODS[method], LayerExplainer):
        assert heat.shape[1:] == grid
    assert heat.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        make if make not in (swin, video) else pytest.param(make, marks=pytest.mark.thorough) for make in ARCHITECTURES
    ],  # test_zoo has a Swin and a 3-D transformer
    ids=lambda make: make.__name__,
)
def test_all_methods_agree_on_layer_class_and_score(built, make, pytestconfig):
    model, x, _ = built(make)
    every_method = make is vit or (make is not video and pytestconfig.getoption("--thorough"))
    without = {"cam", *(ATTENTION if make in REFUSES_ATTENTION else ()), *(RECTIFIED if make in NO_RELUS else ())}
    without |= {"excitationbackprop"} if make in NO_RULE else set()
    without |= {"xrai"} if x.ndim != 4 else set()
    without |= {"lrp"} if make in NO_RULE_OF_LRP else set()
    tools = [small(method)(model) for method in (METHODS if every_method else REPRESENTATIVES) if method not in without]
    answers = GradCAM(model).explain_methods(x[0], tools)
    assert len({(one.target, round(one.score, 4)) for one in answers}) == 1
    assert len({one.layer for one in answers if one.layer and "+" not in one.layer}) == 1
