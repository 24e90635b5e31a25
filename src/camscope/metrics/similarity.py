"""Similarity: what two maps (*S) of one size have in common. Signs count: what speaks against is not what speaks for.

Every one is the same whatever positive number either map is multiplied by. Maps with NaN have none (UndefinedError), nor has
a constant map where an order or a correlation is asked for, nor a map of zeros, which has no scale.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.metrics.base import FloatArray, register_metric, to_finite_array
from camscope.optional import require
from camscope.plurals import plural

SSIM_DATA_RANGE = 1.0  # SSIM's: from the least to the largest value that a map on its scale can have
SSIM_WINDOW_SIZE = 7  # pixels of a side of SSIM's window, of even weight
HOG_CELL_SIZE, HOG_ORIENTATIONS, HOG_BLOCK_SIZE = (
    16,
    9,
    3,
)  # HOG: pixels of a cell's side, directions, cells of a block's side
CONSTANT_ROW_TOLERANCE = 1e-12  # of the largest value: what is left of a constant map when its mean is taken away


@register_metric(
    "pearson",
    title="Pearson correlation",
    input_kind="map_pair",
    formula="covariance / product of standard deviations, over cells",
    paper="Pearson 1895",
    lower_bound=-1.0,
    higher_is_better=None,
    chance_level="0",
)
def pearson(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """(*S), (*S) -> -1..1; undefined beside a constant map."""
    return _correlate_vectors(*(values.ravel() for values in _check_same_shape(first, second)))


@register_metric(
    "spearman",
    title="Spearman correlation",
    input_kind="map_pair",
    formula="Pearson's correlation of the cells' ranks, the mean rank among equals",
    paper="Spearman 1904",
    lower_bound=-1.0,
    higher_is_better=None,
    chance_level="0",
)
def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """(*S), (*S) -> -1..1; undefined beside a constant map."""
    return _correlate_vectors(*(rank_values(values) for values in _check_same_shape(first, second)))


@register_metric(
    "ssim",
    title="SSIM",
    input_kind="map_pair",
    formula="mean over windows of (2 m1 m2 + c1)(2 s12 + c2) / ((m1² + m2² + c1)(s1² + s2² + c2)), c = (0.01 R)², (0.03 R)²",
    paper="Wang et al. 2004; as scikit-image's structural_similarity, even windows of 7 pixels a side",
    lower_bound=-1.0,
    higher_is_better=None,
)
def ssim(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    data_range: float = SSIM_DATA_RANGE,
    window_size: int = SSIM_WINDOW_SIZE,
    is_signed: bool | None = None,
) -> float:
    """(*S), (*S) -> -1..1, of maps on the scale of a picture, 0..1; undefined beside a map of zeros.

    Each is divided by its largest size; of signed ones, zero then becomes 1/2: SSIM is one of pictures, and gives two means
    of opposite sign a negative factor that an opposite pattern turns into praise. `is_signed`: None where one of the two is
    negative anywhere. `data_range` R: numbers of different ranges do not compare. `window_size`: pixels of a side; undefined
    where an axis has fewer.
    """
    scaled = [divide_by_peak(values) for values in _check_same_shape(first, second)]
    known = has_negative_values(scaled) if is_signed is None else is_signed
    return compute_ssim(
        *(shift_to_unit_interval(each, known) for each in scaled), data_range=data_range, window_size=window_size
    )


@register_metric(
    "hog",
    title="HOG correlation",
    input_kind="map_pair",
    formula="Pearson's correlation of the histograms of oriented gradients",
    paper="Dalal and Triggs 2005, as Adebayo et al. 2018 compare maps with it, arXiv:1810.03292",
    lower_bound=-1.0,
    higher_is_better=None,
)
def hog_correlation(first: npt.ArrayLike, second: npt.ArrayLike, cell_size: int = HOG_CELL_SIZE) -> float:
    """(H,W), (H,W) -> -1..1; undefined beside a constant map, and for maps of other than two axes.

    `cell_size`: pixels of a side; a map is 3 cells a side at least. 9 directions, blocks of 3 x 3 cells, normed by L2-Hys.
    """
    return _correlate_vectors(*(compute_hog_features(values, cell_size) for values in _check_same_shape(first, second)))


@register_metric(
    "jaccard",
    title="Jaccard index",
    input_kind="map_pair",
    formula="sum of min / sum of max of the cells' memberships in the strongest tenth: |A and B| / |A or B| without ties",
    paper="Jaccard 1912, of what is hottest",
    higher_is_better=None,
    chance_level="about 0.05: 0.1 / (2 - 0.1)",
)
def jaccard(first: npt.ArrayLike, second: npt.ArrayLike, top_share: float = 0.1) -> float:
    """(*S), (*S) -> 0..1. Cells that tie at the last place are members in part; undefined beside a constant map."""
    if not 0 < top_share < 1:
        raise InputError(f"top_share={top_share}: expected a number between 0 and 1")
    here, there = (_compute_top_membership(values.ravel(), top_share) for values in _check_same_shape(first, second))
    return float(np.minimum(here, there).sum() / np.maximum(here, there).sum())


SIMILARITIES: Mapping[str, Callable[..., float]] = {
    "pearson": pearson,
    "spearman": spearman,
    "ssim": ssim,
    "hog": hog_correlation,
    "jaccard": jaccard,
}


def rank_values(values: npt.ArrayLike) -> FloatArray:
    """(*S) -> (M,): ranks from 1 on, the mean one among equals."""
    _, which, counts = np.unique(np.asarray(values).ravel(), return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[which])


def compute_hog_features(values: FloatArray, cell_size: int = HOG_CELL_SIZE) -> FloatArray:
    """(H,W) -> (M,): histograms of oriented gradients of the map divided by its largest size."""
    if values.ndim != 2:
        raise UndefinedError(
            f"a map of {plural(values.ndim, 'axis')} has no histogram of oriented gradients: it is one of pictures"
        )
    if min(values.shape) < HOG_BLOCK_SIZE * cell_size:
        raise UndefinedError(
            f"a map {values.shape} has no {HOG_BLOCK_SIZE} x {HOG_BLOCK_SIZE} cells of {plural(cell_size, 'pixel')}: bring it to the "
            "image's size, or pass cell_size="
        )
    made = _import_skimage("feature").hog(
        divide_by_peak(values), HOG_ORIENTATIONS, (cell_size, cell_size), (HOG_BLOCK_SIZE, HOG_BLOCK_SIZE), "L2-Hys"
    )
    return np.asarray(made, np.float64)


def divide_by_peak(values: FloatArray) -> FloatArray:
    """(*S) divided by its largest size: -1..1, zero stays zero. UndefinedError for a map of zeros."""
    peak = np.abs(values).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: it has no scale")
    return np.asarray(values / peak)


def has_negative_values(maps: Sequence[FloatArray]) -> bool:
    """Whether one is negative anywhere."""
    return any(bool((values < 0).any()) for values in maps)


def shift_to_unit_interval(scaled_map: FloatArray, is_signed: bool) -> FloatArray:
    """(*S) on the scale of `divide_by_peak` -> 0..1."""
    return (scaled_map + 1) / 2 if is_signed else scaled_map


def compute_ssim(
    first: FloatArray, second: FloatArray, *, data_range: float = SSIM_DATA_RANGE, window_size: int = SSIM_WINDOW_SIZE
) -> float:
    """SSIM of two maps as they are."""
    if window_size < 3 or window_size % 2 == 0:
        raise InputError(f"window_size={window_size}: expected an odd number of pixels, 3 or more")
    if min(first.shape) < window_size:
        raise UndefinedError(
            f"a map {first.shape} is smaller than the window of {plural(window_size, 'pixel')}: bring it to the "
            "image's size, or pass window_size="
        )
    return float(
        _import_skimage("metrics").structural_similarity(first, second, win_size=window_size, data_range=data_range)
    )


def correlate_rows(first_rows: FloatArray, second_rows: FloatArray) -> FloatArray:
    """(R,M), (R,M) -> (R,): Pearson's correlation of each row with the other; NaN beside a constant one."""
    return np.asarray(
        (center_and_normalize_rows(first_rows) * center_and_normalize_rows(second_rows)).sum(-1).clip(-1, 1)
    )


