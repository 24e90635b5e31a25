"""From values of images to a statement: means with 95 % intervals, paired differences, corrected for how many there are."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isnan, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, MissingExtraError, UndefinedError
from camscope.explainers.scope import expect_count
from camscope.metrics.base import Floats

REPLICATES = 2000
BOOTSTRAP = "bootstrap"  # the method of an interval: expanded percentiles of resampled groups
HELD = 4_000_000  # numbers at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with its bootstrap interval: of `n` values in `groups` groups, beside `undefined` rows without one.

    `low`, `high`: NaN where fewer than two groups leave nothing to draw. `p`: of a difference, two-sided; None of a mean.
    `method`: how the interval was made, "bootstrap" unless another function says so. `roles`: where each value belongs to
    groups of several kinds, how many of each there are; `groups` is then the smallest of these counts.
    """

    mean: float
    low: float
    high: float
    n: int
    groups: int
    undefined: int = 0
    p: float | None = None
    method: str = BOOTSTRAP
    roles: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if isnan(self.low) else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimated(
    values: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """(N,) -> mean and bootstrap interval, of expanded percentiles; NaN are undefined rows, and left out.

    `groups` (N,): patients or scenes, drawn whole: images of one are no independent witnesses. Without them each image is
    a group of its own. Plain percentiles are too narrow, the more so the fewer groups there are: those taken here lie as
    much farther out as Student's t for so many groups does (Hesterberg 2015, doi:10.1080/00031305.2015.1089789).
    UndefinedError where no row has a value.
    """
    expect_count(replicates=replicates)
    if not 0 < level < 1:
        raise InputError(f"level={level}: expected a number between 0 and 1, such as 0.95")
    known, sums, counts = _by_group(values, groups)
    low, high = interval_of(_means(sums, counts, replicates, seed), len(sums), level)
    undefined = len(np.asarray(values)) - int(counts.sum())
    return Estimate(float(sums.sum() / counts.sum()), low, high, int(counts.sum()), len(known), undefined)


def difference(
    one: npt.ArrayLike,
    other: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Estimate:
    """(N,), (N,) of the same images -> the mean of one - other, over images where both have a value.

    `p`: twice the smaller share of replicates on one side of zero, as much larger as the interval is wider; it is below
    1 - level where the interval of `estimated` leaves zero out. UndefinedError where no image has both values.
    """
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if first.shape != second.shape:
        raise InputError(f"values {first.shape} and {second.shape}: expected (N,) of both, of the same images")
    gaps = first - second
    made = estimated(gaps, groups, replicates=replicates, seed=seed)
    _, sums, counts = _by_group(gaps, groups)
    p = p_of(_means(sums, counts, replicates, seed), len(sums))
    return Estimate(made.mean, made.low, made.high, made.n, made.groups, made.undefined, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order: the k-th smallest of m times m - k, and none below the one before. Holm 1979."""
    if not all(0 <= p <= 1 for p in ps):
        raise InputError(f"p-values {list(ps)}: expected numbers in 0..1")
    order, adjusted, so_far = sorted(range(len(ps)), key=lambda i: ps[i]), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, ps[i] * (len(ps) - rank)))
        adjusted[i] = so_far
    return adjusted


def least_p(groups: int, replicates: int = REPLICATES) -> float:
    """The smallest p that `difference` can give of so many groups, whatever they show: of few it is not small."""
    return _two_sided(0, groups, replicates)


def numbered(groups: Sequence[Hashable] | None, rows: int) -> npt.NDArray[np.int64]:
    """(rows,): the number of each row's group, in order of appearance; without groups each row is its own."""
    if groups is None:
        return np.arange(rows)
    if len(groups) != rows:
        raise InputError(f"{rows} rows and {len(groups)} groups; expected (N,) of both")
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


def interval_of(drawn: Floats, groups: int, level: float = 0.95) -> tuple[float, float]:
    """Of replicates of so many groups: the expanded percentiles of `estimated`; NaN of fewer than two groups."""
    if groups < 2:
        return np.nan, np.nan
    tail = _expanded((1 - level) / 2, groups)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def p_of(drawn: Floats, groups: int) -> float:
    """Of replicates of a difference, of so many groups: the two-sided p of `difference`."""
    beyond = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return _two_sided(int(beyond), groups, len(drawn))


def reach(groups: int, level: float = 0.95) -> float:
    """How many standard deviations of the draws of so many groups an interval reaches to either side: Student's t, unbiased."""
    return float(-_special().stdtrit(groups - 1, (1 - level) / 2)) * sqrt(groups / (groups - 1))


def _two_sided(beyond: int, groups: int, replicates: int) -> float:
    """Of how many replicates lie beyond zero."""
    if groups < 2:
        return 1.0
    return min(1.0, 2 * _narrowed(min(0.5, (beyond + 1) / (replicates + 1)), groups))


def _expanded(tail: float, groups: int) -> float:
    """The share of replicates to leave out at either end, for what a normal curve would leave out to be `tail`."""
    if groups < 2:
        return tail
    return NormalDist().cdf(-reach(groups, 1 - 2 * tail))


def _narrowed(share: float, groups: int) -> float:
    """The tail whose expansion is this share of replicates."""
    return float(_special().stdtr(groups - 1, NormalDist().inv_cdf(share) / sqrt(groups / (groups - 1))))


def _special() -> Any:
    try:
        return import_module("scipy.special")
    except ImportError as error:
        raise MissingExtraError("scipy", "metrics") from error


def _by_group(
    values: npt.ArrayLike, groups: Sequence[Hashable] | None
) -> tuple[list[Hashable], Floats, npt.NDArray[np.int64]]:
    """The groups with a value, and of each its sum and its count of values."""
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or (groups is not None and len(groups) != len(given)):
        raise InputError(
            f"values {given.shape} and {'no' if groups is None else len(groups)} groups; expected (N,) of both"
        )
    there = np.flatnonzero(~np.isnan(given))
    if not len(there):
        raise UndefinedError("no row has a value")
    if np.isinf(given).any():
        raise InputError(f"value {int(np.flatnonzero(np.isinf(given))[0])} is infinite: expected numbers, NaN for none")
    names: list[Hashable] = [int(i) for i in there] if groups is None else _named(groups, there)
    places = numbered(names, len(names))
    sums = np.asarray(np.bincount(places, weights=given[there]), np.float64)
    return list(dict.fromkeys(names)), sums, np.asarray(np.bincount(places), np.int64)


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
