"""Localisation: whether a map (*S), on the image's own pixels or voxels, lies where the evidence is known to be.

All of them judge what speaks for the target, the map's positive part. Where cells tie, they count in expectation over the
orders that are possible: a map of one value gets what guessing gets. A mask that is empty, or everything, and a map with NaN
have no number (UndefinedError); nor has a map without anything positive where a share of its sum is asked for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_number
from camscope.metrics.base import FloatArray, Mask, check_mask, positive_part, register_metric
from camscope.optional import require
from camscope.plurals import plural

MASK_AREA_LEVEL = "the mask's share of the image"
CONSTANT_MAP_TOLERANCE = 1e-12  # of the largest value
IOU_THRESHOLDS = tuple(np.linspace(0.05, 0.95, 19))


@register_metric(
    "pointing-game",
    title="Pointing Game",
    input_kind="mask",
    formula="1 if the peak lies in the mask, or no farther than tolerance from it; of tied peaks the share that does",
    paper="Zhang et al. 2018, arXiv:1608.00507",
    chance_level=MASK_AREA_LEVEL,
)
def pointing_game(
    attribution: npt.ArrayLike, mask: npt.ArrayLike, tolerance: float = 0.0, spacing: Sequence[float] | None = None
) -> float:
    """(*S), (*S) bool -> 0..1. `tolerance` in pixels, or in the units of `spacing`, the size of a pixel along each axis."""
    values, known = _prepare_map_and_mask(attribution, mask)
    check_number(tolerance=tolerance, low=0)
    near = known if not tolerance else _compute_distances_to_mask(known, spacing) <= tolerance
    return float(near[values == values.max()].mean())


@register_metric(
    "energy-inside",
    title="Energy inside",
    input_kind="mask",
    formula="sum of the map in the mask / sum of the map",
    paper="Arras et al. 2022, relevance mass accuracy, arXiv:2003.07258",
    chance_level=MASK_AREA_LEVEL,
)
def energy_inside(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive."""
    values, known = _prepare_map_and_mask(attribution, mask)
    return float(_divide_by_sum(values)[known].sum())


