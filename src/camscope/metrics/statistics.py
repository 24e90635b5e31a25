"""Statistics over images: means with 95 % intervals, paired differences with p-values, corrections for many comparisons."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray
from camscope.metrics.cluster_variance import (
    MIN_EFFECTIVE_GROUPS,
    compute_degrees_of_freedom,
    compute_jackknife_deviations,
    compute_linearized_variance,
    count_effective_groups,
)
from camscope.optional import require
from camscope.plurals import plural

N_RESAMPLES = 2000
MIN_GROUPS_FOR_INTERVAL: Final = (
    6  # of five groups no difference has p below 0.05, even if all have one sign: 2^(1 - 5)
)
RELATIVE_PRECISION: Final = 1e-6  # of float32, with room for sums: smaller relative differences are rounding
BOOTSTRAP_INTERVAL, KORN_GRAUBARD_INTERVAL, STUDENT_T_INTERVAL = (
    "bootstrap",
    "korn-graubard",
    "student",
)  # methods of intervals, by name
MAX_NUMBERS_IN_MEMORY = 4_000_000  # numbers at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval: of `n_values` values in `n_groups` groups; `n_undefined` rows have no value.

    `low`, `high`: NaN with fewer than `MIN_GROUPS_FOR_INTERVAL` groups, or where nothing varies from which an interval could be estimated.
    `p_value`: of a difference, two-sided; None of a mean, and of a difference of too few groups. `n_limiting_groups`: the groups that the
    interval rests on, where these are fewer than `n_groups`: of an AUROC those of the rarer class. `interval_method`: how the interval
    was made, "bootstrap" unless another function says so. `n_groups_by_role`: where each value belongs to groups of several kinds, how
    many of each there are; `n_groups` is then the smallest of these counts. `n_effective_groups`: Kish's effective number of groups, and
    `largest_group_share`: the share of the values that the largest group has, where they are known; with fewer than `MIN_EFFECTIVE_GROUPS`
    effective groups there is no interval and no p. `dof`: degrees of freedom of a difference, `n_groups` - 1 unless known.
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
        """Whether so few groups have most of the values that there is no interval."""
        counted = self.n_groups if self.n_limiting_groups is None else self.n_limiting_groups
        enough = self.n_groups >= MIN_GROUPS_FOR_INTERVAL and self.n_effective_groups is not None
        return (
            enough
            and self.n_effective_groups is not None
            and self.n_effective_groups < min(counted, MIN_EFFECTIVE_GROUPS) - RELATIVE_PRECISION
        )

    def describe_dominance(self, group_name: str = "group") -> str:
        """Why there is no interval, where few groups have most of the values; else ""."""
        if not self.is_dominated_by_few_groups or self.n_effective_groups is None or self.largest_group_share is None:
            return ""
        values = "images" if self.n_limiting_groups is None else "images of one class"
        return (
            f"one {group_name} has {100 * self.largest_group_share:.0f} % of the {values}: they weigh as {self.n_effective_groups:.1f} {group_name}s of "
            f"equal size, and {MIN_EFFECTIVE_GROUPS:g} are needed for an interval"
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
    """Estimate the mean of (N,) values with its interval; NaN are undefined rows, and left out.

    Args:
        values: (N,) numbers of images.
        groups: (N,) patients or scenes. Images of one group are not independent. Default: each image is its own group.
        bounds: The least and the largest possible value, such as (0, 1) for a share. The interval is then that of Korn and
            Graubard (1998), which has a width where all values are 0 or all are 1. Without bounds it is a bootstrap of groups
            with percentiles expanded for as many groups of one size as these weigh (Hesterberg 2015,
            doi:10.1080/00031305.2015.1089789).
        replicates: Bootstrap resamples, without bounds.
        seed: Seed of the bootstrap.
        level: Confidence level.

    Returns:
        The estimate. It has no interval with fewer than `MIN_GROUPS_FOR_INTERVAL` groups, nor where so few of them have most of the images
        that they weigh as fewer than `MIN_EFFECTIVE_GROUPS` of equal size. Without bounds it has none either where all groups have
        the same mean.

    Raises:
        UndefinedError: No row has a value.
        InputError: A value is infinite or out of bounds, or the shapes differ.

    """
    check_positive_integer(n_resamples=n_resamples)
    if not 0 < confidence_level < 1:
        raise InputError(f"confidence_level={confidence_level}: expected a number between 0 and 1, such as 0.95")
    sample = _GroupedValues.from_values(values, groups)
    low, high = nan, nan
    if bounds is not None:
        low, high = sample.compute_bounded_interval(bounds, confidence_level)
    elif sample.has_enough_groups and sample.has_group_differences:
        drawn = _compute_bootstrap_means(sample.group_sums, sample.group_sizes, n_resamples, seed)
        low, high = compute_bootstrap_interval(
            drawn, sample.n_groups, confidence_level, count_effective_groups(sample.group_sizes)
        )
    return sample.build_estimate(
        low, high, interval_method=BOOTSTRAP_INTERVAL if bounds is None else KORN_GRAUBARD_INTERVAL
    )


def estimate_difference(
    values: npt.ArrayLike,
    reference_values: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    rounding_tolerance: float = 0.0,
) -> Estimate:
    """Estimate the mean of one - other over the images of which both (N,) have a value.

    The interval and `p` are of one procedure, so they never contradict each other: Student's t of the jackknife's variance
    over groups, with degrees of freedom for groups of these sizes; see `cluster_masks`. `p` is never less than `compute_min_p_value`.

    Args:
        one: (N,) values.
        other: (N,) values of the same images.
        groups: (N,) patients or scenes; see `estimate_mean`.
        precision: Smaller differences are rounding and count as 0, as do those of less than 1e-6 of the two values.

    Returns:
        The estimate, with `p`. With fewer than `MIN_GROUPS_FOR_INTERVAL` groups, or fewer than `MIN_EFFECTIVE_GROUPS` effective ones, it has neither
        interval nor `p`. Where all groups differ alike it has no interval; `p` is then `compute_min_p_value`, or 1 where they differ by 0.

    Raises:
        UndefinedError: No image has both values.

    """
    first, second = np.asarray(values, np.float64), np.asarray(reference_values, np.float64)
    if first.shape != second.shape:
        raise InputError(f"values {first.shape} and {second.shape}: expected (N,) of both, of the same images")
    check_no_infinity(first)
    check_no_infinity(second)
    gaps = first - second
    gaps[
        np.abs(gaps) <= np.maximum(rounding_tolerance, RELATIVE_PRECISION * np.maximum(np.abs(first), np.abs(second)))
    ] = 0.0
    sample = _GroupedValues.from_values(gaps, groups)
    mean = sample.mean if sample.has_group_differences or abs(sample.mean) > sample.rounding_tolerance else 0.0
    error = sqrt(sample.variance_of_mean) if sample.has_enough_groups and sample.has_group_differences else 0.0
    low, high, p = (
        compute_t_interval(mean, error, sample.n_groups, sample.dof) if sample.has_enough_groups else (nan, nan, None)
    )
    return sample.build_estimate(low, high, p_value=p, interval_method=STUDENT_T_INTERVAL, dof=sample.dof)


def compute_t_interval(
    mean: float, standard_error: float, n_groups: int, dof: float | None = None
) -> tuple[float, float, float | None]:
    """The ends and p of a difference with this standard error, of so many groups; `dof`: default one less than groups.

    NaN for the ends where the error is 0; NaN and None with too few groups.
    """
    if n_groups < MIN_GROUPS_FOR_INTERVAL:
        return nan, nan, None
    if standard_error == 0:
        return nan, nan, compute_min_p_value(n_groups) if mean else 1.0
    dof = n_groups - 1 if dof is None else dof
    half = compute_t_quantile(dof, 0.025) * standard_error
    p = max(2 * float(_import_scipy_special().stdtr(dof, -abs(mean) / standard_error)), compute_min_p_value(n_groups))
    return mean - half, mean + half, p


def adjust_bonferroni(estimates: Sequence[Estimate], n_comparisons: int | None = None) -> list[Estimate]:
    """Bonferroni: differences whose intervals hold together at 95 %, and whose p are corrected alike.

    `n_comparisons`: how many comparisons there are; default: as many as estimates. An interval leaves 0 out exactly where p is below
    0.05. There is none where so few groups cannot be that certain; see `compute_min_p_value`.
    """
    count = max(1, len(estimates) if n_comparisons is None else n_comparisons)
    return [_adjust_estimate(each, count) for each in estimates]


def _adjust_estimate(estimate: Estimate, n_comparisons: int) -> Estimate:
    if estimate.p_value is None or n_comparisons == 1:
        return estimate
    p, groups = min(1.0, n_comparisons * estimate.p_value), estimate.n_limiting_groups or estimate.n_groups
    if n_comparisons * compute_min_p_value(groups) >= 0.05:
        return replace(estimate, low=nan, high=nan, p_value=p)
    freedom = groups - 1 if estimate.dof is None else estimate.dof
    half = (
        (estimate.high - estimate.low)
        / 2
        * compute_t_quantile(freedom, 0.025 / n_comparisons)
        / compute_t_quantile(freedom, 0.025)
    )
    return replace(estimate, low=estimate.mean - half, high=estimate.mean + half, p_value=p)


def compute_t_quantile(dof: float, tail_probability: float) -> float:
    """Student's t that this share of the distribution exceeds."""
    return -float(_import_scipy_special().stdtrit(dof, tail_probability))


