"""Similarity metrics: compare two signed maps (*S) of the same size. The scale of the maps does not matter.

A map of zeros or with NaN raises UndefinedError, as does a constant map if ranks or a correlation are needed.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics.metric_registry import FloatArray, register_metric, to_finite_array
from camscope.optional_packages import require
from camscope.plurals import plural

SSIM_DATA_RANGE = 1.0  # the range of a map on the scale 0..1
SSIM_WINDOW_SIZE = 7  # side of the uniform SSIM window in pixels
HOG_CELL_SIZE, HOG_ORIENTATIONS, HOG_BLOCK_SIZE = 16, 9, 3  # pixels of a cell's side, number, cells of a block's side
CONSTANT_ROW_TOLERANCE = 1e-12  # relative rounding error of a constant row minus its mean
_register = partial(register_metric, input_kind="map_pair", higher_is_better=None)


@_register(
    "pearson",
    title="Pearson correlation",
    formula="covariance / product of standard deviations, over cells",
    paper="Pearson 1895",
    lower_bound=-1.0,
    chance_level="0",
)
def pearson(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Return Pearson's correlation between two maps, -1..1. It is undefined for constant maps.

    Args:
        first: (*S) a map.
        second: (*S) another map.

    Returns:
        A correlation in -1..1.

    >>> round(pearson([0.0, 1.0, 2.0], [0.0, 2.0, 4.0]), 6)
    1.0

    """
    return _correlate_vectors(*(values.ravel() for values in _convert_to_two_arrays_of_same_shape(first, second)))


@_register(
    "spearman",
    title="Spearman correlation",
    formula="Pearson's correlation of the ranks of the cells, with mean ranks for ties",
    paper="Spearman 1904",
    lower_bound=-1.0,
    chance_level="0",
)
def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Return Spearman's rank correlation between two maps, -1..1. It is undefined for constant maps.

    Args:
        first: (*S) a map.
        second: (*S) another map.

    Returns:
        A correlation in -1..1.

    >>> spearman([0.0, 1.0, 2.0], [0.0, 1.0, 9.0])
    1.0

    """
    return _correlate_vectors(*(rank_values(values) for values in _convert_to_two_arrays_of_same_shape(first, second)))


@_register(
    "ssim",
    title="SSIM",
    formula="mean over windows of (2 m1 m2 + c1)(2 s12 + c2) / ((m1² + m2² + c1)(s1² + s2² + c2)), c = (0.01 R)², (0.03 R)²",
    paper="Wang et al. 2004; as scikit-image's structural_similarity, uniform windows of 7 x 7 pixels",
    lower_bound=-1.0,
)
def ssim(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    data_range: float = SSIM_DATA_RANGE,
    window_size: int = SSIM_WINDOW_SIZE,
    is_signed: bool | None = None,
) -> float:
    """Return the structural similarity of two maps, -1..1. It is undefined for maps of zeros.

    Each map is divided by its largest absolute value. Signed maps are then shifted from -1..1 to 0..1, because SSIM is
    defined for images without negative values. Otherwise an inverted pattern could get a high score.

    Args:
        first: (*S) a map.
        second: (*S) another map.
        data_range: R in the formula. Values for different ranges are not comparable.
        window_size: Side of the window in pixels. A map with a shorter axis has no value.
        is_signed: Whether the maps are signed. By default they are if one of them has a negative value.

    Returns:
        A number in -1..1.

    >>> attribution = np.random.default_rng(0).random((32, 32))
    >>> round(ssim(attribution, attribution), 6)
    1.0

    """
    scaled = [divide_by_peak(values) for values in _convert_to_two_arrays_of_same_shape(first, second)]
    signed = any(bool((values < 0).any()) for values in scaled) if is_signed is None else is_signed
    left, right = (shift_to_unit_interval(values, signed) for values in scaled)
    return compute_ssim(left, right, data_range=data_range, window_size=window_size)


@_register(
    "hog",
    title="HOG correlation",
    formula="Pearson's correlation of the histograms of oriented gradients",
    paper="Dalal and Triggs 2005, as Adebayo et al. 2018 compare maps with it, arXiv:1810.03292",
    lower_bound=-1.0,
)
def hog_correlation(first: npt.ArrayLike, second: npt.ArrayLike, cell_size: int = HOG_CELL_SIZE) -> float:
    """Compute histograms of oriented gradients for two maps (H,W). Return their correlation, -1..1.

    A constant map has no value. A map needs two axes and at least 3 x 3 cells. There are 9 orientations, and blocks of
    3 x 3 cells with L2-Hys normalization.

    Args:
        first: (H,W) a map.
        second: (H,W) another map.
        cell_size: Side of a cell in pixels.

    Returns:
        A correlation in -1..1.

    >>> attribution = np.random.default_rng(0).random((48, 48))
    >>> round(hog_correlation(attribution, attribution), 6)
    1.0

    """
    return _correlate_vectors(
        *(compute_hog_features(values, cell_size) for values in _convert_to_two_arrays_of_same_shape(first, second))
    )


@_register(
    "jaccard",
    title="Jaccard index",
    formula="|A and B| / |A or B|, A and B: the strongest tenth of the cells of each map",
    paper="Jaccard 1912, of the strongest cells",
    chance_level="about 0.05: 0.1 / (2 - 0.1)",
)
def jaccard(first: npt.ArrayLike, second: npt.ArrayLike, top_share: float = 0.1) -> float:
    """Return the Jaccard index of the strongest pixels in two maps, 0..1. It is undefined for constant maps.

    If cells tie for the last places, each of them counts in part.

    Args:
        first: (*S) a map.
        second: (*S) another map.
        top_share: The share of the cells that count as the strongest, above 0 and below 1.

    Returns:
        The size of the intersection divided by that of the union, 0..1.

    Raises:
        InputError: `top_share` is not between 0 and 1.

    >>> jaccard([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 9.0], top_share=0.5)
    1.0

    """
    if not 0 < top_share < 1:
        raise InputError(f"top_share={top_share}: expected a number between 0 and 1")
    left, right = (
        _compute_top_membership(map_.ravel(), top_share) for map_ in _convert_to_two_arrays_of_same_shape(first, second)
    )
    return float(np.minimum(left, right).sum() / np.maximum(left, right).sum())


SIMILARITIES: Mapping[str, Callable[..., float]] = {
    "pearson": pearson,
    "spearman": spearman,
    "ssim": ssim,
    "hog": hog_correlation,
    "jaccard": jaccard,
}


def rank_values(values: npt.ArrayLike) -> FloatArray:
    """Return the ranks (M,) of the values, starting at 1. Tied values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values).ravel(), return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[inverse])


