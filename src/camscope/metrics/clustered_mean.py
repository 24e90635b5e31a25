"""Multiway: the interval of a mean whose values share groups of several kinds, as a pasted region a receiver and a donor."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.base import Floats
from camscope.metrics.cluster_variance import MIN_EFFECTIVE, degrees_of_freedom, deletion_effects, effective_groups
from camscope.metrics.statistics import MIN_GROUPS, Estimate, numbered

Groups = npt.NDArray[np.int64]
CLUSTERED = "clustered"  # the method of an interval: Student's t of a variance clustered by several kinds of groups


def multiway(values: npt.ArrayLike, *kinds: Sequence[Hashable] | None, level: float = 0.95) -> Estimate:
    """(N,) values, of each kind (N,) groups -> their mean and its interval; `groups`: those of the kind that has the fewest.

    The variance is that of the mean clustered by each kind, less that by each two together, and so on, and never less than
    that by any one kind: Cameron, Gelbach & Miller 2011, doi:10.1198/jbes.2010.07136. Each is the jackknife's, and Student's t
    has the degrees of freedom of the kind with the fewest; see `clusters`. `effective`, `largest`: of the kind with the fewest
    effective groups. NaN for the ends where a kind has fewer groups, or fewer effective ones, than an interval needs.
    InputError for values that are not finite.
    """
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise InputError(f"values {given.shape}: expected (N,) finite numbers")
    named = [numbered(kind, len(given)) for kind in kinds or (None,)]
    fewest = min(len(np.unique(one)) for one in named)
    mean, half, sizes = float(given.mean()), nan, [np.bincount(one) for one in named]
    worst = min(sizes, key=effective_groups)
    if fewest >= MIN_GROUPS and effective_groups(worst) >= MIN_EFFECTIVE:
        half = _t(min(map(degrees_of_freedom, sizes)), level) * sqrt(_variance(given - mean, named))
    return Estimate(
        mean,
        mean - half,
        mean + half,
        len(given),
        fewest,
        method=CLUSTERED,
        effective=effective_groups(worst),
        largest=float(worst.max() / worst.sum()),
    )


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
    sums = np.asarray(np.bincount(groups, weights=off), np.float64)
    return 0.0 if len(sums) < 2 else float((deletion_effects(sums, np.bincount(groups)) ** 2).sum())


def _together(kinds: Sequence[Groups]) -> Groups:
    """One number for each combination of groups that occurs."""
    return np.asarray(np.unique(np.stack(kinds), axis=1, return_inverse=True)[1].reshape(-1), np.int64)


def _t(freedom: float, level: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.5 + level / 2, freedom))
