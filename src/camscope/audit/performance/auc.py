"""AUROC and average precision with confidence intervals by patient."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.metrics.intervals_and_p_values import (
    compute_bootstrap_interval,
    compute_interval_multiplier,
    index_groups,
    iter_bootstrap_indices,
)
from camscope.metrics.jackknife_variance import MIN_EFFECTIVE_GROUPS, count_effective_groups
from camscope.metrics.mean_estimates import N_RESAMPLES, RELATIVE_PRECISION, Estimate
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import plural

IntArray = npt.NDArray[np.int64]
AreaFunction = Callable[[FloatArray, FloatArray], FloatArray]  # weights (r,V) of either class at each score -> (r,)
MAX_UNDEFINED_SHARE = 0.1  # of the resamples may hold one class only
NEWCOMBE = "newcombe"  # the interval method of `compute_auroc_interval`


@dataclass(frozen=True)
class Ranking:
    """Rows sorted by score, the lowest first, with the label, group and rank of each row (N,).

    Equal scores have equal ranks. Resamples draw `n_resampled_groups` groups.
    """

    truth: Mask
    group_index: IntArray
    rank: IntArray
    row_index: IntArray
    n_resampled_groups: int

    @property
    def n_positive_and_negative_groups(self) -> tuple[int, int]:
        """The number of groups with at least one positive row, and the number with at least one negative row."""
        return len(np.unique(self.group_index[self.truth])), len(np.unique(self.group_index[~self.truth]))

    @property
    def _smaller_class_group_sizes(self) -> IntArray:
        sizes = [np.bincount(self.group_index[rows]) for rows in (self.truth, ~self.truth)]
        return min(sizes, key=count_effective_groups)

    @property
    def n_effective_groups(self) -> float:
        """The effective number of groups. It is counted for each class, and the smaller number is used."""
        return count_effective_groups(self._smaller_class_group_sizes)

    @property
    def largest_group_share(self) -> float:
        """The share of rows that the largest group holds. Only the class with fewer effective groups is counted."""
        return float(self._smaller_class_group_sizes.max() / self._smaller_class_group_sizes.sum())

    @property
    def n_groups(self) -> int:
        """The number of groups, such as patients."""
        return len(np.unique(self.group_index))

    def select_rows(self, row_mask: Mask) -> "Ranking":
        """Return a ranking of the selected rows only. Bootstrap resamples still draw from all groups."""
        selected = row_mask[self.row_index]
        names = ("truth", "group_index", "rank", "row_index")
        return _require_two_classes(replace(self, **{name: getattr(self, name)[selected] for name in names}))

    def sum_positive_and_negative_weights_by_rank(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sum the row weights of each resample at every distinct score (r,V), separately for positive and for negative rows."""
        positive = weights * self.truth
        negative = weights - positive
        starts = np.flatnonzero(np.diff(self.rank, prepend=-1))
        if len(starts) == len(self.truth):
            return positive, negative
        return np.add.reduceat(positive, starts, 1), np.add.reduceat(negative, starts, 1)

    def compute_area(self, area_function: AreaFunction) -> float:
        """Return the area under the curve for all rows."""
        return float(area_function(*self.sum_positive_and_negative_weights_by_rank(np.ones((1, len(self.truth)))))[0])

    def describe_counts(self) -> str:
        """Return the numbers of positive images, negative images and patients as text."""
        n_positives = int(self.truth.sum())
        negatives = plural(len(self.truth) - n_positives, "negative image")
        return f"{n_positives} positive and {negatives} of {plural(self.n_groups, 'patient')}"


def rank_scores(truth: npt.ArrayLike, score: npt.ArrayLike, groups: Sequence[Hashable] | None) -> Ranking:
    """Sort rows by score. Raise an UndefinedError if all rows belong to one class."""
    truths, scores = np.asarray(truth), np.asarray(score, np.float64)
    if truths.dtype != np.bool_ or truths.shape != scores.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        raise InputError(
            f"received truth {truths.dtype} {truths.shape} and scores {scores.shape}; expected N booleans and N finite numbers"
        )
    order = np.argsort(scores, kind="stable")
    group = index_groups(None if groups is None else [groups[int(i)] for i in order], len(order))
    rank = np.unique(scores[order], return_inverse=True)[1]
    return _require_two_classes(Ranking(truths[order], group, rank, order, len(np.unique(group))))


