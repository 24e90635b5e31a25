"""Faithfulness: numbers worked out by hand on linear models, a box of known evidence, and what has no number."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope import GradCAM
from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics import (
    METRICS,
    MetricValues,
    NoisyLinearImputation,
    PerturbationTest,
    aopc,
    imputation,
    removal_curve,
    scoring_scope,
)
from camscope.metrics.imputation import impute_linearly
from camscope.metrics.perturbation_test import sample_region_sets, sample_squares
from tests.tools import Counting, seen_before
from tests.untouched import untouched

ASKED = sorted(name for name, one in METRICS.items() if one.input_kind == "perturbation_test")
WITH_MAPS = ("adcc", "arcc")
ALL = [*ASKED, *WITH_MAPS]


class Linear(nn.Module):
    """Logits (Σ w x, 0) of inputs of any rank: the class's probability is the sigmoid of its score."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.Parameter(torch.as_tensor(weights, dtype=torch.float64))

    def forward(self, x):
        score = x.sum(1).flatten(1) @ self.weights.flatten()
        return torch.stack([score, torch.zeros_like(score)], 1)


def ask(name, trial, **settings):
    """The metric; where it makes the map anew, that of x times its shares is the map times them."""
    if name in WITH_MAPS:
        settings["compute_maps"] = lambda z: trial.maps.nan_to_num() * (z.sum(1) / trial.scorer.x.sum(1))
    return METRICS[name](trial, **settings)


def said(name, weights, heat, x=None, *, fill="zero", n_steps=20, seed=0, target=0, **settings):
    """The number of one signal under a linear model."""
    x = torch.ones(1, 1, len(weights), dtype=torch.float64) if x is None else torch.tensor(x).double().view(1, 1, -1)
    with scoring_scope(Linear(weights), x, target) as scores:
        return ask(
            name, PerturbationTest(np.array([heat]), scores, imputation=fill, n_steps=n_steps, seed=seed), **settings
        )[0]


# --- by hand: x = 1, w = (4, 3, 2, 1), f = 10. The strongest first: 10 6 3 1 0; the weakest first: 10 9 7 4 0.

WEIGHTS = [4.0, 3.0, 2.0, 1.0]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("deletion", {}, (10 / 2 + 6 + 3 + 1 + 0 / 2) / 4),
        (
            "deletion",
            {"output_kind": "probability"},
            (sigmoid(10) / 2 + sigmoid(6) + sigmoid(3) + sigmoid(1) + 0.25) / 4,
        ),
        ("insertion", {}, (10 / 2 + 9 + 7 + 4 + 0 / 2) / 4),
        ("lerf-morf-gap", {}, 2.5),
        ("aopc", {}, (0 + 4 + 7 + 9 + 10) / 5),
        ("aopc", {"n_regions": 2}, (0 + 4 + 7) / 3),
        ("necessity", {"share": 0.5}, 7.0),
        ("necessity", {"share": 0.25, "output_kind": "probability"}, sigmoid(10) - sigmoid(6)),
        ("sufficiency", {"share": 0.25}, 10.0 - 4.0),
        ("average-drop", {}, 1 - (4 + 3 * 0.75 + 2 * 0.5 + 0.25) / 10),
        ("average-increase", {}, 0.0),
        ("completeness-gap", {}, 0.0),
        ("infidelity", {"fit_scale": False}, 0.0),
        ("faithfulness-correlation", {"share": 0.5}, 1.0),
        ("sensitivity-n", {"shares": (0.25, 0.5)}, 1.0),
    ],
)
def test_a_linear_model_by_hand(name, settings, expected):
    if "correlation" not in name and name not in ("sensitivity-n", "infidelity"):
        settings = {"output_kind": "score", **settings}
    assert said(name, WEIGHTS, WEIGHTS, **settings) == pytest.approx(expected, abs=1e-12)


def test_what_speaks_against_is_masked_away_and_raises_the_score():
    weights = [4.0, 3.0, -2.0, -1.0]  # f(x) = 4, f(x a) = 4 + 9/4
    assert said("average-increase", weights, weights) == 1
    assert said("average-drop", weights, weights) == 0
    gain = (sigmoid(6.25) - sigmoid(4)) / (1 - sigmoid(4))
    assert said("average-gain", weights, weights) == pytest.approx(gain, abs=1e-12)


