"""Robustness, on explainers whose maps are known: exact where the map moves with the picture, and by hand where it does not."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import nn

from camscope.errors import GeometryError, InputError, NonFiniteError, UndefinedError
from camscope.explainers import GradCAM, InputXGradient, Saliency
from camscope.explainers.control_methods import BaseControl
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.metrics import (
    METRICS,
    GaussianNoise,
    IntensityWindow,
    JPEGCompression,
    Resampling,
    Rotation,
    Shift,
    acquisition_stability,
    average_sensitivity,
    batch_invariance,
    compare_under_transforms,
    determinism,
    max_sensitivity,
    stability,
)
from camscope.metrics.explain_changed_inputs import ExplainerProbe, clean_maps_and_predictions_shared
from camscope.metrics.stability_under_transforms import compute_stable_prediction_share
from tests.nets import CASES, Flat
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


MINE = (
    "max-sensitivity",
    "average-sensitivity",
    "stability",
    "acquisition-stability",
    "determinism",
    "batch-invariance",
)


class Drawn(BaseControl):
    """A map that `draw` makes of the input."""

    name, paper = "drawn", ""
    draw = staticmethod(lambda x: x.sum(1))

    def control_map(self, x):
        return self.draw(x)


def drawn(draw, shape, model=None):
    tool = Drawn(model or Steady(shape[0]))
    tool.draw = draw
    return tool


class Steady(nn.Module):
    """Two classes that hardly depend on the input."""

    def __init__(self, channels=1):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), 1e-3, dtype=torch.float64))

    def forward(self, x):
        mean = (x.flatten(2).mean(2) * self.weight).sum(1)
        return torch.stack([mean, -mean], 1)


def smooth(*size):
    """(1,1,*size): a picture without edges."""
    axes = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in size], indexing="ij")
    return sum(torch.sin(axis / (3 + i) + i) for i, axis in enumerate(axes))[None, None]


# Sensitivity


def test_sensitivity_by_hand():
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    found = []
    for one in draw_seeds(10, torch.Generator().manual_seed(3)):
        draw = torch.rand(x.shape, generator=torch.Generator().manual_seed(one)).double()
        change = 0.1 * (x.max() - x.min()) * (2 * draw - 1)
        found.append(float(change.sum(1).norm() / x.sum(1).norm()))  # the map is a sum: so is its change
    tool = drawn(lambda x: x.sum(1), (2, 5, 6))
    assert max_sensitivity(tool, x, radius=0.1, seed=3) == pytest.approx(max(found), rel=1e-6)
    assert average_sensitivity(tool, x, radius=0.1, seed=3) == pytest.approx(np.mean(found), rel=1e-6)
    assert max_sensitivity(tool, x, radius=0.1, seed=3, n_samples=2) == pytest.approx(max(found[:2]), rel=1e-6)
    # twice the radius changes a linear map twice as much; the range is the input's own
    assert max_sensitivity(tool, 5 * x + 0.0, radius=0.2, seed=3) == pytest.approx(2 * max(found), rel=1e-6)


def test_a_map_that_is_always_the_same_is_not_sensitive():
    x = smooth(8, 9)
    assert max_sensitivity(drawn(lambda x: torch.ones_like(x[:, 0]), (1, 8, 9)), x) == 0.0
    wild = drawn(lambda x: (1e6 * x[:, 0]).sin(), (1, 8, 9))  # drawn anew, whatever the change
    assert average_sensitivity(wild, x, n_samples=30) == pytest.approx(2**0.5, abs=0.15)


# Moved, turned, noisy


@pytest.mark.parametrize("size", [(40,), (20, 26), (9, 10, 12)])
def test_a_map_that_moves_with_the_picture_agrees_wholly(size):
    x, tool = smooth(*size), drawn(lambda x: x[:, 0].exp(), (1, *size))
    for by in (1, 3, -2, tuple(range(1, len(size) + 1))):
        (found,) = compare_under_transforms(tool, x, transforms=[Shift(by)], similarity="pearson")
        steps = by if isinstance(by, tuple) else (by,) * len(size)
        assert found.similarity == pytest.approx(1.0, abs=1e-12)
        assert found.compared_share == pytest.approx(
            np.prod([1 - abs(s) / n for s, n in zip(steps, size, strict=True)])
        )
        assert found.is_prediction_stable
        still = drawn(lambda x: smooth(*x.shape[2:])[:, 0].expand(len(x), *x.shape[2:]), (1, *size))
        (other,) = compare_under_transforms(still, x, transforms=[Shift(by)], similarity="pearson")
        assert other.similarity < 0.99  # one that stays where it was does not


@pytest.mark.parametrize("size", [(40, 56), (6, 40, 44)])
@pytest.mark.parametrize("degrees", [1.0, -3.0, 20.0])
def test_a_map_that_turns_with_the_picture_agrees(size, degrees):
    x, tool = smooth(*size), drawn(lambda x: x[:, 0], (1, *size))
    (found,) = compare_under_transforms(tool, x, transforms=[Rotation(degrees)], similarity="pearson")
    assert found.similarity > 0.999
    assert 0.7 < found.compared_share < 1 or (
        degrees == 1 and found.compared_share == 1
    )  # by a degree no center of a pixel is lost
    back = Rotation(-degrees).apply(Rotation(degrees).apply(x))
    inner = (..., slice(12, -12), slice(12, -12))
    assert (back[inner] - x[inner]).abs().max() < 0.05


def test_a_turn_of_a_quarter_is_exact():
    x = torch.arange(25.0, dtype=torch.float64).view(1, 1, 5, 5)
    turned = Rotation(90).apply(x)
    assert torch.allclose(turned, torch.rot90(x, -1, (2, 3))) or torch.allclose(turned, torch.rot90(x, 1, (2, 3)))
    values, covered = Rotation(90).project_back(turned[0, 0].numpy(), (5, 5))
    np.testing.assert_allclose(values, x[0, 0].numpy(), atol=1e-9)
    assert covered.all()


def test_half_precision_is_turned_as_well():
    x = smooth(200, 200)
    near = Rotation(2.0).apply(x.bfloat16())
    assert near.dtype == torch.bfloat16
    assert (near.double() - Rotation(2.0).apply(x)).abs().max() < 0.02


def test_noise_is_a_share_of_the_range():
    x = smooth(60, 70) * 7
    noisy = GaussianNoise(0.1, seed=2).apply(x)
    assert torch.equal(noisy, GaussianNoise(0.1, seed=2).apply(x))
    assert not torch.equal(noisy, GaussianNoise(0.1, seed=3).apply(x))
    assert float((noisy - x).std() / (x.max() - x.min())) == pytest.approx(0.1, rel=0.05)
    assert torch.equal(GaussianNoise(0.1).apply(torch.cat([x, 3 * x]))[:1], GaussianNoise(0.1).apply(x))


def test_a_border_goes_on_as_it_ends():
    x = torch.tensor([[[1.0, 2.0, 3.0]]])
    assert Shift(1).apply(x).tolist() == [[[1.0, 1.0, 2.0]]]
    assert Shift(-2).apply(x).tolist() == [[[3.0, 3.0, 3.0]]]


class OnePixel(nn.Module):
    """Class 0 where the first pixel is bright, class 1 where it is dark."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(50.0, dtype=torch.float64))

    def forward(self, x):
        first = self.weight * x[:, 0, 0, 0]
        return torch.stack([first, -first], 1)


