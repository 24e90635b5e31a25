"""Variance and degrees of freedom of a mean over groups of different sizes (the delete-one-group jackknife).

If one patient has most of the images, the differences between patients understate the variance: the mean lies near that
patient. The jackknife leaves out one patient at a time. Its variance is CR3, which MacKinnon, Nielsen and Webb 2023
(doi:10.1002/jae.2969) recommend for groups of different sizes. The degrees of freedom are Satterthwaite's for images with
equal, independent variances (Bell and McCaffrey 2002, Survey Methodology 28, 169; Pustejovsky and Tipton 2018,
doi:10.1080/07350015.2016.1247004). For groups of equal size they are the number of groups minus one, and the variance is the
usual one.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.metrics.base import FloatArray

MIN_EFFECTIVE_GROUPS: Final = 3.0  # one group with 58 % of all values leaves fewer
GroupSizes = npt.NDArray[Any]


def count_effective_groups(group_sizes: GroupSizes) -> float:
    """Return Kish's effective number of groups, (Σ n)² / Σ n², from group sizes (G,). Kish 1965, Survey Sampling."""
    counts = np.asarray(group_sizes, np.float64)
    return float(counts.sum() ** 2 / (counts**2).sum())


def compute_jackknife_deviations(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """Return for each group how much the mean changes without it (G,), from the sums and sizes (G,) of two or more groups.

    The deviations are scaled so that the sum of their squares is the jackknife variance of the mean, (G - 1) / G Σ (changes)².
    """
    shares, groups = group_sizes / group_sizes.sum(), len(group_sizes)
    moves = _compute_group_residuals(group_sums, group_sizes) / (1 - shares)
    return np.asarray(moves * np.sqrt((groups - 1) / groups), np.float64)


def _compute_group_residuals(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """Return the contribution of each group (G,) to the mean in excess of the group's share."""
    total = group_sizes.sum()
    return np.asarray((group_sums - group_sizes * (group_sums.sum() / total)) / total, np.float64)


def compute_linearized_variance(group_sums: FloatArray, group_sizes: GroupSizes) -> float:
    """Return the variance of the mean from the spread of the groups, which a bootstrap of groups estimates.

    It is too small for groups of different sizes.
    """
    groups = len(group_sizes)
    squares = float((_compute_group_residuals(group_sums, group_sizes) ** 2).sum())
    return squares * groups / (groups - 1) if groups > 1 else 0.0


def compute_degrees_of_freedom(group_sizes: GroupSizes) -> float:
    """Return Satterthwaite's degrees of freedom of the jackknife variance, 1..G - 1, from sizes (G,) of at least two groups.

    The variance is Σ a_g q_g², where q_g is a group's mean minus the overall mean, and a_g = h_g² / (1 - h_g)² with its
    share h_g. With covariances c_gk of the q they are
    (Σ a_g c_gg)² / Σ a_g a_k c_gk². Here c_gk = v_g [g = k] - 1/N, with v_g = 1 / n_g.
    """
    counts = np.asarray(group_sizes, np.float64)
    total = counts.sum()
    shares, spread = counts / total, 1 / counts - 1 / total
    weights = (shares / (1 - shares)) ** 2
    trace = float((weights * spread).sum())
    squares = float((weights**2 * (spread**2 - 1 / total**2)).sum() + weights.sum() ** 2 / total**2)
    return min(len(counts) - 1.0, max(1.0, trace**2 / squares))
