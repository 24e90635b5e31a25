"""Detect image regions that may hold shortcuts, such as borders, markers or background.

The regions depend on the modality.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, UndefinedError
from camscope.metrics.localization import compute_otsu_threshold
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.optional_packages import require

RegionDetector = Callable[[NDArray[Any]], Mask]

BORDER_WIDTH_FRACTION: Final = 0.05  # of each side
CORNER_SIDE_FRACTION: Final = 0.2  # of each side
FLAT_RANGE_FRACTION: Final = 0.01  # of the image's range: compression changes the values of flat parts
MIN_BODY_FRACTION: Final = 0.05  # of the image
SKIN_THRESHOLD_HU: Final = -500.0  # HU, between air and fat
SCANNER_FIELD_THRESHOLD_HU: Final = -1100.0  # HU: the noise of air stays above it, and padding lies below
MIN_ZERO_FRACTION: Final = 0.05  # of an image: with as many exact zeros, the background was set to zero
SHELL_WIDTH_FRACTION: Final = 0.03  # of the mean side
APERTURE_BRIGHTNESS_FRACTION: Final = 0.1  # of the range between dark and bright percentiles: shadows are brighter
MAX_ROUNDNESS_ERROR: Final = 0.02  # of the radius: the median distance of the outline from the circle
RIM_WIDTH_FRACTION: Final = 0.04  # of the radius
MAX_NOTCH_DISTANCE: Final = 0.04  # of the radius: outline farther from the circle belongs to a notch or an eyelash
SATURATION_TOLERANCE: Final = 0.02  # of the image's range: how far below its maximum a pixel is still saturated
MAX_MARKER_FRACTION: Final = 0.01  # of the image
MIN_MARKER_PIXELS: Final = 4  # smaller parts are noise
MIN_EDGE_STEP: Final = 0.25  # of the image's range: the smallest step at a marker's edge; organs have soft edges
INK_HUE_RANGE: Final = (0.69, 0.87)  # hues of gentian violet, 0..1
PEN_HUE_RANGES: Final = ((0.22, 0.50), (0.50, 0.63))  # green and blue; red is also that of blood
MIN_INK_SATURATION: Final = 0.25
MIN_COLORED_FRACTION: Final = 0.0005  # of the image: fewer colored pixels are noise
MIN_STAIN_SATURATION: Final = 0.04  # a slide with a lower maximum has no stain


@dataclass(frozen=True)
class Region:
    """A kind of image region that is detected from pixel values.

    `phrase`: its name in a sentence. `description`: which pixels it has.
    """

    name: str
    phrase: str
    description: str
    detect: RegionDetector

    def __call__(self, image: NDArray[Any]) -> Mask:
        """Return a mask of the region. Raise an UndefinedError if the mask would be empty or cover the whole image.

        `image` is (H,W), (H,W,3) or a volume (D,H,W).
        """
        values = np.asarray(image)
        if values.ndim not in (2, 3) or not values.size:
            raise InputError(f"received an image of shape {values.shape}; expected (H,W), (H,W,3) or a volume (D,H,W)")
        name = self.phrase.removeprefix("the ")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UndefinedError(f"no {name}: the image holds NaN or infinity")
        mask = self.detect(values)
        if not mask.any():
            raise UndefinedError(f"no {name}: nothing in the image is {self.description}")
        if mask.all():
            raise UndefinedError(f"no {name}: the whole image is {self.description}")
        return mask


def _detect_border(image: NDArray[Any]) -> Mask:
    widths = _get_axis_lengths_and_strip_widths(image, BORDER_WIDTH_FRACTION)
    border = np.ones([n for n, _ in widths], np.bool_)
    border[tuple(slice(width, max(width, n - width)) for n, width in widths)] = False
    return border


def _detect_corners(image: NDArray[Any]) -> Mask:
    widths = _get_axis_lengths_and_strip_widths(image, CORNER_SIDE_FRACTION)
    positions = np.ogrid[tuple(slice(n) for n, _ in widths)]
    at_ends = [(i < width) | (i >= n - width) for i, (n, width) in zip(positions, widths, strict=True)]
    return np.asarray(reduce(np.logical_and, at_ends))


def _detect_padding(image: NDArray[Any]) -> Mask:
    """Return a mask of the constant rows and columns at the edges of the image."""
    values = _to_gray_values(image)
    max_range, box = FLAT_RANGE_FRACTION * float(np.ptp(values)), [[0, n] for n in values.shape]
    while (
        edge := _find_axis_and_end_of_constant_edge(values[tuple(slice(*ends) for ends in box)], max_range)
    ) is not None:
        axis, end = edge
        box[axis][end] += 1 if end == 0 else -1
    padding = np.ones(values.shape, np.bool_)
    padding[tuple(slice(*ends) for ends in box)] = False
    if not padding.any():
        raise UndefinedError("no padding: the outermost rows and columns are not constant")
    return padding


def _find_axis_and_end_of_constant_edge(values: FloatArray, max_range: float) -> tuple[int, int] | None:
    """Find an outer row, column or slice that is constant. Return its axis and end (0 or -1), or None."""
    edges = product(range(values.ndim), (0, -1))
    return next((e for e in edges if values.shape[e[0]] > 1 and np.ptp(values.take(e[1], e[0])) <= max_range), None)


def _get_axis_lengths_and_strip_widths(image: NDArray[Any], fraction: float) -> list[tuple[int, int]]:
    """Return (length, border width) of each axis in pixels. The border is `fraction` of the length wide, at least 1 pixel."""
    shape = image.shape[:2] if _is_color_image(image) else image.shape
    return [(n, max(1, round(n * fraction))) for n in shape]


def _detect_outside_body(image: NDArray[Any]) -> Mask:
    values = _to_gray_values(image)
    return ~_segment_body(values > compute_otsu_threshold(values))


def _detect_outside_body_ct(image: NDArray[Any]) -> Mask:
    _check_values_are_hounsfield_units(image)
    return ~_segment_body(image > SKIN_THRESHOLD_HU)


def _detect_outside_scanner_field(image: NDArray[Any]) -> Mask:
    """Return a mask of pixels below -1100 HU. They lie outside the scanner's field of view."""
    _check_values_are_hounsfield_units(image)
    return np.asarray(image < SCANNER_FIELD_THRESHOLD_HU)