def test_only_where_the_prediction_holds():
    x = smooth(20, 20) * 0.1
    x[..., 0, 0], x[..., 1:, :] = 1.0, x[..., 1:, :] - 0.5
    tool = drawn(lambda x: x[:, 0], (1, 20, 20), OnePixel())
    moved, still = compare_under_transforms(tool, x, transforms=[Shift(-1), Shift((0, 0))])
    assert (moved.probability_change, moved.is_prediction_stable) == (pytest.approx(1.0), False)
    assert moved.similarity is not None  # it is told all the same
    assert (still.probability_change, still.is_prediction_stable, still.similarity) == (0.0, True, pytest.approx(1.0))
    assert stability(tool, x, transforms=[Shift(-1), Shift((0, 0))]) == pytest.approx(1.0)
    assert compute_stable_prediction_share(
        ExplainerProbe.from_explainer(tool, x), [Shift(-1), Shift((0, 0))]
    ).tolist() == [0.5]
    with pytest.raises(UndefinedError, match=r"no transform keeps the prediction stable.*\(shift -1 px: \|dp\| 1\)"):
        stability(tool, x, transforms=[Shift(-1)])


def test_a_changed_input_is_asked_about_the_class_of_the_clean_one():
    model = Flat(nn.Identity(), 36, 2).double()
    places = torch.arange(36).view(6, 6)
    left = (places % 6 < 3).double()  # class 0 is of the left half, class 1 of the right, each pixel a little its own
    model.head.weight.data[:] = torch.stack([left, 1 - left]).flatten(1) * (1 + places.flatten() / 100)
    model.head.bias.data[:] = 0
    x = (left * (places % 6 > 0))[None, None]  # of its border nothing goes on
    assert model(Shift(3).apply(x)).argmax() == 1 != model(x).argmax()
    (found,) = compare_under_transforms(Saliency(model), x, transforms=[Shift((0, 0))])
    one = Saliency(model).attribute(x, 0)
    from camscope.metrics.explain_changed_inputs import ExplainerProbe

    maps = ExplainerProbe.from_explainer(Saliency(model), x).compute_maps(Shift(3).apply(x), [0])
    np.testing.assert_allclose(maps[0], one[0].numpy())
    assert found.similarity == pytest.approx(1.0)


