"""Complexity: on how few cells a map (*S) puts its weight, whatever they show.

All of them judge sizes, |value|: of a signed map both signs count. They depend on the number of cells, so maps are compared
at one size. A map with NaN, a map of zeros and a map of one cell have no number (UndefinedError); a constant one is as spread
out as a map can be.
"""

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.metrics.base import FloatArray, register_metric, to_finite_array
from camscope.plurals import plural


@register_metric(
    "sparseness",
    input_kind="map",
    formula="Gini index of the sizes: sum over k of (2k - N - 1) a_k / (N sum a), a_1 <= … <= a_N",
    paper="Chalasani et al. 2020, arXiv:1810.06583; the index of Hurley and Rickard 2009",
    chance_level="0 for a constant map, 1/3 for evenly drawn values",
)
def sparseness(attribution: npt.ArrayLike) -> float:
    """(*S) -> 0 for a constant map .. 1 - 1/N for a single cell."""
    shares = np.sort(_compute_absolute_shares(attribution))
    ranks = 2 * np.arange(1, len(shares) + 1) - len(shares) - 1
    return max(0.0, float(ranks @ shares) / len(shares))  # rounding leaves a constant map below 0


@register_metric(
    "entropy",
    input_kind="map",
    formula="-sum of p log p / log N, p: each cell's share of the sizes",
    paper="Bhatt et al. 2020, complexity, arXiv:2005.00631; here divided by log N, its largest value",
    higher_is_better=False,
    chance_level="1 for a constant map",
)
def entropy(attribution: npt.ArrayLike) -> float:
    """(*S) -> 0 for a single cell .. 1 for a constant map: the logarithm's base does not matter."""
    shares = _compute_absolute_shares(attribution)
    some = shares[shares > 0]
    return min(1.0, max(0.0, float(-(some * np.log(some)).sum() / np.log(len(shares)))))


@register_metric(
    "effective-area",
    input_kind="map",
    formula="the smallest share of the cells that holds 90 % of the sum of sizes, the last cell in part",
    paper="the map's Lorenz curve, read from its steep end",
    higher_is_better=False,
    chance_level="0.9 for a constant map",
)
def effective_area(attribution: npt.ArrayLike, share: float = 0.9) -> float:
    """(*S) -> share / N for a single cell .. share for a constant map. `share`: of the sum, in 0..1, 0 excluded."""
    if not 0 < share <= 1:
        raise InputError(f"share={share}: expected a number in 0..1, 0 excluded")
    shares = np.sort(_compute_absolute_shares(attribution))[::-1]
    held = np.append(0.0, shares.cumsum())
    positive = int(np.count_nonzero(shares))
    whole = min(int(np.searchsorted(held, share)), positive) - 1  # cells that are needed whole; the next one in part
    return float((whole + min(1.0, (share - held[whole]) / shares[whole])) / len(shares))


def _compute_absolute_shares(attribution: npt.ArrayLike) -> FloatArray:
    """(N,): each cell's share of the sum of sizes, without overflow or underflow."""
    sizes = np.abs(to_finite_array(attribution)).ravel()
    if len(sizes) < 2:
        raise UndefinedError(f"a map of {plural(len(sizes), 'cell')} cannot be more or less spread out")
    if not sizes.max() > 0:
        raise UndefinedError("the map is zero everywhere")
    scaled = sizes / sizes.max()
    return np.asarray(scaled / scaled.sum())
