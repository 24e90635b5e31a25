"""Localisation: whether a map (*S), on the image's own pixels or voxels, lies where the evidence is known to be.

All of them judge what speaks for the target, the map's positive part. Where cells tie, they count in expectation over the
orders that are possible: a map of one value gets what guessing gets. A mask that is empty, or everything, and a map with NaN
have no number (UndefinedError); nor has a map without anything positive where a share of its sum is asked for.
"""

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, MissingExtraError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_number
from camscope.metrics.base import Floats, Mask, evidence, expect_mask, metric
from camscope.plurals import plural

AREA = "the mask's share of the image"
ROUNDING = 1e-12  # of the largest value
LEVELS = tuple(np.linspace(0.05, 0.95, 19))


@metric(
    "pointing-game",
    needs="mask",
    formula="1 if the peak lies in the mask, or no farther than tolerance from it; of tied peaks the share that does",
    paper="Zhang et al. 2018, arXiv:1608.00507",
    chance=AREA,
)
def pointing_game(
    heat: npt.ArrayLike, mask: npt.ArrayLike, tolerance: float = 0.0, spacing: Sequence[float] | None = None
) -> float:
    """(*S), (*S) bool -> 0..1. `tolerance` in pixels, or in the units of `spacing`, the size of a pixel along each axis."""
    values, known = _given(heat, mask)
    expect_number(tolerance=tolerance, low=0)
    near = known if not tolerance else _distances(known, spacing) <= tolerance
    return float(near[values == values.max()].mean())