def compute_min_p_value(n_groups: int) -> float:
    """The smallest p that so many groups can give: that all differences have one sign by chance, 2^(1 - groups)."""
    return float(min(1.0, 2.0 ** (1 - n_groups)))


def compute_min_detectable_prevalence(n_groups: int) -> float:
    """The share of groups that must show something for one of so many to show it with 95 % certainty: about 3 / groups.

    The rule of three: Hanley and Lippman-Hand 1983, doi:10.1001/jama.1983.03330370053031.
    """
    return float(1 - 0.05 ** (1 / n_groups)) if n_groups > 0 else 1.0


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order: the k-th smallest of m times m - k, and none below the one before. Holm 1979."""
    if not all(0 <= p <= 1 for p in p_values):
        raise InputError(f"p-values {list(p_values)}: expected numbers in 0..1")
    order, adjusted, so_far = sorted(range(len(p_values)), key=lambda i: p_values[i]), [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = so_far
    return adjusted


def index_groups(groups: Sequence[Hashable] | None, n_rows: int) -> npt.NDArray[np.int64]:
    """(rows,): the number of each row's group, in order of appearance; without groups each row is its own."""
    if groups is None:
        return np.arange(n_rows)
    if len(groups) != n_rows:
        raise InputError(f"{plural(n_rows, 'row')} and {plural(len(groups), 'group')}; expected (N,) of both")
    names = _select_groups_of_rows(groups, np.arange(n_rows))
    numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def iter_bootstrap_indices(
    n_groups: int, n_resamples: int, seed: int, values_per_resample: int | None = None
) -> Iterator[npt.NDArray[np.int64]]:
    """(r,groups) at a time, `n_resamples` in all: as many groups as there are, drawn with replacement, as numbers.

    `values_per_resample`: how many numbers a replicate is turned into, where those are more: fewer are held at a time.
    """
    random = np.random.default_rng(seed)
    step = max(1, MAX_NUMBERS_IN_MEMORY // max(n_groups, values_per_resample or 0))
    for first in range(0, n_resamples, step):
        yield random.integers(0, n_groups, (min(step, n_resamples - first), n_groups))


def compute_bootstrap_interval(
    resampled_values: FloatArray, n_groups: int, confidence_level: float = 0.95, n_effective_groups: float | None = None
) -> tuple[float, float]:
    """The expanded percentiles of bootstrap replicates of so many groups; NaN where these are too few, or nothing varies.

    `n_effective_groups`: of how many groups they are in effect, where these are of different sizes.
    """
    if n_groups < MIN_GROUPS_FOR_INTERVAL or (
        n_effective_groups is not None and n_effective_groups < MIN_EFFECTIVE_GROUPS
    ):
        return nan, nan
    size = n_groups if n_effective_groups is None else n_effective_groups
    tail = NormalDist().cdf(-compute_interval_multiplier(size, confidence_level))
    low, high = (float(end) for end in np.quantile(resampled_values, [tail, 1 - tail]))
    return (low, high) if low < high else (nan, nan)


def compute_interval_multiplier(n_groups: float, confidence_level: float = 0.95) -> float:
    """How many standard deviations of the draws of so many groups an interval reaches to either side: Student's t, unbiased."""
    return compute_t_quantile(n_groups - 1, (1 - confidence_level) / 2) * sqrt(n_groups / (n_groups - 1))


def compute_p_from_intervals(interval_at_level: Callable[[float], tuple[float, float]]) -> float:
    """The two-sided p of a difference whose interval at any level is given: 1 - the highest level that leaves 0 out."""
    least, most = -16.0, 0.0  # log10(p)
    for _ in range(40):
        middle = (least + most) / 2
        low, high = interval_at_level(1 - 10**middle)
        least, most = (least, middle) if low > 0 or high < 0 else (middle, most)
    return float(10**most)


def _import_scipy_special() -> Any:
    return require("scipy.special", extra="metrics")


@dataclass(frozen=True)
class _GroupedValues:
    """Values (n,) that are defined, the `group_indices` (n,) of each one's group, and of each group its sum and count."""

    values: FloatArray
    group_indices: npt.NDArray[np.int64]
    group_sums: FloatArray
    group_sizes: npt.NDArray[np.int64]
    n_undefined: int

    @classmethod
    def from_values(cls, values: npt.ArrayLike, groups: Sequence[Hashable] | None) -> "_GroupedValues":
        """Of (N,) values in (N,) groups."""
        given = np.asarray(values, np.float64)
        if given.ndim != 1 or (groups is not None and len(groups) != len(given)):
            raise InputError(
                f"values {given.shape} and {'no groups' if groups is None else plural(len(groups), 'group')}; "
                "expected (N,) of both"
            )
        there = np.flatnonzero(~np.isnan(given))
        if not len(there):
            raise UndefinedError("no row has a value")
        check_no_infinity(given)
        names: list[Hashable] = [int(i) for i in there] if groups is None else _select_groups_of_rows(groups, there)
        place = index_groups(names, len(names))
        sums = np.asarray(np.bincount(place, weights=given[there]), np.float64)
        return cls(given[there], place, sums, np.asarray(np.bincount(place), np.int64), len(given) - len(there))

    @property
    def n_groups(self) -> int:
        return len(self.group_sums)

    @property
    def mean(self) -> float:
        return float(self.group_sums.sum() / self.group_sizes.sum())

    @property
    def rounding_tolerance(self) -> float:
        """What is no more than this beside the values is 0."""
        return RELATIVE_PRECISION * float(np.abs(self.values).max())

    @property
    def has_enough_groups(self) -> bool:
        """Whether there are as many groups as an interval needs, and as many of them effective."""
        return (
            self.n_groups >= MIN_GROUPS_FOR_INTERVAL
            and count_effective_groups(self.group_sizes) >= MIN_EFFECTIVE_GROUPS
        )

    @property
    def has_group_differences(self) -> bool:
        """Whether groups differ, but for rounding."""
        return (
            not self.is_constant
            and sqrt(compute_linearized_variance(self.group_sums, self.group_sizes))
            > self.rounding_tolerance / self.n_groups
        )

    @property
    def variance_of_mean(self) -> float:
        """Of the mean: the jackknife's."""
        return float((compute_jackknife_deviations(self.group_sums, self.group_sizes) ** 2).sum())

    @property
    def dof(self) -> float:
        """Degrees of freedom of the variance."""
        return compute_degrees_of_freedom(self.group_sizes) if self.has_enough_groups else max(1, self.n_groups - 1)

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal, but for rounding."""
        return float(np.ptp(self.values)) <= self.rounding_tolerance

    def build_estimate(self, low: float, high: float, **fields: Any) -> Estimate:
        """The mean with this interval."""
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
        """Clopper and Pearson's interval of an effective sample size: Korn and Graubard 1998, Survey Methodology 24, 193.

        Of values that are `bounds` (0 or 1) and groups of one image each it is Clopper and Pearson's own. The effective size
        is that at which independent shares would vary as the mean does, corrected for how few groups say so. Where nothing
        varies it is the effective number of groups: images of one group are then taken for one.
        """
        low, high = bounds
        if self.values.min() < low - RELATIVE_PRECISION * (
            high - low
        ) or self.values.max() > high + RELATIVE_PRECISION * (high - low):
            raise InputError(
                f"values {self.values.min():g}..{self.values.max():g}: expected {low:g}..{high:g}, the bounds"
            )
        if not self.has_enough_groups:
            return nan, nan
        share = min(1.0, max(0.0, (self.mean - low) / (high - low)))
        ends = compute_clopper_pearson_interval(
            share, self._compute_effective_sample_size(share, high - low, bounds, confidence_level), confidence_level
        )
        return low + (high - low) * ends[0], low + (high - low) * ends[1]

    def _compute_effective_sample_size(
        self, mean_share: float, bounds_width: float, bounds: tuple[float, float], confidence_level: float
    ) -> float:
        if float(np.ptp(self.values)) <= RELATIVE_PRECISION * bounds_width:
            return count_effective_groups(self.group_sizes)
        if self.n_groups == len(self.values) and np.isin(self.values, bounds).all():
            return float(self.n_groups)
        by_image = float(self.values.var()) / (len(self.values) - 1)
        normal = NormalDist().inv_cdf((1 + confidence_level) / 2)
        few = normal / compute_t_quantile(self.dof, (1 - confidence_level) / 2)
        return mean_share * (1 - mean_share) / (max(self.variance_of_mean, by_image) / bounds_width**2) * few**2


def check_no_infinity(values: FloatArray) -> None:
    """InputError for an infinite value; NaN may stay."""
    if np.isinf(values).any():
        place = int(np.flatnonzero(np.isinf(values))[0])
        raise InputError(f"value {place} is infinite: expected numbers, NaN for none")


def compute_clopper_pearson_interval(
    proportion: float, sample_size: float, confidence_level: float = 0.95
) -> tuple[float, float]:
    """The interval of a share of `sample_size` independent answers, which need not be a whole number; Clopper and Pearson 1934."""
    tail, hits, misses = (1 - confidence_level) / 2, proportion * sample_size, (1 - proportion) * sample_size
    low = float(_import_scipy_special().betaincinv(hits, misses + 1, tail)) if hits > 0 else 0.0
    high = float(_import_scipy_special().betaincinv(hits + 1, misses, 1 - tail)) if misses > 0 else 1.0
    return low, high


def _select_groups_of_rows(groups: Sequence[Hashable], row_indices: npt.NDArray[np.int64]) -> list[Hashable]:
    """The group of each row with a value; InputError where it is missing: such rows are not all of one group."""
    every = list(groups)
    names = [every[int(i)] for i in row_indices]
    for i, name in zip(row_indices, names, strict=True):
        if name is None or name != name:  # NaN is the only thing that is not itself
            raise InputError(f"row {int(i)} has no group: name one, or leave groups out")
    return names


def _compute_bootstrap_means(
    group_sums: FloatArray, group_sizes: npt.NDArray[np.int64], n_resamples: int, seed: int
) -> FloatArray:
    """(replicates,): means of as many groups as there are, drawn with replacement."""
    means = [
        group_sums[drawn].sum(1) / group_sizes[drawn].sum(1)
        for drawn in iter_bootstrap_indices(len(group_sums), n_resamples, seed)
    ]
    return np.concatenate(means)