def test_too_little_in_common_is_no_comparison():
    (found,) = compare_under_transforms(drawn(lambda x: x[:, 0], (1, 10, 10)), smooth(10, 10), transforms=[Shift(6)])
    assert (found.similarity, found.reason) == (None, "only 16% of the pixels are shown by both inputs")


# Taken, and kept, another way


def test_a_window_is_a_line_clipped_to_the_range():
    x = torch.tensor([[[[0.0, 2.0, 5.0, 10.0]]], [[[3.0, 3.0, 3.0, 3.0]]]])
    wider, narrower = IntensityWindow(2.0).apply(x), IntensityWindow(0.5, 0.1).apply(x)
    assert wider[0].flatten().tolist() == pytest.approx([2.5, 3.5, 5.0, 7.5])  # half as steep about the middle, 5
    assert narrower[0].flatten().tolist() == pytest.approx([0.0, 0.0, 3.0, 10.0])  # twice as steep about 6, but at 5
    assert wider[1].unique().tolist() == narrower[1].unique().tolist() == [3.0]
    assert torch.equal(IntensityWindow().apply(x), x)


def test_resampling_keeps_a_line_and_flattens_a_point():
    line = torch.arange(20.0, dtype=torch.float64).expand(1, 1, 20, 20)
    kept = Resampling(0.9).apply(line)
    np.testing.assert_allclose(kept[..., 2:-2], line[..., 2:-2], atol=1e-9)
    point = torch.zeros(1, 1, 20, 20)
    point[..., 10, 10] = 1.0
    assert 0.2 < Resampling(0.9).apply(point).max() < 0.9
    assert torch.equal(Resampling(1.0).apply(point), point)
    volume = torch.rand(2, 1, 6, 7, 8)
    assert Resampling(0.5).apply(volume).shape == volume.shape


@pytest.mark.parametrize(
    "shape", [(2, 1, 24, 17), (1, 3, 24, 17), (1, 2, 24, 17), (1, 1, 3, 16, 18), (1, 3, 4, 16, 18)]
)
def test_compression_is_that_of_pillow_and_of_every_plane_for_itself(shape):
    x = torch.from_numpy(
        ndimage.gaussian_filter(np.random.default_rng(0).random(shape), (0, 0, *[2] * (len(shape) - 2)))
    )
    low, high = (each.view(-1, *[1] * (len(shape) - 1)) for each in (x.flatten(1).amin(1), x.flatten(1).amax(1)))
    again, color = JPEGCompression(60).apply(x), shape[1] == 3
    bits = ((x - low) / (high - low) * 255).round().byte().numpy()
    sample = np.moveaxis(bits[0], 0, -1) if color else bits[0]
    places = list(np.ndindex(*sample.shape[: -3 if color else -2]))
    assert len(places) == int(np.prod(shape[2:-2])) * (1 if color else shape[1])
    for place in places:
        Image.fromarray(np.ascontiguousarray(sample[place])).save(file := io.BytesIO(), "JPEG", quality=60)
        sample[place] = np.array(Image.open(file))
    expected = np.moveaxis(sample, -1, 0) if color else sample
    np.testing.assert_allclose(again[0], (low[0] + torch.from_numpy(expected) / 255 * (high - low)[0]), atol=1e-6)
    flat = torch.full((1, 1, 9, 9), 3.5)
    assert torch.equal(JPEGCompression(90).apply(flat), flat)


