"""Localization against numbers worked out by hand, against scikit-learn and scikit-image, and against chance."""

import math

import numpy as np
import pytest

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics import (
    METRICS,
    average_precision,
    centroid_distance,
    dice_at_mask_area,
    energy_inside,
    enrichment,
    iou,
    iou_otsu,
    iou_over_thresholds,
    peak_distance,
    pointing_game,
    rank_accuracy,
)
from camscope.metrics.localization import compute_otsu_threshold

# A map of 3 x 4 whose mask is its left upper corner: 10 and 6 lie inside, 8 and 4 do not, the rest says nothing.
HEAT = np.array([[10.0, 6.0, 8.0, 0.0], [0.0, 0.0, 4.0, -3.0], [0.0, 0.0, 0.0, 0.0]])
MASK = np.zeros((3, 4), bool)
MASK[:2, :2] = True

# The same in a volume of 2 x 3 x 4: the mask is one plane's corner.
VOLUME, INSIDE = np.stack([HEAT, np.zeros((3, 4))]), np.stack([MASK, np.zeros((3, 4), bool)])


@pytest.mark.parametrize(
    ("metric", "flat", "deep"),
    [
        (pointing_game, 1.0, 1.0),
        (energy_inside, 16 / 28, 16 / 28),
        (enrichment, 16 / 28 * 3, 16 / 28 * 6),
        # the four strongest are 10, 8, 6 and 4
        (rank_accuracy, 0.5, 0.5),
        (dice_at_mask_area, 0.5, 0.5),
        # 10 of 1, 6 is third: (1 + 2/3) / 4; then two of the mask among the 8, or the 20, cells of zero
        (average_precision, (1 + 2 / 3 + 2 * 4 / 12) / 4, (1 + 2 / 3 + 2 * 4 / 24) / 4),
        # what reaches 5 is 10, 8, 6: two in the mask, five in either
        (iou, 2 / 5, 2 / 5),
        # Otsu parts {10, 8, 6} from {4, 0 …} or {10, 8, 6, 4} from the zeros: see below
        (peak_distance, 0.0, 0.0),
    ],
)
def test_by_hand(metric, flat, deep):
    assert metric(HEAT, MASK) == pytest.approx(flat, abs=1e-12)
    assert metric(VOLUME, INSIDE) == pytest.approx(deep, abs=1e-12)
    assert metric(HEAT * 1e-300, MASK) == pytest.approx(flat, abs=1e-12)
    assert metric(HEAT.astype(np.float32), MASK) == pytest.approx(flat, abs=1e-12)


def test_otsu_by_hand():
    # Between-class variance w0 w1 (m0 - m1)², 12 cells: {10,8,6} from the rest 3·9·(8 - 4/9)² = 1541; {10,8,6,4} 4·8·7² = 1568
    assert iou_otsu(HEAT, MASK) == pytest.approx(2 / 6)
    # Of 24 cells: 3·21·(8 - 4/21)² = 3843, 4·20·7² = 3920
    assert iou_otsu(VOLUME, INSIDE) == pytest.approx(2 / 6)
    # without the 4 the three are parted from the zeros
    assert iou_otsu(np.where(HEAT == 4, 0, HEAT), MASK) == pytest.approx(2 / 5)


def test_swept_iou_by_hand():
    # levels 0.05 … 0.4 hold 10, 8, 6, 4 (2 of 6); to 0.6: 10, 8, 6 (2 of 5); to 0.8: 10, 8 (1 of 5); to 0.95: 10 (1 of 4)
    assert iou_over_thresholds(HEAT, MASK) == pytest.approx((8 * 2 / 6 + 4 * 2 / 5 + 4 / 5 + 3 / 4) / 19)
    assert iou_over_thresholds(HEAT, MASK, (0.5, 1.0)) == pytest.approx((2 / 5 + 1 / 4) / 2)
    assert iou(HEAT, MASK, threshold=1.0) == pytest.approx(1 / 4)


def test_distances_by_hand():
    away = np.zeros((3, 4))
    away[2, 3] = 5.0  # nearest is cell (1,1): one down, two right
    assert peak_distance(away, MASK) == pytest.approx(math.sqrt(5))
    assert peak_distance(away, MASK, spacing=(3.0, 0.5)) == pytest.approx(math.sqrt(9 + 1))
    away[0, 0] = 5.0  # a tie: one of two peaks lies inside
    assert peak_distance(away, MASK) == pytest.approx(math.sqrt(5) / 2)
    # centers of mass: of the map (4/28, (6 + 2·12)/28), of the mask (1/2, 1/2)
    down, right = 4 / 28 - 0.5, 30 / 28 - 0.5
    assert centroid_distance(HEAT, MASK) == pytest.approx(math.hypot(down, right))
    assert centroid_distance(HEAT, MASK, spacing=(2.0, 10.0)) == pytest.approx(math.hypot(2 * down, 10 * right))
    assert centroid_distance(VOLUME, INSIDE, spacing=(7.0, 2.0, 10.0)) == pytest.approx(
        math.hypot(2 * down, 10 * right)
    )
    deep = np.roll(VOLUME, 1, 0)  # the other plane
    assert centroid_distance(deep, INSIDE, spacing=(7.0, 1.0, 1.0)) == pytest.approx(math.sqrt(49 + down**2 + right**2))
    assert peak_distance(deep, INSIDE, spacing=(7.0, 1.0, 1.0)) == 7.0


