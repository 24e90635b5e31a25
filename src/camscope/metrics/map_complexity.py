"""Complexity metrics: how strongly the absolute values of a map (*S) concentrate on few cells.

Compare only maps of one size. A map with NaN, a map of zeros or a map of one cell raises UndefinedError.
"""

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.metrics.metric_registry import FloatArray, register_metric, to_finite_array
from camscope.plurals import plural


@register_metric(
    "sparseness",
    input_kind="map",
    formula="Gini index of the absolute values: sum over k of (2k - N - 1) a_k / (N sum a), a_1 <= … <= a_N",
    paper="Chalasani et al. 2020, arXiv:1810.06583; the index of Hurley and Rickard 2009",
    chance_level="0 for a constant map, 1/3 for uniform random values",
)
def sparseness(attribution: npt.ArrayLike) -> float:
    """Return the Gini index of a map's absolute values. It is 0 for a constant map, and at most 1 - 1/N.

    Args:
        attribution: (*S) a map.

    Returns:
        The Gini index, without a unit.

    >>> sparseness([1.0, 1.0, 1.0, 1.0]), sparseness([0.0, 0.0, 0.0, 1.0])
    (0.0, 0.75)

    """
    shares = np.sort(_compute_absolute_shares(attribution))
    ranks = 2 * np.arange(1, len(shares) + 1) - len(shares) - 1
    return max(0.0, float(ranks @ shares) / len(shares))  # rounding may give a constant map less than 0


@register_metric(
    "entropy",
    input_kind="map",
    formula="-sum of p log p / log N, p: share of each cell in the sum of absolute values",
    paper="Bhatt et al. 2020, complexity, arXiv:2005.00631; here divided by its maximum, log N",
    higher_is_better=False,
    chance_level="1 for a constant map",
)
def entropy(attribution: npt.ArrayLike) -> float:
    """Return the normalized entropy of a map's absolute values. It is 1 for a constant map.

    Args:
        attribution: (*S) a map.

    Returns:
        The entropy divided by that of a constant map, 0..1.

    >>> entropy([1.0, 1.0, 1.0, 1.0])
    1.0

    """
    shares = _compute_absolute_shares(attribution)
    positive = shares[shares > 0]
    return min(1.0, max(0.0, float(-(positive * np.log(positive)).sum() / np.log(len(shares)))))


@register_metric(
    "effective-area",
    input_kind="map",
    formula="smallest share of the cells that holds 90 % of the sum of absolute values",
    paper="Lorenz curve of the map, from its steep end",
    higher_is_better=False,
    chance_level="0.9 for a constant map",
)
def effective_area(attribution: npt.ArrayLike, share: float = 0.9) -> float:
    """Return the smallest share of a map's pixels that together hold `share` of the sum of absolute values.

    The result is share / N for a single nonzero cell and `share` for a constant map.

    Args:
        attribution: (*S) a map.
        share: The share of the sum of absolute values, above 0 and at most 1.

    Returns:
        A share of the cells, 0..1.

    Raises:
        InputError: `share` is not above 0 and at most 1.

    >>> effective_area([0.0, 0.0, 0.0, 1.0], share=1.0)
    0.25

    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: expected a number above 0 and at most 1")
    shares = np.sort(_compute_absolute_shares(attribution))[::-1]
    cumulative = np.append(0.0, shares.cumsum())
    n_positive = int(np.count_nonzero(shares))
    whole = min(int(np.searchsorted(cumulative, share)), n_positive) - 1  # full cells; the next cell counts in part
    return float((whole + min(1.0, (share - cumulative[whole]) / shares[whole])) / len(shares))


def _compute_absolute_shares(attribution: npt.ArrayLike) -> FloatArray:
    """Divide each absolute value by the sum of absolute values. Overflow and underflow are avoided."""
    sizes = np.abs(to_finite_array(attribution)).ravel()
    if len(sizes) < 2:
        raise UndefinedError(f"the map has {plural(len(sizes), 'cell')}: expected 2 cells or more")
    if not sizes.max() > 0:
        raise UndefinedError("the map is zero everywhere")
    scaled = sizes / sizes.max()
    return np.asarray(scaled / scaled.sum())