def test_stable_under_another_acquisition_is_who_does_not_look_at_its_steps():
    x = smooth(40, 40) + 0.02 * torch.rand(40, 40, dtype=torch.float64)
    still = acquisition_stability(drawn(lambda x: x[:, 0], (1, 40, 40)), x)
    restless = acquisition_stability(drawn(lambda x: (1e4 * x[:, 0]).sin(), (1, 40, 40)), x)
    assert still > 0.99
    assert abs(restless) < 0.1
    found = compare_under_transforms(
        drawn(lambda x: x[:, 0], (1, 40, 40)),
        x,
        transforms=[IntensityWindow(1.05), Resampling(0.9), JPEGCompression(90)],
    )
    assert [str(one.transform) for one in found] == ["window 1.05 x, level +0", "resampled to 0.9 x", "JPEG 90"]
    assert all(one.compared_share == 1 and one.is_prediction_stable for one in found)


# Asked again, and in company


def test_what_depends_on_the_call_is_not_deterministic():
    calls = []

    def draw(x):
        calls.append(1)
        return x[:, 0] * (1 + 0.1 * len(calls))

    x = smooth(6, 7)
    peak = determinism(drawn(draw, (1, 6, 7)), x, n_repeats=3)
    assert peak == pytest.approx(0.3 / 1.1)  # the first is 1.1 x, the fourth 1.4 x
    assert determinism(drawn(lambda x: x[:, 0], (1, 6, 7)), x) == 0.0


def test_what_depends_on_the_batch_is_found():
    x = smooth(6, 7)
    shared = drawn(lambda x: x[:, 0] / x.abs().max(), (1, 6, 7))
    assert batch_invariance(shared, x, other_images=4 * x) == pytest.approx(0.75)
    assert batch_invariance(shared, x, other_images=torch.cat([x, x / 2, x])) == 0.0
    assert batch_invariance(drawn(lambda x: x[:, 0] - x.mean(), (1, 6, 7)), x) > 0.1
    model, x = CASES["residual"].make()
    assert batch_invariance(GradCAM(model, "block"), x[:1]) < 1e-5


# What all have in common


