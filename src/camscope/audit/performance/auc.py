"""AUROC and average precision, with confidence intervals by patient."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray, Mask
from camscope.metrics.cluster_variance import MIN_EFFECTIVE_GROUPS, count_effective_groups
from camscope.metrics.statistics import (
    N_RESAMPLES,
    RELATIVE_PRECISION,
    Estimate,
    compute_bootstrap_interval,
    compute_interval_multiplier,
    index_groups,
    iter_bootstrap_indices,
)
from camscope.plurals import plural

IntArray = npt.NDArray[np.int64]
AreaFunction = Callable[
    [FloatArray, FloatArray], FloatArray
]  # (r,V) weights of positives and of negatives at each answer -> (r,)
MAX_UNDEFINED_SHARE = 0.1  # the share of draws that may hold one class only


@dataclass(frozen=True)
class Ranking:
    """Rows with an answer, the lowest first: `truth` (N,), `group_index` (N,) numbers, `rank` (N,), equal for equal answers.

    `row_index` (N,): which rows these were. `n_resampled_groups`: how many are drawn from. `n_undefined`: rows without an answer.
    """

    truth: Mask
    group_index: IntArray
    rank: IntArray
    row_index: IntArray
    n_resampled_groups: int
    n_undefined: int

    @property
    def n_positives(self) -> int:
        """How many rows show the finding."""
        return int(self.truth.sum())

    @property
    def n_negatives(self) -> int:
        """How many do not."""
        return len(self.truth) - self.n_positives

    @property
    def n_groups_per_class(self) -> tuple[int, int]:
        """How many groups have a positive, and how many a negative row."""
        return len(np.unique(self.group_index[self.truth])), len(np.unique(self.group_index[~self.truth]))

    @property
    def n_effective_groups(self) -> float:
        """How many groups the rows of the class weigh as that has the fewest; see `count_effective_groups`."""
        return count_effective_groups(self._limiting_group_sizes)

    @property
    def largest_group_share(self) -> float:
        """The share of that class's rows that one group has."""
        return float(self._limiting_group_sizes.max() / self._limiting_group_sizes.sum())

    @property
    def _limiting_group_sizes(self) -> IntArray:
        sizes = [np.bincount(self.group_index[rows]) for rows in (self.truth, ~self.truth)]
        return min(sizes, key=count_effective_groups)

    @property
    def n_groups(self) -> int:
        """How many groups have a row."""
        return len(np.unique(self.group_index))

    def select_rows(self, row_mask: Mask) -> "Ranking":
        """(M,) of the rows as they came -> the ranking of some; draws are still of all groups."""
        is_selected = row_mask[self.row_index]
        ranking = replace(
            self, truth=self.truth[is_selected], group_index=self.group_index[is_selected], rank=self.rank[is_selected]
        )
        return _check_two_classes(replace(ranking, row_index=self.row_index[is_selected]))

    def sum_weights_by_rank(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(r,N) of the rows in order -> (r,V), (r,V): at each answer the weight of positives and of negatives."""
        positive = weights * self.truth
        negative = weights - positive
        starts = np.flatnonzero(np.diff(self.rank, prepend=-1))
        if len(starts) == len(self.truth):
            return positive, negative
        return np.add.reduceat(positive, starts, 1), np.add.reduceat(negative, starts, 1)

    def compute_area(self, area_function: AreaFunction) -> float:
        """The number of all rows."""
        return float(area_function(*self.sum_weights_by_rank(np.ones((1, len(self.truth)))))[0])

    def describe_counts(self) -> str:
        """What there is of each class."""
        classes = f"{plural(self.n_positives, 'positive')} and {plural(self.n_negatives, 'negative')}"
        return f"{classes} in {plural(self.n_groups, 'group')}"


def rank_scores(truth: npt.ArrayLike, score: npt.ArrayLike, groups: Sequence[Hashable] | None) -> Ranking:
    """(N,) bool, (N,) numbers, (N,) patients -> their ranking; UndefinedError where a class has no row."""
    truths, scores = check_truth(truth), np.asarray(score, np.float64)
    if scores.shape != truths.shape:
        raise InputError(f"truth {truths.shape} and answers {scores.shape}; expected (N,) of both, of the same images")
    if np.isinf(scores).any():
        raise InputError(
            f"answer {int(np.flatnonzero(np.isinf(scores))[0])} is infinite: expected numbers, NaN for none"
        )
    order = np.argsort(scores, kind="stable")[: len(scores) - int(np.isnan(scores).sum())]  # NaN are last
    names = list(groups) if groups is not None else list(range(len(scores)))
    if len(names) != len(scores):
        raise InputError(f"{plural(len(scores), 'answer')} and {plural(len(names), 'group')}; expected (N,) of both")
    group = index_groups([names[int(i)] for i in order], len(order))
    rank = np.unique(scores[order], return_inverse=True)[1]
    n_undefined = len(scores) - len(order)
    return _check_two_classes(Ranking(truths[order], group, rank, order, len(np.unique(group)), n_undefined))


def _check_two_classes(ranking: Ranking) -> Ranking:
    if not ranking.n_positives or not ranking.n_negatives:
        raise UndefinedError(f"{ranking.describe_counts()}: of one class there is none")
    return ranking


def check_truth(truth: npt.ArrayLike) -> Mask:
    """(N,) bool; InputError for anything else."""
    values = np.asarray(truth)
    if values.dtype != np.bool_ or values.ndim != 1:
        raise InputError(f"truth is {values.dtype} {values.shape}; expected (N,) bool: True where the finding is")
    return values


def bootstrap_areas(ranking: Ranking, area_function: AreaFunction, n_resamples: int, seed: int) -> FloatArray:
    """Return the area in each bootstrap resample of groups; NaN where a resample holds one class only."""
    rows = len(ranking.truth)
    areas = []
    for group_draws in iter_bootstrap_indices(ranking.n_resampled_groups, n_resamples, seed, rows):
        positive, negative = ranking.sum_weights_by_rank(
            count_draws(group_draws, ranking.n_resampled_groups)[:, ranking.group_index]
        )
        has_both = (positive.sum(1) > 0) & (negative.sum(1) > 0)
        values = np.full(len(group_draws), np.nan)
        values[has_both] = area_function(positive[has_both], negative[has_both])
        areas.append(values)
    return np.concatenate(areas)


def drop_undefined(resampled_areas: FloatArray, description: str) -> FloatArray:
    """Return the resampled areas that are defined; UndefinedError where more than a tenth are not."""
    lost = int(np.isnan(resampled_areas).sum())
    if lost > MAX_UNDEFINED_SHARE * len(resampled_areas):
        raise UndefinedError(
            f"{description}: {lost} of {plural(len(resampled_areas), 'draw')} of groups hold one class only"
        )
    return resampled_areas[~np.isnan(resampled_areas)]


def count_draws(drawn_groups: IntArray, n_groups: int) -> FloatArray:
    """(r,groups) numbers -> (r,groups): how often each group was drawn."""
    flat = drawn_groups + n_groups * np.arange(len(drawn_groups))[:, None]
    return (
        np.bincount(flat.ravel(), minlength=len(drawn_groups) * n_groups)
        .reshape(len(drawn_groups), n_groups)
        .astype(np.float64)
    )


def compute_roc_area(positive_weights: FloatArray, negative_weights: FloatArray) -> FloatArray:
    """(r,V), (r,V) -> (r,): the share of pairs in which the positive one is higher; equals count half."""
    lower = np.cumsum(negative_weights, 1) - 0.5 * negative_weights
    return np.asarray((positive_weights * lower).sum(1) / (positive_weights.sum(1) * negative_weights.sum(1)))


def compute_precision_recall_area(positive_weights: FloatArray, negative_weights: FloatArray) -> FloatArray:
    """(r,V), (r,V) -> (r,): Σ over answers, the highest first, of the recall gained there times the precision."""
    hits = np.cumsum(positive_weights[:, ::-1], 1)
    called = hits + np.cumsum(negative_weights[:, ::-1], 1)
    precision = np.divide(hits, called, out=np.zeros_like(hits), where=called > 0)
    return np.asarray((positive_weights[:, ::-1] * precision).sum(1) / hits[:, -1])


NEWCOMBE = "newcombe"  # the method of an interval: that of `area_interval`


def auroc(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """(N,) bool, (N,) -> area under the ROC curve: the chance that an image with the finding is answered higher, ties half.

    `groups` (N,): patients, drawn whole; without them each image is its own. The interval is that of
    `compute_auroc_interval`. NaN
    answers are left out, and counted. UndefinedError where one class has no row, or more than a tenth of the draws none.
    """
    check_positive_integer(n_resamples=n_resamples)
    ranking = rank_scores(truth, score, groups)
    return build_auroc_estimate(ranking, bootstrap_areas(ranking, compute_roc_area, n_resamples, seed))


def average_precision(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """(N,) bool, (N,) -> Σ_k (R_k - R_{k-1}) P_k over answers, the highest first. Chance is the share of positives.

    As `auroc`, with the interval of `estimate_mean`, for as many groups as the rarer class has. Where all pairs are in order it
    is 1 in every draw: nothing says how far below it may lie, and the interval has no ends (NaN).
    """
    check_positive_integer(n_resamples=n_resamples)
    ranking = rank_scores(truth, score, groups)
    drawn = drop_undefined(
        bootstrap_areas(ranking, compute_precision_recall_area, n_resamples, seed), ranking.describe_counts()
    )
    low, high = compute_bootstrap_interval(
        drawn, min(ranking.n_groups, *ranking.n_groups_per_class), n_effective_groups=ranking.n_effective_groups
    )
    low, high = (np.nan, np.nan) if low == 1 else (low, high)
    return _build_estimate(ranking, ranking.compute_area(compute_precision_recall_area), low, high)


def build_auroc_estimate(ranking: Ranking, resampled_aurocs: FloatArray) -> Estimate:
    """The AUROC of a ranking, with the interval that its draws give."""
    point, areas = ranking.compute_area(compute_roc_area), drop_undefined(resampled_aurocs, ranking.describe_counts())
    interval = compute_auroc_interval(
        point, areas, *ranking.n_groups_per_class, n_effective_groups=ranking.n_effective_groups
    )
    return replace(_build_estimate(ranking, point, *interval), interval_method=NEWCOMBE)


def compute_auroc_interval(
    point: float,
    resampled_aurocs: FloatArray,
    n_positive_groups: int,
    n_negative_groups: int,
    confidence_level: float = 0.95,
    *,
    n_effective_groups: float | None = None,
) -> tuple[float, float]:
    """An AUROC A, its draws and the patients of either class -> the two limits a where |A - a| = t √(D V(a)).

    V: Hanley and McNeil's variance of so many patients, at the limit and not at A (method 5 of Newcombe 2006,
    doi:10.1002/sim.2324); D: how much larger the draws' variance is at A. Percentiles of draws miss an area of 0.98 in
    more than one set of ten, for few draws lie below what was seen; these miss it half as often. Where all pairs are in
    order the draws are all alike, and D is 1. NaN where a class has fewer than two patients. `n_effective_groups`: as how many
    patients of one size the rows of either class weigh at least; NaN where they are fewer than `MIN_EFFECTIVE_GROUPS` and more
    were counted.
    """
    fewest = min(n_positive_groups, n_negative_groups)
    if fewest < 2 or (
        n_effective_groups is not None and n_effective_groups < min(fewest, MIN_EFFECTIVE_GROUPS) - RELATIVE_PRECISION
    ):
        return np.nan, np.nan
    variance, expected = (
        float(np.var(resampled_aurocs)),
        _compute_hanley_mcneil_variance(point, n_positive_groups, n_negative_groups),
    )
    inflation = variance / expected if variance and expected else 1.0
    half_width = compute_interval_multiplier(
        fewest if n_effective_groups is None else n_effective_groups, confidence_level
    ) * sqrt(inflation)

    def inside(limit: float) -> bool:
        return abs(point - limit) <= half_width * sqrt(
            _compute_hanley_mcneil_variance(limit, n_positive_groups, n_negative_groups)
        )

    return _bisect_boundary(inside, point, 0.0), _bisect_boundary(inside, point, 1.0)


def _bisect_boundary(is_inside: Callable[[float], bool], start: float, end: float) -> float:
    """Between a start that is inside and an end that is not: where it ends, by bisection."""
    for _ in range(50):
        middle = (start + end) / 2
        start, end = (middle, end) if is_inside(middle) else (start, middle)
    return end


def _compute_hanley_mcneil_variance(area: float, n_positives: int, n_negatives: int) -> float:
    half = (n_positives + n_negatives) / 2 - 1
    return (
        area
        * (1 - area)
        * (1 + half * (1 - area) / (2 - area) + half * area / (1 + area))
        / (n_positives * n_negatives)
    )


def _build_estimate(ranking: Ranking, point: float, low: float, high: float) -> Estimate:
    return Estimate(
        point,
        low,
        high,
        len(ranking.truth),
        ranking.n_groups,
        ranking.n_undefined,
        n_limiting_groups=min(ranking.n_groups_per_class),
        n_effective_groups=ranking.n_effective_groups,
        largest_group_share=ranking.largest_group_share,
    )
