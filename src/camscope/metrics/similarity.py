"""Similarity: what two maps (*S) of one size have in common. Signs count: what speaks against is not what speaks for.

Every one is the same whatever positive number either map is multiplied by. Maps with NaN have none (UndefinedError), nor has
a constant map where an order or a correlation is asked for, nor a map of zeros, which has no scale.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import GeometryError, InputError, MissingExtraError, UndefinedError
from camscope.metrics.base import Floats, finite, metric
from camscope.plurals import plural

DATA_RANGE = 1.0  # SSIM's: from the least to the largest value that a map on its scale can have
WINDOW = 7  # pixels of a side of SSIM's window, of even weight
CELL, ORIENTATIONS, BLOCK = 16, 9, 3  # HOG: pixels of a cell's side, directions, cells of a block's side
ROUNDING = 1e-12  # of the largest value: what is left of a constant map when its mean is taken away


@metric(
    "pearson",
    needs="pair",
    formula="covariance / product of standard deviations, over cells",
    paper="Pearson 1895",
    low=-1.0,
    higher_is_better=None,
    chance="0",
)
def pearson(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """(*S), (*S) -> -1..1; undefined beside a constant map."""
    return _correlation(*(values.ravel() for values in _pair(one, other)))


@metric(
    "spearman",
    needs="pair",
    formula="Pearson's correlation of the cells' ranks, the mean rank among equals",
    paper="Spearman 1904",
    low=-1.0,
    higher_is_better=None,
    chance="0",
)
def spearman(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """(*S), (*S) -> -1..1; undefined beside a constant map."""
    return _correlation(*(ranks(values) for values in _pair(one, other)))


@metric(
    "ssim",
    needs="pair",
    formula="mean over windows of (2 m1 m2 + c1)(2 s12 + c2) / ((m1² + m2² + c1)(s1² + s2² + c2)), c = (0.01 R)², (0.03 R)²",
    paper="Wang et al. 2004; as scikit-image's structural_similarity, even windows of 7 pixels a side",
    low=-1.0,
    higher_is_better=None,
)
def ssim(
    one: npt.ArrayLike,
    other: npt.ArrayLike,
    data_range: float = DATA_RANGE,
    window: int = WINDOW,
    signed: bool | None = None,
) -> float:
    """(*S), (*S) -> -1..1, of maps on the scale of a picture, 0..1; undefined beside a map of zeros.

    Each is divided by its largest size; of signed ones, zero then becomes 1/2: SSIM is one of pictures, and gives two means
    of opposite sign a negative factor that an opposite pattern turns into praise. `signed`: None where one of the two is
    negative anywhere. `data_range` R: numbers of different ranges do not compare. `window`: pixels of a side; undefined
    where an axis has fewer.
    """
    scaled = [on_scale(values) for values in _pair(one, other)]
    known = are_signed(scaled) if signed is None else signed
    return windowed(*(as_picture(each, known) for each in scaled), data_range=data_range, window=window)


@metric(
    "hog",
    needs="pair",
    formula="Pearson's correlation of the histograms of oriented gradients",
    paper="Dalal and Triggs 2005, as Adebayo et al. 2018 compare maps with it, arXiv:1810.03292",
    low=-1.0,
    higher_is_better=None,
)
def hog_correlation(one: npt.ArrayLike, other: npt.ArrayLike, cell: int = CELL) -> float:
    """(H,W), (H,W) -> -1..1; undefined beside a constant map, and for maps of other than two axes.

    `cell`: pixels of a side; a map is 3 cells a side at least. 9 directions, blocks of 3 x 3 cells, normed by L2-Hys.
    """
    return _correlation(*(hog_features(values, cell) for values in _pair(one, other)))


@metric(
    "jaccard",
    needs="pair",
    formula="sum of min / sum of max of the cells' memberships in the strongest tenth: |A and B| / |A or B| without ties",
    paper="Jaccard 1912, of what is hottest",
    higher_is_better=None,
    chance="about 0.05: 0.1 / (2 - 0.1)",
)
def jaccard(one: npt.ArrayLike, other: npt.ArrayLike, share: float = 0.1) -> float:
    """(*S), (*S) -> 0..1. Cells that tie at the last place are members in part; undefined beside a constant map."""
    if not 0 < share < 1:
        raise InputError(f"share={share}: expected a number between 0 and 1")
    here, there = (_hottest(values.ravel(), share) for values in _pair(one, other))
    return float(np.minimum(here, there).sum() / np.maximum(here, there).sum())


SIMILARITIES: Mapping[str, Callable[..., float]] = {
    "pearson": pearson,
    "spearman": spearman,
    "ssim": ssim,
    "hog": hog_correlation,
    "jaccard": jaccard,
}


def ranks(values: npt.ArrayLike) -> Floats:
    """(*S) -> (M,): ranks from 1 on, the mean one among equals."""
    _, which, counts = np.unique(np.asarray(values).ravel(), return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[which])


def hog_features(values: Floats, cell: int = CELL) -> Floats:
    """(H,W) -> (M,): histograms of oriented gradients of the map divided by its largest size."""
    if values.ndim != 2:
        raise UndefinedError(
            f"a map of {plural(values.ndim, 'axis')} has no histogram of oriented gradients: it is one of pictures"
        )
    if min(values.shape) < BLOCK * cell:
        raise UndefinedError(
            f"a map {values.shape} has no {BLOCK} x {BLOCK} cells of {plural(cell, 'pixel')}: bring it to the "
            "image's size, or pass cell="
        )
    made = _skimage("feature").hog(on_scale(values), ORIENTATIONS, (cell, cell), (BLOCK, BLOCK), "L2-Hys")
    return np.asarray(made, np.float64)


def on_scale(values: Floats) -> Floats:
    """(*S) divided by its largest size: -1..1, zero stays zero. UndefinedError for a map of zeros."""
    peak = np.abs(values).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: it has no scale")
    return np.asarray(values / peak)


def are_signed(maps: Sequence[Floats]) -> bool:
    """Whether one is negative anywhere."""
    return any(bool((values < 0).any()) for values in maps)


def as_picture(scaled: Floats, signed: bool) -> Floats:
    """(*S) on the scale of `on_scale` -> 0..1."""
    return (scaled + 1) / 2 if signed else scaled


def windowed(one: Floats, other: Floats, *, data_range: float = DATA_RANGE, window: int = WINDOW) -> float:
    """SSIM of two maps as they are."""
    if window < 3 or window % 2 == 0:
        raise InputError(f"window={window}: expected an odd number of pixels, 3 or more")
    if min(one.shape) < window:
        raise UndefinedError(
            f"a map {one.shape} is smaller than the window of {plural(window, 'pixel')}: bring it to the "
            "image's size, or pass window="
        )
    return float(_skimage("metrics").structural_similarity(one, other, win_size=window, data_range=data_range))


def correlations(rows: Floats, others: Floats) -> Floats:
    """(R,M), (R,M) -> (R,): Pearson's correlation of each row with the other; NaN beside a constant one."""
    return np.asarray((unit(rows) * unit(others)).sum(-1).clip(-1, 1))


