"""The methods against numbers worked out by hand, and against their equations on networks whose gradient is known."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from camscope.explainers import (
    METHODS,
    GradCAM,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    RefineCAM,
    SmoothGradCAMPlusPlus,
    XGradCAM,
)
from tests.by_hand import BY_HAND, OTHER, A, G
from tests.nets import CASES, Flat, Pooled, linear
from tests.refusals import LINEAR, answers
from tests.tools import explainer

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.mark.parametrize(
    "method", [method for method in METHODS if answers(method, "flat") and answers(method, LINEAR)]
)
def test_two_channels_of_two_by_two_by_hand(method):
    assert method in BY_HAND, "a new method needs its numbers in tests/by_hand"
    model, _ = linear()
    model.head.weight.data[:] = torch.tensor([OTHER, G]).flatten(1)
    model.head.bias.data[0] = model.head.bias.data[1]
    steps = {"n_steps": 50} if method == "opticam" else {}  # as many as by hand
    heat = explainer(method, model, "features", **steps).attribute(torch.tensor([A], dtype=torch.float64), 1)
    torch.testing.assert_close(heat[0], torch.tensor(BY_HAND[method], dtype=torch.float64), rtol=1e-14, atol=1e-14)


def pooled():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    return model, x, model.features(x).detach(), model.head.weight.detach(), model.head.bias.detach()


def test_grad_cam_of_pooling_and_a_linear_head_is_the_class_activation_map():
    model, x, features, weight, _ = pooled()
    expected = torch.einsum("k,nkhw->nhw", weight[2], features).relu() / 12
    torch.testing.assert_close(GradCAM(model, "features").attribute(x, 2), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(XGradCAM(model, "features").attribute(x, 2), expected, rtol=1e-12, atol=1e-15)


def test_the_cells_of_hires_cam_add_up_to_the_score_without_its_bias():
    model, x, _, _, bias = pooled()
    for target in range(3):
        expected = model(x)[:, target].detach() - bias[target]
        torch.testing.assert_close(HiResCAM(model, "features").attribute(x, target).sum((1, 2)), expected)
    flat, y = CASES["flat"].make(dtype=torch.float64)
    total = HiResCAM(flat, "features").attribute(y, 1).sum((1, 2))
    torch.testing.assert_close(total, flat(y)[:, 1].detach() - flat.head.bias[1].detach())


def test_a_flat_linear_head_has_its_row_as_gradient():
    model, x = CASES["flat"].make(dtype=torch.float64)
    features, row = model.features(x).detach(), model.head.weight[1].detach().view(1, 6, 4, 3)
    expected = {
        GradCAM: (row.mean((2, 3), keepdim=True) * features).sum(1).relu(),
        HiResCAM: (row * features).sum(1),
        LayerCAM: (row.clamp(min=0) * features).sum(1).relu(),
        XGradCAM: ((row * features).sum((2, 3), keepdim=True) / features.sum((2, 3), keepdim=True) * features)
        .nan_to_num()
        .sum(1)
        .relu(),
    }
    for method, heat in expected.items():
        assert heat.any()
        torch.testing.assert_close(method(model, "features").attribute(x, 1), heat, rtol=1e-12, atol=1e-15)


def equation_19(activation, gradient):
    """One sample's Grad-CAM++ map, one scalar at a time: alpha = g^2 / (2 g^2 + g^3 sum A), weight = sum alpha relu(g)."""
    channels, rows, columns = activation.shape
    heat = np.zeros((rows, columns))
    for k in range(channels):
        total = math.fsum(activation[k].flatten().tolist())
        weight = 0.0
        for g in gradient[k].flatten().tolist():
            denominator = 2 * g**2 + total * g**3
            alpha = g**2 / denominator if denominator != 0 else 0.0
            weight += alpha * max(g, 0.0)
        heat += weight * activation[k].numpy()
    return np.maximum(heat, 0)


@pytest.mark.parametrize("features", ["features.5", "features.3"])  # after a ReLU, and with both signs
def test_grad_cam_plus_plus_is_equation_19_with_its_denominator(features):
    model, x = CASES["flat"].make(dtype=torch.float64)
    model.head.weight.data *= 20
    depth = int(features[-1]) + 1
    activation = model.features[:depth](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(model.features[depth:](activation).flatten(1))[:, 2].sum(), activation)
    heat = GradCAMPlusPlus(model, features, layout="channels_first").attribute(x, 2).numpy()
    assert heat.any()
    for i in range(2):
        np.testing.assert_allclose(heat[i], equation_19(activation[i].detach(), gradient[i]), rtol=1e-11, atol=1e-15)


