"""Estimates of a mean over images, or of a paired difference: `Estimate` with its interval, p-value and group counts."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.metrics.intervals_and_p_values import (
    MIN_GROUPS_FOR_INTERVAL,
    compute_bootstrap_interval,
    compute_exact_interval,
    compute_min_p_value,
    compute_t_interval,
    compute_t_quantile,
    index_groups,
    iter_bootstrap_indices,
)
from camscope.metrics.jackknife_variance import (
    MIN_EFFECTIVE_GROUPS,
    compute_degrees_of_freedom,
    compute_jackknife_variance,
    compute_linearized_variance,
    count_effective_groups,
)
from camscope.metrics.metric_registry import FloatArray, check_no_infinity

N_RESAMPLES = 2000
RELATIVE_PRECISION: Final = 1e-6  # relative differences below this are float32 rounding
BOOTSTRAP_INTERVAL, KORN_GRAUBARD_INTERVAL, STUDENT_T_INTERVAL = "bootstrap", "korn-graubard", "student"


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    Attributes:
        mean: The mean.
        low: Lower end of the interval, or NaN with fewer than `MIN_GROUPS_FOR_INTERVAL` groups, or if nothing varies.
        high: Upper end of the interval, or NaN in the same cases.
        n_values: The number of values.
        n_groups: The number of groups. If there are several kinds of groups, that of the kind with the fewest.
        n_undefined: The number of rows without a value.
        p_value: Two-sided p-value of a difference, or None for a mean, and for a difference with too few groups.
        n_limiting_groups: The number of groups that limits the interval if it is smaller than `n_groups`, such as that of
            the rarer class for an AUROC. Otherwise None.
        interval_method: How the interval was computed.
        n_groups_by_role: The number of groups of each kind, if values belong to groups of several kinds.
        n_effective_groups: Kish's effective number of groups. Below `MIN_EFFECTIVE_GROUPS` there is no interval and no
            p-value.
        largest_group_share: The share of the values that belong to the largest group.
        dof: Degrees of freedom of a difference. None stands for `n_groups` - 1.

    >>> estimate = estimate_mean([0.2, 0.4, 0.6, 0.8, 1.0, 0.9])
    >>> round(estimate.mean, 3), estimate.n_values, estimate.low < estimate.mean < estimate.high
    (0.65, 6, True)

    """

    mean: float
    low: float
    high: float
    n_values: int
    n_groups: int
    n_undefined: int = 0
    p_value: float | None = None
    n_limiting_groups: int | None = None
    interval_method: str = BOOTSTRAP_INTERVAL
    n_groups_by_role: tuple[tuple[str, int], ...] = ()
    n_effective_groups: float | None = None
    largest_group_share: float | None = None
    dof: float | None = None

    @property
    def is_dominated_by_few_groups(self) -> bool:
        """Whether a few groups hold so many of the values that there is no interval."""
        n_counted = self.n_groups if self.n_limiting_groups is None else self.n_limiting_groups
        return (
            self.n_groups >= MIN_GROUPS_FOR_INTERVAL
            and self.n_effective_groups is not None
            and self.n_effective_groups < min(n_counted, MIN_EFFECTIVE_GROUPS) - RELATIVE_PRECISION
        )

    def explain_missing_intervals(self, group_name: str = "group") -> str:
        """Explain that the interval is missing because a few groups hold most values. For another reason, return ""."""
        if not self.is_dominated_by_few_groups or self.n_effective_groups is None or self.largest_group_share is None:
            return ""
        values = "images" if self.n_limiting_groups is None else "images of one class"
        return (
            f"one {group_name} has {100 * self.largest_group_share:.0f} % of the {values}: they weigh as "
            f"{self.n_effective_groups:.1f} {group_name}s of equal size, and {MIN_EFFECTIVE_GROUPS:g} are needed for an interval"
        )

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if isnan(self.low) else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate_mean(
    values: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    bounds: tuple[float, float] | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    confidence_level: float = 0.95,
) -> Estimate:
    """Estimate the mean of values (N,) with a confidence interval. NaN values are left out.

    Args:
        values: (N,) numbers of images.
        groups: (N,) patients or scenes. Images of one group are not independent. By default each image is a group.
        bounds: The smallest and the largest possible value, such as (0, 1) for a share. The interval is then that of Korn and
            Graubard (1998), which has a width even if all values are equal. Without bounds it is a bootstrap of groups. Its
            percentiles are expanded for the effective number of groups (Hesterberg 2015,
            doi:10.1080/00031305.2015.1089789).
        n_resamples: Bootstrap resamples, without bounds.
        seed: Seed of the bootstrap.
        confidence_level: The confidence level of the interval.

    Returns:
        The estimate. It has no interval with fewer than `MIN_GROUPS_FOR_INTERVAL` groups or fewer than `MIN_EFFECTIVE_GROUPS`
        effective groups. Without bounds it also has none if all groups have the same mean.

    Raises:
        UndefinedError: No row has a value.
        InputError: A value is infinite or out of bounds, or the shapes differ.

    >>> estimate_mean([1.0, 2.0, 4.0, 3.0, 5.0, 9.0]).mean
    4.0

    """
    check_positive_integer(n_resamples=n_resamples)
    if not 0 < confidence_level < 1:
        raise InputError(f"confidence_level={confidence_level}: expected a number between 0 and 1, such as 0.95")
    sample = _GroupedValues.from_values(values, groups)
    low, high = nan, nan
    if bounds is not None:
        low, high = sample.compute_bounded_interval(bounds, confidence_level)
    elif sample.has_enough_groups and sample.has_group_differences:
        draws = iter_bootstrap_indices(sample.n_groups, n_resamples, seed)
        means = [sample.group_sums[drawn].sum(1) / sample.group_sizes[drawn].sum(1) for drawn in draws]
        n_effective = count_effective_groups(sample.group_sizes)
        low, high = compute_bootstrap_interval(np.concatenate(means), sample.n_groups, confidence_level, n_effective)
    method = BOOTSTRAP_INTERVAL if bounds is None else KORN_GRAUBARD_INTERVAL
    return sample.build_estimate(low, high, interval_method=method)


