"""Methods that hide parts of the input: exact where they must be, the same for any number of masks in a pass."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.errors import InputError, MissingExtraError
from camscope.explainers import (
    DRISE,
    HSIC,
    METHODS,
    RISE,
    ExtremalPerturbation,
    MeaningfulPerturbation,
    Occlusion,
    SegmentAblation,
    Sobol,
)
from camscope.explainers.core.run_methods_in_shared_passes import run_methods
from camscope.explainers.perturbation.mask_optimization import apply_smooth_maximum
from camscope.explainers.perturbation.perturbation_explainer import PerturbationExplainer
from camscope.explainers.perturbation.rise import RunningMean, enlarge_shifted_grids
from camscope.explainers.perturbation.sobol_and_hsic import compute_hsic, compute_total_sobol_indices
from camscope.explanation import Explanation
from camscope.targets import Box
from tests.nets import CASES
from tests.tools import FEW, Counting, explainer, seen_before
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]
FAMILY = [name for name, kind in METHODS.items() if issubclass(kind, PerturbationExplainer)]


class Linear(nn.Module):
    """Classes are sums over the input, and each row is added up by itself: its score has no company."""

    def __init__(self, *shape, classes=2, seed=0):
        super().__init__()
        drawn = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.weight = nn.Parameter(drawn)

    def forward(self, x):
        return torch.stack([(row * self.weight).flatten(1).sum(1) for row in x])


def linear(*shape, samples=1, **settings):
    """A linear net, an input of it, and what each pixel adds to the score of class 1."""
    model = Linear(*shape, **settings)
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(samples, *shape, generator=drawn, dtype=torch.float64)
    return model, x, (x * model.weight[-1]).sum(1).detach()


# --- occlusion


def occluded(terms, window, stride):
    """A window at a time: the mean, over the windows that cover a pixel, of what their pixels add up to."""
    starts = []
    for length, own, step in zip(terms.shape, window, stride, strict=True):
        usual = [s for s in range(0, length, step) if s + own < length]
        starts.append([*usual, length - own])
    total, count = torch.zeros_like(terms), torch.zeros_like(terms)
    for corner in itertools.product(*starts):
        place = tuple(slice(s, s + own) for s, own in zip(corner, window, strict=True))
        total[place] += terms[place].sum()
        count[place] += 1
    return total / count


@pytest.mark.parametrize(
    ("shape", "window", "stride"),
    [
        ((2, 11), (3,), (2,)),
        ((3, 8, 7), (3, 2), (2, 2)),
        ((3, 6, 9), (4, 4), (3, 3)),
        ((1, 4, 5, 3), (2, 2, 3), (1, 2, 1)),
    ],
)
def test_occlusion_of_a_linear_net_is_the_windows_sums(shape, window, stride):
    model, x, terms = linear(*shape, samples=2)
    heat = Occlusion(model, window=window, stride=stride, batch_size=4).attribute(x, 1)
    expected = torch.stack([occluded(one, window, stride) for one in terms])
    torch.testing.assert_close(heat, expected, rtol=1e-12, atol=1e-12)


def test_occlusion_with_several_fills_is_the_mean_of_the_maps():
    model, x, _ = linear(3, 6, 6)
    other = torch.full((3, 6, 6), 0.5, dtype=torch.float64)
    one, two = (Occlusion(model, baseline=fill, window=2).attribute(x, 1) for fill in ("zero", other))
    both = Occlusion(model, baseline=["zero", other], window=2).attribute(x, 1)
    assert not torch.allclose(one, two)
    torch.testing.assert_close(both, (one + two) / 2)


def test_occlusions_usual_window_is_a_seventh_and_its_step_half_of_that():
    model, x, _ = linear(1, 28, 21)
    assert Occlusion(model).explain(x[0], 1).notes[0] == "130 windows of 4 x 3 pixels"


def test_a_window_may_be_counted_by_numpy():
    model, x, _ = linear(1, 9, 6)
    for given, meant in ((np.int64(4), 4), ((np.int64(4), 4), 4), ([np.uint8(4), np.int32(3)], (4, 3))):
        expected = Occlusion(model, window=meant, stride=2).attribute(x, 1)
        assert torch.equal(Occlusion(model, window=given, stride=np.int64(2)).attribute(x, 1), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 2, "stride": 3}, "leaves gaps"),
        ({"window": (2, 2, 2)}, r"one for each spatial axis \(2\)"),
        ({"window": 0}, "^window=0: expected a whole number, 1 or more"),
        ({"stride": (1, 0)}, "^stride=0: expected a whole number, 1 or more"),
        ({"window": (4, None)}, "^window=None: expected a whole number, 1 or more$"),
        ({"window": np.array([4, 4])}, r"^window=array\(\[4, 4\]\): expected a whole number, 1 or more or None$"),
    ],
)
def test_windows_that_cannot_be_are_refused(settings, message):
    model, x, _ = linear(1, 6, 6)
    with pytest.raises(InputError, match=message):
        Occlusion(model, **settings).attribute(x, 1)


# --- RISE


def rise_mask(cells, shift, size):
    """The authors' recipe: a grid of one more cell than asked for, enlarged to whole cells' pixels, cut where it is shifted."""
    pixels = [math.ceil(length / (count - 1)) for length, count in zip(size, cells.shape, strict=True)]
    large = [count * own for count, own in zip(cells.shape, pixels, strict=True)]
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[cells.ndim]
    whole = F.interpolate(cells[None, None], large, mode=mode)[0, 0]
    places = tuple(slice(s, s + length) for s, length in zip(shift, size, strict=True))
    return whole[places]


@pytest.mark.parametrize(("shape", "cells"), [((2, 13), 3), ((3, 10, 7), 3), ((1, 5, 6, 7), 2)])
def test_rise_is_the_authors_recipe_in_loops(shape, cells):
    model, x, _ = linear(*shape)
    rank, samples = len(shape) - 1, 20
    numbers = (cells + 1) ** rank
    drawn = torch.rand(
        samples, numbers + rank, generator=torch.Generator().manual_seed(5), dtype=torch.float32
    ).double()
    masks, chances = [], []
    for row in drawn:
        grid = (row[:numbers] < 0.3).double().view([cells + 1] * rank)
        shift = [int(u * math.ceil(length / cells)) for u, length in zip(row[numbers:], shape[1:], strict=True)]
        mask = rise_mask(grid, shift, shape[1:])
        chances.append(model((x[0] * mask)[None]).softmax(1)[0, 1].detach())
        masks.append(mask)
    masks, above = torch.stack(masks), torch.stack(chances) - torch.stack(chances).mean()
    maps = above.view(-1, *[1] * rank) * (masks / 0.3 - 1)
    tool = RISE(model, n_samples=samples, grid_size=cells, keep_probability=0.3, seed=5, batch_size=6)
    found = run_methods([tool], x, [1])[0].maps[0]
    torch.testing.assert_close(found.attribution[0], maps.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.standard_error[0], maps.std(0) / samples**0.5, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_rise_of_a_linear_score_comes_to_its_expectation_within_its_own_error():
    """Cov(f(x ∘ M), M_i) / keep = w_i (1 - keep), where cells are pixels that the shift cannot mix."""
    model, x, terms = linear(1, 3, classes=1)
    terms = terms[0]
    tool = RISE(model, n_samples=10_000, grid_size=3, keep_probability=0.4, batch_size=2000)
    found = run_methods([tool], x, [lambda output: output[:, 0]])[0].maps[0]
    expected = terms * (1 - 0.4)
    assert ((found.attribution[0] - expected).abs() < 4 * found.standard_error[0]).all()
    assert found.standard_error.max() < 0.02 * (expected.max() - expected.min())


def test_a_mean_and_its_error_do_not_depend_on_how_maps_are_told():
    drawn = torch.Generator().manual_seed(0)
    weights, masks = torch.rand(11, generator=drawn, dtype=torch.float64), torch.rand(11, 2, 3, generator=drawn)
    running = RunningMean()
    for part in (slice(0, 1), slice(1, 6), slice(6, 11)):
        running.add_maps(weights[part], masks[part])
    each = weights[:, None, None] * masks
    torch.testing.assert_close(running.mean, each.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(running.standard_error, each.std(0) / 11**0.5, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_rise_stops_when_it_has_settled_and_says_so():
    model, x, _ = linear(1, 8, 8)
    counting = Counting(model)
    loose, tight = (
        RISE(counting, n_samples=2000, grid_size=2, tolerance=until, batch_size=50) for until in (0.1, 0.02)
    )
    first = loose.explain(x[0], 1)
    passes = counting.rows
    assert "settled to tolerance=0.1 before all 2000" in first.notes[0]
    assert first.standard_error.max() <= 0.1 * np.ptp(first.attribution)
    masks = int(first.notes[0].split()[0])
    assert masks % 64 == 0
    assert masks < passes <= 1 + masks + 50
    alone = RISE(model, n_samples=masks, grid_size=2)
    drawn_the_same = RISE(model, n_samples=2000, grid_size=2, tolerance=0.1, batch_size=7).explain(x[0], 1)
    assert (
        first.attribution.tobytes()
        == drawn_the_same.attribution.tobytes()
        == alone.explain(x[0], 1).attribution.tobytes()
    )
    assert "2000 masks" in tight.explain(x[0], 1).notes[0]
    assert tight.explain(x[0], 1).notes[0].endswith(": not settled to tolerance=0.02")


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_the_standard_error_is_kept_in_files(tmp_path, suffix):
    model, x, _ = linear(1, 6, 6)
    made = RISE(model, n_samples=10).explain(x[0], 1)
    path = made.save(tmp_path / f"why{suffix}")
    again = Explanation.load(path)
    assert again.standard_error.tobytes() == made.standard_error.tobytes()
    assert again.standard_error.shape == made.attribution.shape
    assert Occlusion(model).explain(x[0], 1).standard_error is None


# --- segments


def test_a_segments_pixels_hold_what_the_score_loses_with_it():
    model, x, terms = linear(3, 5, 4, samples=2)
    labels = torch.tensor([[7, 7, 2, 2]] * 3 + [[-1, -1, -1, 2]] * 2)
    heat = SegmentAblation(model, segments=labels).attribute(x, 1)
    for number in (7, 2, -1):
        inside = labels == number
        for own, map_ in zip(terms, heat, strict=True):
            torch.testing.assert_close(map_[inside], own[inside].sum().expand(int(inside.sum())))
    called = SegmentAblation(model, segments=lambda image: labels.numpy()).attribute(x, 1)
    assert torch.equal(called, heat)


def test_superpixels_are_of_one_color_each():
    pytest.importorskip("skimage")
    model, x, _ = linear(3, 24, 24)
    x = torch.zeros_like(x)
    x[:, 0, :, 12:], x[:, 1, 12:] = 3.0, -2.0
    tool = SegmentAblation(model, segments=4)
    found = tool.compute_segment_labels(x[0])
    assert found.shape == (24, 24)
    assert found.dtype == torch.int64
    for number in found.unique():
        assert x[0, :, found == number].unique(dim=1).shape[1] == 1
    assert len(found.unique()) == 4


def test_without_scikit_image_the_error_says_what_to_install(monkeypatch):
    model, x, _ = linear(3, 6, 6)
    monkeypatch.setitem(__import__("sys").modules, "skimage.segmentation", None)
    with pytest.raises(MissingExtraError, match=r'pip install "camscope\[segments\]"'):
        SegmentAblation(model).attribute(x, 1)


def test_segments_of_any_array_and_what_is_none():
    model, x = CASES["pooled"].make()
    labels = np.arange(16 * 12).reshape(16, 12) // 40
    expected = SegmentAblation(model, segments=labels[::-1].copy()).attribute(x, 1)
    for same in (labels[::-1], labels[::-1].astype(">u2"), lambda one: labels[::-1]):
        assert torch.equal(SegmentAblation(model, segments=same).attribute(x, 1), expected)
    with pytest.raises(InputError, match=r"the segments are a list: .* torch\.tensor"):
        SegmentAblation(model, segments=labels.tolist())
    with pytest.raises(InputError, match="segments function returned NoneType; expected a label map"):
        SegmentAblation(model, segments=lambda one: None).attribute(x, 1)
    with pytest.raises(InputError, match="an array of object"):
        SegmentAblation(model, segments=labels.astype(object)).attribute(x, 1)


@pytest.mark.parametrize("labels", [torch.zeros(5, 5, dtype=torch.long), torch.zeros(6, 6), np.zeros((1, 6, 6), int)])
def test_a_label_map_of_another_kind_is_refused(labels):
    model, x, _ = linear(3, 6, 6)
    with pytest.raises(InputError, match=r"expected one integer for each pixel of the model's input, \(6, 6\)"):
        SegmentAblation(model, segments=labels).attribute(x, 1)


# --- Sobol and HSIC


def test_sobol_of_a_sum_comes_to_each_cells_share_of_the_variance():
    model, x, terms = linear(2, 6, 4)
    cells = terms.view(2, 3, 2, 2).sum((1, 3)).flatten()
    expected = (cells**2 / (cells**2).sum()).view(2, 2)
    heat = Sobol(model, grid_size=2, n_samples=1024).attribute(x, 1)[0]
    large = expected.repeat_interleave(3, 0).repeat_interleave(2, 1)
    torch.testing.assert_close(heat, large, rtol=0, atol=2e-3)


def test_sobol_of_a_product_counts_what_cells_do_together():
    """f = a b, a and b even in 0..1: V = 7/144; what is left without one of them is E[b²] V[a] = 1/36: 4/7 each."""
    drawn = torch.quasirandom.SobolEngine(6, scramble=True, seed=3).draw(4096, dtype=torch.float64)
    first, second = drawn[:, :3], drawn[:, 3:]

    def changed(i):
        rows = first.clone()
        rows[:, i] = second[:, i]
        return rows[:, 0] * rows[:, 1]

    found, error = compute_total_sobol_indices(
        first[:, 0] * first[:, 1], torch.stack([changed(i) for i in range(3)], 1)
    )
    torch.testing.assert_close(found, torch.tensor([4 / 7, 4 / 7, 0.0], dtype=torch.float64), rtol=0, atol=0.01)
    assert error[2] == 0
    assert (error[:2] > 0).all()


def test_hsic_is_the_trace_and_nothing_for_a_cell_that_does_not_count():
    """All masks of three cells once: what the score does not read is exactly independent of it."""
    shown = torch.tensor(list(itertools.product([False, True], repeat=3)))
    scores = 2.0 * shown[:, 0] - 1.0 * shown[:, 2] + 1.5 * (shown[:, 0] & shown[:, 2])
    found = compute_hsic(shown, scores.double())
    n = len(shown)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    distances = scores.double()[:, None] - scores.double()
    kernel = (-(distances**2) / (2 * scores.double().var())).exp()
    for i in (0, 2):
        same = (shown[:, None, i] == shown[None, :, i]).double()
        expected = (same @ centring @ kernel @ centring).trace() / (n - 1) ** 2
        torch.testing.assert_close(found[i], expected)
    assert found[1].abs() < 1e-15
    assert found[0] > 2 * found[2] > 0


@pytest.mark.parametrize("method", [Sobol, HSIC])
def test_what_no_mask_changes_has_a_map_of_zero(method):
    model, x, _ = linear(1, 6, 6)
    model.weight.data.zero_()

    class Noisy(nn.Module):
        """Rounds differently in passes of another size, as convolutions do."""

        def forward(self, x):
            return model(x) + 10 + 1e-15 * len(x)

    assert not method(Noisy(), n_samples=5, grid_size=3, batch_size=3).attribute(x, 1).any()


def test_a_grid_finer_than_the_input_is_the_inputs_own():
    model, x, _ = linear(1, 3, 5)
    found = HSIC(model, grid_size=99, n_samples=64).attribute(x, 1)
    assert len(found.unique()) == 15


# --- masks that are learnt


class Corner(nn.Module):
    """Class 1 is what is bright in one corner."""

    def forward(self, x):
        score = x[:, :, :4, :4].mean((1, 2, 3)) * 40
        return torch.stack([torch.zeros_like(score), score], 1)


def corner():
    return Corner(), torch.ones(1, 1, 16, 16) + 0.1 * torch.arange(16.0)


@pytest.mark.slow
def test_extremal_masks_have_their_areas_and_keep_what_counts():
    model, x = corner()
    made = ExtremalPerturbation(model, areas=(0.1, 0.2), grid_size=16, n_steps=150, baseline="zero").explain(x[0], 1)
    covered = [float(word.rstrip("%,")) / 100 for word in made.notes[0].split() if "%" in word]
    np.testing.assert_allclose(covered, [0.1, 0.25], atol=0.05)
    inside = np.zeros((16, 16), bool)
    inside[:4, :4] = True
    assert made.attribution[inside].min() > 0.9
    assert made.attribution[8:, 8:].max() < 0.1
    assert 0 <= made.attribution.min() <= made.attribution.max() <= 1


@pytest.mark.parametrize("shape", [(9,), (7, 9), (5, 6, 7)])
def test_extremal_masks_do_not_begin_in_the_corners(shape):
    """The first step goes by the score alone: an even mask has no place that is ahead."""
    flat = apply_smooth_maximum(torch.full((1, *shape), 0.5, dtype=torch.float64))
    torch.testing.assert_close(flat, flat.flatten()[:1].expand_as(flat))


def test_extremal_masks_find_what_lies_in_the_middle():
    class Middle(nn.Module):
        def forward(self, x):
            score = x[:, :, 6:10, 6:10].mean((1, 2, 3))
            return torch.stack([torch.zeros_like(score), score], 1)

    made = ExtremalPerturbation(Middle(), areas=(0.1,), grid_size=16, n_steps=100, baseline="zero").attribute(
        corner()[1], 1
    )
    assert made[0, 7:9, 7:9].min() > 0.8
    assert made[0, [0, 0, -1, -1], [0, -1, 0, -1]].max() < 0.1


@pytest.mark.slow
def test_meaningful_perturbation_deletes_the_least_that_makes_the_class_go():
    model, x = corner()
    made = MeaningfulPerturbation(model, grid_size=16, n_steps=100, baseline="zero").explain(x[0], 1)
    inside = np.zeros((16, 16), bool)
    inside[:4, :4] = True
    assert made.attribution[inside].mean() > 5 * made.attribution[~inside].mean()
    assert float(made.notes[0].split()[1].rstrip("%")) < 25
    whole = MeaningfulPerturbation(model, grid_size=16, n_steps=20, size_weight=10.0, baseline="zero").attribute(x, 1)
    assert not whole.any()


@pytest.mark.parametrize("areas", [(), 0.1, (0.0,), (0.5, 1.0), ("a",)])
def test_areas_that_cannot_be_are_refused(areas):
    with pytest.raises(InputError, match=r"^areas=.*: expected a list of shares"):
        ExtremalPerturbation(Corner(), areas=areas)


# --- all of them


@pytest.mark.parametrize("method", FAMILY)
def test_the_bytes_do_not_depend_on_the_size_of_a_pass(method):
    model, x, _ = linear(3, 9, 8, samples=2)
    fills = ["mean", "noise"]
    every = [explainer(method, model, None, baseline=fills, seed=3, batch_size=size) for size in (None, 1, 5)]
    maps = [tool.attribute(x, 1).numpy().tobytes() for tool in every]
    assert maps[0] == maps[1] == maps[2]
    assert explainer(method, model, None, baseline=fills, seed=4).attribute(x, 1).numpy().tobytes() != maps[0]


class Failing(nn.Module):
    """Raises in its third pass of several rows."""

    def __init__(self, model, error):
        super().__init__()
        self.model, self.error, self.passes = model, error, [0]

    def forward(self, x):
        self.passes[0] += 1
        if self.passes[0] == 4:  # the first one is the clean one
            raise self.error
        return self.model(x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.one_in(3)
def test_an_end_half_way_says_how_far_it_came_and_leaves_the_model(method, error):
    case = CASES["residual"]
    model, x = case.make(1)
    failing = Failing(model.train(), type(error)(*error.args))
    tool = explainer(method, failing, None, batch_size=1)
    failing.passes[0] = 4  # none of these fails
    seen_before(failing, x)
    failing.passes[0] = 0
    with untouched(failing, x), pytest.raises(type(error)) as caught:
        tool.attribute(x, 1)
    steps = getattr(tool, "n_steps", None)
    done = 2 if steps is None or method == "meaningfulperturbation" else 1  # two areas a step
    (note,) = caught.value.__notes__
    assert note.startswith(f"{method}, image 1 of 1: stopped after {done} of ")
    failing.passes[0] = 4
    assert tool.attribute(x, 1).isfinite().all()


@pytest.mark.parametrize("method", ["occlusion", "rise", "sobol"])
def test_where_memory_ends_passes_are_halved_and_the_map_is_the_same(method):
    model, x, _ = linear(3, 9, 8)

    class Small(nn.Module):
        def forward(self, x):
            if len(x) > 3:
                raise torch.OutOfMemoryError("no memory")
            return model(x)

    right = explainer(method, model, None).attribute(x, 1)
    assert torch.equal(explainer(method, Small(), None).attribute(x, 1), right)


def test_every_method_of_the_family_is_among_the_few():
    assert set(FAMILY) <= set(FEW)


# --- D-RISE


class Detector(nn.Module):
    """Finds a box of class 1 in each half, as likely as the half is bright."""

    def forward(self, images):
        return [self.of(image) for image in images]

    def of(self, image):
        width = image.shape[-1]
        half = width // 2
        boxes = [[0.0, 0.0, half, image.shape[-2]], [half, 0.0, width, image.shape[-2]]]
        scores = torch.stack([image[..., :half].mean(), image[..., half:].mean()])
        return {"boxes": image.new_tensor(boxes), "labels": torch.tensor([1, 1]), "scores": scores}


@pytest.mark.slow
def test_drise_of_a_box_is_hot_where_its_detection_looks():
    x = torch.ones(2, 1, 8, 12, dtype=torch.float64)
    tool = DRISE(Detector(), n_samples=300, grid_size=2)
    left, right = (tool.attribute(x, Box(*corners)) for corners in ((0, 0, 6, 8), (6, 0, 12, 8)))
    for inside, outside in ((left[..., :5], left[..., 7:]), (right[..., 7:], right[..., :5])):
        assert inside.mean() > 2 * outside.mean() > 0
    assert torch.equal(left[0], left[1])


def test_the_rest_of_the_family_is_asked_about_boxes_too():
    x = torch.ones(1, 1, 8, 12, dtype=torch.float64)
    heat = Occlusion(Detector(), window=4, stride=4).attribute(x, Box(0, 0, 6, 8))[0]
    expected = torch.zeros(8, 12, dtype=torch.float64)
    expected[:, :4], expected[:, 4:8] = 16 / 48, 8 / 48
    torch.testing.assert_close(heat, expected)


# --- captum's: a second opinion


@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_captums_occlusion_is_the_same_where_its_last_windows_are_whole(fill):
    attr = pytest.importorskip("captum.attr")
    model, x = CASES["pooled"].make(2, torch.float64)
    theirs = attr.Occlusion(model).attribute(x, (3, 4, 4), (3, 3, 2), baselines=fill, target=1)
    ours = Occlusion(model, window=4, stride=(3, 2), baseline=torch.full((3, 16, 12), fill)).attribute(x, 1)
    torch.testing.assert_close(ours, theirs[:, 0].double(), rtol=1e-5, atol=1e-7)  # theirs is in float32
    cut = attr.Occlusion(model).attribute(x, (3, 4, 4), (3, 3, 3), baselines=fill, target=1)
    whole = Occlusion(model, window=4, stride=3, baseline=torch.full((3, 16, 12), fill)).attribute(x, 1)
    assert not torch.allclose(
        whole[..., -4:], cut[:, 0, :, -4:].double(), rtol=1e-3
    )  # its last window is three pixels wide
    torch.testing.assert_close(whole[..., :8], cut[:, 0, :, :8].double(), rtol=1e-5, atol=1e-7)


def test_captums_feature_ablation_is_the_same():
    attr = pytest.importorskip("captum.attr")
    model, x = CASES["pooled"].make(2, torch.float64)
    labels = torch.arange(16 * 12).view(16, 12) * 7 // 50 % 5
    theirs = attr.FeatureAblation(model).attribute(x, target=1, feature_mask=labels[None, None])
    ours = SegmentAblation(model, segments=labels).attribute(x, 1)
    torch.testing.assert_close(ours, theirs[:, 0], rtol=1e-5, atol=1e-12)


def test_rise_of_a_long_signal_takes_the_memory_of_its_masks():
    """Each mask is enlarged from its few cells: no table of all shifts, which would be 3 GB here."""
    masks = enlarge_shifted_grids(torch.ones(2, 8), torch.tensor([[0.0], [0.9]]), [20_000], [7])
    assert torch.equal(masks, torch.ones(2, 20_000))


@pytest.mark.parametrize(("method", "looked", "turns", "samples"), [(Sobol, 8, 5, 400), (HSIC, 64, 1, 4000)])
def test_indices_stop_when_they_have_settled_and_say_so(method, looked, turns, samples):
    model, x, _ = linear(1, 8, 8)
    counting = seen_before(Counting(model), x)
    made = method(counting, grid_size=2, n_samples=samples, tolerance=0.2, batch_size=7).explain(x[0], 1)
    drawn = int(made.notes[0].split()[0])
    assert f"settled to tolerance=0.2 before all {samples}" in made.notes[0]
    assert drawn % looked == 0
    assert counting.rows <= 1 + drawn * turns + 7
    assert made.standard_error.max() <= 0.2 * np.ptp(made.attribution)
    again = method(model, grid_size=2, n_samples=samples, tolerance=0.2, batch_size=64).explain(x[0], 1)
    assert made.attribution.tobytes() == again.attribution.tobytes()
    tight = method(model, grid_size=2, n_samples=16, tolerance=1e-6).explain(x[0], 1)
    assert tight.notes[0].endswith(": not settled to tolerance=1e-06")


@pytest.mark.slow
def test_the_jackknifes_error_of_hsic_is_about_the_spread_over_seeds():
    model, x, _ = linear(1, 8, 8)
    made = [HSIC(model, grid_size=3, n_samples=200, seed=seed).explain(x[0], 1) for seed in range(30)]
    spread = np.stack([one.attribution for one in made]).var(0, ddof=1).mean() ** 0.5
    told = np.stack([one.standard_error**2 for one in made]).mean() ** 0.5
    assert 0.7 < spread / told < 1.3


def test_hsic_of_many_masks_takes_a_part_of_its_kernel_at_a_time():
    drawn = torch.Generator().manual_seed(0)
    shown = torch.rand(1100, 3, generator=drawn).argsort(0) < 550
    scores = torch.rand(1100, generator=drawn, dtype=torch.float64) + shown[:, 0]
    L = (-0.5 * ((scores[:, None] - scores) / scores.std()).square()).exp()
    H = torch.eye(1100, dtype=torch.float64) - 1 / 1100
    centered = H @ L @ H
    agree = [(one[:, None] == one).double() for one in shown.T]
    expected = torch.stack([(K * centered).sum() for K in agree]) / 1099**2  # tr(KHLH)
    torch.testing.assert_close(compute_hsic(shown, scores), expected, rtol=1e-9, atol=1e-12)