def test_adcc_by_hand():
    a = np.array(WEIGHTS) / 4
    coherency = (1 + np.corrcoef(a, a * a)[0, 1]) / 2
    drop = 1 - sigmoid(7.5) / sigmoid(10)
    expected = 3 / (1 / coherency + 1 / (1 - a.mean()) + 1 / (1 - drop))
    assert said("adcc", WEIGHTS, WEIGHTS) == pytest.approx(expected, abs=1e-12)


def test_arcc_by_hand():
    # a = (0, 1, 0) is its own map again. The second of (1, 9, 2) is removed, and becomes 1.5
    settings = {"x": [1, 9, 2], "shares": (0.33,), "noise_std": 0}
    gap = sigmoid(9) - sigmoid(1.5)
    expected = 3 / (1 / 1 + 1 / (2 / 3) + 1 / gap)
    assert said("arcc", [0, 1, 0], [0, 1, 0], **settings) == pytest.approx(expected, rel=1e-6)
    assert said("arcc", [0, -1, 0], [0, 1, 0], **settings) == 0  # ROAD is not positive


def test_infidelity_by_hand():
    masks = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0]]).bool()  # which cost 4 and 5; the map says 1 and 0 of them
    heat = [1.0, 0.0, 0.0, 0.0]
    assert said("infidelity", WEIGHTS, heat, masks=masks, fit_scale=False) == pytest.approx((3**2 + 5**2) / 2)
    assert said("infidelity", WEIGHTS, heat, masks=masks) == pytest.approx((0 + 5**2) / 2)
    assert said("infidelity", WEIGHTS, [7 * w for w in WEIGHTS]) == pytest.approx(0, abs=1e-9)
    assert said("infidelity", WEIGHTS, [7 * w for w in WEIGHTS], fit_scale=False) > 1
    fill = torch.full((1, 4), -1.0)  # two steps below x: a gradient says half of what is lost
    assert said("infidelity", WEIGHTS, WEIGHTS, fill=fill, unit="gradients", fit_scale=False) == pytest.approx(
        0, abs=1e-12
    )
    assert said("infidelity", WEIGHTS, WEIGHTS, fill=fill, fit_scale=False) > 1
    assert said("completeness-gap", WEIGHTS, WEIGHTS, fill=fill) == pytest.approx(10)


def test_road_by_hand():
    # the second of (0, 9, 2) is removed, and becomes 1: f falls from 9 to 1
    assert said(
        "necessity", [0, 1, 0], [0, 1, 0], [0, 9, 2], fill="inpainting", share=0.33, output_kind="score"
    ) == pytest.approx(8)
    for name, expected in (("road-morf", 1.0), ("road-lerf", 9.0), ("road", 8.0)):
        assert said(
            name, [0, 1, 0], [0, 1, 0], [0, 9, 2], shares=[0.33], noise_std=0, output_kind="score"
        ) == pytest.approx(expected)


def test_correlations_are_those_of_the_same_sets_in_a_loop():
    drawn = np.random.default_rng(0)
    weights, heat, x = drawn.normal(size=12), drawn.normal(size=12), drawn.normal(size=12)
    found = []
    for count in (3, 6):
        sets = sample_region_sets(torch.arange(12), 12, count, 30, seed=5)(slice(0, 30)).numpy()
        assert (sets.sum(1) == count).all()
        lost = [weights @ x - weights @ np.where(one, x.mean(), x) for one in sets]
        found.append(np.corrcoef(lost, [heat[one].sum() for one in sets])[0, 1])
    settings = {"fill": "mean", "seed": 5, "n_sets": 30}
    assert said("faithfulness-correlation", weights, heat, x, share=0.5, **settings) == pytest.approx(found[1])
    assert said("sensitivity-n", weights, heat, x, shares=(0.25, 0.5), **settings) == pytest.approx(np.mean(found))


# --- a box of known evidence