def _check_values_are_hounsfield_units(image: NDArray[Any]) -> None:
    if _is_color_image(image) or image.min() > SKIN_THRESHOLD_HU:  # gray levels lie above -500
        raise UndefinedError(
            f"no air: the lowest value is {image.min():g}; a CT in HU has values below {SKIN_THRESHOLD_HU:g}"
        )


def _detect_background(image: NDArray[Any]) -> Mask:
    """Return a mask of the background, which are pixels of value zero. If few pixels are zero, Otsu's threshold is used."""
    values = _to_gray_values(image)
    is_zero = values == 0
    has_zero_background = is_zero.mean() >= MIN_ZERO_FRACTION and values.min() == 0
    return ~_segment_body(~is_zero if has_zero_background else values > compute_otsu_threshold(values))


def _detect_foreground_shell(image: NDArray[Any]) -> Mask:
    """Return a mask of the pixels near the border between the foreground and the background."""
    background = _detect_background(image)
    if not background.any():
        raise UndefinedError("no shell: the foreground fills the image")
    max_distance = max(1.0, SHELL_WIDTH_FRACTION * float(np.mean(background.shape)))
    edt = require("scipy.ndimage", extra="audit").distance_transform_edt
    return np.asarray(edt(~background) + edt(background) <= max_distance)


def _segment_body(bright_mask: Mask) -> Mask:
    body = _fill_holes(select_largest_component(bright_mask))
    if body.mean() < MIN_BODY_FRACTION:
        raise UndefinedError(f"no body: the largest bright part covers {body.mean():.1%} of the image")
    return body


def _detect_outside_aperture(image: NDArray[Any]) -> Mask:
    distances, _ = _measure_distances_and_radius_of_aperture(image)
    return distances > 0


def _detect_ring_along_aperture_edge(image: NDArray[Any]) -> Mask:
    """Return a mask of a ring along the edge of the round aperture. It extends 4 % of the radius to both sides of the edge."""
    distances, radius = _measure_distances_and_radius_of_aperture(image)
    return np.abs(distances) <= RIM_WIDTH_FRACTION * radius


