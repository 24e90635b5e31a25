"""Factorisations against what they must be, and concepts on networks and images whose parts are known."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope import load_model
from camscope.errors import InputError
from camscope.explainers import DeepFeatureFactorization
from camscope.explainers.cam import deep_feature_factorization
from camscope.explainers.core.nonnegative_factorization import factorize_nonnegative
from camscope.explainers.core.principal_component import project_on_first_component
from camscope.phantom import CATEGORIES, draw_radiograph
from camscope.render import choose_region_colors
from tests.nets import CASES, Flat

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


def positive(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rebuilt(factors):
    return factors.maps @ factors.vectors


def test_one_part_is_the_first_singular_pair():
    for shape in ((2, 9, 5), (2, 5, 9)):
        matrix = positive(*shape)
        factors = factorize_nonnegative(matrix, 1, tolerance=0)
        torch.testing.assert_close(factors.maps[..., 0], project_on_first_component(matrix.mT), rtol=1e-9, atol=0)
        torch.testing.assert_close(factors.vectors.norm(dim=2), torch.ones(2, 1, dtype=torch.float64))


def test_planted_parts_are_found_where_only_one_answer_exists():
    maps, vectors = positive(12, 3), positive(3, 20, seed=1)
    maps[:3], vectors[:, :3] = torch.eye(3), torch.eye(3)  # each part alone in a cell, and with a channel of its own
    found = factorize_nonnegative((maps @ vectors)[None], 3, n_iterations=2000, tolerance=0)
    assert found.relative_error < 1e-6
    order = (found.vectors[0] @ (vectors / vectors.norm(dim=1, keepdim=True)).mT).argmax(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    expected = maps * vectors.norm(dim=1)
    torch.testing.assert_close(found.maps[0], expected[:, order], rtol=1e-4, atol=1e-5)


def test_nothing_negative_and_no_single_change_makes_it_better():
    matrix = positive(2, 15, 10) ** 3
    factors = factorize_nonnegative(matrix, 4, n_iterations=3000, tolerance=0)
    maps, vectors = factors.maps, factors.vectors
    assert maps.min() >= 0 <= vectors.min()
    for value, slope in (
        (maps, (rebuilt(factors) - matrix) @ vectors.mT),
        (vectors, maps.mT @ (rebuilt(factors) - matrix)),
    ):
        assert slope[value > 1e-6].abs().max() < 1e-4  # level where it could go either way
        assert slope[value == 0].min() > -1e-4  # uphill where it could only grow
    missing = (matrix - rebuilt(factors)).norm(dim=(1, 2)) / matrix.norm(dim=(1, 2))
    torch.testing.assert_close(factors.relative_error, missing, rtol=1e-9, atol=0)
    roots = torch.linalg.svdvals(matrix)
    assert (missing >= roots[:, 4:].norm(dim=1) / roots.norm(dim=1)).all()  # no four parts of any sign are better


def test_parts_that_are_not_needed_are_empty_and_nothing_is_zeros():
    line = positive(1, 6, 1) @ positive(1, 1, 5, seed=1)
    factors = factorize_nonnegative(torch.cat([line, torch.zeros_like(line)]), 3)
    assert factors.relative_error.tolist() == [pytest.approx(0, abs=1e-12), 0]
    assert factors.maps[0, :, 0].min() > 0
    assert not factors.maps[0, :, 1:].any()
    assert not factors.maps[1].any()
    assert factorize_nonnegative(line, 50).maps.shape == (1, 6, 5)


@pytest.mark.slow
def test_each_matrix_alone_any_size_and_the_tolerance():
    matrix = positive(4, 9, 12) ** 2
    matrix[1] = positive(1, 9, 2, seed=3) @ positive(1, 2, 12, seed=4)  # done long before the others
    together = factorize_nonnegative(matrix, 3)
    for i in range(4):
        torch.testing.assert_close(
            factorize_nonnegative(matrix[i : i + 1], 3).maps[0], together.maps[i], rtol=1e-10, atol=1e-14
        )
    torch.testing.assert_close(
        factorize_nonnegative(matrix * 1e-250, 3).maps * 1e250, together.maps, rtol=1e-10, atol=1e-14
    )
    closer = factorize_nonnegative(matrix, 3, n_iterations=2000, tolerance=0)
    assert (closer.relative_error <= together.relative_error).all()
    assert (closer.relative_error < together.relative_error).any()


def pooled(**settings):
    model, x = CASES["pooled"].make(3, torch.float64)
    activation = model.features(x).detach()
    return model, x, activation, DeepFeatureFactorization(model, "features", **settings)


def test_a_map_adds_up_to_what_a_linear_head_says_of_the_factorisation():
    model, x, activation, tool = pooled(n_concepts=2)
    factors = factorize_nonnegative(activation.flatten(2).mT, 2)
    assert factors.relative_error.min() > 0.01, "a factorisation that is exact cannot tell"
    score = (rebuilt(factors).mean(1) @ model.head.weight.T)[:, 1].detach()
    torch.testing.assert_close(tool.attribute(x, 1).sum((1, 2)), score, rtol=1e-9, atol=1e-12)


def test_the_map_is_each_concepts_gain_spread_over_its_cells():
    model, x = CASES["residual"].make(1, torch.float64)
    activation = []
    handle = model.block.register_forward_hook(lambda module, args, output: activation.append(output.detach().clone()))
    model(x)
    handle.remove()
    factors = factorize_nonnegative(activation[0].flatten(2).mT.relu(), 3)

    def score(values):
        replaced = model.block.register_forward_hook(lambda module, args, output: values.clone())
        found = model(x)[0, 2].item()
        replaced.remove()
        return found

    expected = torch.zeros(36, dtype=torch.float64)
    for c in range(3):
        cells = factors.maps[0, :, c]
        alone = (factors.vectors[0, c, :, None] * cells).view(1, 6, 6, 6)
        expected += (score(alone) - score(torch.zeros_like(alone))) * cells / cells.sum()
    heat = DeepFeatureFactorization(model, "block", n_concepts=3).attribute(x, 2)[0]
    torch.testing.assert_close(heat.flatten(), expected, rtol=1e-9, atol=1e-12)


def test_shared_concepts_are_one_factorisation_of_all_images(monkeypatch):
    _, x, activation, tool = pooled(n_concepts=3)
    whole = tool.factorize(list(x))
    matrix = activation.flatten(2).mT
    assert (whole.maps.shape, whole.vectors.shape, whole.gains.shape) == ((3, 3, 4, 3), (3, 6), (3, 3))
    made = np.einsum("nchw,ck->nhwk", whole.maps, whole.vectors).reshape(3, 12, 6)
    missing = np.linalg.norm(made - matrix.numpy()) / np.linalg.norm(matrix.numpy())
    assert whole.relative_error == pytest.approx(missing, rel=1e-9)
    masses = np.einsum("nchw,ck->c", whole.maps, whole.vectors)
    np.testing.assert_allclose(whole.shares, masses / masses.sum())
    assert list(whole.shares) == sorted(whole.shares, reverse=True)
    monkeypatch.setattr(deep_feature_factorization, "IMAGES_PER_PASS", 2)
    paged = tool.factorize(list(x))
    np.testing.assert_allclose(paged.maps, whole.maps, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(paged.gains, whole.gains, rtol=1e-10, atol=1e-14)


def test_a_concepts_gain_is_the_mean_over_the_images_that_hold_it():
    model, x, _, tool = pooled(n_concepts=3)
    concepts = tool.factorize(list(x))
    amounts = concepts.maps.sum((2, 3))
    # the head is linear: alone in image n, concept c gives each class weight · vector x its mean over the cells
    each = (amounts / 12)[..., None] * (concepts.vectors @ model.head.weight.detach().numpy().T)
    expected = (amounts[..., None] * each).sum(0) / amounts.sum(0)[:, None]
    np.testing.assert_allclose(concepts.gains, expected, rtol=1e-9, atol=1e-12)
    for gains, top in zip(concepts.gains, concepts.top_classes, strict=True):
        assert [one.gain for one in top] == [gain for gain in sorted(gains, reverse=True) if gain > 0]
        assert [one.class_index for one in top] == [k for k in np.argsort(-gains) if gains[k] > 0]


class Everywhere(nn.Module):
    """A score at every place: no class scores."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x):
        return self.features(x).relu()