def _correlation(one: Floats, other: Floats) -> float:
    found = float(correlations(one[None], other[None])[0])
    if np.isnan(found):
        raise UndefinedError("a map, or what is compared of it, has one value everywhere")
    return found


def unit(rows: Floats) -> Floats:
    """(R,M): each row less its mean, of length 1; NaN for a constant one."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scaled = rows / np.where(largest > 0, largest, 1)
    centred = scaled - scaled.mean(-1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=-1, keepdims=True)
    return np.asarray(centred / np.where(lengths > ROUNDING * np.sqrt(rows.shape[-1]), lengths, np.nan))


def _hottest(values: Floats, share: float) -> Floats:
    """(M,): 1 for the strongest cells, as many as `share` says, 0 for the rest; what ties at the last place shares its room."""
    if values.min() == values.max():
        raise UndefinedError("the map has one value everywhere: no part of it is the hottest")
    wanted = max(1, round(share * len(values)))
    last = np.partition(values, -wanted)[-wanted]
    above, tied = values > last, values == last
    return np.asarray(above + tied * ((wanted - above.sum()) / tied.sum()))


def _pair(one: npt.ArrayLike, other: npt.ArrayLike) -> tuple[Floats, Floats]:
    first, second = finite(one), finite(other)
    if first.shape != second.shape:
        raise GeometryError(f"the maps are {first.shape} and {second.shape}; bring them to one size first")
    return first, second


def _skimage(part: str) -> Any:
    try:
        return import_module(f"skimage.{part}")
    except ImportError as error:
        raise MissingExtraError("scikit-image", "metrics") from error