def _measure_distances_and_radius_of_aperture(image: NDArray[Any]) -> tuple[FloatArray, float]:
    """Find the bright circle in an image. Return each pixel's distance (H,W) to its edge, and its radius.

    Distances inside the circle are negative. UndefinedError where the bright part is not round, or a corner is not dark.
    """
    values = _to_gray_values(image)
    if values.ndim == 3:
        raise UndefinedError("no aperture: expected a 2-D image, received a volume")
    dark, bright = np.percentile(values, [1, 99])
    field = _fill_holes(select_largest_component(values > dark + APERTURE_BRIGHTNESS_FRACTION * (bright - dark)))
    if min(field.shape) < 2 or field[:: field.shape[0] - 1, :: field.shape[1] - 1].any():
        raise UndefinedError("no aperture: not all corners of the image are dark")
    contours = require("skimage.measure", extra="audit").find_contours(field.astype(np.float64), 0.5)
    outline = np.concatenate(contours) if contours else np.empty((0, 2))
    if len(outline) < 8:
        raise UndefinedError("no aperture: the bright part has no outline")
    circle = _fit_circle_center_and_radius(outline)
    for _ in range(3):  # without the outline of notches and labels
        is_near = np.abs(_measure_distances(circle, outline.T)) <= MAX_NOTCH_DISTANCE * circle[2]
        if is_near.sum() >= len(outline) / 2:
            circle = _fit_circle_center_and_radius(outline[is_near])
    error = np.median(np.abs(_measure_distances(circle, outline.T)))
    if error > MAX_ROUNDNESS_ERROR * circle[2]:
        raise UndefinedError(
            f"no aperture: the bright part is not round ({error / circle[2]:.0%} of the radius off a circle)"
        )
    return _measure_distances(circle, np.indices(image.shape[:2]).astype(np.float64)), circle[2]


def _measure_distances(circle: tuple[float, float, float], points: FloatArray) -> FloatArray:
    """Return the distances from points (2,...) to a circle (row, column, radius). Distances inside the circle are negative."""
    row, column, radius = circle
    return np.asarray(np.hypot(points[0] - row, points[1] - column) - radius)


def _fit_circle_center_and_radius(points: FloatArray) -> tuple[float, float, float]:
    """Fit a circle to points by least squares. Return its center row, center column and radius.

    Minimizes |p|² - 2 c·p - (r² - |c|²) (Kåsa 1976).
    """
    middle = points.mean(0)
    centered = points - middle
    equations = np.column_stack([2 * centered, np.ones(len(centered))])
    row, column, offset = np.linalg.lstsq(equations, (centered**2).sum(1), rcond=None)[0].tolist()
    return row + middle[0], column + middle[1], float(np.sqrt(max(offset + row**2 + column**2, 1e-12)))


def _detect_saturated_markers(image: NDArray[Any]) -> Mask:
    """Return a mask of small, sharp objects of maximum brightness, such as letters and metal clips."""
    values = _to_gray_values(image)
    span = values.max() - values.min()
    bright = values >= values.max() - SATURATION_TOLERANCE * span
    labels, count = require("scipy.ndimage", extra="audit").label(bright, np.ones((3,) * values.ndim))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    ring = np.where(bright, 0, require("skimage.segmentation", extra="audit").expand_labels(labels, 2))
    ring_sums = np.bincount(ring.ravel(), values.ravel(), count + 1)
    ring_sizes = np.bincount(ring.ravel(), minlength=count + 1)
    ring_means = np.where(ring_sizes > 0, ring_sums / np.maximum(ring_sizes, 1), np.inf)
    is_marker = (
        (sizes >= MIN_MARKER_PIXELS)
        & (sizes <= max(MIN_MARKER_PIXELS, MAX_MARKER_FRACTION * values.size))
        & (ring_means <= values.max() - MIN_EDGE_STEP * span)
    )
    is_marker[0] = False
    return np.asarray(is_marker[labels], np.bool_)


def _detect_purple_skin_ink(image: NDArray[Any]) -> Mask:
    """Return a mask of the saturated purple ink of a surgical marker on skin."""
    hue, saturation, value = _convert_to_hue_saturation_and_value(image, "ink")
    is_purple = (hue >= INK_HUE_RANGE[0]) & (hue <= INK_HUE_RANGE[1])
    return _remove_small_components(is_purple & (saturation >= MIN_INK_SATURATION) & (value >= 0.15) & (value <= 0.95))


def _detect_pen(image: NDArray[Any]) -> Mask:
    """Return a mask of saturated green, saturated blue and black pixels, such as pen marks on a glass slide."""
    hue, saturation, value = _convert_to_hue_saturation_and_value(image, "pen")
    is_colored = np.logical_or.reduce([(hue >= low) & (hue <= high) for low, high in PEN_HUE_RANGES])
    is_black = (value < 0.15) & (saturation < 0.5)
    return _remove_small_components((is_colored & (saturation >= 0.45) & (value >= 0.1)) | is_black)


def _detect_outside_tissue(image: NDArray[Any]) -> Mask:
    """Return a mask of the pixels with low saturation, which show no stained tissue."""
    _, saturation, _ = _convert_to_hue_saturation_and_value(image, "tissue")
    if saturation.max() < MIN_STAIN_SATURATION or saturation.min() == saturation.max():
        raise UndefinedError(
            f"no tissue: the image has almost no color, its highest saturation is {saturation.max():.2f}"
        )
    return np.asarray(saturation <= compute_otsu_threshold(saturation))