def test_a_model_without_class_scores_has_concepts_without_classes():
    torch.manual_seed(0)
    concepts = DeepFeatureFactorization(Everywhere(), "features", n_concepts=2).factorize(torch.rand(3, 8, 8))
    assert concepts.gains.shape == (2, 0)
    assert concepts.top_classes == ((), ())
    assert [entry.lines for entry in concepts.legend] == [(), ()]
    heat = DeepFeatureFactorization(Everywhere(), "features").attribute(
        torch.rand(2, 3, 8, 8), lambda out: out.mean((1, 2, 3))
    )
    assert heat.shape == (2, 8, 8)


def test_the_legends_color_is_the_color_in_the_picture():
    values = torch.zeros(2, 8, 8, dtype=torch.float64)
    values[0, :4], values[1, 6:] = 2.0, 1.0
    model = Flat(nn.MaxPool2d(1), 128, classes=2).double()
    concepts = DeepFeatureFactorization(model, "features", layout="channels_first").factorize(values)
    picture = concepts.concept_image(alpha=1.0)
    first, second = (entry.color for entry in concepts.legend)
    assert concepts.shares == pytest.approx([64 / 80, 16 / 80])
    assert tuple(picture[0, 0]) == first == choose_region_colors(1)[0]
    gray = picture[4, 0]  # no concept is here
    assert gray[0] == gray[1] == gray[2]
    blend = np.array(picture[7, 7], float) - 0.75 * np.array(second)  # half as strong, so three quarters opaque
    assert np.ptp(blend) <= 1.5
    figure = concepts.figure()
    assert all((figure == color).all(2).sum() > 50 for color in (first, second))