class Box(nn.Module):
    """The class's logit is eight times the mean of a known box, less what an empty one gives."""

    def __init__(self, row, column):
        super().__init__()
        self.place = slice(row, row + 5), slice(column, column + 22)

    def forward(self, x):
        score = 8 * x[(..., *self.place)].mean((1, 2, 3)) - 4
        return torch.stack([score, torch.zeros_like(score)], 1)


def blurred(mask):
    """Under a mean of 13 by 13 pixels, twice: the box's ends fall below what lies beside its middle."""
    for _ in range(2):
        mask = F.avg_pool2d(mask[None, None], 13, 1, 6)[0, 0]
    return mask


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.one_in(3)
def test_true_map_beats_blurred_beats_random_beats_inverted(seed):
    drawn = torch.Generator().manual_seed(seed)
    model = Box(*torch.randint(2, 8, (2,), generator=drawn).tolist())
    x = 0.3 * torch.rand(1, 1, 32, 32, generator=drawn)
    x[(..., *model.place)] += 0.7
    true = torch.zeros(32, 32)
    true[model.place] = 1
    maps = [true, blurred(true), torch.rand(32, 32, generator=drawn), 1 - true]
    with scoring_scope(model, x, 0) as scores:
        for name, sign in (("deletion", -1), ("insertion", 1), ("road", 1)):
            found = [sign * METRICS[name](PerturbationTest(one[None], scores, seed=seed))[0] for one in maps]
            assert all(better > worse for better, worse in itertools.pairwise(found)), (name, found)


# --- ties


def test_ties_are_a_seeded_random_order_and_a_constant_map_starts_nowhere():
    x = torch.ones(1, 1, 100)
    weights = torch.zeros(100)
    weights[0] = 2.0  # a constant map that began at the first pixel would lose all at once
    with scoring_scope(Linear(weights.double()), x.double(), 0) as scores:
        trials = [
            PerturbationTest(torch.full((1, 100), value), scores, imputation="zero", seed=seed)
            for seed in range(60)
            for value in (0.0, 3.0)
        ]
        areas = [METRICS["deletion"](one, output_kind="score")[0] for one in trials]
        assert areas[::2] == areas[1::2]  # one order, whatever the value
        assert np.mean(areas) == pytest.approx(1, abs=0.2)
        half = torch.arange(100) < 50
        ranks = PerturbationTest(half[None].double(), scores, seed=1).region_ranks[0]
    assert sorted(ranks[:50].tolist()) == list(range(50))
    assert ranks[:50].tolist() != list(range(50))


def test_regions_are_ranked_by_their_mean_and_removed_whole():
    heat = torch.zeros(1, 5, 7)
    heat[0, 4, 6] = 1.0  # in the corner, in a region of 1 x 2 pixels
    with scoring_scope(Linear(torch.ones(5, 7)), torch.ones(1, 1, 5, 7, dtype=torch.float64), 0) as scores:
        trial = PerturbationTest(heat, scores, imputation="zero", region_size=3)
        left = [int(value) for value in removal_curve(trial, output_kind="score")[0].tolist()]
        ranks = trial.region_ranks[0]
    assert trial.n_regions == 6
    assert {len(set(ranks[rows, columns].flatten().tolist())) for rows, columns in [(slice(0, 3), slice(0, 3))]} == {1}
    assert ranks[4, 6] == 0
    assert left[0] == 35
    assert left[-1] == 0
    assert len(left) == 7


# --- imputation


@pytest.mark.parametrize("size", [(9,), (6, 7), (4, 5, 3), (1, 8)])
def test_imputed_pixels_are_the_weighted_means_of_their_neighbors(size):
    torch.manual_seed(0)
    x, removed = torch.randn(2, 3, *size, dtype=torch.float64), torch.rand(2, *size) < 0.6
    removed.view(2, -1)[:, 0] = False
    made = impute_linearly(x, removed, tolerance=1e-12)
    assert torch.equal(made[~removed[:, None].expand_as(made)], x[~removed[:, None].expand_as(x)])
    steps = [step for step in itertools.product((-1, 0, 1), repeat=len(size)) if any(step)]
    for image, place in [(int(row[0]), tuple(row[1:].tolist())) for row in removed.nonzero()]:
        there = [(step, tuple(p + s for p, s in zip(place, step, strict=True))) for step in steps]
        near = [(s, at) for s, at in there if all(0 <= p < length for p, length in zip(at, size, strict=True))]
        weights = torch.tensor([0.5 ** (sum(map(abs, s)) - 1) for s, _ in near], dtype=torch.float64)
        values = torch.stack([made[(image, slice(None), *at)] for _, at in near])
        torch.testing.assert_close(made[(image, slice(None), *place)], weights @ values / weights.sum())