@metric(
    "energy-inside",
    needs="mask",
    formula="sum of the map in the mask / sum of the map",
    paper="Arras et al. 2022, relevance mass accuracy, arXiv:2003.07258",
    chance=AREA,
)
def energy_inside(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive."""
    values, known = _given(heat, mask)
    return float(_shares(values)[known].sum())


@metric(
    "enrichment",
    needs="mask",
    formula="energy inside / (mask's area / image's area)",
    paper="energy inside, made comparable across sizes of masks",
    high=None,
    chance="1",
)
def enrichment(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0 .. image's area / mask's; undefined for a map without anything positive."""
    return energy_inside(heat, mask) / float(np.asarray(mask, np.float64).mean())


@metric(
    "rank-accuracy",
    needs="mask",
    formula="share of the |M| strongest cells that lie in the mask M",
    paper="Arras et al. 2022, relevance rank accuracy, arXiv:2003.07258; it is Dice at the mask's own area",
    chance=AREA,
)
def rank_accuracy(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1. Of cells that tie at the last place, as many count as there is room for, in expectation."""
    values, known = _given(heat, mask)
    wanted = int(known.sum())
    last = np.partition(values.ravel(), -wanted)[-wanted]
    above, tied = values > last, values == last
    room = wanted - int(above.sum())
    return float((known[above].sum() + room * known[tied].mean()) / wanted)


@metric(
    "average-precision",
    needs="mask",
    formula="sum over thresholds of (recall gained) x precision, the map's values as scores of the mask's pixels",
    paper="as scikit-learn's average_precision_score: no interpolation",
    chance=AREA,
)
def average_precision(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1. Tied cells have one threshold, and so one precision."""
    values, known = _given(heat, mask)
    order = np.argsort(-values, axis=None, kind="stable")
    scores, hits = values.ravel()[order], known.ravel()[order].cumsum()
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # the last of each group of ties
    precision, recall = hits[ends] / (ends + 1), hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


@metric(
    "iou-otsu",
    needs="mask",
    formula="|A and M| / |A or M|, A: what exceeds Otsu's threshold of the map",
    paper="Otsu 1979; as localisation is scored by Saporta et al. 2022",
)
def iou_otsu(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map of one value, but for rounding, which has no threshold."""
    values, known = _given(heat, mask)
    scaled = values / (values.max() or 1.0)
    return _iou(scaled > _otsu(scaled), known)


@metric(
    "iou",
    needs="mask",
    formula="|A and M| / |A or M|, A: what reaches level times the maximum",
    paper="Zhou et al. 2016, arXiv:1512.04150",
)
def iou(heat: npt.ArrayLike, mask: npt.ArrayLike, level: float = 0.5) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive. `level`: of the maximum, above 0, 1 at most."""
    return iou_swept(heat, mask, (level,))


@metric(
    "iou-swept",
    needs="mask",
    formula="the mean of IoU over the levels 0.05, 0.10 … 0.95 of the maximum",
    paper="no cut is chosen; as Choe et al. 2020 sweep their threshold, arXiv:2001.07437",
)
def iou_swept(heat: npt.ArrayLike, mask: npt.ArrayLike, levels: Sequence[float] = LEVELS) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive."""
    values, known = _given(heat, mask)
    if not len(levels) or not all(0 < level <= 1 for level in levels):
        raise InputError(f"levels {list(levels)}: expected one at least, each above 0 and 1 at most")
    peak = _peak(values)
    return float(np.mean([_iou(values >= level * peak, known) for level in levels]))


@metric(
    "matched-dice",
    needs="mask",
    formula="2 |A and M| / (|A| + |M|), A: the |M| strongest cells",
    paper="Dice 1945, at the mask's own area: the same number as rank accuracy",
    chance=AREA,
)
def matched_dice(heat: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1: 2 |A and M| / 2 |M|."""
    return rank_accuracy(heat, mask)


@metric(
    "peak-distance",
    needs="mask",
    formula="distance from the peak to the nearest pixel of the mask; of tied peaks the mean",
    paper="pointing game, as a length",
    high=None,
    higher_is_better=False,
)
def peak_distance(heat: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """(*S), (*S) bool -> pixels between centres, or the units of `spacing`; 0 inside."""
    values, known = _given(heat, mask)
    return float(_distances(known, spacing)[values == values.max()].mean())


@metric(
    "centroid-distance",
    needs="mask",
    formula="distance between the map's centre of mass and the mask's",
    paper="first moments",
    high=None,
    higher_is_better=False,
)
def centroid_distance(heat: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """(*S), (*S) bool -> pixels, or the units of `spacing`; undefined for a map without anything positive."""
    values, known = _given(heat, mask)
    here, there = _centre(_shares(values)), _centre(known / known.sum())
    return float(np.linalg.norm((here - there) * _lengths(spacing, known.ndim)))


def _given(heat: npt.ArrayLike, mask: npt.ArrayLike) -> tuple[Floats, Mask]:
    values = evidence(heat)
    return values, expect_mask(values, mask)


def _peak(values: Floats) -> float:
    peak = float(values.max())
    if not peak > 0:
        raise UndefinedError("nothing in the map is positive")
    return peak


def _shares(values: Floats) -> Floats:
    """Divided by their sum, without overflow or underflow."""
    shares = values / _peak(values)
    return np.asarray(shares / shares.sum())


def _iou(one: Mask, other: Mask) -> float:
    return float((one & other).sum() / (one | other).sum())


def _centre(shares: Floats) -> Floats:
    axes = range(shares.ndim)
    sums = [shares.sum(tuple(other for other in axes if other != axis)) for axis in axes]
    return np.array([float(np.arange(len(each)) @ each) for each in sums])


def _otsu(values: Floats) -> float:
    """Of values of which the largest is 1: what parts them into two classes of least variance within, over 256 bins."""
    low, high = float(values.min()), float(values.max())
    if high - low <= ROUNDING:
        raise UndefinedError("the map has one value everywhere: there is no threshold")
    counts, edges = np.histogram(values, 256, (low, high))
    centres = (edges[:-1] + edges[1:]) / 2
    below, sums = counts.cumsum()[:-1], (counts * centres).cumsum()[:-1]
    above, rest = values.size - below, (counts * centres).sum() - sums
    between = below * above * (sums / below - rest / above) ** 2
    return float(centres[int(between.argmax())])


def _distances(mask: Mask, spacing: Sequence[float] | None) -> Floats:
    """(*S): from each pixel's centre to that of the nearest one in the mask."""
    try:
        transform = import_module("scipy.ndimage").distance_transform_edt
    except ImportError as error:
        raise MissingExtraError("scipy", "metrics") from error
    return np.asarray(transform(~mask, sampling=_lengths(spacing, mask.ndim)), np.float64)


def _lengths(spacing: Sequence[float] | None, axes: int) -> Floats:
    """(axes,): the size of a pixel along each; 1 where it is not given."""
    lengths = np.ones(axes) if spacing is None else np.asarray(spacing, np.float64)
    if lengths.shape != (axes,) or not ((lengths > 0) & np.isfinite(lengths)).all():
        raise InputError(
            f"spacing={spacing!r}: expected {plural(axes, 'positive number')}, the size of a pixel along each axis"
        )
    return lengths
