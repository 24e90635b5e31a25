"""The first component against a plain singular value decomposition, and where that one is not unique."""

from typing import get_args

import numpy as np
import pytest
import torch

from camscope.explainers import KPCACAM
from camscope.explainers.cam.kpca_cam import Kernel
from camscope.explainers.core.principal_component import (
    compute_leading_axes,
    find_nearest_vector_in_span,
    project_on_first_component,
)
from tests.nets import Pooled


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(3, 7, 4), (3, 4, 7), (2, 5, 5), (2, 1, 6), (2, 6, 1)])
def test_the_projection_on_the_first_right_singular_vector_that_agrees_with_the_sum(shape):
    parts = random(*shape)
    for one, heat in zip(parts.numpy(), project_on_first_component(parts).numpy(), strict=True):
        vector = np.linalg.svd(one.T)[2][0]
        expected = one.T @ vector
        expected *= np.sign(expected @ one.sum(0))
        np.testing.assert_allclose(heat, expected, rtol=1e-11, atol=1e-13)


def test_each_sample_alone_and_any_size_have_the_same_component():
    parts = random(4, 6, 9)
    together = project_on_first_component(parts)
    for i in range(4):
        torch.testing.assert_close(project_on_first_component(parts[i : i + 1])[0], together[i], rtol=1e-12, atol=1e-14)
    for size in (1e-200, 1e200):
        torch.testing.assert_close(project_on_first_component(parts * size) / size, together, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wide", [True, False])
def test_of_a_tie_the_direction_nearest_to_the_sum(wide):
    parts = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, -1.0]]], dtype=torch.float64)
    parts = torch.cat([parts, torch.zeros_like(parts)], 1 if wide else 2)  # nothing, by which each Gram matrix is used
    heat = project_on_first_component(parts)[0]
    # both axes have the singular value 3: of their plane, the direction of the sum (3, 3)
    torch.testing.assert_close(heat[:3], torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64) / 2**0.5)
    assert not heat[3:].any()


@pytest.mark.parametrize("wide", [True, False])
def test_a_sum_that_says_nothing_leaves_the_strongest_positive(wide):
    line = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    parts = torch.stack([line, -line] + [0 * line] * (2 if wide else 0))[None]
    for sign in (1, -1):
        heat = project_on_first_component(sign * parts)[0]
        strongest = line * 2**0.5
        assert min((heat - strongest).abs().max(), (heat + strongest).abs().max()) < 1e-12
        torch.testing.assert_close(heat, project_on_first_component(parts)[0], rtol=0, atol=0)


def test_nothing_is_zeros_and_what_is_not_finite_spoils_its_own_sample_alone():
    parts = random(3, 5, 4)
    right = project_on_first_component(parts)
    parts[0], parts[1, 2, 3] = 0, torch.inf
    heat = project_on_first_component(parts)
    assert not heat[0].any()
    assert heat[1].isnan().all()
    torch.testing.assert_close(heat[2], right[2], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_full(dtype):
    parts = random(2, 64, 9, dtype=dtype)
    heat = project_on_first_component(parts)
    assert heat.dtype == dtype
    exact = project_on_first_component(parts.double())
    torch.testing.assert_close(heat.double(), exact.to(dtype).double(), rtol=1e-6, atol=0)


def with_eigenvalues(values):
    turn = torch.linalg.qr(random(len(values), len(values)))[0]
    return turn * values @ turn.mT


FALLING = torch.linspace(0.5, -0.9, 300, dtype=torch.float64)
SPECTRA = {
    "one": [1.0],
    "close": [1.0, 0.998],
    "three alike": [1.0, 1.0, 1.0],
    "more alike than a block has": [1.0] * 12,
    "none positive": [-0.1],
}


def eigenspace(gram, towards):
    """The direction nearest to a map in the space of the largest eigenvalue, by numpy."""
    values, vectors = np.linalg.eigh(gram.numpy())
    axes = vectors[:, values > values[-1] - 1e-9] if values[-1] > 0 else 0 * vectors
    along = axes @ (axes.T @ towards.numpy())
    return along / (np.linalg.norm(along) or 1) * max(values[-1], 0) ** 0.5


@pytest.mark.slow
def test_large_matrices_have_the_axes_of_a_full_decomposition():
    grams, towards = [], random(len(SPECTRA), 300, seed=5)
    for first in SPECTRA.values():
        values = FALLING - 0.7 if max(first) < 0 else FALLING.clone()
        values[: len(first)] = torch.tensor(first, dtype=torch.float64)
        grams.append(with_eigenvalues(values))
    found = find_nearest_vector_in_span(compute_leading_axes(torch.stack(grams)), towards)
    for gram, one, towards_one, name in zip(grams, found.numpy(), towards, SPECTRA, strict=True):
        np.testing.assert_allclose(one, eigenspace(gram, towards_one), rtol=0, atol=1e-11, err_msg=name)
        alone = find_nearest_vector_in_span(compute_leading_axes(gram[None]), towards_one[None])[0]
        np.testing.assert_allclose(alone, one, rtol=0, atol=1e-12, err_msg=name)
    assert torch.equal(find_nearest_vector_in_span(compute_leading_axes(torch.stack(grams)), towards), found)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_no_map_decomposes_more_than_a_few_rows(kernel, monkeypatch):
    x = random(2, 8, 17, 18)
    tool = KPCACAM(Pooled(torch.nn.MaxPool2d(1), 8).double(), "features", kernel=kernel)
    monkeypatch.setattr("camscope.explainers.core.principal_component.MAX_ROWS_FOR_FULL_DECOMPOSITION", 1000)
    exact = tool.attribute(x, 1)
    monkeypatch.undo()
    whole, rows = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: (rows.append(gram.shape[-1]), whole(gram))[1])
    torch.testing.assert_close(tool.attribute(x, 1), exact, rtol=0, atol=1e-10 * float(exact.abs().max()))
    assert rows
    assert max(rows) < 17 * 18