@pytest.mark.parametrize("name", MINE)
def test_each_is_registered_and_leaves_the_model_as_it_was(name):
    model, x = CASES["residual"].make()
    model.train()
    tool, x = GradCAM(model, "block"), x[:1]
    with untouched(model, x):
        first = METRICS[name](tool, x, 1)
    assert type(first) is float
    with untouched(model, x):
        assert METRICS[name](tool, x, 1) == first
    assert METRICS[name].input_kind == "explainer"
    if "stability" not in name:  # a score that is no class's holds in shares of itself
        assert METRICS[name](tool, x, lambda output: output[:, 1]) == pytest.approx(first, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", MINE)
def test_a_map_of_zeros_or_nan_has_no_number(name):
    x = smooth(9, 9)
    with pytest.raises(UndefinedError, match=r"zero everywhere|constant"):
        METRICS[name](drawn(lambda x: torch.zeros_like(x[:, 0]), (1, 9, 9)), x)
    with pytest.raises(NonFiniteError, match="the map of drawn"):
        METRICS[name](drawn(lambda x: x[:, 0] / 0, (1, 9, 9)), x)


@pytest.mark.parametrize("name", MINE)
def test_a_batch_is_refused(name):
    x = smooth(9, 9)
    with pytest.raises(InputError, match="expected one sample"):
        METRICS[name](drawn(lambda x: x[:, 0], (1, 9, 9)), torch.cat([x, x]))


def test_refused():
    x, tool = smooth(9, 9), drawn(lambda x: x[:, 0], (1, 9, 9))
    for call, error, words in (
        (lambda: compare_under_transforms(tool, x, similarity="ssim"), InputError, "which compare single pixels"),
        (lambda: compare_under_transforms(tool, x, transforms=[]), InputError, "transforms is empty"),
        (
            lambda: compare_under_transforms(tool, x, transforms=[Shift((1, 2, 3))]),
            InputError,
            "or 2 numbers with one for each axis",
        ),
        (lambda: compare_under_transforms(tool, x, transforms=[Shift(0.5)]), InputError, "pixels=0.5"),
        (lambda: compare_under_transforms(tool, x, transforms=[GaussianNoise(-1.0)]), InputError, "relative_std=-1.0"),
        (lambda: Rotation(3).apply(smooth(9)), GeometryError, "leave Rotation out"),
        (lambda: compare_under_transforms(tool, x, transforms=[IntensityWindow(0)]), InputError, "width_factor=0"),
        (
            lambda: compare_under_transforms(tool, x, transforms=[IntensityWindow(level_shift=np.nan)]),
            InputError,
            "level_shift=nan",
        ),
        (lambda: compare_under_transforms(tool, x, transforms=[Resampling(-1)]), InputError, "scale_factor=-1"),
        (lambda: compare_under_transforms(tool, x, transforms=[JPEGCompression(0)]), InputError, "quality=0"),
        (
            lambda: compare_under_transforms(tool, x, transforms=[JPEGCompression(101)]),
            InputError,
            "quality=101: expected a whole number, 100 or",
        ),
        (lambda: JPEGCompression(90).apply(smooth(9)), GeometryError, "leave JPEGCompression out"),
        (lambda: Resampling(0.9).apply(torch.zeros(1, 1, 2, 3, 4, 5)), GeometryError, "an input of 4 axes"),
        (lambda: max_sensitivity(tool, x, radius=0), InputError, "radius=0"),
        (lambda: max_sensitivity(tool, x, n_samples=0), InputError, "n_samples=0"),
        (lambda: determinism(tool, x, n_repeats=0), InputError, "n_repeats=0"),
        (lambda: batch_invariance(tool, x, other_images=smooth(9, 8)), InputError, "other_images is"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_signed_map_of_a_volume():
    model, x = CASES["volume"].make()
    assert (
        -1
        <= stability(
            InputXGradient(model), x[:1], 1, transforms=[Shift(1), GaussianNoise(0.01)], max_probability_change=1.0
        )
        <= 1
    )


@pytest.mark.parametrize("method", [GradCAM, Saliency])
def test_what_metrics_share_is_computed_once_with_the_same_values(method):
    model, x = CASES["residual"].make()
    tool, x = method(model, "block") if method is GradCAM else method(model), x[:1]
    passes = []
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    apart = {name: METRICS[name](tool, x, 1) for name in MINE}
    n_apart = sum(passes)
    passes.clear()
    with clean_maps_and_predictions_shared():
        together = {name: METRICS[name](tool, x, 1) for name in MINE}
    n_together = sum(passes)
    passes.clear()
    with clean_maps_and_predictions_shared():  # of another image nothing is known
        METRICS[MINE[0]](tool, x.flip(3), 1)
        assert METRICS[MINE[0]](tool, x, 1) == apart[MINE[0]]
    handle.remove()
    assert together == apart
    assert n_together < n_apart


def test_methods_share_the_prediction_and_a_map_gives_that_of_its_changed_input():
    model, x = CASES["residual"].make()
    x, passes = x[:1], []
    methods = [GradCAM(model, "block"), InputXGradient(model)]
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    with clean_maps_and_predictions_shared():
        together = [compare_under_transforms(method, x, 1, transforms=[Shift(1), Shift(2)]) for method in methods]
    handle.remove()
    assert sum(passes) == 1 + 2 * (1 + 2)  # the prediction, and for each method the maps
    probe = ExplainerProbe.from_explainer(methods[0], x, 1)
    changed = probe.compute_probabilities(torch.cat([Shift(1).apply(x), Shift(2).apply(x)]), [0, 0])
    expected = abs(changed - probe.clean_probabilities)
    for agreements in together:
        assert [each.probability_change for each in agreements] == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_control_takes_no_pass_of_the_model():
    model, x = CASES["residual"].make()
    probe = ExplainerProbe.from_explainer(drawn(lambda x: x[:, 0], tuple(x.shape[1:]), model), x[:1], 1)
    passes = []
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    maps = probe.compute_maps(torch.cat([x[:1], 2 * x[:1]]), [0, 0])
    handle.remove()
    assert passes == []
    np.testing.assert_allclose(maps[1], 2 * maps[0])
