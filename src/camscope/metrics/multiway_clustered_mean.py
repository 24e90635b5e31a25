"""Estimate a mean and its interval if each value belongs to groups of several kinds, such as a patient and a reader."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.intervals_and_p_values import MIN_GROUPS_FOR_INTERVAL, compute_t_quantile, index_groups
from camscope.metrics.jackknife_variance import (
    MIN_EFFECTIVE_GROUPS,
    compute_degrees_of_freedom,
    compute_jackknife_variance,
    count_effective_groups,
)
from camscope.metrics.mean_estimates import Estimate
from camscope.metrics.metric_registry import FloatArray

GroupIndices = npt.NDArray[np.int64]


def estimate_clustered_mean(
    values: npt.ArrayLike, *groupings: Sequence[Hashable] | None, confidence_level: float = 0.95
) -> Estimate:
    """Estimate the mean of values (N,). The values can belong to groups of several kinds, such as patients and scanners.

    Each of `groupings` (N,) names the group of each value (Cameron et al. 2011, doi:10.1198/jbes.2010.07136). The estimate
    has the group count of the kind with the fewest groups. If there are too few groups, it has no interval.
    """
    checked_values = np.asarray(values, np.float64)
    if checked_values.ndim != 1 or not len(checked_values) or not np.isfinite(checked_values).all():
        raise InputError(f"values have shape {checked_values.shape}: expected finite numbers of shape (N,)")
    indices_by_kind = [index_groups(kind, len(checked_values)) for kind in groupings or (None,)]
    fewest = min(len(np.unique(indices)) for indices in indices_by_kind)
    mean, half, sizes = float(checked_values.mean()), nan, [np.bincount(indices) for indices in indices_by_kind]
    worst = min(sizes, key=count_effective_groups)
    if fewest >= MIN_GROUPS_FOR_INTERVAL and count_effective_groups(worst) >= MIN_EFFECTIVE_GROUPS:
        dof, tail = min(map(compute_degrees_of_freedom, sizes)), (1 - confidence_level) / 2
        half = compute_t_quantile(dof, tail) * sqrt(_compute_clustered_variance(checked_values - mean, indices_by_kind))
    return Estimate(
        mean,
        mean - half,
        mean + half,
        len(checked_values),
        fewest,
        interval_method="clustered",
        n_effective_groups=count_effective_groups(worst),
        largest_group_share=float(worst.max() / worst.sum()),
    )


def _compute_clustered_variance(deviations: FloatArray, groupings: Sequence[GroupIndices]) -> float:
    """Return the variance of the mean. Groups of all kinds are combined by inclusion and exclusion."""
    alone = [_compute_variance(deviations, kind) for kind in groupings]
    shared = 0.0
    for size in range(2, len(groupings) + 1):
        for subset in combinations(groupings, size):
            intersection = np.unique(np.stack(subset), axis=1, return_inverse=True)[1].reshape(-1)
            shared += (-1) ** (size + 1) * _compute_variance(deviations, intersection)
    return float(max(*alone, sum(alone) + shared)) if len(alone) > 1 else alone[0]


def _compute_variance(deviations: FloatArray, group_indices: GroupIndices) -> float:
    sums = np.asarray(np.bincount(group_indices, weights=deviations), np.float64)
    return compute_jackknife_variance(sums, np.bincount(group_indices))
