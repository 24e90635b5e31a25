"""The confidence interval of a mean whose values belong to groups of several kinds, such as receiver and donor of a paste."""

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
from camscope.metrics.statistics import MIN_GROUPS_FOR_INTERVAL, Estimate, compute_t_quantile, index_groups

GroupIndices = npt.NDArray[np.int64]


def estimate_clustered_mean(
    values: npt.ArrayLike, *groupings: Sequence[Hashable] | None, confidence_level: float = 0.95
) -> Estimate:
    """Estimate the mean of values (N,) with an interval that is clustered by several kinds of groups.

    The variance is the variance clustered by each kind, minus the variance clustered by each pair of kinds, and so on. It is
    at least the variance clustered by any single kind: Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136. Each is a
    jackknife variance. Student's t has the smallest degrees of freedom of all kinds; see `cluster_variance`.

    Args:
        values: (N,) finite numbers.
        groupings: (N,) groups of each kind. None: each value is its own group.
        confidence_level: The confidence level of the interval.

    Returns:
        The estimate. `n_groups`, `n_effective_groups` and `largest_group_share` are those of the kind with the fewest groups or
        effective groups. The ends of the interval are NaN if a kind has too few groups or effective groups.

    Raises:
        InputError: A value is not finite.

    """
    checked_values = np.asarray(values, np.float64)
    if checked_values.ndim != 1 or not len(checked_values) or not np.isfinite(checked_values).all():
        raise InputError(f"values {checked_values.shape}: expected (N,) finite numbers")
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
    """Return the variance of the mean from deviations (N,), by inclusion and exclusion over all kinds of groups."""
    alone = [_compute_jackknife_variance(deviations, kind) for kind in groupings]
    shared = 0.0
    for size in range(2, len(groupings) + 1):
        for subset in combinations(groupings, size):
            intersection = np.unique(np.stack(subset), axis=1, return_inverse=True)[1].reshape(-1)
            shared += (-1) ** (size + 1) * _compute_jackknife_variance(deviations, intersection)
    return float(max(*alone, sum(alone) + shared)) if len(alone) > 1 else alone[0]


def _compute_jackknife_variance(deviations: FloatArray, group_indices: GroupIndices) -> float:
    sums = np.asarray(np.bincount(group_indices, weights=deviations), np.float64)
    return 0.0 if len(sums) < 2 else float((compute_jackknife_deviations(sums, np.bincount(group_indices)) ** 2).sum())
