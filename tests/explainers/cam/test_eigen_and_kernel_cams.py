"""The decompositions against plain loops and textbook algebra, and where a decomposition is not unique."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import InputError
from camscope.explainers import FEM, KPCACAM, EigenCAM, EigenGradCAM, HiResCAM, SegEigenCAM
from camscope.explainers.cam import kpca_cam
from camscope.explainers.core import chunk_perturbed_copies_by_memory
from tests.by_hand import A
from tests.nets import CASES, Flat
from tests.tools import Largest
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def case(name):
    model, x = CASES[name].make(3, torch.float64)
    return model, x, model.get_submodule(CASES[name].layer)


def activation(model, x, layer):
    kept = []
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    model(x)
    handle.remove()
    return kept[0].flatten(2).numpy()


def of_itself(values, method, **settings):
    """The map of a layer whose activation is `values` (K,h,w)."""
    x = torch.as_tensor(np.asarray(values, dtype=float))[None]
    model = Flat(nn.MaxPool2d(1), x.numel(), classes=2).double()
    return method(model, "features", **settings).attribute(x, 1)[0].numpy()


@pytest.mark.parametrize("name", ["pooled", "residual", "volume"])  # after a ReLU, and with both signs
def test_eigen_cam_is_the_first_singular_vector_positive_where_the_layer_is_active(name):
    model, x, layer = case(name)
    heat = EigenCAM(model, CASES[name].layer).attribute(x).flatten(1).numpy()
    for values, found in zip(activation(model, x, layer), heat, strict=True):
        expected = values.T @ np.linalg.svd(values.T)[2][0]
        expected *= np.sign(expected @ (values**2).sum(0))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        assert (values < 0).any() or found.min() > -1e-12


def test_eigengrad_cam_keeps_the_largest_part_of_hires_cam_and_its_sign():
    model, x, _ = case("flat")
    for target in range(3):
        heat = EigenGradCAM(model, "features").attribute(x, target).flatten(1)
        total = HiResCAM(model, "features").attribute(x, target).flatten(1)
        assert ((heat * total).sum(1) > 0).all()
        row = model.head.weight[target].detach().view(6, 12)
        for values, found in zip(torch.from_numpy(activation(model, x, model.features)), heat, strict=True):
            largest = torch.linalg.matrix_norm(row * values, 2)
            torch.testing.assert_close(found.norm(), largest, rtol=1e-10, atol=0)


def test_seg_eigen_cam_weighs_by_the_size_of_the_gradient_and_makes_its_largest_value_positive():
    model, x, _ = case("flat")
    for target in range(3):
        heat = SegEigenCAM(model, "features").attribute(x, target).flatten(1).numpy()
        sizes = model.head.weight[target].detach().abs().view(6, 12).numpy()
        for values, found in zip(activation(model, x, model.features), heat, strict=True):
            matrix = sizes * values
            expected = matrix.T @ np.linalg.svd(matrix.T)[2][0]
            expected *= np.sign(expected[np.abs(expected).argmax()])
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        negated = type(model)(model.features, 72, classes=3).double()
        negated.head.load_state_dict({name: -weights for name, weights in model.head.state_dict().items()})
    np.testing.assert_allclose(SegEigenCAM(negated, "features").attribute(x, 2).flatten(1).numpy(), heat, rtol=1e-9)


def kernel_of(kind, gamma, a, b):
    if kind == "sigmoid":
        return math.tanh(gamma * a @ b + 1)
    if kind == "rbf":
        return math.exp(-gamma * ((a - b) ** 2).sum())
    return a @ b if kind == "linear" else a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("gamma", [None, 2.0])
@pytest.mark.parametrize("kind", ["sigmoid", "rbf", "linear", "cosine"])
def test_kpca_cam_is_the_first_component_of_the_centered_kernel(kind, gamma):
    model, x, layer = case("residual")
    heat = KPCACAM(model, "block", kernel=kind, gamma=gamma).attribute(x).flatten(1).numpy()
    for values, found in zip(activation(model, x, layer), heat, strict=True):
        cells = values.T - values.T.mean(0)
        kernel = np.array([[kernel_of(kind, gamma or 1 / 6, a, b) for b in cells] for a in cells])
        middle = np.eye(36) - 1 / 36
        roots, vectors = np.linalg.eigh(middle @ kernel @ middle)
        expected = vectors[:, -1] * roots[-1] ** 0.5
        expected *= np.sign(expected @ (values**2).sum(0))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)
    assert KPCACAM(model, "block", kernel=kind, gamma=gamma).parameters["kernel"] == kind


@pytest.mark.parametrize("kernel", ["sigmoid", "rbf", "linear", "cosine"])
def test_cells_that_are_all_the_same_have_no_kernel_component(kernel):
    for level in (0.0, 0.1, 12345.678):
        assert not of_itself(np.full((3, 4, 4), level), KPCACAM, kernel=kernel).any()


def test_rare_strong_cells_by_hand():
    # A1 = 1 2 0 1: mean 1, deviation √(1/2): above 1.7 lies the 2; A2 = 2 0 1 -1: mean 1/2, deviation √(5/4): the 2
    np.testing.assert_allclose(of_itself(A, FEM, k_sigma=1), [[0.5, 1.0], [0.0, 0.0]], rtol=1e-12)
    spike = np.zeros((1, 4, 4))
    spike[0, 1, 2] = 3.0  # mean 3/16; √15 deviations above it
    np.testing.assert_allclose(of_itself(spike, FEM), spike[0] / 16, rtol=1e-12)
    assert not of_itself(spike, FEM, k_sigma=3.9).any()


def test_a_constant_channel_and_a_cell_just_at_the_threshold_mark_nothing():
    for level in (0.1, 0.3, 1e9 / 3):
        assert not of_itself(np.full((2, 3, 7), level), FEM, k_sigma=0).any()
        five = np.zeros((1, 1, 5))
        five[0, 0, 3] = level  # exactly two deviations above the mean
        assert not of_itself(five, FEM).any()


def test_fem_is_its_rule_written_as_loops():
    model, x, layer = case("pooled")
    heat = FEM(model, "features", k_sigma=0.8).attribute(x).flatten(1).numpy()
    expected = np.zeros_like(heat)
    for i, values in enumerate(activation(model, x, layer)):
        for channel in values:
            mean = sum(channel) / len(channel)
            sigma = (sum((value - mean) ** 2 for value in channel) / len(channel)) ** 0.5
            expected[i] += [mean if value > mean + 0.8 * sigma else 0.0 for value in channel]
    assert expected.any()
    np.testing.assert_allclose(heat, expected, rtol=1e-12)


@pytest.mark.parametrize("method", [EigenCAM, KPCACAM, FEM])
def test_a_batch_with_a_sample_that_is_not_finite_spoils_that_one_alone(method):
    model, x, _ = case("residual")
    right = method(model, "block").attribute(x)
    x[1] = torch.nan
    heat = method(model, "block", on_nonfinite="warn").attribute(x)
    torch.testing.assert_close(heat[::2], right[::2], rtol=1e-10, atol=1e-12)


def test_where_a_kernel_is_large_samples_come_by_turns(monkeypatch):
    model, x, _ = case("residual")
    x = torch.cat([x, x.flip(0)])
    right = KPCACAM(model, "block").attribute(x)
    monkeypatch.setattr(
        chunk_perturbed_copies_by_memory,
        "DEFAULT_MEMORY_BUDGET_BYTES",
        2 * chunk_perturbed_copies_by_memory.LIVE_TENSORS_PER_PASS * 8 * 36**2,
    )  # two kernels of 36 cells
    with Largest() as largest:
        torch.testing.assert_close(KPCACAM(model, "block").attribute(x), right, rtol=1e-10, atol=1e-12)
    assert largest.numbers == 2 * 36**2


def test_a_layer_with_too_many_cells_for_a_kernel_is_refused(monkeypatch):
    model, x = CASES["pooled"].make()
    monkeypatch.setattr(kpca_cam, "MAX_CELLS", 20)
    why = r"layer 'features\.1' has 48 cells; .*at most 20: choose a coarser layer, such as 'features'$"
    with untouched(model, x), pytest.raises(InputError, match=why):
        KPCACAM(model, "features.1").attribute(x)
    assert KPCACAM(model, "features").attribute(x).any()


def test_settings_that_mean_nothing_are_refused():
    model, _, _ = case("pooled")
    with pytest.raises(InputError, match="kernel='poly': expected 'sigmoid' or 'rbf'"):
        KPCACAM(model, "features", kernel="poly")
    with pytest.raises(InputError, match="gamma=0: expected a positive number"):
        KPCACAM(model, "features", gamma=0)
    with pytest.raises(InputError, match="k_sigma=-1: expected"):
        FEM(model, "features", k_sigma=-1)