def _correlate_vectors(first: FloatArray, second: FloatArray) -> float:
    found = float(correlate_rows(first[None], second[None])[0])
    if np.isnan(found):
        raise UndefinedError("a map, or what is compared of it, has one value everywhere")
    return found


def center_and_normalize_rows(rows: FloatArray) -> FloatArray:
    """(R,M): each row less its mean, of length 1; NaN for a constant one."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scaled = rows / np.where(largest > 0, largest, 1)
    centred = scaled - scaled.mean(-1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=-1, keepdims=True)
    return np.asarray(centred / np.where(lengths > CONSTANT_ROW_TOLERANCE * np.sqrt(rows.shape[-1]), lengths, np.nan))


def _compute_top_membership(values: FloatArray, top_share: float) -> FloatArray:
    """(M,): 1 for the strongest cells, as many as `top_share` says, 0 for the rest; what ties at the last place shares its room."""
    if values.min() == values.max():
        raise UndefinedError("the map has one value everywhere: no part of it is the hottest")
    wanted = max(1, round(top_share * len(values)))
    last = np.partition(values, -wanted)[-wanted]
    above, tied = values > last, values == last
    return np.asarray(above + tied * ((wanted - above.sum()) / tied.sum()))


def _check_same_shape(left: npt.ArrayLike, right: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    first, second = to_finite_array(left), to_finite_array(right)
    if first.shape != second.shape:
        raise GeometryError(f"the maps are {first.shape} and {second.shape}; bring them to one size first")
    return first, second


def _import_skimage(submodule: str) -> Any:
    return require(f"skimage.{submodule}", extra="metrics")
