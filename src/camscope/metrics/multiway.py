"""Multiway: the interval of a mean whose values share groups of several kinds, as a pasted region a receiver and a donor."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.base import Floats
from camscope.metrics.statistics import MIN_GROUPS, Estimate, numbered

Groups = npt.NDArray[np.int64]
CLUSTERED = "clustered"  # the method of an interval: Student's t of a variance clustered by several kinds of groups


def multiway(values: npt.ArrayLike, *kinds: Sequence[Hashable] | None, level: float = 0.95) -> Estimate:
    """(N,) values, of each kind (N,) groups -> their mean and its interval; `groups`: those of the kind that has the fewest.

    The variance is that of the mean clustered by each kind, less that by each two together, and so on, and never less than
    that by any one kind; Student's t with one less than the fewest groups. Cameron, Gelbach & Miller 2011,
    doi:10.1198/jbes.2010.07136.
    NaN for the ends where a kind has fewer groups than an interval needs. InputError for values that are not finite.
    """
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise InputError(f"values {given.shape}: expected (N,) finite numbers")
    named = [numbered(kind, len(given)) for kind in kinds or (None,)]
    fewest = min(len(np.unique(one)) for one in named)
    mean, half = float(given.mean()), nan
    if fewest >= MIN_GROUPS:
        half = _t(fewest - 1, level) * sqrt(_variance(given - mean, named))
    return Estimate(mean, mean - half, mean + half, len(given), fewest, method=CLUSTERED)


def _variance(off: Floats, kinds: Sequence[Groups]) -> float:
    """Of the mean of what is `off` it by so much, by inclusion and exclusion."""
    alone = [_clustered(off, kind) for kind in kinds]
    shared = sum(
        (-1) ** (size + 1) * _clustered(off, _together(some))
        for size in range(2, len(kinds) + 1)
        for some in combinations(kinds, size)
    )
    return float(max(*alone, sum(alone) + shared)) if len(alone) > 1 else alone[0]


def _clustered(off: Floats, groups: Groups) -> float:
    sums = np.bincount(groups, weights=off)[np.unique(groups)]
    count = len(sums)
    return 0.0 if count < 2 else float((sums**2).sum()) / len(off) ** 2 * count / (count - 1)


def _together(kinds: Sequence[Groups]) -> Groups:
    """One number for each combination of groups that occurs."""
    return np.asarray(np.unique(np.stack(kinds), axis=1, return_inverse=True)[1].reshape(-1), np.int64)


def _t(freedom: int, level: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.5 + level / 2, freedom))