def estimate_difference(
    values: npt.ArrayLike,
    reference_values: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    rounding_tolerance: float = 0.0,
) -> Estimate:
    """Estimate the mean of `values` - `reference_values` with a confidence interval and a p-value.

    An image counts if both values are defined. Interval and p-value both come from Student's t, so they never contradict each
    other. The variance is the jackknife variance over groups, and the degrees of freedom allow for groups of different sizes.
    The p-value is never less than `compute_min_p_value`.

    Args:
        values: (N,) values.
        reference_values: (N,) values of the same images to subtract.
        groups: (N,) patients or scenes (see `estimate_mean`).
        rounding_tolerance: Smaller differences count as 0, as do those of less than 1e-6 of the two values.

    Returns:
        The estimate with its p-value. With fewer than `MIN_GROUPS_FOR_INTERVAL` groups or fewer than
        `MIN_EFFECTIVE_GROUPS` effective groups it has neither interval nor p-value. If all groups have the same
        difference, it has no interval. The p-value is then `compute_min_p_value`, or 1 for a difference of 0.

    Raises:
        UndefinedError: No image has both values.
        InputError: `values` and `reference_values` have different shapes.

    >>> estimate = estimate_difference([0.5, 0.7, 0.9, 0.8, 0.6, 0.7], [0.1, 0.2, 0.4, 0.5, 0.1, 0.3])
    >>> round(estimate.mean, 3), estimate.n_groups
    (0.433, 6)

    """
    first, second = np.asarray(values, np.float64), np.asarray(reference_values, np.float64)
    if first.shape != second.shape:
        raise InputError(f"values {first.shape} and reference_values {second.shape}: expected the same shape (N,)")
    check_no_infinity(first)
    check_no_infinity(second)
    differences = first - second
    rounding = np.maximum(rounding_tolerance, RELATIVE_PRECISION * np.maximum(np.abs(first), np.abs(second)))
    differences[np.abs(differences) <= rounding] = 0.0
    sample = _GroupedValues.from_values(differences, groups)
    low, high, p = nan, nan, None
    if sample.has_enough_groups:
        mean = sample.mean if sample.has_group_differences or abs(sample.mean) > sample.rounding_tolerance else 0.0
        variance = compute_jackknife_variance(sample.group_sums, sample.group_sizes)
        error = sqrt(variance) if sample.has_group_differences else 0.0
        low, high, p = compute_t_interval(mean, error, sample.n_groups, sample.dof)
    return sample.build_estimate(low, high, p_value=p, interval_method=STUDENT_T_INTERVAL, dof=sample.dof)


def adjust_bonferroni(estimates: Sequence[Estimate], n_comparisons: int | None = None) -> list[Estimate]:
    """Correct intervals and p-values of differences by Bonferroni. By default, `n_comparisons` is the number of estimates."""
    count, adjusted = max(1, len(estimates) if n_comparisons is None else n_comparisons), []
    for estimate in estimates:
        if estimate.p_value is None or count == 1:
            adjusted.append(estimate)
            continue
        groups, half = estimate.n_limiting_groups or estimate.n_groups, nan
        if count * compute_min_p_value(groups) < 0.05:
            dof = groups - 1 if estimate.dof is None else estimate.dof
            half = (estimate.high - estimate.low) / 2
            half = half * compute_t_quantile(dof, 0.025 / count) / compute_t_quantile(dof, 0.025)
        p = min(1.0, count * estimate.p_value)
        adjusted.append(replace(estimate, low=estimate.mean - half, high=estimate.mean + half, p_value=p))
    return adjusted


