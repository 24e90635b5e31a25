"""Compute the jackknife variance of a mean whose values belong to groups, and its degrees of freedom.

The variance is CR3 (MacKinnon et al. 2023, doi:10.1002/jae.2969).
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.metrics.metric_registry import FloatArray

MIN_EFFECTIVE_GROUPS: Final = 3.0  # one group with 58 % of all values leaves fewer
GroupSizes = npt.NDArray[Any]


def count_effective_groups(group_sizes: GroupSizes) -> float:
    """Return Kish's effective number of groups, (Σ n)² / Σ n². The numbers n are the sizes of the groups (Kish 1965)."""
    counts = np.asarray(group_sizes, np.float64)
    return float(counts.sum() ** 2 / (counts**2).sum())


def compute_jackknife_deviations(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """Leave out one group at a time. Return the change of the mean for each group (G,), scaled for the jackknife variance.

    The changes are scaled so that their squares sum to the jackknife variance.
    """
    shares, groups = group_sizes / group_sizes.sum(), len(group_sizes)
    moves = _compute_shift_of_mean_by_group(group_sums, group_sizes) / (1 - shares)
    return np.asarray(moves * np.sqrt((groups - 1) / groups), np.float64)


def _compute_shift_of_mean_by_group(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """Return how far each group (G,) moves the mean: the group's summed deviations divided by the number of all values."""
    total = group_sizes.sum()
    return np.asarray((group_sums - group_sizes * (group_sums.sum() / total)) / total, np.float64)


def compute_jackknife_variance(group_sums: FloatArray, group_sizes: GroupSizes) -> float:
    """Return the jackknife variance of the mean. It is computed from sums and sizes of groups (G,). A single group gives 0."""
    return 0.0 if len(group_sums) < 2 else float((compute_jackknife_deviations(group_sums, group_sizes) ** 2).sum())


def compute_linearized_variance(group_sums: FloatArray, group_sizes: GroupSizes) -> float:
    """Return the linearized variance of the mean. It is too small if the groups differ in size."""
    groups = len(group_sizes)
    squares = float((_compute_shift_of_mean_by_group(group_sums, group_sizes) ** 2).sum())
    return squares * groups / (groups - 1) if groups > 1 else 0.0


def compute_degrees_of_freedom(group_sizes: GroupSizes) -> float:
    """Return the degrees of freedom by Satterthwaite's formula (Pustejovsky and Tipton 2018). Two or more groups are needed."""
    # the variance is Σ a_g q_g², where q_g is a group's mean minus the overall mean, and a_g = h_g² / (1 - h_g)² with its share
    # h_g; with covariances c_gk = [g = k] / n_g - 1/N of the q, the result is (Σ a_g c_gg)² / Σ a_g a_k c_gk²
    counts = np.asarray(group_sizes, np.float64)
    total = counts.sum()
    shares, spread = counts / total, 1 / counts - 1 / total
    weights = (shares / (1 - shares)) ** 2
    trace = float((weights * spread).sum())
    squares = float((weights**2 * (spread**2 - 1 / total**2)).sum() + weights.sum() ** 2 / total**2)
    return min(len(counts) - 1.0, max(1.0, trace**2 / squares))
