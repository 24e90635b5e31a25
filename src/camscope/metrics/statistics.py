"""Statistics over images: means with 95 % intervals, paired differences with p-values, corrections for many comparisons."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import isnan, nan, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, MissingExtraError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats
from camscope.metrics.cluster_variance import (
    MIN_EFFECTIVE,
    degrees_of_freedom,
    deletion_effects,
    effective_groups,
    linearized_variance,
)
from camscope.plurals import plural

REPLICATES = 2000
MIN_GROUPS: Final = 6  # of five groups no difference has p below 0.05, even if all have one sign: 2^(1 - 5)
PRECISION: Final = 1e-6  # of float32, with room for sums: smaller relative differences are rounding
BOOTSTRAP, KORN_GRAUBARD, STUDENT = "bootstrap", "korn-graubard", "student"  # methods of intervals, by name
HELD = 4_000_000  # numbers at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval: of `n` values in `groups` groups; `undefined` rows have no value.

    `low`, `high`: NaN with fewer than `MIN_GROUPS` groups, or where nothing varies from which an interval could be estimated.
    `p`: of a difference, two-sided; None of a mean, and of a difference of too few groups. `witnesses`: the groups that the
    interval rests on, where these are fewer than `groups`: of an AUROC those of the rarer class. `method`: how the interval
    was made, "bootstrap" unless another function says so. `roles`: where each value belongs to groups of several kinds, how
    many of each there are; `groups` is then the smallest of these counts. `effective`: Kish's effective number of groups, and
    `largest`: the share of the values that the largest group has, where they are known; with fewer than `MIN_EFFECTIVE`
    effective groups there is no interval and no p. `freedom`: degrees of freedom of a difference, `groups` - 1 unless known.
    """

    mean: float
    low: float
    high: float
    n: int
    groups: int
    undefined: int = 0
    p: float | None = None
    witnesses: int | None = None
    method: str = BOOTSTRAP
    roles: tuple[tuple[str, int], ...] = ()
    effective: float | None = None
    largest: float | None = None
    freedom: float | None = None

    @property
    def is_dominated(self) -> bool:
        """Whether so few groups have most of the values that there is no interval."""
        counted = self.groups if self.witnesses is None else self.witnesses
        enough = self.groups >= MIN_GROUPS and self.effective is not None
        return enough and self.effective is not None and self.effective < min(counted, MIN_EFFECTIVE) - PRECISION

    def dominance(self, group: str = "group") -> str:
        """Why there is no interval, where few groups have most of the values; else ""."""
        if not self.is_dominated or self.effective is None or self.largest is None:
            return ""
        values = "images" if self.witnesses is None else "images of one class"
        return (
            f"one {group} has {100 * self.largest:.0f} % of the {values}: they weigh as {self.effective:.1f} {group}s of "
            f"equal size, and {MIN_EFFECTIVE:g} are needed for an interval"
        )

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if isnan(self.low) else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimated(
    values: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    bounds: tuple[float, float] | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
    level: float = 0.95,
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
        The estimate. It has no interval with fewer than `MIN_GROUPS` groups, nor where so few of them have most of the images
        that they weigh as fewer than `MIN_EFFECTIVE` of equal size. Without bounds it has none either where all groups have
        the same mean.

    Raises:
        UndefinedError: No row has a value.
        InputError: A value is infinite or out of bounds, or the shapes differ.

    """
    expect_count(replicates=replicates)
    if not 0 < level < 1:
        raise InputError(f"level={level}: expected a number between 0 and 1, such as 0.95")
    sample = _Sample.of(values, groups)
    low, high = nan, nan
    if bounds is not None:
        low, high = sample.bounded_interval(bounds, level)
    elif sample.is_enough and sample.varies:
        drawn = _means(sample.sums, sample.counts, replicates, seed)
        low, high = interval_of(drawn, sample.groups, level, effective_groups(sample.counts))
    return sample.estimate(low, high, method=BOOTSTRAP if bounds is None else KORN_GRAUBARD)


def difference(
    one: npt.ArrayLike, other: npt.ArrayLike, groups: Sequence[Hashable] | None = None, *, precision: float = 0.0
) -> Estimate:
    """Estimate the mean of one - other over the images of which both (N,) have a value.

    The interval and `p` are of one procedure, so they never contradict each other: Student's t of the jackknife's variance
    over groups, with degrees of freedom for groups of these sizes; see `clusters`. `p` is never less than `least_p`.

    Args:
        one: (N,) values.
        other: (N,) values of the same images.
        groups: (N,) patients or scenes; see `estimated`.
        precision: Smaller differences are rounding and count as 0, as do those of less than 1e-6 of the two values.

    Returns:
        The estimate, with `p`. With fewer than `MIN_GROUPS` groups, or fewer than `MIN_EFFECTIVE` effective ones, it has neither
        interval nor `p`. Where all groups differ alike it has no interval; `p` is then `least_p`, or 1 where they differ by 0.

    Raises:
        UndefinedError: No image has both values.

    """
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if first.shape != second.shape:
        raise InputError(f"values {first.shape} and {second.shape}: expected (N,) of both, of the same images")
    expect_finite(first)
    expect_finite(second)
    gaps = first - second
    gaps[np.abs(gaps) <= np.maximum(precision, PRECISION * np.maximum(np.abs(first), np.abs(second)))] = 0.0
    sample = _Sample.of(gaps, groups)
    mean = sample.mean if sample.varies or abs(sample.mean) > sample.rounding else 0.0
    error = sqrt(sample.variance) if sample.is_enough and sample.varies else 0.0
    low, high, p = student(mean, error, sample.groups, sample.freedom) if sample.is_enough else (nan, nan, None)
    return sample.estimate(low, high, p=p, method=STUDENT, freedom=sample.freedom)


def student(mean: float, error: float, groups: int, freedom: float | None = None) -> tuple[float, float, float | None]:
    """The ends and p of a difference with this standard error, of so many groups; `freedom`: default one less than groups.

    NaN for the ends where the error is 0; NaN and None with too few groups.
    """
    if groups < MIN_GROUPS:
        return nan, nan, None
    if error == 0:
        return nan, nan, least_p(groups) if mean else 1.0
    freedom = groups - 1 if freedom is None else freedom
    half = t_quantile(freedom, 0.025) * error
    p = max(2 * float(_special().stdtr(freedom, -abs(mean) / error)), least_p(groups))
    return mean - half, mean + half, p


def simultaneous(estimates: Sequence[Estimate], among: int | None = None) -> list[Estimate]:
    """Bonferroni: differences whose intervals hold together at 95 %, and whose p are corrected alike.

    `among`: how many comparisons there are; default: as many as estimates. An interval leaves 0 out exactly where p is below
    0.05. There is none where so few groups cannot be that certain; see `least_p`.
    """
    count = max(1, len(estimates) if among is None else among)
    return [_widened(each, count) for each in estimates]


def _widened(one: Estimate, count: int) -> Estimate:
    if one.p is None or count == 1:
        return one
    p, groups = min(1.0, count * one.p), one.witnesses or one.groups
    if count * least_p(groups) >= 0.05:
        return replace(one, low=nan, high=nan, p=p)
    freedom = groups - 1 if one.freedom is None else one.freedom
    half = (one.high - one.low) / 2 * t_quantile(freedom, 0.025 / count) / t_quantile(freedom, 0.025)
    return replace(one, low=one.mean - half, high=one.mean + half, p=p)


def t_quantile(freedom: float, tail: float) -> float:
    """Student's t that this share of the distribution exceeds."""
    return -float(_special().stdtrit(freedom, tail))


def least_p(groups: int) -> float:
    """The smallest p that so many groups can give: that all differences have one sign by chance, 2^(1 - groups)."""
    return float(min(1.0, 2.0 ** (1 - groups)))


def smallest_prevalence(groups: int) -> float:
    """The share of groups that must show something for one of so many to show it with 95 % certainty: about 3 / groups.

    The rule of three: Hanley and Lippman-Hand 1983, doi:10.1001/jama.1983.03330370053031.
    """
    return float(1 - 0.05 ** (1 / groups)) if groups > 0 else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order: the k-th smallest of m times m - k, and none below the one before. Holm 1979."""
    if not all(0 <= p <= 1 for p in ps):
        raise InputError(f"p-values {list(ps)}: expected numbers in 0..1")
    order, adjusted, so_far = sorted(range(len(ps)), key=lambda i: ps[i]), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, ps[i] * (len(ps) - rank)))
        adjusted[i] = so_far
    return adjusted


def numbered(groups: Sequence[Hashable] | None, rows: int) -> npt.NDArray[np.int64]:
    """(rows,): the number of each row's group, in order of appearance; without groups each row is its own."""
    if groups is None:
        return np.arange(rows)
    if len(groups) != rows:
        raise InputError(f"{plural(rows, 'row')} and {plural(len(groups), 'group')}; expected (N,) of both")
    names = _named(groups, np.arange(rows))
    numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def draws(groups: int, replicates: int, seed: int, width: int | None = None) -> Iterator[npt.NDArray[np.int64]]:
    """(r,groups) at a time, `replicates` in all: as many groups as there are, drawn with replacement, as numbers.

    `width`: how many numbers a replicate is turned into, where those are more: fewer are held at a time.
    """
    random = np.random.default_rng(seed)
    step = max(1, HELD // max(groups, width or 0))
    for first in range(0, replicates, step):
        yield random.integers(0, groups, (min(step, replicates - first), groups))


def interval_of(drawn: Floats, groups: int, level: float = 0.95, effective: float | None = None) -> tuple[float, float]:
    """The expanded percentiles of bootstrap replicates of so many groups; NaN where these are too few, or nothing varies.

    `effective`: of how many groups they are in effect, where these are of different sizes.
    """
    if groups < MIN_GROUPS or (effective is not None and effective < MIN_EFFECTIVE):
        return nan, nan
    size = groups if effective is None else effective
    tail = NormalDist().cdf(-reach(size, level))
    low, high = (float(end) for end in np.quantile(drawn, [tail, 1 - tail]))
    return (low, high) if low < high else (nan, nan)


def reach(groups: float, level: float = 0.95) -> float:
    """How many standard deviations of the draws of so many groups an interval reaches to either side: Student's t, unbiased."""
    return t_quantile(groups - 1, (1 - level) / 2) * sqrt(groups / (groups - 1))


def p_of(interval: Callable[[float], tuple[float, float]]) -> float:
    """The two-sided p of a difference whose interval at any level is given: 1 - the highest level that leaves 0 out."""
    least, most = -16.0, 0.0  # log10(p)
    for _ in range(40):
        middle = (least + most) / 2
        low, high = interval(1 - 10**middle)
        least, most = (least, middle) if low > 0 or high < 0 else (middle, most)
    return float(10**most)


def _special() -> Any:
    try:
        return import_module("scipy.special")
    except ImportError as error:
        raise MissingExtraError("scipy", "metrics") from error


@dataclass(frozen=True)
class _Sample:
    """Values (n,) that are defined, the `place` (n,) of each one's group, and of each group its sum and count."""

    values: Floats
    place: npt.NDArray[np.int64]
    sums: Floats
    counts: npt.NDArray[np.int64]
    undefined: int

    @classmethod
    def of(cls, values: npt.ArrayLike, groups: Sequence[Hashable] | None) -> "_Sample":
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
        expect_finite(given)
        names: list[Hashable] = [int(i) for i in there] if groups is None else _named(groups, there)
        place = numbered(names, len(names))
        sums = np.asarray(np.bincount(place, weights=given[there]), np.float64)
        return cls(given[there], place, sums, np.asarray(np.bincount(place), np.int64), len(given) - len(there))

    @property
    def groups(self) -> int:
        return len(self.sums)

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    @property
    def rounding(self) -> float:
        """What is no more than this beside the values is 0."""
        return PRECISION * float(np.abs(self.values).max())

    @property
    def is_enough(self) -> bool:
        """Whether there are as many groups as an interval needs, and as many of them effective."""
        return self.groups >= MIN_GROUPS and effective_groups(self.counts) >= MIN_EFFECTIVE

    @property
    def varies(self) -> bool:
        """Whether groups differ, but for rounding."""
        return not self.is_constant and sqrt(linearized_variance(self.sums, self.counts)) > self.rounding / self.groups

    @property
    def variance(self) -> float:
        """Of the mean: the jackknife's."""
        return float((deletion_effects(self.sums, self.counts) ** 2).sum())

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance."""
        return degrees_of_freedom(self.counts) if self.is_enough else max(1, self.groups - 1)

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal, but for rounding."""
        return float(np.ptp(self.values)) <= self.rounding

    def estimate(self, low: float, high: float, **fields: Any) -> Estimate:
        """The mean with this interval."""
        return Estimate(
            self.mean,
            low,
            high,
            len(self.values),
            self.groups,
            self.undefined,
            effective=effective_groups(self.counts),
            largest=float(self.counts.max() / self.counts.sum()),
            **fields,
        )

    def bounded_interval(self, bounds: tuple[float, float], level: float) -> tuple[float, float]:
        """Clopper and Pearson's interval of an effective sample size: Korn and Graubard 1998, Survey Methodology 24, 193.

        Of values that are `bounds` (0 or 1) and groups of one image each it is Clopper and Pearson's own. The effective size
        is that at which independent shares would vary as the mean does, corrected for how few groups say so. Where nothing
        varies it is the effective number of groups: images of one group are then taken for one.
        """
        low, high = bounds
        if self.values.min() < low - PRECISION * (high - low) or self.values.max() > high + PRECISION * (high - low):
            raise InputError(
                f"values {self.values.min():g}..{self.values.max():g}: expected {low:g}..{high:g}, the bounds"
            )
        if not self.is_enough:
            return nan, nan
        share = min(1.0, max(0.0, (self.mean - low) / (high - low)))
        ends = clopper_pearson(share, self._effective_size(share, high - low, bounds, level), level)
        return low + (high - low) * ends[0], low + (high - low) * ends[1]

    def _effective_size(self, share: float, wide: float, bounds: tuple[float, float], level: float) -> float:
        if float(np.ptp(self.values)) <= PRECISION * wide:
            return effective_groups(self.counts)
        if self.groups == len(self.values) and np.isin(self.values, bounds).all():
            return float(self.groups)
        by_image = float(self.values.var()) / (len(self.values) - 1)
        normal = NormalDist().inv_cdf((1 + level) / 2)
        few = normal / t_quantile(self.freedom, (1 - level) / 2)
        return share * (1 - share) / (max(self.variance, by_image) / wide**2) * few**2


def expect_finite(values: Floats) -> None:
    """InputError for an infinite value; NaN may stay."""
    if np.isinf(values).any():
        place = int(np.flatnonzero(np.isinf(values))[0])
        raise InputError(f"value {place} is infinite: expected numbers, NaN for none")


def clopper_pearson(share: float, size: float, level: float = 0.95) -> tuple[float, float]:
    """The interval of a share of `size` independent answers, which need not be a whole number; Clopper and Pearson 1934."""
    tail, hits, misses = (1 - level) / 2, share * size, (1 - share) * size
    low = float(_special().betaincinv(hits, misses + 1, tail)) if hits > 0 else 0.0
    high = float(_special().betaincinv(hits + 1, misses, 1 - tail)) if misses > 0 else 1.0
    return low, high


def _named(groups: Sequence[Hashable], there: npt.NDArray[np.int64]) -> list[Hashable]:
    """The group of each row with a value; InputError where it is missing: such rows are not all of one group."""
    every = list(groups)
    names = [every[int(i)] for i in there]
    for i, name in zip(there, names, strict=True):
        if name is None or name != name:  # NaN is the only thing that is not itself
            raise InputError(f"row {int(i)} has no group: name one, or leave groups out")
    return names


def _means(sums: Floats, counts: npt.NDArray[np.int64], replicates: int, seed: int) -> Floats:
    """(replicates,): means of as many groups as there are, drawn with replacement."""
    means = [sums[drawn].sum(1) / counts[drawn].sum(1) for drawn in draws(len(sums), replicates, seed)]
    return np.concatenate(means)