def _require_two_classes(ranking: Ranking) -> Ranking:
    if ranking.truth.all() or not ranking.truth.any():
        raise UndefinedError(f"{ranking.describe_counts()}; expected images of both classes")
    return ranking


def bootstrap_areas(ranking: Ranking, area_function: AreaFunction, n_resamples: int, seed: int) -> FloatArray:
    """Return the area under a curve for each bootstrap resample of groups. A resample that contains only one class gets NaN."""
    areas, n_groups = [], ranking.n_resampled_groups
    for drawn_groups in iter_bootstrap_indices(n_groups, n_resamples, seed, len(ranking.truth)):
        weights = count_group_draws(drawn_groups, n_groups)[:, ranking.group_index]
        positive, negative = ranking.sum_positive_and_negative_weights_by_rank(weights)
        has_both = (positive.sum(1) > 0) & (negative.sum(1) > 0)
        values = np.full(len(drawn_groups), np.nan)
        values[has_both] = area_function(positive[has_both], negative[has_both])
        areas.append(values)
    return np.concatenate(areas)


def drop_undefined_areas(resampled_areas: FloatArray, description: str) -> FloatArray:
    """Drop NaN areas. Raise an UndefinedError if more than 10 % of the areas are NaN."""
    n_undefined = int(np.isnan(resampled_areas).sum())
    if n_undefined > MAX_UNDEFINED_SHARE * len(resampled_areas):
        raise UndefinedError(
            f"{description}: {n_undefined} of {plural(len(resampled_areas), 'resample')} have only one class"
        )
    return resampled_areas[~np.isnan(resampled_areas)]


def count_group_draws(drawn_groups: IntArray, n_groups: int) -> FloatArray:
    """Count how often each resample drew each group. The array has the shape (r,n_groups)."""
    n_rows = len(drawn_groups)
    flat = drawn_groups + n_groups * np.arange(n_rows)[:, None]
    return np.bincount(flat.ravel(), minlength=n_rows * n_groups).reshape(n_rows, n_groups).astype(np.float64)


def compute_roc_area(positive_weights: FloatArray, negative_weights: FloatArray) -> FloatArray:
    """Return the area under the ROC curve for each resample (r,).

    It is the weighted share of pairs whose positive row has the higher score. Ties count half.
    """
    lower = np.cumsum(negative_weights, 1) - 0.5 * negative_weights
    return np.asarray((positive_weights * lower).sum(1) / (positive_weights.sum(1) * negative_weights.sum(1)))


def compute_precision_recall_area(positive_weights: FloatArray, negative_weights: FloatArray) -> FloatArray:
    """Return the average precision for each resample (r,).

    It is the sum over scores, the highest first, of the recall gained times the precision.
    """
    hits = np.cumsum(positive_weights[:, ::-1], 1)
    called = hits + np.cumsum(negative_weights[:, ::-1], 1)
    precision = np.divide(hits, called, out=np.zeros_like(hits), where=called > 0)
    return np.asarray((positive_weights[:, ::-1] * precision).sum(1) / hits[:, -1])