def _convert_to_hue_saturation_and_value(
    image: NDArray[Any], region_name: str
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the hue, saturation and value of a color image, each in 0..1. Pixels of the image may be in 0..1 or 0..255."""
    if not _is_color_image(image):
        raise UndefinedError(f"no {region_name}: the image has no colors")
    values = np.asarray(image, np.float64)
    rgb = np.clip(values / (255 if values.max() > 1 else 1), 0, 1)
    hsv = require("skimage.color", extra="audit").rgb2hsv(rgb)
    return hsv[..., 0], hsv[..., 1], hsv[..., 2]


def _remove_small_components(mask: Mask) -> Mask:
    """Remove the small connected components of a mask."""
    labels, count = require("scipy.ndimage", extra="audit").label(mask, np.ones((3, 3)))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    is_large = sizes >= max(MIN_MARKER_PIXELS, MIN_COLORED_FRACTION * mask.size)
    is_large[0] = False
    return np.asarray(is_large[labels], np.bool_)


def _is_color_image(image: NDArray[Any]) -> bool:
    return image.ndim == 3 and image.shape[-1] == 3


def _to_gray_values(image: NDArray[Any]) -> FloatArray:
    """Convert an image to gray values (*S). Raise an UndefinedError if all pixels have the same value."""
    values = np.asarray(image, np.float64)
    values = values.mean(-1) if _is_color_image(image) else values
    if values.min() == values.max():
        raise UndefinedError("all pixels of the image have the same value")
    return values


def select_largest_component(mask: Mask) -> Mask:
    """Return the largest connected component of a mask. Diagonal neighbors are connected."""
    labels, count = require("scipy.ndimage", extra="audit").label(mask, np.ones((3,) * mask.ndim))
    return mask if count < 2 else np.asarray(labels == 1 + np.bincount(labels.ravel())[1:].argmax())


def _fill_holes(mask: Mask) -> Mask:
    """Fill the holes of a mask. In a volume, each slice is filled separately."""
    fill = require("scipy.ndimage", extra="audit").binary_fill_holes
    return np.stack([fill(slice_mask) for slice_mask in mask]) if mask.ndim == 3 else np.asarray(fill(mask), np.bool_)


REGIONS: Final[Mapping[str, Region]] = MappingProxyType(
    {
        name: Region(name, phrase, description, detect)
        for name, phrase, description, detect in (
            ("border", "the image border", "within 5 % of an edge", _detect_border),
            ("corners", "the image corners", "within a fifth of the sides from a corner", _detect_corners),
            ("padding", "the blank edges of the image", "an outermost row or column of one value", _detect_padding),
            (
                "outside-body",
                "the area outside the body",
                "outside the largest part above Otsu's threshold",
                _detect_outside_body,
            ),
            (
                "outside-body-ct",
                "the area outside the body",
                "outside the largest part above -500 HU",
                _detect_outside_body_ct,
            ),
            (
                "outside-field",
                "the area outside the scanner's field",
                "below -1100 HU, outside the scanner's field",
                _detect_outside_scanner_field,
            ),
            ("background", "the background", "outside the foreground", _detect_background),
            ("shell", "the outer edge of the anatomy", "along the edge of the foreground", _detect_foreground_shell),
            (
                "aperture",
                "the area outside the round field of view",
                "outside the round field",
                _detect_outside_aperture,
            ),
            (
                "rim",
                "the rim of the round field of view",
                "along the edge of the round field",
                _detect_ring_along_aperture_edge,
            ),
            (
                "saturated",
                "burned-in text or markers",
                "a small, hard-edged part at the maximum",
                _detect_saturated_markers,
            ),
            ("ink", "ink marks on the skin", "purple ink", _detect_purple_skin_ink),
            ("pen", "pen marks", "green, blue or black pen", _detect_pen),
            ("outside-tissue", "the glass without tissue", "glass without tissue", _detect_outside_tissue),
        )
    }
)
REGION_PRESETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "xray": ("border", "corners", "padding", "outside-body", "saturated"),
        "ct": ("border", "padding", "outside-field", "outside-body-ct"),
        "mri": ("border", "padding", "background", "shell"),
        "dermoscopy": ("border", "corners", "aperture", "rim", "ink"),
        "retina": ("border", "aperture", "rim"),
        "pathology": ("border", "outside-tissue", "pen"),
        "any": ("border", "corners", "padding", "saturated"),
    }
)
