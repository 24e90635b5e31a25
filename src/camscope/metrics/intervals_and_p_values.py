"""Confidence intervals and p-values of means over groups: Student's t, bootstrap, smallest p-value, Holm correction."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import nan, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.jackknife_variance import MIN_EFFECTIVE_GROUPS
from camscope.metrics.metric_registry import FloatArray
from camscope.optional_packages import require
from camscope.plurals import plural

MIN_GROUPS_FOR_INTERVAL: Final = 6  # with five groups of one sign p is at least 2^(1 - 5) > 0.05
MAX_NUMBERS_IN_MEMORY = 4_000_000  # numbers held at a time by a bootstrap


class IntervalAndPValue(NamedTuple):
    """The 95 % interval and the p-value of a mean difference. Missing ends are NaN, a missing p-value is None."""

    low: float
    high: float
    p_value: float | None


def compute_t_interval(
    mean: float, standard_error: float, n_groups: int, dof: float | None = None
) -> IntervalAndPValue:
    """Return the 95 % interval and the p-value of a mean difference. With too few groups, they are NaN and None."""
    if n_groups < MIN_GROUPS_FOR_INTERVAL:
        return IntervalAndPValue(nan, nan, None)
    if standard_error == 0:
        return IntervalAndPValue(nan, nan, compute_min_p_value(n_groups) if mean else 1.0)
    dof = n_groups - 1 if dof is None else dof
    half = compute_t_quantile(dof, 0.025) * standard_error
    p = 2 * float(require("scipy.special", extra="metrics").stdtr(dof, -abs(mean) / standard_error))
    return IntervalAndPValue(mean - half, mean + half, max(p, compute_min_p_value(n_groups)))


def compute_t_quantile(dof: float, tail_probability: float) -> float:
    """Return the value that a Student's t variable exceeds with probability `tail_probability`."""
    return -float(require("scipy.special", extra="metrics").stdtrit(dof, tail_probability))


def compute_exact_interval(n_hits: float, n: float, confidence_level: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a share: `n_hits` of `n` independent cases. Both may be fractional.

    Args:
        n_hits: The number of cases that count, from 0 to `n`.
        n: The number of cases, above 0.
        confidence_level: The probability with which the interval covers the true share, at least.

    Returns:
        The lower and the upper end, in 0..1.

    >>> [round(end, 3) for end in compute_exact_interval(1, 20)]
    [0.001, 0.249]

    """
    betaincinv, tail = require("scipy.special", extra="metrics").betaincinv, (1 - confidence_level) / 2
    n_misses = n - n_hits
    lower = float(betaincinv(n_hits, n_misses + 1, tail)) if n_hits > 0 else 0.0
    upper = float(betaincinv(n_hits + 1, n_misses, 1 - tail)) if n_misses > 0 else 1.0
    return lower, upper


def compute_min_p_value(n_groups: int) -> float:
    """Return the smallest p-value that `n_groups` groups allow. If all differences have the same sign, it is 2^(1 - groups).

    Args:
        n_groups: The number of groups, such as patients.

    Returns:
        A p-value.

    >>> compute_min_p_value(5)
    0.0625

    """
    return float(min(1.0, 2.0 ** (1 - n_groups)))


def compute_min_detectable_prevalence(n_groups: int) -> float:
    """Return the smallest prevalence at which `n_groups` groups contain at least one case with 95 % probability.

    For many groups this is the rule of three (doi:10.1001/jama.1983.03330370053031).
    """
    return float(1 - 0.05 ** (1 / n_groups)) if n_groups > 0 else 1.0


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, in the given order (Holm 1979).

    Args:
        p_values: P-values of one family of tests.

    Returns:
        The adjusted p-values, at most 1.

    Raises:
        InputError: A p-value is not in 0..1.

    >>> adjust_holm([0.01, 0.04])
    [0.02, 0.04]

    """
    if not all(0 <= p <= 1 for p in p_values):
        raise InputError(f"p-values {list(p_values)}: expected numbers from 0 to 1")
    order, adjusted, largest = sorted(range(len(p_values)), key=lambda i: p_values[i]), [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def index_groups(
    groups: Sequence[Hashable] | None, n_rows: int, selected_rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Number the groups in order of appearance. Return the group number of each row. By default, each row is its own group."""
    row_indices = np.arange(n_rows) if selected_rows is None else selected_rows
    if groups is None:
        return np.arange(len(row_indices))
    if len(groups) != n_rows:
        raise InputError(f"{plural(n_rows, 'row')} and {plural(len(groups), 'group')}: expected one group for each row")
    all_groups, numbers = list(groups), dict[Hashable, int]()
    for i in row_indices.tolist():
        name = all_groups[i]
        if name is None or name != name:  # NaN is not equal to itself
            raise InputError(f"row {i} has no group: give each row a group, or omit groups")
        numbers.setdefault(name, len(numbers))
    return np.array([numbers[all_groups[i]] for i in row_indices.tolist()], np.int64)


def iter_bootstrap_indices(
    n_groups: int, n_resamples: int, seed: int, values_per_resample: int | None = None
) -> Iterator[npt.NDArray[np.int64]]:
    """Draw groups with replacement. Yield the drawn indices (resamples,n_groups) in chunks that fit into memory."""
    random = np.random.default_rng(seed)
    step = max(1, MAX_NUMBERS_IN_MEMORY // max(n_groups, values_per_resample or 0))
    for first in range(0, n_resamples, step):
        yield random.integers(0, n_groups, (min(step, n_resamples - first), n_groups))


def compute_bootstrap_interval(
    resampled_values: FloatArray, n_groups: int, confidence_level: float = 0.95, n_effective_groups: float | None = None
) -> tuple[float, float]:
    """Return the limits of the expanded percentile interval. They are NaN with too few groups, or if all values are equal."""
    size = n_groups if n_effective_groups is None else n_effective_groups
    if n_groups < MIN_GROUPS_FOR_INTERVAL or size < MIN_EFFECTIVE_GROUPS:
        return nan, nan
    tail = NormalDist().cdf(-compute_interval_multiplier(size, confidence_level))
    low, high = (float(end) for end in np.quantile(resampled_values, [tail, 1 - tail]))
    return (low, high) if low < high else (nan, nan)


def compute_interval_multiplier(n_groups: float, confidence_level: float = 0.95) -> float:
    """Return the factor that turns the standard deviation of bootstrap means into the half-width of an interval."""
    return compute_t_quantile(n_groups - 1, (1 - confidence_level) / 2) * sqrt(n_groups / (n_groups - 1))


def compute_p_from_intervals(interval_at_level: Callable[[float], tuple[float, float]]) -> float:
    """Return the two-sided p-value of a difference. It is 1 minus the highest confidence level whose interval excludes 0."""
    lowest, highest = -16.0, 0.0  # log10(p)
    for _ in range(40):
        middle = (lowest + highest) / 2
        low, high = interval_at_level(1 - 10**middle)
        lowest, highest = (lowest, middle) if low > 0 or high < 0 else (middle, highest)
    return float(10**highest)