def auroc(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return the area under the ROC curve of scores (N,) for labels (N,), with a confidence interval.

    `groups` (N,) are the patients, which are resampled as a whole. By default each image is its own group. UndefinedError if a
    class has no row, or if more than a tenth of the resamples hold one class.
    """
    ranking = rank_scores(truth, score, groups)
    return estimate_mean_auroc([ranking], bootstrap_areas(ranking, compute_roc_area, n_resamples, seed))


def average_precision(
    truth: npt.ArrayLike,
    score: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return the average precision of scores (N,) for labels (N,), with a bootstrap interval.

    The formula is Σ_k (R_k - R_{k-1}) P_k. The arguments are those of `auroc`. The chance level is the share of positives.
    If all pairs are in order, every resample is 1 and there is no interval.
    """
    ranking = rank_scores(truth, score, groups)
    areas = bootstrap_areas(ranking, compute_precision_recall_area, n_resamples, seed)
    low, high = compute_bootstrap_interval(
        drop_undefined_areas(areas, ranking.describe_counts()),
        min(ranking.n_groups, *ranking.n_positive_and_negative_groups),
        n_effective_groups=ranking.n_effective_groups,
    )
    low, high = (np.nan, np.nan) if low == 1 else (low, high)
    return _build_estimate([ranking], ranking.compute_area(compute_precision_recall_area), (low, high))


def estimate_mean_auroc(rankings: Sequence[Ranking], resampled_aurocs: FloatArray) -> Estimate:
    """Average the AUROCs of several rankings of the same rows. Return the mean with a confidence interval."""
    point = float(np.mean([ranking.compute_area(compute_roc_area) for ranking in rankings]))
    interval = compute_auroc_interval(
        point, drop_undefined_areas(resampled_aurocs, rankings[0].describe_counts()), rankings
    )
    return replace(_build_estimate(rankings, point, interval), interval_method=NEWCOMBE)


def compute_auroc_interval(
    point: float, resampled_aurocs: FloatArray, rankings: Sequence[Ranking], confidence_level: float = 0.95
) -> tuple[float, float]:
    """Return the confidence limits of an AUROC by Newcombe's method. Bootstrap variance can widen the interval.

    The limits of an AUROC A are the two values a with |A - a| = t √(D V(a)). V is the variance of Hanley and McNeil for the
    numbers of patients, at the limit and not at A (method 5 of Newcombe 2006, doi:10.1002/sim.2324). D is the ratio of the
    variance of the resamples to V(A). It is 1 where all pairs are in order. For an area of 0.98, percentiles of resamples
    miss the truth in more than one of ten datasets, and these limits half as often. The limits are NaN with fewer than two
    patients of a class, or too few effective patients. With several rankings, the ranking with the fewest patients and the
    one with the fewest effective patients count.
    """
    n_positives, n_negatives = min((ranking.n_positive_and_negative_groups for ranking in rankings), key=min)
    n_effective = min(ranking.n_effective_groups for ranking in rankings)
    fewest = min(n_positives, n_negatives)
    if fewest < 2 or n_effective < min(fewest, MIN_EFFECTIVE_GROUPS) - RELATIVE_PRECISION:
        return np.nan, np.nan
    variance = float(np.var(resampled_aurocs))
    expected = _compute_hanley_mcneil_variance(point, n_positives, n_negatives)
    inflation = variance / expected if variance and expected else 1.0
    half_width = compute_interval_multiplier(n_effective, confidence_level) * sqrt(inflation)

    def is_inside(limit: float) -> bool:
        return abs(point - limit) <= half_width * sqrt(_compute_hanley_mcneil_variance(limit, n_positives, n_negatives))

    return _bisect_boundary(is_inside, point, 0.0), _bisect_boundary(is_inside, point, 1.0)


def _bisect_boundary(is_inside: Callable[[float], bool], start: float, end: float) -> float:
    for _ in range(50):
        middle = (start + end) / 2
        start, end = (middle, end) if is_inside(middle) else (start, middle)
    return end


def _compute_hanley_mcneil_variance(area: float, n_positives: int, n_negatives: int) -> float:
    half = (n_positives + n_negatives) / 2 - 1
    factor = 1 + half * (1 - area) / (2 - area) + half * area / (1 + area)
    return area * (1 - area) * factor / (n_positives * n_negatives)


def _build_estimate(rankings: Sequence[Ranking], point: float, interval: tuple[float, float]) -> Estimate:
    """Build the estimate of a mean AUC. Its effective counts are those of the ranking with the fewest effective groups."""
    limiting = min(rankings, key=lambda ranking: ranking.n_effective_groups)
    return Estimate(
        point,
        *interval,
        len(rankings[0].truth),
        rankings[0].n_groups,
        n_limiting_groups=min(min(ranking.n_positive_and_negative_groups) for ranking in rankings),
        n_effective_groups=limiting.n_effective_groups,
        largest_group_share=limiting.largest_group_share,
    )
