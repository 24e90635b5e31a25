"""Controls: maps that know nothing of the answer, each against its formula; the model is asked all the same."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import InputError, NonFiniteError
from camscope.explainers import METHODS, CenterGaussian, EdgeDetector, LayerExplainer, RandomCAM
from tests.nets import CASES, Flat

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
CONTROLS = {name: method for name, method in METHODS.items() if method.control}
EVERY_CONTROL = pytest.mark.parametrize("method", CONTROLS.values(), ids=CONTROLS)


def made(method, model, layer, **settings):
    return method(model, layer, **settings) if issubclass(method, LayerExplainer) else method(model, **settings)


def identity(shape):
    """A model whose layer `iter_method_indices_and_features` hands its input on."""
    return Flat(nn.MaxPool2d(1), math.prod(shape)).double()


def test_the_controls_say_that_they_are():
    assert {"randomcam", "center", "edges"} <= set(CONTROLS)
    assert not any(method.class_specific for method in CONTROLS.values())
    assert METHODS["gradcam"].class_specific
    assert not METHODS["gradcam"].control


@EVERY_CONTROL
@pytest.mark.parametrize("case", ["residual", "signal", "volume", "tokens"])
def test_no_answer_changes_a_control(method, case):
    model, x = CASES[case].make()
    tool = made(method, model, CASES[case].layer)
    first = tool.attribute(x, 0)
    assert first.any()
    assert torch.equal(tool.attribute(x, [2, None]), first)
    assert torch.equal(tool.attribute(x, lambda output: -output[:, 1]), first)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.weight.data.neg_()
    assert torch.equal(tool.attribute(x, 0), first)
    model.requires_grad_(False)
    explanation = tool.explain(x[0], 1)
    assert (explanation.target, explanation.score) == (1, pytest.approx(float(model(x)[0, 1]), rel=1e-4))


@EVERY_CONTROL
def test_a_broken_model_is_an_error_of_a_control_too(method):
    model, x = CASES["residual"].make()
    model.head.bias.data[1] = torch.nan
    with pytest.raises(NonFiniteError, match="the score has"):
        made(method, model, "block").attribute(x, 1)


# Random-CAM


def test_random_weights_are_the_same_for_every_input_and_lie_in_minus_one_to_one():
    model = identity((500, 1, 2))
    x = torch.zeros(500, 500, 1, 2, dtype=torch.float64)
    for channel in range(500):  # is one in one image, in cell 0; minus one in cell 1, for what a ReLU cuts off
        x[channel, channel, 0] = torch.tensor([1.0, -1.0])
    positive, negative = RandomCAM(model, "features").attribute(x, 0)[:, 0].T.numpy()
    weights = positive - negative
    assert np.abs(weights).max() < 1
    assert np.ptp(weights) > 1.98
    assert abs(weights.mean()) < 0.1
    x = torch.randn(3, 500, 1, 2, dtype=torch.float64)
    expected = np.maximum(np.einsum("k,nkij->nij", weights, x.numpy()), 0)
    np.testing.assert_allclose(RandomCAM(model, "features").attribute(x, 0).numpy(), expected, atol=1e-12)


def test_another_seed_has_other_weights():
    model, x = CASES["residual"].make()
    maps = [RandomCAM(model, "block", seed=seed).attribute(x, 1) for seed in (0, 0, 1)]
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[0], maps[2])


# The center


def test_the_center_is_a_gaussian_of_so_many_lengths_of_the_input():
    x = torch.zeros(2, 3, 9, 5, dtype=torch.float64)
    heat = CenterGaussian(identity(x.shape[1:]), sigma=0.2).attribute(x, 0).numpy()
    for row in range(9):
        for column in range(5):
            down, right = (row - 4) / 9, (column - 2) / 5
            assert heat[1, row, column] == pytest.approx(math.exp(-(down**2 + right**2) / (2 * 0.2**2)), rel=1e-13)
    assert heat[0].max() == heat[0, 4, 2] == 1.0


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_a_gaussian_without_a_width_is_refused(sigma):
    model, _ = CASES["residual"].make()
    with pytest.raises(InputError, match="sigma="):
        CenterGaussian(model, sigma=sigma)


# Edges


def test_a_step_is_an_edge_and_even_ground_is_none():
    x = torch.zeros(1, 3, 20, 30, dtype=torch.float64)
    x[..., 12:] = torch.tensor([3.0, 0.0, 3.0]).view(3, 1, 1)  # gray rises by 2 between columns 11 and 12
    sharp = EdgeDetector(identity(x.shape[1:]), smoothing=0).attribute(x, 0)[0]
    expected = torch.zeros(20, 30, dtype=torch.float64)
    expected[:, 11:13] = 1.0
    assert torch.equal(sharp, expected)
    smooth = EdgeDetector(identity(x.shape[1:]), smoothing=0.05).attribute(x, 0)[0]
    torch.testing.assert_close(smooth.sum(), sharp.sum())
    assert smooth.argmax(1).unique().tolist() == [11]
    # sigma is 0.05 of 30 columns: the two steps' Gaussians are added, each cut at 3 sigma and of sum 1
    gaussian = np.exp(-((np.arange(30) - 11) ** 2) / (2 * 1.5**2)) + np.exp(-((np.arange(30) - 12) ** 2) / (2 * 1.5**2))
    total = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2)).sum()
    np.testing.assert_allclose(smooth[0, 8:16].numpy(), gaussian[8:16] / total, rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 40), (3, 16, 12), (1, 8, 9, 10)])
def test_edges_see_neither_brightness_nor_sign(shape):
    x = torch.randn(2, *shape, dtype=torch.float64)
    tool = EdgeDetector(identity(shape) if len(shape) == 3 else Flat(nn.Identity(), math.prod(shape)).double())
    heat = tool.attribute(x, 0)
    torch.testing.assert_close(tool.attribute(5 - x, 0), heat)
    slope = torch.linspace(0, 1, shape[-1], dtype=torch.float64).expand(2, *shape) * (shape[-1] - 1) * 3
    inner = EdgeDetector(tool.model, smoothing=0).attribute(slope, 0)[..., 1:-1]
    torch.testing.assert_close(inner, torch.full_like(inner, 3.0))  # a plane is as steep as it is, whatever its axes


def test_one_pixel_has_no_edge():
    x = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    assert EdgeDetector(identity(x.shape[1:])).attribute(x, 0).tolist() == [[[0.0]]]
    with pytest.raises(InputError, match="smoothing=-1"):
        EdgeDetector(identity(x.shape[1:]), smoothing=-1)
