"""Localization metrics: how well the positive part of a map (*S) agrees with a ground-truth mask.

Tied cells count with their mean. A map with NaN raises UndefinedError, as does a mask that is empty or covers the whole image.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.setting_checks import check_number
from camscope.metrics.metric_registry import FloatArray, Mask, positive_part, register_metric, require_valid_mask
from camscope.optional_packages import require
from camscope.plurals import plural

MASK_AREA_LEVEL = "the mask's share of the image area"
CONSTANT_MAP_TOLERANCE = 1e-12  # of the largest value
IOU_THRESHOLDS = tuple(np.linspace(0.05, 0.95, 19))
_register = partial(register_metric, input_kind="mask")


@_register(
    "pointing-game",
    title="Pointing Game",
    formula="1 if the peak lies in the mask or within a tolerance of it, else 0; mean over tied peaks",
    paper="Zhang et al. 2018, arXiv:1608.00507",
    chance_level=MASK_AREA_LEVEL,
)
def pointing_game(
    attribution: npt.ArrayLike, mask: npt.ArrayLike, tolerance: float = 0.0, spacing: Sequence[float] | None = None
) -> float:
    """Return 1 if the peak of a map lies in the mask, else 0. If several pixels tie for the peak, return the share of hits.

    Args:
        attribution: (*S) the map.
        mask: (*S) bool, the ground truth.
        tolerance: Distance from the mask that still counts as a hit, in pixels or in the units of `spacing`.
        spacing: The size of a pixel along each axis. Default: 1.

    Returns:
        A number in 0..1.

    >>> pointing_game([[0.0, 2.0], [1.0, 0.0]], np.array([[False, True], [False, False]]))
    1.0

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    check_number(tolerance=tolerance, low=0)
    is_hit = ground_truth if not tolerance else _compute_distances_to_mask(ground_truth, spacing) <= tolerance
    return float(is_hit[values == values.max()].mean())