def compute_hog_features(values: FloatArray, cell_size: int = HOG_CELL_SIZE) -> FloatArray:
    """Scale a map (H,W) to a peak of 1. Return its histograms of oriented gradients (M,)."""
    if values.ndim != 2:
        axes = plural(values.ndim, "axis")
        raise UndefinedError(f"a map with {axes} has no histogram of oriented gradients: expected a map with 2 axes")
    if min(values.shape) < HOG_BLOCK_SIZE * cell_size:
        cells = f"{HOG_BLOCK_SIZE} x {HOG_BLOCK_SIZE} cells of {plural(cell_size, 'pixel')}"
        raise UndefinedError(
            f"a map of shape {values.shape} has no {cells}: resize the map to the image, or pass a smaller cell_size"
        )
    features = require("skimage.feature", extra="metrics").hog(
        divide_by_peak(values), HOG_ORIENTATIONS, (cell_size, cell_size), (HOG_BLOCK_SIZE, HOG_BLOCK_SIZE), "L2-Hys"
    )
    return np.asarray(features, np.float64)


def divide_by_peak(values: FloatArray) -> FloatArray:
    """Divide a map by its largest absolute value. Raise an UndefinedError for a map of zeros."""
    peak = np.abs(values).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: it cannot be scaled")
    return np.asarray(values / peak)


def shift_to_unit_interval(scaled_map: FloatArray, is_signed: bool) -> FloatArray:
    """Shift a map with negative values from -1..1 to 0..1. Any other map stays unchanged."""
    return (scaled_map + 1) / 2 if is_signed else scaled_map


def compute_ssim(
    first: FloatArray, second: FloatArray, *, data_range: float = SSIM_DATA_RANGE, window_size: int = SSIM_WINDOW_SIZE
) -> float:
    """Return the structural similarity of two maps. `data_range` is the range of their values."""
    if window_size < 3 or window_size % 2 == 0:
        raise InputError(f"window_size={window_size}: expected an odd number of pixels, 3 or more")
    if min(first.shape) < window_size:
        received = f"a map of shape {first.shape} is smaller than the window of {plural(window_size, 'pixel')}"
        raise UndefinedError(f"{received}: resize the map to the image, or pass a smaller window_size")
    metrics = require("skimage.metrics", extra="metrics")
    return float(metrics.structural_similarity(first, second, win_size=window_size, data_range=data_range))


def correlate_rows(first_rows: FloatArray, second_rows: FloatArray) -> FloatArray:
    """Return Pearson's correlation between each row of one array and the same row of another array. Constant rows give NaN."""
    products = center_and_normalize_rows(first_rows) * center_and_normalize_rows(second_rows)
    return np.asarray(products.sum(-1).clip(-1, 1))


def _correlate_vectors(first: FloatArray, second: FloatArray) -> float:
    correlation = float(correlate_rows(first[None], second[None])[0])
    if np.isnan(correlation):
        raise UndefinedError("the values or features of a map are constant: its correlation is not defined")
    return correlation


def center_and_normalize_rows(rows: FloatArray) -> FloatArray:
    """Shift each row (R,M) to mean 0, and divide it by its length. Constant rows become NaN."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scaled = rows / np.where(largest > 0, largest, 1)
    centered = scaled - scaled.mean(-1, keepdims=True)
    lengths = np.linalg.norm(centered, axis=-1, keepdims=True)
    return np.asarray(centered / np.where(lengths > CONSTANT_ROW_TOLERANCE * np.sqrt(rows.shape[-1]), lengths, np.nan))


def _compute_top_membership(values: FloatArray, top_share: float) -> FloatArray:
    """Return 1 for values among the strongest `top_share`, and 0 for other values. Values tied at the cutoff get a fraction."""
    if values.min() == values.max():
        raise UndefinedError("the map is constant: it has no strongest cells")
    n_top = max(1, round(top_share * len(values)))
    cutoff = np.partition(values, -n_top)[-n_top]
    above, tied = values > cutoff, values == cutoff
    return np.asarray(above + tied * ((n_top - above.sum()) / tied.sum()))


def _convert_to_two_arrays_of_same_shape(left: npt.ArrayLike, right: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    first, second = to_finite_array(left), to_finite_array(right)
    if first.shape != second.shape:
        raise GeometryError(f"the maps have shapes {first.shape} and {second.shape}: resize one of them to the other")
    return first, second