def test_grad_cam_plus_plus_at_the_pole_of_its_denominator_is_finite():
    model = Flat(nn.MaxPool2d(1), 4, classes=1).double()
    model.head.weight.data[:] = torch.tensor([[1.0, 1.0, 1.0, 0.5]])
    x = torch.tensor([[[[-1.0, -1.0], [-1.0, 1.0]]]], dtype=torch.float64)  # sum -2: 2 + g sum = 0 where g = 1
    heat = GradCAMPlusPlus(model, "features").attribute(x, 0)
    weight = 1 / (2 - 2 * 0.5) * 0.5  # the cells at the pole have no alpha, as those without gradient
    torch.testing.assert_close(heat[0], (weight * x[0, 0]).relu())


def test_xgrad_cam_of_a_channel_that_sums_to_nothing_is_finite():
    model = Flat(nn.MaxPool2d(1), 8, classes=1).double()
    model.head.weight.data[:] = 1.0
    x = torch.tensor([[[[1.0, -1.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    torch.testing.assert_close(XGradCAM(model, "features").attribute(x, 0)[0], x[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("side", "offset"), [(8, 0), (2, 10), (4, 100)])
def test_xgrad_cam_of_channels_whose_sum_is_rounding_is_nothing(dtype, side, offset):
    torch.manual_seed(3)
    model = Flat(nn.InstanceNorm2d(6), 6 * side**2).to(dtype)
    x = (torch.randn(2, 6, side, side) + offset).to(dtype)
    sums = model.features(x).sum((2, 3))
    assert sums.any(), "a test of rounding needs sums that are not 0"
    assert not XGradCAM(model, "features", layout="channels_first").attribute(x, 1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_xgrad_cam_of_a_channel_whose_sum_is_small_counts_it(dtype):
    small = torch.cat([torch.full((33,), 1.0), torch.full((31,), -1.0)]).view(1, 1, 8, 8).to(dtype)
    plain = Flat(nn.MaxPool2d(1), 64).to(dtype)
    weight = (plain.head.weight[1] * small.flatten()).sum().detach() / 2
    heat = XGradCAM(plain, "features").attribute(small, 1)
    torch.testing.assert_close(heat, (weight * small[0]).relu(), rtol=1e-4, atol=1e-6)


def test_the_mean_and_not_the_sum_of_the_gradient():
    small, large = (torch.ones(1, 1, n, n, dtype=torch.float64) for n in (2, 8))
    model = Pooled(nn.MaxPool2d(1), 1).double()
    model.head.weight.data[:] = 1.0
    tool = GradCAM(model, "features", layout="channels_first")
    assert tool.attribute(small, 0).sum() == pytest.approx(1.0)
    assert tool.attribute(large, 0).sum() == pytest.approx(1.0)


POSITIVE_CHANNEL = ([3.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0])
CANCELLING = {  # method: what cancels and what does not, the gradient, and the share: |w| Σ|A| of one channel over both
    # sums 0.1 of 2.1 and 0.2 of 2.2; w = 0.1 / 0.1 and 3 / 4 of the other channel
    XGradCAM: ([1.0, -1.0, 0.1, 0.0], [1.0, -1.0, 0.2, 0.0], [0.0, 0.0, 1.0, 0.0], 2.1 / (2.1 + 3)),
    # 2 - 2 * 0.95 of 3.9, and 2 - 1 * 0.95; w = 0.95 / 0.1 and 1 / 6 of the other channel
    GradCAMPlusPlus: ([-1.0, -1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.95, 0.0], 19 / (19 + 4 / 6)),
}


@pytest.mark.parametrize("kind", CANCELLING, ids=lambda kind: kind.name)
def test_a_map_carried_by_denominators_that_nearly_cancel_says_so(kind):
    cancels, stands, gradient, share = CANCELLING[kind]
    model = Flat(nn.MaxPool2d(1), 8, classes=2).double()
    model.head.weight.data[1] = torch.tensor([*gradient, *POSITIVE_CHANNEL[1]])
    images = [torch.tensor([*cells, *POSITIVE_CHANNEL[0]]).double().view(2, 2, 2) for cells in (stands, cancels)]
    for tool in (kind(model, "features"), RefineCAM(model, ["features"], base_method=kind.name)):
        sound, doubtful = ([note for note in one.notes if "cancel" in note] for one in tool.explain_batch(images, 1))
        assert sound == []
        (note,) = doubtful
        assert note.startswith(f"{share:.0%} of the map at layer 'features' comes from denominators that cancel")


def test_smooth_grad_cam_plus_plus_says_it_too():
    cancels, stands, gradient, share = CANCELLING[GradCAMPlusPlus]
    model = Flat(nn.MaxPool2d(1), 8, classes=2).double()  # linear: the gradient is the same whatever the noise
    model.head.weight.data[1] = torch.tensor([*gradient, *POSITIVE_CHANNEL[1]])
    tool = SmoothGradCAMPlusPlus(model, "features", n_samples=2)
    for cells, noted in ((cancels, [f"{share:.0%}"]), (stands, [])):
        found = tool.explain(torch.tensor([*cells, *POSITIVE_CHANNEL[0]]).double().view(2, 2, 2), 1)
        assert [note.split()[0] for note in found.notes if "cancel" in note] == noted
