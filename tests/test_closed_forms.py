"""The methods against numbers worked out by hand, and against their equations on networks whose gradient is known."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from by_hand import BY_HAND, A, G
from camscope.errors import InputError
from camscope.explainers import METHODS, GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM, fuse
from camscope.explanation import Explanation
from nets import CASES, Flat, Pooled

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.mark.parametrize("method", METHODS)
def test_two_channels_of_two_by_two_by_hand(method):
    assert method in BY_HAND, "a new method needs its numbers in tests/by_hand"
    model = Flat(nn.MaxPool2d(1), 8, classes=2).double()  # a pooling of 1 x 1 hands its input on
    model.head.weight.data[1] = torch.tensor(G).flatten()
    model.head.weight.data[0], model.head.bias.data[0] = 0, model.head.bias.data[1]  # a rival whom only the score beats
    heat = METHODS[method](model, "features").attribute(torch.tensor([A], dtype=torch.float64), 1)
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


def test_the_mean_and_not_the_sum_of_the_gradient():
    small, large = (torch.ones(1, 1, n, n, dtype=torch.float64) for n in (2, 8))
    model = Pooled(nn.MaxPool2d(1), 1).double()
    model.head.weight.data[:] = 1.0
    tool = GradCAM(model, "features", layout="channels_first")
    assert tool.attribute(small, 0).sum() == pytest.approx(1.0)
    assert tool.attribute(large, 0).sum() == pytest.approx(1.0)


def explanation(heat, **facts):
    known = {"method": "gradcam", "target": 1, "label": "one", "score": 2.0, "layer": "a", "input_size": (8, 8)}
    return Explanation(np.array(heat, dtype=np.float32), **{**known, **facts})


def test_fuse_by_hand():
    first = explanation([[2.0, 0.0], [0.0, -4.0]])
    second = explanation([[0.0, 10.0], [5.0, 0.0]], layer="b")
    np.testing.assert_array_equal(fuse([first, second]).heat, [[1.0, 1.0], [0.5, 0.0]])
    np.testing.assert_array_equal(fuse([first, second], "mean").heat, [[0.5, 0.5], [0.25, 0.0]])
    assert fuse([first, second]).layer == "a + b"
    assert fuse([first]).heat.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_fuse_brings_a_coarse_map_to_the_finest_grid():
    coarse, fine = explanation([[0.0, 4.0]]), explanation(np.zeros((2, 4)), status="no_positive_evidence", layer="b")
    fused = fuse([coarse, fine])
    # cell centres 0.5 and 1.5 hold 0 and 1; the four new centres lie at 0.25, 0.75, 1.25, 1.75, the ends are flat
    np.testing.assert_allclose(fused.heat, [[0.0, 0.25, 0.75, 1.0]] * 2)
    assert fused.status == "ok"
    assert any("b: nothing in the map is positive" in note for note in fused.notes)
    empty = explanation(np.zeros((1, 2)), status="zero_gradient")
    assert fuse([empty, fine]).status == "zero_gradient"
    assert not fuse([empty, fine]).heat.any()


@pytest.mark.parametrize(
    "other", [{"target": 2}, {"method": "layercam"}, {"input_size": (9, 9)}, {"model": "beef"}, {"name": "dog.jpg"}]
)
def test_fuse_refuses_what_does_not_belong_together(other):
    with pytest.raises(InputError, match=f"cannot fuse: {next(iter(other))} is"):
        fuse([explanation([[1.0]]), explanation([[1.0]], **other)])


def test_fuse_refuses_two_images_of_one_name():
    with pytest.raises(InputError, match="the score is 2 and 3: not the same input"):
        fuse([explanation([[1.0]]), explanation([[1.0]], score=3.0)])
    dark, light = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 9, np.uint8)
    with pytest.raises(InputError, match="of different images"):
        fuse([explanation([[1.0]], seen=dark), explanation([[1.0]], seen=light)])


def test_a_fused_map_says_what_it_is():
    fused = fuse([explanation([[1.0]]), explanation([[2.0]], layer="b")], "mean")
    assert fused.parameters == {"layer": "a + b", "how": "mean"}
    assert any("divided by its maximum" in note for note in fused.notes)


def test_fuse_refuses_nothing_and_an_unknown_way():
    with pytest.raises(InputError, match="nothing to fuse"):
        fuse([])
    with pytest.raises(InputError, match="how='sum': expected 'max' or 'mean'"):
        fuse([explanation([[1.0]])], "sum")


def test_fused_layers_of_one_call_lie_on_one_picture():
    model, x = CASES["pooled"].make(1)
    maps = [LayerCAM(model, layer).explain(x, 1) for layer in ("features.0", "features.4")]
    fused = fuse(maps)
    assert (fused.grid, fused.placement) == (maps[0].grid, maps[0].placement)
    assert fused.heatmap("input").shape == (16, 12)