@dataclass(frozen=True)
class _GroupedValues:
    """Values (n,) that are not NaN, with the sum and the size of each group."""

    values: FloatArray
    group_sums: FloatArray
    group_sizes: npt.NDArray[np.int64]
    n_undefined: int

    @classmethod
    def from_values(cls, values: npt.ArrayLike, groups: Sequence[Hashable] | None) -> "_GroupedValues":
        """Group the defined values. Raise an error without a defined value, or if some are infinite."""
        array = np.asarray(values, np.float64)
        if array.ndim != 1:
            raise InputError(f"values have shape {array.shape}; expected (N,)")
        rows = np.flatnonzero(~np.isnan(array))
        if not len(rows):
            raise UndefinedError("no row has a value")
        check_no_infinity(array)
        group_indices, defined = index_groups(groups, len(array), rows), array[rows]
        sums = np.asarray(np.bincount(group_indices, weights=defined), np.float64)
        return cls(defined, sums, np.bincount(group_indices), len(array) - len(rows))

    @property
    def n_groups(self) -> int:
        return len(self.group_sums)

    @property
    def mean(self) -> float:
        return float(self.group_sums.sum() / self.group_sizes.sum())

    @property
    def rounding_tolerance(self) -> float:
        """The largest difference between values that can be a rounding error."""
        return RELATIVE_PRECISION * float(np.abs(self.values).max())

    @property
    def has_enough_groups(self) -> bool:
        """Whether there are enough groups for an interval. The number and the effective number of groups must both suffice."""
        n_effective = count_effective_groups(self.group_sizes)
        return self.n_groups >= MIN_GROUPS_FOR_INTERVAL and n_effective >= MIN_EFFECTIVE_GROUPS

    @property
    def has_group_differences(self) -> bool:
        """Whether the means of the groups differ by more than rounding errors."""
        if float(np.ptp(self.values)) <= self.rounding_tolerance:
            return False
        spread = sqrt(compute_linearized_variance(self.group_sums, self.group_sizes))
        return spread > self.rounding_tolerance / self.n_groups

    @property
    def dof(self) -> float:
        return compute_degrees_of_freedom(self.group_sizes) if self.has_enough_groups else max(1, self.n_groups - 1)

    def build_estimate(self, low: float, high: float, **fields: Any) -> Estimate:
        """Build an estimate of the mean with this interval and the counts of values and groups."""
        return Estimate(
            self.mean,
            low,
            high,
            len(self.values),
            self.n_groups,
            self.n_undefined,
            n_effective_groups=count_effective_groups(self.group_sizes),
            largest_group_share=float(self.group_sizes.max() / self.group_sizes.sum()),
            **fields,
        )

    def compute_bounded_interval(self, bounds: tuple[float, float], confidence_level: float) -> tuple[float, float]:
        """Return the Clopper-Pearson interval for the effective sample size (Korn, Graubard 1998, Surv. Methodol. 24, 193)."""
        (low, high), smallest, largest = bounds, self.values.min(), self.values.max()
        width = high - low
        if smallest < low - RELATIVE_PRECISION * width or largest > high + RELATIVE_PRECISION * width:
            raise InputError(
                f"values lie in {smallest:g}..{largest:g}: expected values within the bounds {low:g}..{high:g}"
            )
        if not self.has_enough_groups:
            return nan, nan
        share = min(1.0, max(0.0, (self.mean - low) / width))
        sample_size = self._compute_effective_sample_size(share, bounds, confidence_level)
        lower, upper = compute_exact_interval(share * sample_size, sample_size, confidence_level)
        return low + width * lower, low + width * upper

    def _compute_effective_sample_size(
        self, mean_share: float, bounds: tuple[float, float], confidence_level: float
    ) -> float:
        """Return the number of independent values whose mean would have the same variance as this mean."""
        width = bounds[1] - bounds[0]
        if float(np.ptp(self.values)) <= RELATIVE_PRECISION * width:
            return count_effective_groups(self.group_sizes)
        if self.n_groups == len(self.values) and np.isin(self.values, bounds).all():
            return float(self.n_groups)
        by_image = float(self.values.var()) / (len(self.values) - 1)
        by_group = compute_jackknife_variance(self.group_sums, self.group_sizes)
        normal = NormalDist().inv_cdf((1 + confidence_level) / 2)
        correction = normal / compute_t_quantile(self.dof, (1 - confidence_level) / 2)
        return mean_share * (1 - mean_share) / (max(by_group, by_image) / width**2) * correction**2
