"""Paths: nets whose integrals are known in closed form, the methods' rules written as loops, and what is told of the gap."""

import itertools
import math
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn

from camscope import Explanation
from camscope.errors import InputError, MissingExtraError
from camscope.explainers import (
    METHODS,
    XRAI,
    BlurIG,
    ExpectedGradients,
    GradientSHAP,
    GuidedIG,
    IntegratedGradients,
)
from camscope.explainers.core.maps_with_flags import AttributionMaps, merge_notes_and_flags
from camscope.explainers.core.random_mixin import draw_normal
from camscope.explainers.path.blur_ig import BlurredCopies
from camscope.explainers.path.expected_gradients import PathSamples
from camscope.explainers.path.guided_ig import allocate_distance
from camscope.explainers.path.xrai import average_over_segments, find_pixels_near_mask, segment_image
from tests.nets import CASES, Flat
from tests.tools import Counting, explainer, seen_before

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
PATHS = [name for name, method in METHODS.items() if method.__module__.startswith("camscope.explainers.path.")]
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Formula(nn.Module):
    """Class 0 is nothing; class 1 is a formula of x (N,C,*S)."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, x):
        values = self.formula(x)
        return torch.stack([0 * values, values], 1)


def linear(weight):
    return Formula(lambda x: (weight * x).flatten(1).sum(1))


def square(weight):
    return Formula(lambda x: (weight * x * x).flatten(1).sum(1))


# --- integrated gradients


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("shape", [(2, 9), (3, 4, 5), (1, 3, 4, 2)])
def test_of_a_square_net_integrated_gradients_are_exact_at_any_number_of_steps(steps, shape):
    weight, x, base = drawn(*shape), drawn(2, *shape, seed=1), drawn(*shape, seed=2)
    found = IntegratedGradients(square(weight), n_steps=steps, baseline=base).attribute(x, 1)
    # (x - x') times the mean of 2 w (x' + a (x - x')) over a, which is w (x + x')
    torch.testing.assert_close(found, (weight * (x - base) * (x + base)).sum(1), **EXACT)


def test_a_product_is_shared_evenly_on_the_straight_line_and_goes_to_what_moves_last_on_the_guided_path():
    model, x = Formula(lambda x: x[:, 0, 0] * x[:, 0, 1]), torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)
    assert IntegratedGradients(model, n_steps=1).attribute(x, 1).tolist() == [[0.5, 0.5]]
    # at (0,0) nothing is felt: the first goes first, to (1,0), where only the second is felt: (0 + 0)/2, (1 + 1)/2
    assert GuidedIG(model, n_steps=2, fraction=0.5, max_distance=1).attribute(x, 1).tolist() == [[0.0, 1.0]]
    assert GuidedIG(model, n_steps=2, fraction=0.5, max_distance=0).attribute(x, 1).tolist() == [[0.5, 0.5]]


def hinge(x):
    """relu(x_1 + x_2 - 1): on the way to (1,1) its gradient is 0 up to the middle, there too, and then 1."""
    return (x.flatten(1).sum(1) - 1).relu()


def test_of_a_hinge_integral_gap_and_steps_are_those_worked_out_by_hand():
    x = torch.ones(1, 1, 2, dtype=torch.float64)
    assert IntegratedGradients(Formula(hinge), n_steps=2).attribute(x[None], 1).tolist() == [[[0.5, 0.5]]]
    # middles of fifths: 0.1, 0.3, 0.5, 0.7, 0.9, of which two are behind the hinge: 0.4 + 0.4 of the change of 1
    one = IntegratedGradients(Formula(hinge), n_steps=5).explain(x, 1)
    assert one.attribution[0].tolist() == pytest.approx([0.4, 0.4])
    assert one.diagnostics == {"completeness_gap": pytest.approx(-0.2), "score_change": 1.0, "gradients": 5.0}
    assert "gap is -0.2, 20.00% of it, after 5 gradients" in one.notes[0]


def test_steps_are_tripled_until_the_gap_is_small_and_none_is_run_twice():
    counting = Counting(Formula(hinge))
    # of an odd number of steps m, (m - 1) / 2 middles lie behind the hinge: the gap is 1 / m
    tool = IntegratedGradients(counting, n_steps=1, tolerance=0.1)
    one = tool.explain(torch.ones(1, 1, 2, dtype=torch.float64), 1)
    assert (one.diagnostics["gradients"], counting.backward_rows) == (27, 27)
    assert one.diagnostics["completeness_gap"] == pytest.approx(-1 / 27)
    once = IntegratedGradients(counting, n_steps=27).explain(torch.ones(1, 1, 2, dtype=torch.float64), 1)
    np.testing.assert_allclose(one.attribution, once.attribution, rtol=1e-14)
    assert "tolerance" not in " ".join(one.notes)
    never = IntegratedGradients(Formula(hinge), n_steps=3, tolerance=1e-9).explain(torch.ones(1, 1, 2), 1)
    assert never.diagnostics["gradients"] == 3**8, (
        "the most that is a power of three times the steps, and no more than 2^14"
    )
    assert never.notes[0] == "not within tolerance=1e-09 after 6561 steps, the maximum"


@pytest.mark.parametrize("channels", ["abs", "max", "l2"])
def test_what_adds_up_is_named_where_the_map_does_not(channels):
    model, x = CASES["pooled"].make(dtype=torch.float64)
    one = IntegratedGradients(model, n_steps=4, channel_reduction=channels).explain(x[0], 1)
    (note,) = one.notes
    assert note.startswith(f"completeness: the values, before channel_reduction='{channels}', add up to ")
    said = float(note.split("add up to ")[1].split(",")[0])
    signed = IntegratedGradients(model, n_steps=4).explain(x[0], 1)
    assert signed.notes[0].startswith("completeness: the pixels' values add up to ")
    assert float(signed.attribution.sum()) == pytest.approx(said, rel=1e-3)
    assert float(one.attribution.sum()) != pytest.approx(said, rel=1e-3)


def test_the_map_is_the_mean_over_several_baselines():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    names = ["zero", "mean", "blur", "dark", "bright", drawn(3, 16, 12)]
    each = [IntegratedGradients(model, n_steps=4, baseline=one).explain(x[0], 1) for one in names]
    every = IntegratedGradients(model, n_steps=4, baseline=names).explain(x[0], 1)
    np.testing.assert_allclose(every.attribution, np.mean([one.attribution for one in each], 0), rtol=1e-10, atol=1e-14)
    for name in ("completeness_gap", "score_change"):
        mean = np.mean([one.diagnostics[name] for one in each])
        assert every.diagnostics[name] == pytest.approx(mean, rel=1e-8, abs=1e-14)
    assert every.diagnostics["gradients"] == 24
    assert re.search(r"bright, tensor \(3, 16, 12\) [0-9a-f]{8}\]$", every.parameters["baseline"])
    twice = IntegratedGradients(model, n_steps=4, baseline=["noise", "noise"]).attribute(x, 1)
    assert not torch.allclose(twice, IntegratedGradients(model, n_steps=4, baseline="noise").attribute(x, 1))


def test_dark_and_bright_are_each_channels_least_and_largest_and_white_is_what_the_preprocessing_makes_of_it():
    weight = torch.ones(3, 4, 4, dtype=torch.float64)
    x = drawn(3, 4, 4)
    for name, of in (("dark", x.amin((1, 2))), ("bright", x.amax((1, 2)))):
        found = IntegratedGradients(linear(weight), n_steps=1, baseline=name).attribute(x[None], 1)
        torch.testing.assert_close(found[0], (x - of[:, None, None]).sum(0), **EXACT)
    made = {"preprocess": lambda pixels: torch.from_numpy(np.array(pixels)).movedim(-1, 0).float() / 255 - 0.5}
    for name, level in (("black", -0.5), ("white", 0.5)):
        found = IntegratedGradients(linear(weight), n_steps=1, baseline=name, **made).explain(x, 1)
        np.testing.assert_allclose(found.attribution, (x - level).sum(0), rtol=1e-12, atol=1e-13)
        with pytest.raises(InputError, match=f"baseline='{name}' requires the preprocessing of the model"):
            IntegratedGradients(linear(weight), baseline=name).attribute(x[None], 1)


def test_an_input_that_is_the_baseline_has_nothing_to_explain_and_says_so():
    x = torch.zeros(1, 4, 4)
    one = IntegratedGradients(linear(torch.ones(1, 4, 4)), n_steps=1).explain(x, 1)
    assert (one.status, one.attribution.any()) == ("constant_score", False)
    assert one.notes[0] == "the input is the baseline itself: there is nothing to explain"
    blind = IntegratedGradients(Formula(lambda x: 0 * x.sum((1, 2, 3))), n_steps=1).explain(x + 1, 1)
    assert blind.status == "zero_gradient"


# --- all paths


@pytest.mark.parametrize("method", PATHS)
def test_of_a_linear_net_every_path_gives_the_weights_times_what_changed(method):
    weight, x = drawn(3, 12, 12), drawn(2, 3, 12, 12, seed=1)
    found = explainer(
        method, linear(weight), None, channel_reduction="sum", **{"sigma": 0} if method == "gradientshap" else {}
    )
    start = {
        "integratedgradients": 0 * x,
        "guidedig": 0 * x,
        "expectedgradients": x.mean((2, 3), keepdim=True) / 2,
        "gradientshap": x.mean((2, 3), keepdim=True) / 2,
        "blurig": blurred_in_full(x, 0.2 * 12),
        "xrai": (x.amin((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True)) / 2,
    }[method]
    expected = (weight * (x - start)).sum(1)
    heat = found.attribute(x, 1)
    if method == "xrai":  # which spreads it
        expected, heat = expected.sum((1, 2)), heat.sum((1, 2))
    torch.testing.assert_close(heat, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["pooled", "signal", "volume", "tokens"])
@pytest.mark.parametrize("method", ["integratedgradients", "blurig", "guidedig"])
@pytest.mark.one_in(3)
def test_of_enough_steps_a_map_adds_up_to_the_scores_change(method, case):
    model, x = CASES[case].make(dtype=torch.float64)
    one = explainer(method, model, None, n_steps=200).explain(x[0], 1)
    gap, change = one.diagnostics["completeness_gap"], one.diagnostics["score_change"]
    assert abs(gap) < 0.03 * abs(change)
    assert one.attribution.sum() == pytest.approx(change + gap, rel=1e-9)
    start = torch.zeros_like(x[:1]) if method != "blurig" else blurred_in_full(x[:1], 0.2 * max(x.shape[2:]))
    torch.testing.assert_close(torch.tensor(change).double(), (model(x[:1]) - model(start))[0, 1].detach().double())


@pytest.mark.parametrize("method", PATHS)
def test_how_many_are_run_at_a_time_changes_nothing(method):
    model, x = CASES["pooled"].make(dtype=torch.float64)
    first, again = (explainer(method, model, None, batch_size=size).attribute(x, 1) for size in (1, 3))
    torch.testing.assert_close(again, first, rtol=1e-10, atol=1e-15)


def test_what_a_path_measured_is_saved_and_read_again(tmp_path):
    model, x = CASES["pooled"].make()
    one = IntegratedGradients(model, n_steps=3).explain(x[0], 1)
    assert set(one.diagnostics) == {"completeness_gap", "score_change", "gradients"}
    for name in ("one.npz", "one.json"):
        assert Explanation.load(one.save(tmp_path / name)).diagnostics == one.diagnostics
    maps = AttributionMaps(torch.ones(1, 2, 2), diagnostics={"completeness_gap": torch.ones(1)})
    assert merge_notes_and_flags([maps, maps], maps.attribution).diagnostics == {}, (
        "the mean of two gaps is not the gap of what they became"
    )


def test_an_error_half_way_says_how_far_it_came():
    def failing(x):
        if float(x.detach().mean()) > 0.55:
            raise ArithmeticError("too bright")
        return x.sum((1, 2, 3))

    x = torch.ones(1, 1, 2, 2)
    tool = IntegratedGradients(Formula(lambda x: failing(x) if x.requires_grad else x.sum((1, 2, 3))), batch_size=2)
    tool.n_steps = 10
    with pytest.raises(ArithmeticError, match="too bright") as caught:
        tool.attribute(x, 1)
    assert caught.value.__notes__ == ["integratedgradients, image 1 of 1: stopped after 6 of 10 steps"]


# --- blur


def blurred_in_full(x, sigma):
    """(N,C,*S): a Gaussian along each axis, the picture mirrored at its borders as often as the Gaussian reaches over them."""
    for axis in range(2, x.ndim):
        cells = x.shape[axis]
        waves = torch.arange(cells, dtype=torch.float64)
        # what reaches cell i from cell j and from all its mirror images, of a band-limited picture: a sum over cosines
        rows = torch.stack([((i + 0.5) * waves * math.pi / cells).cos() for i in range(cells)])
        kernel = rows * (-0.5 * (sigma * waves * math.pi / cells) ** 2).exp() @ rows.T
        kernel = (2 * kernel - 1) / cells  # the constant wave counts once
        x = (x.movedim(axis, -1).double() @ kernel).movedim(-1, axis)
    return x


def test_blurs_are_the_convolution_with_a_gaussian_mirrored_at_the_borders():
    x, sigma = drawn(2, 15, 11), 3.0
    expected = torch.zeros_like(x)
    reach = range(-30, 31)
    weights = torch.tensor([math.exp(-0.5 * (step / sigma) ** 2) for step in reach], dtype=torch.float64)
    weights /= weights.sum()

    def mirrored(place, cells):
        place %= 2 * cells
        return place if place < cells else 2 * cells - 1 - place

    for i, j in itertools.product(range(15), range(11)):
        rows = [mirrored(i + step, 15) for step in reach]
        columns = [mirrored(j + step, 11) for step in reach]
        expected[:, i, j] = torch.einsum("a,b,cab->c", weights, weights, x[:, rows][:, :, columns])
    blurs = BlurredCopies(x)
    found = (
        blurs.apply_frequency_factors(blurs.compute_frequency_factors(torch.tensor([sigma, 0.0], dtype=torch.float64)))
        + blurs.channel_offset
    )
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], x, **EXACT)
    torch.testing.assert_close(blurred_in_full(x[None], sigma)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_of_a_square_net_blur_ig_of_a_wave_is_what_the_blur_takes_of_it(steps):
    cells, weight = 20, drawn(1, 20)
    wave = (3 * math.pi / cells * (torch.arange(cells, dtype=torch.float64) + 0.5)).cos()[None]
    left = math.exp(-0.5 * (0.1 * cells * 3 * math.pi / cells) ** 2)
    found = BlurIG(square(weight), n_steps=steps, sigma=0.1).attribute(wave[None], 1)
    torch.testing.assert_close(found, weight * wave**2 * (1 - left**2), **EXACT)


def test_a_constant_has_nothing_to_come_into_focus():
    one = BlurIG(square(torch.ones(1, 6, 7)), n_steps=2).explain(torch.full((1, 6, 7), 0.3), 1)
    assert (one.attribution.any(), one.status, one.diagnostics["score_change"]) == (False, "constant_score", 0.0)


# --- guided


def taken_one_by_one(room, gradient, needed, fraction):
    """The rule of the paper as loops: of those with room, groups of the smallest gradients, each as far as is needed."""
    shares = [0.0] * len(room)
    waiting = sorted((i for i in range(len(room)) if room[i] > 0), key=lambda i: abs(gradient[i]))
    size = max(1, int(fraction * len(room)))
    while waiting and needed > 0:
        group, waiting = waiting[:size], waiting[size:]
        share = min(1.0, needed / sum(room[i] for i in group))
        for i in group:
            shares[i] = share
            needed -= share * room[i]
    return shares


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("needed", [0.0, 0.7, 4.0, 100.0])
def test_a_step_takes_from_the_smallest_gradients_first(fraction, needed):
    room, gradient = drawn(13).relu(), drawn(13, seed=1)
    found = allocate_distance(room, gradient, torch.tensor(needed, dtype=torch.float64), fraction)
    expected = taken_one_by_one(room.tolist(), gradient.tolist(), needed, fraction)
    torch.testing.assert_close(found * (room > 0), torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert float((found * room).sum()) == pytest.approx(min(needed, float(room.sum())))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_ordered_by_size_and_equal_ones_by_place_in_every_precision(kind):
    gradient = torch.tensor([-8.0, 0.5, -0.0, 3e-7, -0.5, 0.0, 4e4, 0.25, 1.0], dtype=kind)
    room = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    for needed, last in enumerate([2, 5, 3, 1, 4, 8, 0, 6], start=1):
        found = allocate_distance(room, gradient, torch.tensor(float(needed), dtype=torch.float64), group_fraction=0.0)
        assert found[last] == 1, "each one more that is needed is the next in size"
        assert float((found * room).sum()) == needed


@pytest.mark.parametrize("reach", [0.0, 0.1, 1.0])
def test_every_step_goes_as_far_as_its_share_and_no_value_leaves_its_lane(reach):
    start, end, steps = drawn(1, 5, 4), drawn(1, 5, 4, seed=1), 8
    tool = GuidedIG(linear(torch.ones(1, 5, 4)), n_steps=steps, max_distance=reach)
    place = start
    for step in range(1, steps + 1):
        new = tool.advance_point(place, drawn(1, 5, 4, seed=step), start, end, step)
        shares = (new - start) / (end - start)
        assert float((end - new).abs().sum() / (end - start).abs().sum()) == pytest.approx(1 - step / steps, abs=1e-9)
        assert bool((shares >= max(0, step / steps - reach) - 1e-9).all())
        assert bool((shares <= min(1, step / steps + reach) + 1e-9).all())
        assert bool(((new - place) / (end - start) >= -1e-9).all()), "no value goes back"
        place = new
    assert torch.equal(place, end)


# --- expected gradients


def test_every_baseline_is_drawn_as_often_as_every_other_and_the_way_evenly():
    draws = PathSamples.draw(12, 4, seeded(3))
    assert [sorted(one.tolist()) for one in draws.baseline_indices.split(4)] == [[0, 1, 2, 3]] * 3
    assert (draws.fractions * 12).int().tolist() == list(range(12))
    assert PathSamples.draw(5, 20, seeded(3)).baseline_indices.unique().numel() == 5
    assert not torch.equal(PathSamples.draw(12, 4, seeded(4)).fractions, draws.fractions)
    x = torch.zeros(2, 3)
    whole = draw_normal(draws.noise_seeds, x)
    parts = torch.cat([draw_normal(draws.noise_seeds[:5], x), draw_normal(draws.noise_seeds[5:], x)])
    assert torch.equal(whole, parts)
    assert len({one.numpy().tobytes() for one in whole}) == 12


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def one_by_one(model, x, background, sigma, samples, seed):
    """(C,*S): the definition, a draw at a time."""
    draws, found = PathSamples.draw(samples, len(background), seeded(seed)), []
    for turn in range(samples):
        start = background[draws.baseline_indices[turn]]
        end = x + sigma * (x.max() - x.min()) * draw_normal(draws.noise_seeds[turn : turn + 1], x)[0]
        point = (start + draws.fractions[turn] * (end - start)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(point[None])[0, 1], point)
        found.append((end - start) * gradient)
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("case", ["pooled", "signal", "volume"])
@pytest.mark.parametrize("method", [ExpectedGradients, GradientSHAP])
def test_the_mean_over_draws_is_that_of_the_definition_written_as_a_loop(method, case):
    model, x = CASES[case].make(dtype=torch.float64)
    background = drawn(3, *x.shape[1:], seed=5)
    settings = {"sigma": 0.2} if method is GradientSHAP else {}
    found = method(model, background=background, n_samples=7, seed=2, **settings).attribute(x, 1)
    expected = torch.stack([one_by_one(model, one, background, settings.get("sigma", 0), 7, 2).sum(0) for one in x])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_of_a_square_net_expected_gradients_near_the_means_difference_of_squares():
    weight, x, background = drawn(2, 3, 3), drawn(1, 2, 3, 3, seed=1), drawn(4, 2, 3, 3, seed=2)
    one = ExpectedGradients(square(weight), background=background, n_samples=4000, channel_reduction="sum").explain(
        x[0], 1
    )
    expected = (weight * (x[0] ** 2 - background**2).mean(0)).sum(0)
    np.testing.assert_allclose(one.attribution, expected, atol=0.02)
    assert one.diagnostics["score_change"] == pytest.approx(float(expected.sum()))
    assert abs(one.diagnostics["completeness_gap"]) < 0.05


def test_a_background_is_a_tensor_or_a_list_of_images_and_what_stands_in_for_none_is_noted():
    weight = torch.ones(3, 4, 4, dtype=torch.float64)
    made = {
        "preprocess": lambda pixels: torch.from_numpy(np.array(pixels)).movedim(-1, 0).double() / 255,
        "n_samples": 4,
    }
    x = drawn(3, 4, 4)
    images = [np.full((4, 4, 3), level, np.uint8) for level in (51, 153)]
    one = ExpectedGradients(linear(weight), background=[*images, "zero", x], **made).explain(x, 1)
    np.testing.assert_allclose(one.attribution, (x - (0.2 + 0.6 + 0 + x) / 4).sum(0), rtol=1e-6)
    assert len(one.notes) == 1
    plain = ExpectedGradients(linear(weight), **made).explain(x, 1)
    assert plain.notes[0] == "no background was given: zero, mean, blur, noise instead"
    for wrong in ("zero", [], torch.zeros(0, 3, 4, 4), torch.zeros(4)):
        with pytest.raises(InputError, match="background"):
            ExpectedGradients(linear(weight), background=wrong)
    with pytest.raises(
        InputError, match=r"the baseline has shape \(3, 5, 5\); expected \(3, 4, 4\), the shape of the input"
    ):
        ExpectedGradients(linear(weight), background=torch.zeros(2, 3, 5, 5)).attribute(x[None], 1)
    with pytest.raises(InputError, match=r"pass background\[None\]: one input is \(1,3,4,4\)"):
        ExpectedGradients(linear(weight), background=x).attribute(x[None], 1)


def test_a_baseline_that_is_none_says_what_to_pass():
    model, x = CASES["pooled"].make()
    for wrong in (None, True, [[0.0]], {}, ["zero", None]):
        with pytest.raises(
            InputError,
            match=r"^baseline=.*: expected 'zero', .* a tensor \(C,H,W\) or \(N,C,H,W\), or a function of the input$",
        ):
            IntegratedGradients(model, baseline=wrong)
    with pytest.raises(InputError, match="the baseline has 1 NaN or infinite value of 1"):
        IntegratedGradients(model, baseline=torch.inf).attribute(x, 1)
    broken = x[0].clone()
    broken[0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    with pytest.raises(InputError, match=r"^the baseline has 2 NaN or infinite values of 576: .*nan_to_num"):
        IntegratedGradients(model, baseline=broken).attribute(x, 1)
    with pytest.raises(
        InputError, match=r"expected \(3, 16, 12\), the shape of the input: pass a tensor \(3, 16, 12\), an image"
    ):
        IntegratedGradients(model, baseline=torch.zeros(3, 5, 5)).attribute(x, 1)


def test_without_noise_gradient_shap_is_expected_gradients():
    model, x = CASES["pooled"].make()
    settings = {"background": torch.rand(3, 3, 16, 12), "n_samples": 5}
    quiet = GradientSHAP(model, sigma=0, **settings).attribute(x, 1)
    assert torch.equal(quiet, ExpectedGradients(model, **settings).attribute(x, 1))
    assert not torch.equal(quiet, GradientSHAP(model, sigma=0.1, **settings).attribute(x, 1))


# --- regions


def halves():
    """(1,8,8): the left half dark, the right one bright."""
    return torch.cat([torch.zeros(1, 8, 4), torch.ones(1, 8, 4)], -1).double()


def test_a_region_shares_what_one_of_its_pixels_has():
    pytest.importorskip("skimage")
    weight = torch.zeros(1, 8, 8, dtype=torch.float64)
    weight[0, 2, 6] = 32.0
    # from dark and bright, the mean of which is 0.5: the pixel has 32 (1 - 0.5), each of the 32 of its half 0.5
    settings = {"n_steps": 1, "margin": 0, "min_size": 20, "scales": (1.0,), "min_new_pixels": 1}
    found = XRAI(linear(weight), **settings).attribute(halves()[None], 1)
    torch.testing.assert_close(found[0], 0.5 * halves()[0], **EXACT)


def spread_one_by_one(masks, values, fewest):
    """The rule of the paper as loops: again and again the mask with the largest mean over its free pixels."""
    free, found = np.ones_like(values, dtype=bool), np.zeros_like(values)
    while any((mask & free).sum() >= fewest for mask in masks):
        new = max(
            (mask & free for mask in masks if (mask & free).sum() >= fewest), key=lambda mask: values[mask].mean()
        )
        found[new], free = values[new].mean(), free & ~new
    found[free] = values[free].mean() if free.any() else 0
    return found


@pytest.mark.parametrize(("margin", "fewest"), [(0, 1), (1, 1), (2, 5), (2, 1000)])
def test_regions_take_their_pixels_by_the_density_of_what_they_gain(margin, fewest):
    skimage = pytest.importorskip("skimage.segmentation")
    x, values = drawn(3, 20, 14).cumsum(1).cumsum(2), drawn(20, 14, seed=1)
    scaled = (2 * (x - x.min()) / (x.max() - x.min()) - 1).movedim(0, -1).numpy()
    labels = [skimage.felzenszwalb(scaled, scale=scale, sigma=0.8, min_size=6) for scale in (1.0, 20.0)]
    masks = [widened(torch.from_numpy(one == n), margin).numpy() for one in labels for n in np.unique(one)]
    assert len(masks) > 8
    found = average_over_segments(values, segment_image(x, (1.0, 20.0), 6, margin), fewest)
    np.testing.assert_allclose(found, spread_one_by_one(masks, values.numpy(), fewest), rtol=1e-10, atol=1e-12)
    assert float(found.sum()) == pytest.approx(float(values.sum())), "what integrated gradients add up to stays"


@pytest.mark.parametrize("wrong", [{"margin": -1}, {"scales": ()}, {"scales": "50"}, {"scales": (50.0, 0)}])
def test_settings_of_regions_are_checked_by_name(wrong):
    with pytest.raises(InputError, match=rf"^{next(iter(wrong))}=.*: expected "):
        XRAI(linear(torch.ones(1, 8, 8)), **wrong)


def widened(mask, margin):
    """(H,W) -> (H,W): the definition, over all pairs of pixels."""
    every, inside = torch.cartesian_prod(*map(torch.arange, mask.shape)).double(), mask.nonzero().double()
    return (torch.cdist(every, inside).amin(1) <= margin + 1e-9).view(mask.shape)


def test_a_mask_is_made_wider_by_a_disk():
    pytest.importorskip("skimage")
    mask = torch.zeros(7, 9, dtype=torch.bool)
    mask[3, 3] = True
    assert [len(find_pixels_near_mask(mask.numpy(), margin)) for margin in (0, 1, 2)] == [1, 5, 13]
    mask[0, 7:] = True
    for margin in (0, 1, 3, 9):
        expected = widened(mask, margin).flatten().nonzero()[:, 0]
        np.testing.assert_array_equal(find_pixels_near_mask(mask.numpy(), margin), expected)


def test_xrai_takes_black_and_white_where_they_are_known_and_five_channels_and_constant_pictures():
    pytest.importorskip("skimage")
    preprocess = {"preprocess": lambda pixels: torch.from_numpy(np.array(pixels)).movedim(-1, 0).double() / 255}
    assert XRAI(linear(torch.ones(3, 8, 8)), **preprocess).list_baselines() == ["black", "white"]
    assert XRAI(linear(torch.ones(3, 8, 8))).list_baselines() == ["dark", "bright"]
    assert XRAI(linear(torch.ones(3, 8, 8)), baseline="zero").list_baselines() == ["zero"]
    found = XRAI(linear(torch.ones(5, 8, 8)), baseline="zero", n_steps=1).attribute(torch.ones(1, 5, 8, 8), 1)
    torch.testing.assert_close(found, torch.full((1, 8, 8), 5.0))


def test_without_scikit_image_xrai_names_the_extra_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    counting = seen_before(Counting(linear(torch.ones(1, 8, 8))), torch.ones(1, 1, 8, 8))
    with pytest.raises(
        MissingExtraError, match=r'scikit-image is not installed; run: pip install "camscope\[segments\]"'
    ):
        XRAI(counting).attribute(torch.ones(1, 1, 8, 8), 1)
    assert counting.forwards == 0


# --- a second opinion


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["pooled", "residual", "tokens", "volume"])
def test_integrated_gradients_are_captums_with_the_middles_rule(case):
    captum = pytest.importorskip("captum.attr")
    model, x = CASES[case].make(dtype=torch.float64)
    base = drawn(*x.shape[1:])
    theirs = captum.IntegratedGradients(model).attribute(x, base[None], target=1, n_steps=9, method="riemann_middle")
    mine = IntegratedGradients(model, n_steps=9, baseline=base).attribute(x, 1)
    torch.testing.assert_close(mine, theirs.sum(1), rtol=1e-5, atol=1e-5 * float(mine.abs().max()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["pooled", "tokens", "signal"])
def test_gradient_shap_is_captums_with_the_same_draws(case, monkeypatch):
    captum = pytest.importorskip("captum.attr")
    model, x = CASES[case].make(1, torch.float64)
    background, samples = drawn(3, *x.shape[1:], seed=5), 8
    draws, spread = PathSamples.draw(samples, 3, seeded(0)), 0.2 * float(x.max() - x.min())
    monkeypatch.setattr(np.random, "choice", lambda *args, **kwargs: draws.baseline_indices.numpy())
    monkeypatch.setattr(np.random, "uniform", lambda *args, **kwargs: draws.fractions.numpy())
    monkeypatch.setattr(torch, "normal", lambda mean, deviation: deviation * draw_normal(draws.noise_seeds, x[0]))
    theirs = captum.GradientShap(model).attribute(x, background, n_samples=samples, stdevs=spread, target=1)
    monkeypatch.undo()
    mine = GradientSHAP(model, background=background, n_samples=samples, sigma=0.2).attribute(x, 1)
    torch.testing.assert_close(mine, theirs.sum(1), rtol=1e-5, atol=1e-5 * float(mine.abs().max()))


def test_of_a_flat_head_the_baselines_of_a_batch_are_each_samples_own():
    model = Flat(nn.Identity(), 3 * 4 * 4).double()
    x = drawn(3, 3, 4, 4)
    together = IntegratedGradients(model, baseline=["mean", "noise"], n_steps=2).attribute(x, 1)
    alone = [IntegratedGradients(model, baseline=["mean", "noise"], n_steps=2).attribute(one[None], 1)[0] for one in x]
    torch.testing.assert_close(together, torch.stack(alone), **EXACT)


def test_guided_ig_moves_equal_gradients_in_one_order_whatever_rounding_makes_of_them():
    """At a constant baseline a convolution has one gradient at all places: which comes first must not be rounding."""
    from camscope.explainers.path.guided_ig import allocate_distance

    room, gradient = torch.ones(12, dtype=torch.float64), torch.full((12,), 0.3, dtype=torch.float64)
    expected = allocate_distance(room, gradient, torch.tensor(1.5, dtype=torch.float64), 0.25)
    assert expected.tolist() == [0.5] * 3 + [0.0] * 9
    for seed in range(5):
        noise = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rounded = gradient * (1 + 1e-15 * noise)
        assert torch.equal(allocate_distance(room, rounded, torch.tensor(1.5, dtype=torch.float64), 0.25), expected)
    gradient[7] = 0.299
    moved = allocate_distance(room, gradient, torch.tensor(1.5, dtype=torch.float64), 0.25)
    assert moved.nonzero().flatten().tolist() == [0, 1, 7]


def test_an_equal_baseline_is_scored_once_for_each_class_of_a_batch():
    x = drawn(4, 1, 3, 3)
    model = seen_before(Counting(Formula(lambda x: (x - 1).flatten(1).pow(3).sum(1))), x)
    tool = IntegratedGradients(model, n_steps=2)
    before = model.rows
    together = tool.attribute(x, [1, 1, 0, 1])
    assert model.rows - before == 4 * (1 + 2) + 2  # of two classes
    alone = torch.cat([tool.attribute(x[i : i + 1], [target]) for i, target in enumerate([1, 1, 0, 1])])
    torch.testing.assert_close(together, alone)
    before = model.rows
    IntegratedGradients(model, n_steps=2, baseline="mean").attribute(x, 1)
    assert model.rows - before == 4 * (1 + 1 + 2)  # of each image another baseline
