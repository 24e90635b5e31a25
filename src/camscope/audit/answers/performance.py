"""How well a model tells images with a finding from those without: numbers of images, intervals of patients."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import numpy.typing as npt

from camscope.audit.answers.ranking import Ranking, kept, ranked, redrawn, under_precision, under_roc
from camscope.explainers.scope import expect_count
from camscope.metrics.base import Floats
from camscope.metrics.clusters import MIN_EFFECTIVE
from camscope.metrics.statistics import PRECISION, REPLICATES, Estimate, interval_of, reach

NEWCOMBE = "newcombe"  # the method of an interval: that of `area_interval`


def auroc(
    truth: npt.ArrayLike,
    answer: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """(N,) bool, (N,) -> area under the ROC curve: the chance that an image with the finding is answered higher, ties half.

    `groups` (N,): patients, drawn whole; without them each image is its own. The interval is that of `area_interval`. NaN
    answers are left out, and counted. UndefinedError where one class has no row, or more than a tenth of the draws none.
    """
    expect_count(replicates=replicates)
    ranking = ranked(truth, answer, groups)
    return area_estimate(ranking, redrawn(ranking, under_roc, replicates, seed))


def average_precision(
    truth: npt.ArrayLike,
    answer: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """(N,) bool, (N,) -> Σ_k (R_k - R_{k-1}) P_k over answers, the highest first. Chance is the share of positives.

    As `auroc`, with the interval of `estimated`, for as many groups as the rarer class has. Where all pairs are in order it
    is 1 in every draw: nothing says how far below it may lie, and the interval has no ends (NaN).
    """
    expect_count(replicates=replicates)
    ranking = ranked(truth, answer, groups)
    drawn = kept(redrawn(ranking, under_precision, replicates, seed), ranking.words())
    low, high = interval_of(drawn, min(ranking.patients, *ranking.witnesses), effective=ranking.effective)
    low, high = (np.nan, np.nan) if low == 1 else (low, high)
    return _estimate(ranking, ranking.point(under_precision), low, high)


def area_estimate(ranking: Ranking, drawn: Floats) -> Estimate:
    """The AUROC of a ranking, with the interval that its draws give."""
    point, known = ranking.point(under_roc), kept(drawn, ranking.words())
    ends = area_interval(point, known, *ranking.witnesses, effective=ranking.effective)
    return replace(_estimate(ranking, point, *ends), method=NEWCOMBE)


def area_interval(
    point: float,
    drawn: Floats,
    positives: int,
    negatives: int,
    level: float = 0.95,
    *,
    effective: float | None = None,
) -> tuple[float, float]:
    """An AUROC A, its draws and the patients of either class -> the two limits a where |A - a| = t √(D V(a)).

    V: Hanley and McNeil's variance of so many patients, at the limit and not at A (method 5 of Newcombe 2006,
    doi:10.1002/sim.2324); D: how much larger the draws' variance is at A. Percentiles of draws miss an area of 0.98 in
    more than one set of ten, for few draws lie below what was seen; these miss it half as often. Where all pairs are in
    order the draws are all alike, and D is 1. NaN where a class has fewer than two patients. `effective`: as how many
    patients of one size the rows of either class weigh at least; NaN where they are fewer than `MIN_EFFECTIVE` and more
    were counted.
    """
    fewest = min(positives, negatives)
    if fewest < 2 or (effective is not None and effective < min(fewest, MIN_EFFECTIVE) - PRECISION):
        return np.nan, np.nan
    variance, expected = float(np.var(drawn)), _variance(point, positives, negatives)
    wider = variance / expected if variance and expected else 1.0
    far = reach(fewest if effective is None else effective, level) * sqrt(wider)

    def inside(limit: float) -> bool:
        return abs(point - limit) <= far * sqrt(_variance(limit, positives, negatives))

    return _last(inside, point, 0.0), _last(inside, point, 1.0)


def _last(inside: Callable[[float], bool], start: float, end: float) -> float:
    """Between a start that is inside and an end that is not: where it ends, by bisection."""
    for _ in range(50):
        middle = (start + end) / 2
        start, end = (middle, end) if inside(middle) else (start, middle)
    return end


def _variance(area: float, positives: int, negatives: int) -> float:
    half = (positives + negatives) / 2 - 1
    return area * (1 - area) * (1 + half * (1 - area) / (2 - area) + half * area / (1 + area)) / (positives * negatives)


def _estimate(ranking: Ranking, point: float, low: float, high: float) -> Estimate:
    return Estimate(
        point,
        low,
        high,
        len(ranking.truth),
        ranking.patients,
        ranking.undefined,
        witnesses=min(ranking.witnesses),
        effective=ranking.effective,
        largest=ranking.largest,
    )
