"""Multiway: the interval of a mean whose values share groups of several kinds, as a pasted region a receiver and a donor."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.base import FloatArray
from camscope.metrics.cluster_variance import (
    MIN_EFFECTIVE_GROUPS,
    compute_degrees_of_freedom,
    compute_jackknife_deviations,
    count_effective_groups,
)
from camscope.metrics.statistics import MIN_GROUPS_FOR_INTERVAL, Estimate, index_groups

GroupIndices = npt.NDArray[np.int64]
CLUSTERED_T_INTERVAL = (
    "clustered"  # the method of an interval: Student's t of a variance clustered by several kinds of groups
)


def estimate_clustered_mean(
    values: npt.ArrayLike, *groupings: Sequence[Hashable] | None, confidence_level: float = 0.95
) -> Estimate:
    """(N,) values, of each kind (N,) groups -> their mean and its interval; `n_groups`: those of the kind that has the fewest.

    The variance is that of the mean clustered by each kind, less that by each two together, and so on, and never less than
    that by any one kind: Cameron, Gelbach & Miller 2011, doi:10.1198/jbes.2010.07136. Each is the jackknife's, and Student's t
    has the degrees of freedom of the kind with the fewest; see `cluster_masks`. `n_effective_groups`, `largest_group_share`: of the kind with the fewest
    effective groups. NaN for the ends where a kind has fewer groups, or fewer effective ones, than an interval needs.
    InputError for values that are not finite.
    """
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise InputError(f"values {given.shape}: expected (N,) finite numbers")
    named = [index_groups(kind, len(given)) for kind in groupings or (None,)]
    fewest = min(len(np.unique(one)) for one in named)
    mean, half, sizes = float(given.mean()), nan, [np.bincount(one) for one in named]
    worst = min(sizes, key=count_effective_groups)
    if fewest >= MIN_GROUPS_FOR_INTERVAL and count_effective_groups(worst) >= MIN_EFFECTIVE_GROUPS:
        half = _compute_t_multiplier(min(map(compute_degrees_of_freedom, sizes)), confidence_level) * sqrt(
            _compute_clustered_variance(given - mean, named)
        )
    return Estimate(
        mean,
        mean - half,
        mean + half,
        len(given),
        fewest,
        interval_method=CLUSTERED_T_INTERVAL,
        n_effective_groups=count_effective_groups(worst),
        largest_group_share=float(worst.max() / worst.sum()),
    )


def _compute_clustered_variance(deviations: FloatArray, groupings: Sequence[GroupIndices]) -> float:
    """Of the mean of what is `deviations` it by so much, by inclusion and exclusion."""
    alone = [_compute_jackknife_variance(deviations, kind) for kind in groupings]
    shared = sum(
        (-1) ** (size + 1) * _compute_jackknife_variance(deviations, _intersect_groupings(some))
        for size in range(2, len(groupings) + 1)
        for some in combinations(groupings, size)
    )
    return float(max(*alone, sum(alone) + shared)) if len(alone) > 1 else alone[0]


def _compute_jackknife_variance(deviations: FloatArray, group_indices: GroupIndices) -> float:
    sums = np.asarray(np.bincount(group_indices, weights=deviations), np.float64)
    return 0.0 if len(sums) < 2 else float((compute_jackknife_deviations(sums, np.bincount(group_indices)) ** 2).sum())


def _intersect_groupings(groupings: Sequence[GroupIndices]) -> GroupIndices:
    """One number for each combination of groups that occurs."""
    return np.asarray(np.unique(np.stack(groupings), axis=1, return_inverse=True)[1].reshape(-1), np.int64)


def _compute_t_multiplier(dof: float, confidence_level: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.5 + confidence_level / 2, dof))
