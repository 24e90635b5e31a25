"""Clusters: how a mean varies whose values come in groups of different sizes, and how many groups that rests on.

Where one patient has most of the images, what patients differ by says too little: the mean lies near that patient, who so
seems to differ from it by little. The jackknife leaves each patient out. Its variance is that of CR3, which MacKinnon, Nielsen
and Webb 2023 (doi:10.1002/jae.2969) recommend for groups of different sizes. How certain it is depends on the sizes:
degrees of freedom are Satterthwaite's, of images that vary alike and independently (Bell and McCaffrey 2002, Survey Methodology
28, 169; Pustejovsky and Tipton 2018, doi:10.1080/07350015.2016.1247004). Of groups of one size they are one less than the
groups, and the variance is the usual one.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.metrics.base import FloatArray

MIN_EFFECTIVE_GROUPS: Final = 3.0  # effective groups; one of many groups with 58 % of the values leaves fewer
GroupSizes = npt.NDArray[Any]


def count_effective_groups(group_sizes: GroupSizes) -> float:
    """(G,) sizes of groups -> how many of equal size weigh as they do: (Σ n)² / Σ n². Kish 1965, Survey Sampling."""
    counts = np.asarray(group_sizes, np.float64)
    return float(counts.sum() ** 2 / (counts**2).sum())


def compute_jackknife_deviations(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """(G,) sums and sizes of two groups or more -> (G,): by how much the mean moves without each.

    Scaled so that the sum of their squares is the jackknife's variance of the mean, (G - 1) / G Σ (moves)².
    """
    shares, groups = group_sizes / group_sizes.sum(), len(group_sizes)
    moves = compute_group_residuals(group_sums, group_sizes) / (1 - shares)
    return np.asarray(moves * np.sqrt((groups - 1) / groups), np.float64)


def compute_group_residuals(group_sums: FloatArray, group_sizes: GroupSizes) -> FloatArray:
    """(G,): what each group adds to the mean, beyond its share of it."""
    return np.asarray(
        (group_sums - group_sizes * (group_sums.sum() / group_sizes.sum())) / group_sizes.sum(), np.float64
    )


def compute_linearized_variance(group_sums: FloatArray, group_sizes: GroupSizes) -> float:
    """Of the mean, by what groups differ from it: that which a bootstrap of groups estimates, too small of unequal groups."""
    groups = len(group_sizes)
    return (
        float((compute_group_residuals(group_sums, group_sizes) ** 2).sum()) * groups / (groups - 1)
        if groups > 1
        else 0.0
    )


def compute_degrees_of_freedom(group_sizes: GroupSizes) -> float:
    """(G,) sizes of two groups or more -> Satterthwaite's degrees of freedom of the jackknife's variance, 1..G - 1.

    The variance is Σ a_g q_g², where q_g is a group's mean less that of all, and a_g = h_g² / (1 - h_g)² with its share h_g.
    With covariances c_gk of the q they are (Σ a_g c_gg)² / Σ a_g a_k c_gk². Here c_gk = v_g [g = k] - 1/N, with v_g = 1 / n_g.
    """
    counts = np.asarray(group_sizes, np.float64)
    total = counts.sum()
    shares, spread = counts / total, 1 / counts - 1 / total
    weights = (shares / (1 - shares)) ** 2
    trace = float((weights * spread).sum())
    squares = float((weights**2 * (spread**2 - 1 / total**2)).sum() + weights.sum() ** 2 / total**2)
    return min(len(counts) - 1.0, max(1.0, trace**2 / squares))