def test_a_tolerance_is_a_length_to_the_mask():
    heat = np.zeros((3, 4))
    heat[0, 3] = 1.0  # two columns beyond it
    assert [pointing_game(heat, MASK, tolerance) for tolerance in (0, 1.9, 2.0)] == [0.0, 0.0, 1.0]
    assert pointing_game(heat, MASK, 2.0, spacing=(1.0, 1.5)) == 0.0
    assert pointing_game(heat, MASK, 3.0, spacing=(1.0, 1.5)) == 1.0


def test_ties_count_in_expectation():
    heat = np.zeros((3, 4))
    heat[0] = 2.0  # four tied peaks, two in the mask
    assert pointing_game(heat, MASK) == 0.5
    assert rank_accuracy(heat, MASK) == 0.5
    heat[0, 0] = 3.0  # one sure place; three places among three ties and no zero: 1 + 3·(1/3) of 4
    assert rank_accuracy(heat, MASK) == 0.5
    heat[0, 1:3] = 4.0  # two sure, then the 3 and, of what is left, one tie
    assert rank_accuracy(heat, MASK) == 0.5
    assert rank_accuracy(np.where(MASK, 1.0, 0.0), MASK) == 1.0
    three = np.ones((3, 4))
    three[2, 3] = 5.0  # one place is lost, three among eleven ties of which four are in the mask
    assert rank_accuracy(three, MASK) == pytest.approx(3 * 4 / 11 / 4)


def orders(heat, mask, metric, draws=4000):
    """The mean over ties broken at random."""
    random = np.random.default_rng(0)
    spread = 1e-9 * random.random((draws, *heat.shape))
    return np.mean([metric(heat + one, mask) for one in spread])


@pytest.mark.parametrize("metric", [pointing_game, rank_accuracy], ids=["pointing", "rank"])
def test_the_expectation_is_that_of_ties_broken_at_random(metric):
    heat = np.array([[2.0, 2, 1], [1, 1, 1], [2, 1, 0]])
    mask = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
    assert metric(heat, mask) == pytest.approx(orders(heat, mask, metric), abs=0.015)


# Against others


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_that_of_scikit_learn(ties):
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    random = np.random.default_rng(3)
    for shape in ((9, 7), (5, 6, 4), (40,)):
        heat, mask = random.random(shape), random.random(shape) < 0.3
        heat = np.floor(5 * heat) if ties else heat
        expected = sklearn.average_precision_score(mask.ravel(), heat.ravel())
        assert average_precision(heat, mask) == pytest.approx(expected, abs=1e-12)


def test_otsus_threshold_is_that_of_scikit_image():
    filters = pytest.importorskip("skimage.filters", reason="scikit-image is not installed")
    random = np.random.default_rng(4)
    for power in (1, 3, 8):
        heat = random.random((30, 20)) ** power
        assert compute_otsu_threshold(heat / heat.max()) * heat.max() == pytest.approx(
            filters.threshold_otsu(heat), abs=1e-6
        )


# Chance


@pytest.mark.slow
def test_a_random_map_gets_what_guessing_gets():
    random = np.random.default_rng(5)
    mask = np.zeros((32, 32), bool)
    mask[4:18, 10:25] = True  # a share of 0.205
    area, hits, mass, precision, ranks = mask.mean(), [], [], [], []
    for _ in range(1500):
        heat = random.random(mask.shape) ** 4
        hits.append(pointing_game(heat, mask))
        mass.append(enrichment(heat, mask))
        precision.append(average_precision(heat, mask))
        ranks.append(rank_accuracy(heat, mask))
    assert np.mean(mass) == pytest.approx(1.0, abs=0.05)
    assert np.mean(hits) == pytest.approx(area, abs=0.03)
    assert np.mean(precision) == pytest.approx(area, abs=0.02)
    assert np.mean(ranks) == pytest.approx(area, abs=0.02)


# What is refused


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pointing_game(HEAT, MASK.astype(int)), InputError, "the mask has dtype int64; expected bool"),
        (lambda: pointing_game(HEAT, MASK.T), GeometryError, r"the mask has shape \(4, 3\) and the map \(3, 4\)"),
        (lambda: pointing_game(HEAT, MASK, -1.0), InputError, "tolerance=-1.0: expected a number, 0 or more"),
        (lambda: pointing_game(HEAT, MASK, 1.0, (1.0,)), InputError, "expected 2 positive numbers"),
        (lambda: centroid_distance(HEAT, MASK, (2.0,)), InputError, "expected 2 positive numbers"),
        (lambda: peak_distance(HEAT, MASK, (0.0, 1.0)), InputError, "expected 2 positive numbers"),
        (lambda: iou(HEAT, MASK, 0.0), InputError, "each above 0 and at most 1"),
        (lambda: iou(HEAT, MASK, 1.5), InputError, "each above 0 and at most 1"),
        (lambda: iou_over_thresholds(HEAT, MASK, ()), InputError, "expected at least one"),
        (
            lambda: energy_inside(np.zeros((0, 4)), np.zeros((0, 4), bool)),
            InputError,
            "is empty: expected at least one cell",
        ),
        (lambda: iou_otsu(np.ones((3, 4)) + 1e-16 * HEAT, MASK), UndefinedError, "the map is constant"),
        (lambda: iou_otsu(1 + 2e-16 * HEAT, MASK), UndefinedError, "the map is constant"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_each_says_what_it_is():
    mine = [one for one in METRICS.values() if one.input_kind == "mask"]
    assert len(mine) >= 11
    for one in mine:
        assert one.function.__doc__
        assert one.formula
        assert one.paper
        assert one(HEAT, MASK) == one.function(HEAT, MASK)