def test_every_finding_of_the_phantom_is_a_concept_that_lies_on_it():
    seen = [draw_radiograph(3, finding) for finding in CATEGORIES]
    pictures = [np.repeat(one.image[..., None], 3, axis=2) for one in seen]
    concepts = DeepFeatureFactorization(load_model("phantom"), n_concepts=4).factorize(pictures)
    named = {top[0].label: c for c, top in enumerate(concepts.top_classes)}
    assert set(named) == set(CATEGORIES)
    for i, one in enumerate(seen[1:], start=1):
        strength, _ = concepts.placements[i].project(concepts.maps[i, named[one.name]])
        row, column = np.unravel_index(strength.argmax(), strength.shape)
        top, bottom, left, right = (
            *np.flatnonzero(one.mask.any(1))[[0, -1]],
            *np.flatnonzero(one.mask.any(0))[[0, -1]],
        )
        assert top - 8 <= row <= bottom + 8  # one cell
        assert left - 8 <= column <= right + 8


def test_what_makes_no_sense_is_refused():
    model, x, _, tool = pooled()
    with pytest.raises(InputError, match="images of one size"):
        tool.factorize([x[0], x[0, :, 1:]])
    with pytest.raises(InputError, match="factorize got no images: pass at least one"):
        tool.factorize([])
    with pytest.raises(InputError, match="concepts=0"):
        DeepFeatureFactorization(model, "features", n_concepts=0)
    signal, y = CASES["signal"].make(1)
    concepts = DeepFeatureFactorization(signal, "features").factorize(y[0])
    with pytest.raises(InputError, match="only 2-D maps can be drawn"):
        concepts.figure()
