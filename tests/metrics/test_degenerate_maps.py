"""Maps and masks that say nothing, over the registry: each metric has a number that is right, or a reason why there is none."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from camscope.errors import UndefinedError
from camscope.metrics import METRICS, Metric

MASK = np.zeros((48, 64), bool)
MASK[:24, :32] = True  # a quarter
ONE = np.zeros((48, 64), bool)
ONE[0, 0] = True
PEAK, TIES, NAN = np.zeros((48, 64)), np.zeros((48, 64)), np.ones((48, 64))
PEAK[0, 0] = 2.0
TIES[:, 16:48] = 0.5  # half of the picture, half of the mask
NAN[3, 4] = np.nan
N = MASK.size

MAPS = {
    "zero": np.zeros((48, 64)),
    "constant": np.full((48, 64), 0.3),
    "peak": PEAK,
    "ties": TIES,
    "nan": NAN,
    "infinite": np.where(ONE, np.inf, 1.0),
    "negative": -1 - PEAK,
    "tiny": 1e-310 * (1 + PEAK),  # below the smallest normal number
    "huge": 1e308 * (1 - 0.5 * PEAK / 2),
}
NO = UndefinedError


def reach(rows=range(48), columns=range(64)):
    """The mean distance to the mask."""
    return np.mean([math.hypot(max(0, r - 23), max(0, c - 31)) for r in rows for c in columns])


# What is right: NO where there is no number, None where any number in its range is.
MASKED = {
    "pointing-game": {"zero": 0.25, "constant": 0.25, "peak": 1.0, "ties": 0.25, "negative": 0.25},
    "energy-inside": {"zero": NO, "constant": 0.25, "peak": 1.0, "ties": 0.25, "negative": NO},
    "enrichment": {"zero": NO, "constant": 1.0, "peak": 4.0, "ties": 1.0, "negative": NO},
    "rank-accuracy": {
        "zero": 0.25,
        "constant": 0.25,
        "peak": (1 + 767 * 767 / 3071) / 768,
        "ties": 0.25,
        "negative": 0.25,
    },
    "average-precision": {"zero": 0.25, "constant": 0.25, "peak": (1 + 767 / 4) / 768, "ties": 0.25, "negative": 0.25},
    "iou-otsu": {"zero": NO, "constant": NO, "peak": 1 / 768, "ties": 384 / (1536 + 384), "negative": NO},
    "iou": {"zero": NO, "constant": 0.25, "peak": 1 / 768, "ties": 384 / (1536 + 384), "negative": NO},
    "iou-swept": {"zero": NO, "constant": 0.25, "peak": 1 / 768, "ties": 384 / (1536 + 384), "negative": NO},
    "matched-dice": {
        "zero": 0.25,
        "constant": 0.25,
        "peak": (1 + 767 * 767 / 3071) / 768,
        "ties": 0.25,
        "negative": 0.25,
    },
    "peak-distance": {
        "zero": reach(),
        "constant": reach(),
        "peak": 0.0,
        "ties": reach(columns=range(16, 48)),
        "negative": reach(),
    },
    "centroid-distance": {
        "zero": NO,
        "constant": math.hypot(12, 16),
        "peak": math.hypot(11.5, 15.5),
        "ties": math.hypot(12, 16),
        "negative": NO,
    },
}
ALONE = {
    "sparseness": {"zero": NO, "constant": 0.0, "peak": 1 - 1 / N, "ties": 0.5, "negative": 2 * (1 - 1 / N) / (N + 2)},
    "entropy": {"zero": NO, "constant": 1.0, "peak": 0.0, "ties": 1 - math.log(2) / math.log(N), "negative": None},
    "effective-area": {"zero": NO, "constant": 0.9, "peak": 0.9 / N, "ties": 0.45, "negative": None},
}
# Beside a ramp from the left to the right.
PAIRED = {
    "pearson": {"zero": NO, "constant": NO, "peak": None, "ties": 0.0, "negative": None},
    "spearman": {"zero": NO, "constant": NO, "peak": None, "ties": 0.0, "negative": None},
    "ssim": {"zero": NO, "constant": None, "peak": None, "ties": None, "negative": None},
    "hog": {"zero": NO, "constant": NO, "peak": None, "ties": None, "negative": None},
    "jaccard": {"zero": NO, "constant": NO, "peak": None, "ties": 0.0, "negative": None},
}
RAMP = np.broadcast_to(np.linspace(0, 1, 64), (48, 64))
EVERY = {**MASKED, **ALONE, **PAIRED}


def called(name, heat, mask=MASK):
    metric = METRICS[name]
    beside = {"map": [], "mask": [mask], "map_pair": [RAMP]}[metric.input_kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return metric(heat, *beside)


def test_every_metric_of_maps_is_here():
    assert set(EVERY) == {name for name, one in METRICS.items() if one.input_kind in ("map", "mask", "map_pair")}


@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.one_in(5)
def test_a_map_that_says_nothing(name, case):
    heat, expected = MAPS[case].copy(), EVERY[name].get(case)
    if case in ("nan", "infinite"):
        expected = NO
    if expected is NO:
        with pytest.raises(UndefinedError, match=r"\w+ \w+"):
            called(name, heat)
        return
    value, metric = called(name, heat), METRICS[name]
    assert type(value) is float
    assert (
        (metric.lower_bound if metric.lower_bound is not None else -math.inf)
        <= value
        <= (metric.upper_bound or math.inf)
    )
    if expected is not None:
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)
    np.testing.assert_array_equal(heat, MAPS[case])  # nothing is changed in place


@pytest.mark.parametrize("name", EVERY)
def test_a_map_times_a_number_is_the_same_map(name):
    ordinary = np.random.default_rng(0).random((48, 64)) ** 3
    expected = called(name, ordinary)
    for factor in (1e-200, 1e-9, 3.0, 1e200):
        assert called(name, factor * ordinary) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_says_nothing(name):
    with pytest.raises(UndefinedError, match="the mask is empty"):
        called(name, RAMP, np.zeros_like(MASK))
    with pytest.raises(UndefinedError, match="the mask covers the whole image"):
        called(name, RAMP, np.ones_like(MASK))
    right, wrong = called(name, PEAK, ONE), called(name, RAMP, ONE)  # of one pixel: it, or its opposite
    better = METRICS[name].higher_is_better
    assert right == {"enrichment": N, "peak-distance": 0.0, "centroid-distance": 0.0}.get(name, 1.0)
    assert right > wrong if better else right < wrong


@pytest.mark.parametrize("name", EVERY)
def test_its_range_and_direction_are_said(name):
    metric = METRICS[name]
    assert metric.lower_bound is not None
    assert metric.formula
    assert metric.paper
    if metric.input_kind == "mask":
        perfect = called(name, np.where(MASK, 1.0, 0.0))
        assert perfect == {"enrichment": 4.0, "peak-distance": 0.0, "centroid-distance": 0.0}.get(name, 1.0)


def facts(one: Metric) -> str:
    """A metric's row in docs/explanation/metrics.md."""
    low, high = ("" if end is None else f"{end:g}" for end in (one.lower_bound, one.upper_bound))
    better = {True: "more", False: "less", None: "–"}[one.higher_is_better]
    within = f"{low}..{high}" if high else f"{low} up"
    return f"| `{one.name}` | {within} | {better} | {one.chance_level or '–'} | {one.paper} |"


@pytest.mark.parametrize("name", METRICS)
def test_the_page_has_what_the_registry_says(name):
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "metrics.md").read_text(encoding="utf-8")
    assert facts(METRICS[name]) in page.splitlines()