@register_metric(
    "enrichment",
    title="Enrichment",
    input_kind="mask",
    formula="energy inside / (mask's area / image's area)",
    paper="energy inside, made comparable across sizes of masks",
    upper_bound=None,
    chance_level="1",
)
def enrichment(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0 .. image's area / mask's; undefined for a map without anything positive."""
    return energy_inside(attribution, mask) / float(np.asarray(mask, np.float64).mean())


@register_metric(
    "rank-accuracy",
    title="Relevance rank accuracy",
    input_kind="mask",
    formula="share of the |M| strongest cells that lie in the mask M",
    paper="Arras et al. 2022, relevance rank accuracy, arXiv:2003.07258; it is Dice at the mask's own area",
    chance_level=MASK_AREA_LEVEL,
)
def rank_accuracy(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1. Of cells that tie at the last place, as many count as there is room for, in expectation."""
    values, known = _prepare_map_and_mask(attribution, mask)
    wanted = int(known.sum())
    last = np.partition(values.ravel(), -wanted)[-wanted]
    above, tied = values > last, values == last
    room = wanted - int(above.sum())
    return float((known[above].sum() + room * known[tied].mean()) / wanted)


@register_metric(
    "average-precision",
    title="Average precision",
    input_kind="mask",
    formula="sum over thresholds of (recall gained) x precision, the map's values as scores of the mask's pixels",
    paper="as scikit-learn's average_precision_score: no interpolation",
    chance_level=MASK_AREA_LEVEL,
)
def average_precision(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1. Tied cells have one threshold, and so one precision."""
    values, known = _prepare_map_and_mask(attribution, mask)
    order = np.argsort(-values, axis=None, kind="stable")
    scores, hits = values.ravel()[order], known.ravel()[order].cumsum()
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # the last of each group of ties
    precision, recall = hits[ends] / (ends + 1), hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


@register_metric(
    "iou-otsu",
    title="IoU (Otsu)",
    input_kind="mask",
    formula="|A and M| / |A or M|, A: what exceeds Otsu's threshold of the map",
    paper="Otsu 1979; as localisation is scored by Saporta et al. 2022",
)
def iou_otsu(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map of one value, but for rounding, which has no threshold."""
    values, known = _prepare_map_and_mask(attribution, mask)
    scaled = values / (values.max() or 1.0)
    return _compute_iou(scaled > compute_otsu_threshold(scaled), known)


@register_metric(
    "iou",
    title="IoU",
    input_kind="mask",
    formula="|A and M| / |A or M|, A: what reaches level times the maximum",
    paper="Zhou et al. 2016, arXiv:1512.04150",
)
def iou(attribution: npt.ArrayLike, mask: npt.ArrayLike, threshold: float = 0.5) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive. `threshold`: of the maximum, above 0, 1 at most."""
    return iou_over_thresholds(attribution, mask, (threshold,))


@register_metric(
    "iou-swept",
    title="Mean IoU over thresholds",
    input_kind="mask",
    formula="the mean of IoU over the levels 0.05, 0.10 … 0.95 of the maximum",
    paper="no cut is chosen; as Choe et al. 2020 sweep their threshold, arXiv:2001.07437",
)
def iou_over_thresholds(
    attribution: npt.ArrayLike, mask: npt.ArrayLike, thresholds: Sequence[float] = IOU_THRESHOLDS
) -> float:
    """(*S), (*S) bool -> 0..1; undefined for a map without anything positive."""
    values, known = _prepare_map_and_mask(attribution, mask)
    if not len(thresholds) or not all(0 < level <= 1 for level in thresholds):
        raise InputError(f"thresholds {list(thresholds)}: expected one at least, each above 0 and 1 at most")
    peak = _find_positive_peak(values)
    return float(np.mean([_compute_iou(values >= level * peak, known) for level in thresholds]))


@register_metric(
    "matched-dice",
    title="Dice at mask area",
    input_kind="mask",
    formula="2 |A and M| / (|A| + |M|), A: the |M| strongest cells",
    paper="Dice 1945, at the mask's own area: the same number as rank accuracy",
    chance_level=MASK_AREA_LEVEL,
)
def dice_at_mask_area(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """(*S), (*S) bool -> 0..1: 2 |A and M| / 2 |M|."""
    return rank_accuracy(attribution, mask)


@register_metric(
    "peak-distance",
    title="Peak distance",
    input_kind="mask",
    formula="distance from the peak to the nearest pixel of the mask; of tied peaks the mean",
    paper="pointing game, as a length",
    upper_bound=None,
    higher_is_better=False,
)
def peak_distance(attribution: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """(*S), (*S) bool -> pixels between centres, or the units of `spacing`; 0 inside."""
    values, known = _prepare_map_and_mask(attribution, mask)
    return float(_compute_distances_to_mask(known, spacing)[values == values.max()].mean())


@register_metric(
    "centroid-distance",
    title="Centroid distance",
    input_kind="mask",
    formula="distance between the map's centre of mass and the mask's",
    paper="first moments",
    upper_bound=None,
    higher_is_better=False,
)
def centroid_distance(attribution: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """(*S), (*S) bool -> pixels, or the units of `spacing`; undefined for a map without anything positive."""
    values, known = _prepare_map_and_mask(attribution, mask)
    here, there = _compute_center_of_mass(_divide_by_sum(values)), _compute_center_of_mass(known / known.sum())
    return float(np.linalg.norm((here - there) * _resolve_pixel_spacing(spacing, known.ndim)))


def _prepare_map_and_mask(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> tuple[FloatArray, Mask]:
    values = positive_part(attribution)
    return values, check_mask(values, mask)


def _find_positive_peak(values: FloatArray) -> float:
    peak = float(values.max())
    if not peak > 0:
        raise UndefinedError("nothing in the map is positive")
    return peak


def _divide_by_sum(values: FloatArray) -> FloatArray:
    """Divided by their sum, without overflow or underflow."""
    shares = values / _find_positive_peak(values)
    return np.asarray(shares / shares.sum())


def _compute_iou(first: Mask, second: Mask) -> float:
    return float((first & second).sum() / (first | second).sum())


def _compute_center_of_mass(shares: FloatArray) -> FloatArray:
    axes = range(shares.ndim)
    sums = [shares.sum(tuple(other for other in axes if other != axis)) for axis in axes]
    return np.array([float(np.arange(len(each)) @ each) for each in sums])


def compute_otsu_threshold(values: FloatArray) -> float:
    """Return the threshold that splits the values into two classes of least variance (Otsu 1979).

    The histogram has 256 bins, as in scikit-image's `threshold_otsu` for floats.
    """
    low, high = float(values.min()), float(values.max())
    if high - low <= CONSTANT_MAP_TOLERANCE:
        raise UndefinedError("the map has one value everywhere: there is no threshold")
    counts, edges = np.histogram(values, 256, (low, high))
    centres = (edges[:-1] + edges[1:]) / 2
    below, sums = counts.cumsum()[:-1], (counts * centres).cumsum()[:-1]
    above, rest = values.size - below, (counts * centres).sum() - sums
    between = below * above * (sums / below - rest / above) ** 2
    return float(centres[int(between.argmax())])


def _compute_distances_to_mask(mask: Mask, spacing: Sequence[float] | None) -> FloatArray:
    """(*S): from each pixel's centre to that of the nearest one in the mask."""
    transform = require("scipy.ndimage", extra="metrics").distance_transform_edt
    return np.asarray(transform(~mask, sampling=_resolve_pixel_spacing(spacing, mask.ndim)), np.float64)


def _resolve_pixel_spacing(spacing: Sequence[float] | None, n_axes: int) -> FloatArray:
    """(axes,): the size of a pixel along each; 1 where it is not given."""
    lengths = np.ones(n_axes) if spacing is None else np.asarray(spacing, np.float64)
    if lengths.shape != (n_axes,) or not ((lengths > 0) & np.isfinite(lengths)).all():
        raise InputError(
            f"spacing={spacing!r}: expected {plural(n_axes, 'positive number')}, the size of a pixel along each axis"
        )
    return lengths