def test_a_gray_image_with_several_channels_is_solved_once(monkeypatch):
    """The channels of a gray image differ in offset and scale, as after normalization."""
    gray = torch.rand(3, 1, 12, 10, dtype=torch.float64)
    x = torch.cat([gray, 2.5 * gray - 1, -gray], 1)
    removed = torch.rand(3, 12, 10) > 0.4
    solved = []
    solve = imputation._solve_by_conjugate_gradients
    monkeypatch.setattr(
        imputation,
        "_solve_by_conjugate_gradients",
        lambda values, *rest: solved.append(values.shape[1]) or solve(values, *rest),
    )
    together = impute_linearly(x, removed, 1e-12)
    alone = torch.cat([impute_linearly(x[:, [c]], removed, 1e-12) for c in range(3)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    colored = x + torch.tensor([0.0, 0.0, 1e-3]).view(3, 1, 1) * torch.rand(12, 10)
    apart = torch.cat([impute_linearly(colored[:, [c]], removed, 1e-12) for c in range(3)], 1)
    torch.testing.assert_close(impute_linearly(colored, removed, 1e-12), apart, rtol=0, atol=1e-10)
    constant = torch.ones(1, 3, 12, 10)
    assert torch.equal(impute_linearly(constant, removed[:1]), constant)
    assert solved == [1, 1, 1, 1, 1, 1, 1, 3, 1]  # the colored image alone needs all three channels


def test_imputation_of_everything_is_the_mean_and_its_noise_is_a_share_of_the_spread():
    torch.manual_seed(0)
    x, everything = torch.randn(1, 2, 8, 8), torch.ones(1, 8, 8, dtype=torch.bool)
    torch.testing.assert_close(impute_linearly(x, everything), x.mean((2, 3), keepdim=True).expand_as(x))
    alone = impute_linearly(x, everything.triu())
    beside = impute_linearly(torch.cat([x, 1e3 * x]), torch.cat([everything.triu(), everything.tril()]))[:1]
    torch.testing.assert_close(alone, beside)
    with scoring_scope(Linear(torch.ones(8, 8)).float(), x, 0) as scores:
        rough = PerturbationTest(x[:, 0], scores, imputation=NoisyLinearImputation(0.5))._imputer(
            everything, torch.tensor([0])
        )
    torch.testing.assert_close(rough.std((2, 3)), 0.5 * x.std((2, 3)), rtol=0.25, atol=0)


# --- one question, asked once, of a model that is left alone


class Flips(nn.Module):
    """Its top class is 1 as soon as any pixel is changed."""

    def forward(self, x):
        changed = (x - 1).abs().flatten(1).sum(1)
        return torch.stack([torch.ones_like(changed), 3 * changed - 1], 1)


def test_the_class_is_that_of_the_clean_input():
    with scoring_scope(Flips(), torch.ones(2, 1, 4)) as scores:
        found = removal_curve(PerturbationTest(torch.rand(2, 4), scores, imputation="zero"), output_kind="score")
    assert found.tolist() == [[1.0] * 5] * 2


def test_metrics_share_their_passes():
    x = torch.rand(3, 2, 8, 8, dtype=torch.float64)
    model = seen_before(Counting(Linear(torch.rand(8, 8))), x)
    with scoring_scope(model, x, 0, batch_size=7) as scores:
        trial = PerturbationTest(x.sum(1), scores, n_steps=8)
        for name in ("deletion", "insertion", "lerf-morf-gap", "aopc", "completeness-gap"):
            METRICS[name](trial)
        METRICS["necessity"](trial, share=0.25)
        METRICS["sufficiency"](trial, share=0.25)
        assert model.rows == 3 + 3 * (2 * 8 - 1)  # the image, the fill, and seven points of each curve
        assert model.forwards == 1 + math.ceil(3 * 8 / 7) + math.ceil(3 * 7 / 7)
        before = model.rows
        for name in ("average-drop", "average-increase", "average-gain", "adcc"):
            ask(name, trial)
        assert model.rows == before + 3
        before = model.rows
        METRICS["sensitivity-n"](trial, shares=(0.2, 0.4), n_sets=10)
        METRICS["faithfulness-correlation"](trial, share=0.2, n_sets=10)
        METRICS["infidelity"](trial, n_squares=10)
        METRICS["infidelity"](trial, n_squares=10, fit_scale=False)
        assert model.rows == before + 3 * 30
        before = model.rows
        for name in ("road", "road-morf", "road-lerf"):
            METRICS[name](trial, shares=(0.2, 0.5))
        assert model.rows == before + 3 * 4


class Awkward(nn.Module):
    """Batch norm and dropout, in train mode, which an argument a sample shifts."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.dropout, self.head = (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.stem(x)).relu()).mean((2, 3)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.one_in(5)
def test_model_and_input_are_as_before_and_nothing_depends_on_the_batch(name):
    torch.manual_seed(0)
    model, x = Awkward().train(), torch.randn(3, 2, 8, 8, requires_grad=True)
    heat, few = torch.rand(3, 8, 8), {"n_sets": 12} if name in ("sensitivity-n", "faithfulness-correlation") else {}

    def asked(rows, batch_size):
        with scoring_scope(model, x[rows], [0, 1, 2][rows], batch_size=batch_size) as scores:
            return ask(name, PerturbationTest(heat[rows], scores, n_steps=5), **few).array

    with untouched(model, x):
        found = asked(slice(0, 3), None)
    assert found.tolist() == asked(slice(0, 3), None).tolist()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(asked(slice(0, 3), 2), found, atol=1e-5)
    np.testing.assert_allclose([asked(slice(i, i + 1), None)[0] for i in range(3)], found, atol=1e-5)


@pytest.mark.parametrize("size", [(24,), (6, 5), (4, 3, 4)])
@pytest.mark.parametrize("fill", ["mean", "blur", "noise", "zero", "inpainting", NoisyLinearImputation(0.1)], ids=str)
@pytest.mark.one_in(5)
def test_every_metric_and_fill_takes_any_number_of_axes(size, fill):
    torch.manual_seed(0)
    x = torch.rand(2, 1, *size, dtype=torch.float64)
    with scoring_scope(Linear(torch.rand(size)), x, 0) as scores:
        trial = PerturbationTest(torch.rand(2, *size), scores, imputation=fill, n_steps=4)
        for name in ALL:
            metric = METRICS[name]
            few = {"n_sets": 12} if name in ("sensitivity-n", "faithfulness-correlation") else {}
            for value in ask(name, trial, **few).array:
                assert value >= (-math.inf if metric.lower_bound is None else metric.lower_bound)
                assert value <= (math.inf if metric.upper_bound is None else metric.upper_bound)


def test_squares_lie_inside_and_everywhere():
    masks = sample_squares((6, 9), 3, 400, 0, torch.device("cpu"))(slice(0, 400))
    assert set(masks.flatten(1).sum(1).tolist()) == {1, 4, 9}
    assert masks.any(0).all()
    assert torch.equal(masks[5:9], sample_squares((6, 9), 3, 400, 0, torch.device("cpu"))(slice(5, 9)))


# --- what has no number


NEEDS_POSITIVE = {"average-drop", "average-increase", "average-gain", *WITH_MAPS}
NEEDS_SPREAD = {"faithfulness-correlation", "sensitivity-n", *WITH_MAPS}
UNDEFINED = {
    "nan": (float("nan"), set(ALL)),
    "infinite": (float("inf"), set(ALL)),
    "zero": (0.0, NEEDS_POSITIVE | NEEDS_SPREAD),
    "negative": (-1.0, NEEDS_POSITIVE | NEEDS_SPREAD),
    "constant": (2.0, NEEDS_SPREAD),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", UNDEFINED)
@pytest.mark.one_in(5)
def test_a_map_that_says_nothing_has_a_number_or_a_reason(name, kind):
    torch.manual_seed(0)
    value, undefined = UNDEFINED[kind]
    heat = torch.rand(2, 6, 6)
    heat[0] = value if kind in ("zero", "negative", "constant") else heat[0]
    heat[0, 2, 2] = value
    with scoring_scope(Linear(torch.rand(6, 6)), torch.rand(2, 1, 6, 6, dtype=torch.float64), 0) as scores:
        found = ask(name, PerturbationTest(heat, scores, n_steps=4))
    assert math.isfinite(found[1])
    assert (found.numbers[0] is None) == (name in undefined), found
    if name in undefined:
        with pytest.raises(UndefinedError, match=r"NaN|positive|constant|are equal"):
            found[0]
    else:
        assert math.isfinite(found[0])
    if kind == "constant" and name in NEEDS_POSITIVE - set(WITH_MAPS):
        assert found[0] == 0  # nothing is masked: the flaw of these metrics, said in their page


def test_a_model_that_ignores_its_input_correlates_with_nothing():
    class Ignores(nn.Module):
        def forward(self, x):
            return torch.tensor([[0.7, 0.1]]).expand(len(x), 2) + 1e-8 * x.flatten(1).sum(1, keepdim=True)

    with scoring_scope(Ignores(), torch.rand(1, 1, 6, 6), 0) as scores:
        trial = PerturbationTest(torch.rand(1, 6, 6), scores)
        for name in ("faithfulness-correlation", "sensitivity-n"):
            with pytest.raises(UndefinedError, match="losses, are equal"):
                METRICS[name](trial)[0]
        assert METRICS["deletion"](trial)[0] == pytest.approx(sigmoid(0.6), abs=1e-6)
        assert METRICS["lerf-morf-gap"](trial)[0] == pytest.approx(0, abs=1e-6)


def test_a_methods_own_maps_are_made_anew_inside():
    torch.manual_seed(0)
    model, x = Awkward(), torch.rand(2, 2, 8, 8)
    model.head.weight.data.abs_()
    method = GradCAM(model, "norm")
    heat = F.interpolate(method.attribute(x, [1, 2])[:, None], (8, 8), mode="bilinear")[:, 0].numpy()
    heat.flags.writeable = False

    def again(changed):
        return F.interpolate(method.attribute(changed, [1, 2])[:, None], (8, 8), mode="bilinear")[:, 0]

    with untouched(model, x), scoring_scope(model, x, [1, 2]) as scores:
        found = METRICS["adcc"](PerturbationTest(heat, scores), again).array
    assert ((found > 0) & (found < 1)).all()


class Broken(nn.Module):
    def forward(self, x):
        score = x.flatten(1).sum(1).log()  # NaN for what sums to less than zero
        return torch.stack([score, 0 * score], 1)


def test_an_answer_that_is_no_number_is_a_reason_of_its_image_alone():
    x = torch.tensor([[[4.0, 2.0, 1.0, 3.0]], [[4.0, -2.0, 1.0, 3.0]]])
    with scoring_scope(Broken(), x, lambda output: output[:, 0]) as scores:
        found = METRICS["necessity"](PerturbationTest(x[:, 0], scores, imputation=torch.full((1, 4), -3.0)), share=0.25)
    assert found.numbers[1] is None
    assert "the model's score is NaN" in found.reasons[1]
    assert found[0] == pytest.approx(math.log(10) - math.log(3), rel=1e-6)


def test_no_share_of_an_answer_that_is_not_positive_and_no_room_above_one():
    assert "share" in MetricValues.from_tensor(torch.tensor([1.0]), {"no share": torch.tensor([True])}).reasons[0]
    with pytest.raises(UndefinedError, match="not positive"):
        said("average-drop", [-1.0, 0.5], [1.0, 0.5], output_kind="score")
    with pytest.raises(UndefinedError, match="cannot increase"):
        said("average-gain", [900.0, 0.5], [1.0, 0.5])


def test_what_cannot_be_asked_is_refused():
    x = torch.rand(1, 1, 6, 6, dtype=torch.float64)
    with scoring_scope(Linear(torch.rand(6, 6)), x, 0) as scores:
        trial = PerturbationTest(x[:, 0], scores)
        for call, error, words in [
            (lambda: PerturbationTest(x[:, 0, :3], scores), GeometryError, "at the input|to the input"),
            (lambda: PerturbationTest(x[:, 0], scores, imputation="black hole"), InputError, "expected 'mean', 'blur'"),
            (
                lambda: PerturbationTest(x[:, 0], scores, imputation=torch.zeros(2, 6, 6)),
                InputError,
                "the imputation image is",
            ),
            (lambda: PerturbationTest(x[:, 0], scores, n_steps=0), InputError, "n_steps=0"),
            (lambda: METRICS["necessity"](trial, share=1.5), InputError, "between 0 and 1"),
            (lambda: METRICS["road"](trial, shares=()), InputError, "pass at least one share"),
            (lambda: METRICS["deletion"](trial, output_kind="logit"), InputError, "output_kind='logit'"),
            (lambda: aopc(trial, n_regions=0), InputError, "n_regions=0"),
            (lambda: METRICS["infidelity"](trial, masks=torch.ones(2, 6, 6)), GeometryError, "expected bool"),
            (lambda: METRICS["sensitivity-n"](trial, n_sets=1), InputError, "2 or more"),
            (
                lambda: METRICS["adcc"](trial, compute_maps=lambda z: z[:, 0, :2]),
                GeometryError,
                "compute_maps returned maps",
            ),
        ]:
            with pytest.raises(error, match=words):
                call()
    with pytest.raises(InputError, match="inside the `with"):
        METRICS["insertion"](trial)


def test_ties_of_each_image_may_have_an_order_of_their_own():
    """Of five images alike under a constant map: one seed, one number; seeds of their own, that of each by itself."""
    torch.manual_seed(0)
    model, x = Linear(torch.randn(36)), torch.rand(1, 1, 6, 6, dtype=torch.float64).repeat(5, 1, 1, 1)
    with scoring_scope(model, x, 0) as scores:
        heat = torch.ones(5, 6, 6)
        one = METRICS["deletion"](PerturbationTest(heat, scores, n_steps=6)).array
        each = METRICS["deletion"](PerturbationTest(heat, scores, n_steps=6, tie_seeds=range(5))).array
        again = [METRICS["deletion"](PerturbationTest(heat, scores, n_steps=6, seed=seed))[0] for seed in range(5)]
        with pytest.raises(InputError, match="tie_seeds has 2 seeds for 5 images"):
            PerturbationTest(heat, scores, tie_seeds=[0, 1])
    np.testing.assert_allclose(one, one[0])
    np.testing.assert_allclose(each, again, rtol=1e-6)
    assert np.ptp(each) > 0


def test_a_uniform_map_leaves_the_image_as_it_is_and_takes_no_pass():
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    model = seen_before(Counting(Linear(torch.rand(8, 8))), x)
    maps = torch.stack([torch.ones(8, 8), torch.rand(8, 8)])
    with scoring_scope(model, x, 0) as scores:
        before = model.rows
        drops = METRICS["average-drop"](PerturbationTest(maps, scores, "zero")).array
        assert model.rows - before == 1
        uniform = METRICS["average-drop"](PerturbationTest(torch.ones(2, 8, 8), scores, "zero")).array
        assert model.rows - before == 1
    assert drops[0] == uniform[0] == uniform[1] == 0
    assert drops[1] != 0


def test_an_image_without_all_its_regions_is_predicted_once_for_all_maps_of_a_replacement():
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    model = seen_before(Counting(Linear(torch.rand(8, 8))), x)
    first, second = torch.rand(2, 8, 8), torch.rand(2, 8, 8)
    with scoring_scope(model, x, 0) as scores:
        PerturbationTest(first, scores, "zero").score_after_removal("strongest", [5, 64])
        before = model.rows
        shared = PerturbationTest(second, scores, "zero").score_after_removal("weakest", [5, 64])
        assert model.rows - before == 2  # the point of five regions of each image
        other = PerturbationTest(second, scores, "mean").score_after_removal("weakest", [5, 64])
        assert model.rows - before == 2 + 4  # another replacement is not shared
        alone = PerturbationTest(second, scores, torch.zeros(1, 8, 8)).score_after_removal("weakest", [5, 64])
    torch.testing.assert_close(shared, alone)
    assert not torch.allclose(other[..., 1], shared[..., 1])
