"""AUROC and average precision, with intervals by patient.

- Ranking: rows in the order of their answers, and AUROC and average precision of any number of draws of patients.
- How well a model tells images with a finding from those without: numbers of images, intervals of patients.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats, Mask
from camscope.metrics.cluster_variance import MIN_EFFECTIVE, effective_groups
from camscope.metrics.statistics import PRECISION, REPLICATES, Estimate, draws, interval_of, numbered, reach
from camscope.plurals import plural

Numbers = npt.NDArray[np.int64]
Area = Callable[[Floats, Floats], Floats]  # (r,V) weights of positives and of negatives at each answer -> (r,)
LOST = 0.1  # the share of draws that may hold one class only


@dataclass(frozen=True)
class Ranking:
    """Rows with an answer, the lowest first: `truth` (N,), `group` (N,) numbers, `place` (N,), equal for equal answers.

    `order` (N,): which rows these were. `groups`: how many are drawn from. `undefined`: rows without an answer.
    """

    truth: Mask
    group: Numbers
    place: Numbers
    order: Numbers
    groups: int
    undefined: int

    @property
    def positives(self) -> int:
        """How many rows show the finding."""
        return int(self.truth.sum())

    @property
    def negatives(self) -> int:
        """How many do not."""
        return len(self.truth) - self.positives

    @property
    def witnesses(self) -> tuple[int, int]:
        """How many groups have a positive, and how many a negative row."""
        return len(np.unique(self.group[self.truth])), len(np.unique(self.group[~self.truth]))

    @property
    def effective(self) -> float:
        """How many groups the rows of the class weigh as that has the fewest; see `effective_groups`."""
        return effective_groups(self._sizes)

    @property
    def largest(self) -> float:
        """The share of that class's rows that one group has."""
        return float(self._sizes.max() / self._sizes.sum())

    @property
    def _sizes(self) -> Numbers:
        sizes = [np.bincount(self.group[rows]) for rows in (self.truth, ~self.truth)]
        return min(sizes, key=effective_groups)

    @property
    def patients(self) -> int:
        """How many groups have a row."""
        return len(np.unique(self.group))

    def only(self, rows: Mask) -> "Ranking":
        """(M,) of the rows as they came -> the ranking of some; draws are still of all groups."""
        some = rows[self.order]
        made = replace(self, truth=self.truth[some], group=self.group[some], place=self.place[some])
        return _two_classes(replace(made, order=self.order[some]))

    def summed(self, weights: Floats) -> tuple[Floats, Floats]:
        """(r,N) of the rows in order -> (r,V), (r,V): at each answer the weight of positives and of negatives."""
        positive = weights * self.truth
        negative = weights - positive
        starts = np.flatnonzero(np.diff(self.place, prepend=-1))
        if len(starts) == len(self.truth):
            return positive, negative
        return np.add.reduceat(positive, starts, 1), np.add.reduceat(negative, starts, 1)

    def point(self, area: Area) -> float:
        """The number of all rows."""
        return float(area(*self.summed(np.ones((1, len(self.truth)))))[0])

    def words(self) -> str:
        """What there is of each class."""
        classes = f"{plural(self.positives, 'positive')} and {plural(self.negatives, 'negative')}"
        return f"{classes} in {plural(self.patients, 'group')}"


def ranked(truth: npt.ArrayLike, answer: npt.ArrayLike, groups: Sequence[Hashable] | None) -> Ranking:
    """(N,) bool, (N,) numbers, (N,) patients -> their ranking; UndefinedError where a class has no row."""
    known, given = expect_truth(truth), np.asarray(answer, np.float64)
    if given.shape != known.shape:
        raise InputError(f"truth {known.shape} and answers {given.shape}; expected (N,) of both, of the same images")
    if np.isinf(given).any():
        raise InputError(
            f"answer {int(np.flatnonzero(np.isinf(given))[0])} is infinite: expected numbers, NaN for none"
        )
    order = np.argsort(given, kind="stable")[: len(given) - int(np.isnan(given).sum())]  # NaN are last
    names = list(groups) if groups is not None else list(range(len(given)))
    if len(names) != len(given):
        raise InputError(f"{plural(len(given), 'answer')} and {plural(len(names), 'group')}; expected (N,) of both")
    group = numbered([names[int(i)] for i in order], len(order))
    place = np.unique(given[order], return_inverse=True)[1]
    lost = len(given) - len(order)
    return _two_classes(Ranking(known[order], group, place, order, len(np.unique(group)), lost))


def _two_classes(ranking: Ranking) -> Ranking:
    if not ranking.positives or not ranking.negatives:
        raise UndefinedError(f"{ranking.words()}: of one class there is none")
    return ranking


def expect_truth(truth: npt.ArrayLike) -> Mask:
    """(N,) bool; InputError for anything else."""
    known = np.asarray(truth)
    if known.dtype != np.bool_ or known.ndim != 1:
        raise InputError(f"truth is {known.dtype} {known.shape}; expected (N,) bool: True where the finding is")
    return known


def redrawn(ranking: Ranking, area: Area, replicates: int, seed: int) -> Floats:
    """(replicates,): the number of draws of groups; NaN where a draw holds one class only."""
    rows = len(ranking.truth)
    made = []
    for drawn in draws(ranking.groups, replicates, seed, rows):
        positive, negative = ranking.summed(times(drawn, ranking.groups)[:, ranking.group])
        both = (positive.sum(1) > 0) & (negative.sum(1) > 0)
        values = np.full(len(drawn), np.nan)
        values[both] = area(positive[both], negative[both])
        made.append(values)
    return np.concatenate(made)


def kept(drawn: Floats, words: str) -> Floats:
    """The replicates with a value; UndefinedError where more than a tenth have none."""
    lost = int(np.isnan(drawn).sum())
    if lost > LOST * len(drawn):
        raise UndefinedError(f"{words}: {lost} of {plural(len(drawn), 'draw')} of groups hold one class only")
    return drawn[~np.isnan(drawn)]


def times(drawn: Numbers, groups: int) -> Floats:
    """(r,groups) numbers -> (r,groups): how often each group was drawn."""
    flat = drawn + groups * np.arange(len(drawn))[:, None]
    return np.bincount(flat.ravel(), minlength=len(drawn) * groups).reshape(len(drawn), groups).astype(np.float64)


def under_roc(positive: Floats, negative: Floats) -> Floats:
    """(r,V), (r,V) -> (r,): the share of pairs in which the positive one is higher; equals count half."""
    lower = np.cumsum(negative, 1) - 0.5 * negative
    return np.asarray((positive * lower).sum(1) / (positive.sum(1) * negative.sum(1)))


def under_precision(positive: Floats, negative: Floats) -> Floats:
    """(r,V), (r,V) -> (r,): Σ over answers, the highest first, of the recall gained there times the precision."""
    hits = np.cumsum(positive[:, ::-1], 1)
    called = hits + np.cumsum(negative[:, ::-1], 1)
    precision = np.divide(hits, called, out=np.zeros_like(hits), where=called > 0)
    return np.asarray((positive[:, ::-1] * precision).sum(1) / hits[:, -1])


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