@_register(
    "energy-inside",
    formula="sum of the map in the mask / sum of the map",
    paper="Arras et al. 2022, relevance mass accuracy, arXiv:2003.07258",
    chance_level=MASK_AREA_LEVEL,
)
def energy_inside(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Return the share of the positive attribution that lies inside the mask, 0..1.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        The sum inside the mask, divided by the sum of all positive values, 0..1.

    >>> energy_inside([0.0, 3.0, 1.0, 0.0], [False, True, False, False])
    0.75

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    return float(_divide_by_sum(values)[ground_truth].sum())


@_register(
    "enrichment",
    formula="energy inside / (mask's area / image's area)",
    paper="energy inside, made comparable across sizes of masks",
    upper_bound=None,
    chance_level="1",
)
def enrichment(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Return the share of attribution inside the mask, divided by the share of the image that the mask covers.

    The chance level is 1, the largest value is image area / mask area. A map without a positive value has no value.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        The ratio, 1 for a map that is the same everywhere.

    >>> enrichment([0.0, 3.0, 1.0, 0.0], [False, True, False, False])
    3.0

    """
    return energy_inside(attribution, mask) / float(np.asarray(mask, np.float64).mean())


@_register(
    "rank-accuracy",
    title="Relevance rank accuracy",
    formula="share of the |M| strongest cells that lie in the mask M",
    paper="Arras et al. 2022, relevance rank accuracy, arXiv:2003.07258; equal to Dice at the mask's area",
    chance_level=MASK_AREA_LEVEL,
)
def rank_accuracy(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Select the strongest pixels of the map, as many as the mask has. Return the share that lies in the mask, 0..1.

    If cells tie for the last places, the share of the mask among them counts.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        A share of cells, 0..1.

    >>> rank_accuracy([0.1, 0.9, 0.8, 0.2], [False, True, False, True])
    0.5

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    n_mask = int(ground_truth.sum())
    cutoff = np.partition(values.ravel(), -n_mask)[-n_mask]
    above, tied = values > cutoff, values == cutoff
    n_tied_selected = n_mask - int(above.sum())
    return float((ground_truth[above].sum() + n_tied_selected * ground_truth[tied].mean()) / n_mask)


@_register(
    "average-precision",
    formula="sum over thresholds of (recall gained) x precision, the map's values as scores of the mask's pixels",
    paper="as scikit-learn's average_precision_score: no interpolation",
    chance_level=MASK_AREA_LEVEL,
)
def average_precision(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Return the average precision of the map, 0..1. Its values serve as scores for "this pixel lies in the mask".

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        The area under the precision-recall curve, 0..1.

    >>> average_precision([0.1, 0.9, 0.8, 0.2], [False, True, True, False])
    1.0

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    order = np.argsort(-values, axis=None, kind="stable")
    scores, hits = values.ravel()[order], ground_truth.ravel()[order].cumsum()
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # last index of each group of ties
    precision, recall = hits[ends] / (ends + 1), hits[ends] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


@_register(
    "iou-otsu",
    title="IoU (Otsu)",
    formula="|A and M| / |A or M|, A: cells above Otsu's threshold of the map",
    paper="Otsu 1979; as used by Saporta et al. 2022",
)
def iou_otsu(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Select the pixels above Otsu's threshold of the map. Return their IoU with the mask, 0..1.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        The size of the intersection divided by that of the union, 0..1.

    >>> iou_otsu([0.1, 0.9, 0.8, 0.2], [False, True, True, False])
    1.0

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    scaled = values / (values.max() or 1.0)
    return _compute_iou(scaled > compute_otsu_threshold(scaled), ground_truth)


@_register(
    "iou",
    title="IoU",
    formula="|A and M| / |A or M|, A: cells of at least threshold x maximum",
    paper="Zhou et al. 2016, arXiv:1512.04150",
)
def iou(attribution: npt.ArrayLike, mask: npt.ArrayLike, threshold: float = 0.5) -> float:
    """Select the pixels that reach `threshold` times the map's maximum. Return their IoU with the mask, 0..1.

    A map without a positive value has no value.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.
        threshold: The share of the maximum, above 0 and at most 1.

    Returns:
        The size of the intersection divided by that of the union, 0..1.

    >>> iou([0.1, 0.9, 0.8, 0.2], [False, True, True, True])
    0.6666666666666666

    """
    return iou_over_thresholds(attribution, mask, (threshold,))


@_register(
    "iou-swept",
    title="Mean IoU over thresholds",
    formula="mean IoU over the thresholds 0.05, 0.10 … 0.95 of the maximum",
    paper="thresholds swept as by Choe et al. 2020, arXiv:2001.07437",
)
def iou_over_thresholds(
    attribution: npt.ArrayLike, mask: npt.ArrayLike, thresholds: Sequence[float] = IOU_THRESHOLDS
) -> float:
    """Return the mean of `iou` over several thresholds. It lies in 0..1.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.
        thresholds: Shares of the maximum, each above 0 and at most 1.

    Returns:
        The mean IoU, 0..1.

    Raises:
        InputError: There is no threshold, or one is out of range.

    >>> iou_over_thresholds([0.1, 0.9, 0.8, 0.2], [False, True, True, False], thresholds=[0.5, 0.95])
    0.75

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    if not len(thresholds) or not all(0 < level <= 1 for level in thresholds):
        raise InputError(f"thresholds={list(thresholds)}: expected at least one number, each above 0 and at most 1")
    peak = _find_positive_peak(values)
    return float(np.mean([_compute_iou(values >= level * peak, ground_truth) for level in thresholds]))


@_register(
    "matched-dice",
    title="Dice at mask area",
    formula="2 |A and M| / (|A| + |M|), A: the |M| strongest cells",
    paper="Dice 1945, at the mask's area; equal to rank accuracy",
    chance_level=MASK_AREA_LEVEL,
)
def dice_at_mask_area(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """Select the strongest pixels of the map, as many as the mask has. Return their Dice coefficient with the mask, 0..1.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.

    Returns:
        The Dice coefficient, 0..1.

    >>> dice_at_mask_area([0.1, 0.9, 0.8, 0.2], [False, True, False, True])
    0.5

    """
    return rank_accuracy(attribution, mask)


@_register(
    "peak-distance",
    formula="distance from the peak to the nearest pixel of the mask; mean over tied peaks",
    paper="the pointing game as a distance",
    upper_bound=None,
    higher_is_better=False,
)
def peak_distance(attribution: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """Return the distance from the peak of the map to the mask, in the units of `spacing`. A peak inside the mask gives 0.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.
        spacing: Length of a cell along each axis. The default is 1, so that the unit is a cell.

    Returns:
        The distance between cell centers.

    >>> peak_distance([[0.0, 0.0, 1.0]], [[True, False, False]], spacing=(1.0, 0.5))
    1.0

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    return float(_compute_distances_to_mask(ground_truth, spacing)[values == values.max()].mean())


@_register(
    "centroid-distance",
    formula="distance between the centers of mass of map and mask",
    paper="first moments",
    upper_bound=None,
    higher_is_better=False,
)
def centroid_distance(attribution: npt.ArrayLike, mask: npt.ArrayLike, spacing: Sequence[float] | None = None) -> float:
    """Return the distance between the map's center of mass and the mask's center of mass, in the units of `spacing`.

    The value is undefined for a map without positive values.

    Args:
        attribution: (*S) a map.
        mask: (*S) of the same shape, True inside.
        spacing: Length of a cell along each axis. The default is 1, so that the unit is a cell.

    Returns:
        The distance of the two centroids.

    >>> centroid_distance([[0.0, 0.0, 1.0]], [[True, False, False]])
    2.0

    """
    values, ground_truth = _clip_negatives_and_check_mask(attribution, mask)
    map_center = _compute_center_of_mass(_divide_by_sum(values))
    mask_center = _compute_center_of_mass(ground_truth / ground_truth.sum())
    return float(np.linalg.norm((map_center - mask_center) * _resolve_pixel_spacing(spacing, values.ndim)))


def _clip_negatives_and_check_mask(attribution: npt.ArrayLike, mask: npt.ArrayLike) -> tuple[FloatArray, Mask]:
    """Set negative values of the map to 0, and convert the mask to booleans. Raise an InputError for an unsuitable mask."""
    values = positive_part(attribution)
    return values, require_valid_mask(values, mask)


def _find_positive_peak(values: FloatArray) -> float:
    peak = float(values.max())
    if not peak > 0:
        raise UndefinedError("nothing in the map is positive")
    return peak


def _divide_by_sum(values: FloatArray) -> FloatArray:
    """Divide the values by their sum. Overflow and underflow are avoided."""
    shares = values / _find_positive_peak(values)
    return np.asarray(shares / shares.sum())


def _compute_iou(first: Mask, second: Mask) -> float:
    return float((first & second).sum() / (first | second).sum())


def _compute_center_of_mass(shares: FloatArray) -> FloatArray:
    axes = range(shares.ndim)
    sums = [shares.sum(tuple(other for other in axes if other != axis)) for axis in axes]
    return np.array([float(np.arange(len(profile)) @ profile) for profile in sums])


def compute_otsu_threshold(values: FloatArray) -> float:
    """Return Otsu's threshold for values with the maximum 1. It is computed from a histogram of 256 bins."""
    low, high = float(values.min()), float(values.max())
    if high - low <= CONSTANT_MAP_TOLERANCE:
        raise UndefinedError("the map is constant: Otsu's threshold is not defined")
    counts, edges = np.histogram(values, 256, (low, high))
    centers = (edges[:-1] + edges[1:]) / 2
    below, sums_below = counts.cumsum()[:-1], (counts * centers).cumsum()[:-1]
    above, sums_above = values.size - below, (counts * centers).sum() - sums_below
    between = below * above * (sums_below / below - sums_above / above) ** 2
    return float(centers[int(between.argmax())])


def _compute_distances_to_mask(mask: Mask, spacing: Sequence[float] | None) -> FloatArray:
    """Return the distance (*S) from each pixel's center to the center of the nearest mask pixel."""
    transform = require("scipy.ndimage", extra="metrics").distance_transform_edt
    return np.asarray(transform(~mask, sampling=_resolve_pixel_spacing(spacing, mask.ndim)), np.float64)


def _resolve_pixel_spacing(spacing: Sequence[float] | None, n_axes: int) -> FloatArray:
    """Return the pixel size along each axis. The default is 1."""
    lengths = np.ones(n_axes) if spacing is None else np.asarray(spacing, np.float64)
    if lengths.shape != (n_axes,) or not ((lengths > 0) & np.isfinite(lengths)).all():
        expected_numbers = plural(n_axes, "positive number")
        raise InputError(f"spacing={spacing!r}: expected {expected_numbers}, the pixel size along each axis")
    return lengths
