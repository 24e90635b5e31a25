"""Detectors of image regions that may hold shortcuts, from pixels alone, and the regions of each modality.

- The surroundings and the rim of a round field of view.
- The outside of the body or of the scanner's field, and the shell of the foreground.
- The border, the corners and the padding of an image.
- Burned-in markers, ink and pen marks, and glass without tissue.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.region_base import (
    BoolArray,
    FloatArray,
    Region,
    RegionDetector,
    fill_holes,
    get_spatial_shape,
    import_scipy_ndimage,
    import_skimage,
    is_color_image,
    select_largest_component,
    to_gray_values,
)
from camscope.errors import InputError, UndefinedError
from camscope.metrics.localization import compute_otsu_threshold

APERTURE_BRIGHTNESS_FRACTION: Final = (
    0.1  # of the way from the darkest to the brightest percentile: the field's own shadows are lighter
)
MAX_ROUNDNESS_ERROR: Final = 0.02  # of the radius: how far the outline may lie from the circle, as a mean
RIM_WIDTH_FRACTION: Final = 0.04  # of the radius
MAX_NOTCH_DISTANCE: Final = (
    0.04  # of the radius: outline farther from the circle than this is a notch's or an eyelash's
)


@dataclass(frozen=True)
class Circle:
    """A circle: center as (row, column) with pixel centers at whole numbers, and radius in pixels."""

    row: float
    column: float
    radius: float

    def signed_distance(self, points: FloatArray) -> FloatArray:
        """How far points (2,...) lie outside; inside negative."""
        away: FloatArray = np.hypot(points[0] - self.row, points[1] - self.column) - self.radius
        return away


def detect_outside_aperture(image: NDArray[Any]) -> BoolArray:
    """Outside the bright circle, which may be cut off by the image's edges."""
    return _find_aperture_circle(image).signed_distance(_build_pixel_coordinates(image)) > 0


def detect_aperture_rim(image: NDArray[Any]) -> BoolArray:
    """The ring along the bright circle's edge, 4 % of its radius to either side: there notches and reflections lie."""
    circle = _find_aperture_circle(image)
    return np.abs(circle.signed_distance(_build_pixel_coordinates(image))) <= RIM_WIDTH_FRACTION * circle.radius


def _build_pixel_coordinates(image: NDArray[Any]) -> FloatArray:
    return np.indices(image.shape[:2]).astype(np.float64)


def _find_aperture_circle(image: NDArray[Any]) -> Circle:
    """The circle along the edge of the bright part; UndefinedError where that is not round, or its corners not dark."""
    values = to_gray_values(image)
    if values.ndim == 3:
        raise UndefinedError("no aperture: a volume has none")
    dark, bright = np.percentile(values, [1, 99])
    field = fill_holes(select_largest_component(values > dark + APERTURE_BRIGHTNESS_FRACTION * (bright - dark)))
    if min(field.shape) < 2 or field[:: field.shape[0] - 1, :: field.shape[1] - 1].any():
        raise UndefinedError("no aperture: not all corners of the image are dark")
    outline = _trace_outline(field)
    circle = _fit_circle(outline)
    for _ in range(3):  # without what a notch or a label adds to the outline
        near = np.abs(circle.signed_distance(outline.T)) <= MAX_NOTCH_DISTANCE * circle.radius
        if near.sum() >= len(outline) / 2:
            circle = _fit_circle(outline[near])
    off = np.abs(circle.signed_distance(outline.T))
    if np.median(off) > MAX_ROUNDNESS_ERROR * circle.radius:
        raise UndefinedError(
            f"no aperture: the bright part is not round ({np.median(off) / circle.radius:.0%} of the radius off a circle)"
        )
    return circle


def _trace_outline(field_mask: BoolArray) -> FloatArray:
    """(M,2): points halfway between the pixels inside and those outside, without what the image's edges cut off."""
    lines = import_skimage("measure").find_contours(field_mask.astype(np.float64), 0.5)
    points = np.concatenate(lines) if lines else np.empty((0, 2))
    if len(points) < 8:
        raise UndefinedError("no aperture: the bright part has no outline")
    return np.asarray(points, np.float64)


def _fit_circle(points: FloatArray) -> Circle:
    """The circle of the least squares of |p|² - 2 c·p - (r² - |c|²) over all points p (Kåsa 1976)."""
    middle = points.mean(0)
    centered = points - middle
    solution, *_ = np.linalg.lstsq(
        np.column_stack([2 * centered, np.ones(len(centered))]), (centered**2).sum(1), rcond=None
    )
    row, column, offset = solution.tolist()
    return Circle(row + middle[0], column + middle[1], float(np.sqrt(max(offset + row**2 + column**2, 1e-12))))


MIN_BODY_FRACTION: Final = 0.05  # of the image: a smaller part is no body
SKIN_THRESHOLD_HU: Final = -500.0  # HU, between air and fat
SCANNER_FIELD_THRESHOLD_HU: Final = -1100.0  # HU: noise may bring air to it, what is padded lies below
MIN_ZERO_FRACTION: Final = 0.05  # of an image: so many exact zeros are a background that was cut away
SHELL_WIDTH_FRACTION: Final = 0.03  # of the mean side


def detect_outside_body(image: NDArray[Any]) -> BoolArray:
    """All but the largest part above Otsu's threshold and its holes."""
    values = to_gray_values(image)
    return ~_segment_body(values > compute_otsu_threshold(values))


def detect_outside_body_ct(image: NDArray[Any]) -> BoolArray:
    """All but the largest part above -500 HU and its holes."""
    _check_hounsfield(image)
    return ~_segment_body(image > SKIN_THRESHOLD_HU)


def detect_outside_scanner_field(image: NDArray[Any]) -> BoolArray:
    """Below -1100 HU: the value that a scanner writes outside of what it saw."""
    _check_hounsfield(image)
    outside: BoolArray = image < SCANNER_FIELD_THRESHOLD_HU
    return outside


def detect_background(image: NDArray[Any]) -> BoolArray:
    """All but the foreground: what is not exactly zero, or above Otsu's threshold where nothing was cut away."""
    return ~_segment_foreground(image)


def detect_foreground_shell(image: NDArray[Any]) -> BoolArray:
    """Pixels or voxels up to 3 % of a side from the edge of the foreground, inside and outside."""
    inside = _segment_foreground(image)
    if inside.all():
        raise UndefinedError("no shell: the foreground fills the image")
    max_distance, ndimage = max(1.0, SHELL_WIDTH_FRACTION * float(np.mean(inside.shape))), import_scipy_ndimage()
    shell: BoolArray = ndimage.distance_transform_edt(inside) + ndimage.distance_transform_edt(~inside) <= max_distance
    return shell


def _segment_foreground(image: NDArray[Any]) -> BoolArray:
    values = to_gray_values(image)
    zero = values == 0
    return _segment_body(
        ~zero if zero.mean() >= MIN_ZERO_FRACTION and values.min() == 0 else values > compute_otsu_threshold(values)
    )


def _segment_body(bright_mask: BoolArray) -> BoolArray:
    body = fill_holes(select_largest_component(bright_mask))
    if body.mean() < MIN_BODY_FRACTION:
        raise UndefinedError(f"no body: the largest bright part covers {body.mean():.1%} of the image")
    return body


def _check_hounsfield(image: NDArray[Any]) -> None:
    """Gray levels are no HU, and every one of them is above -500."""
    if is_color_image(image) or image.min() > SKIN_THRESHOLD_HU:
        raise UndefinedError(
            f"no air: the least value is {image.min():g}, and a CT in HU has some below {SKIN_THRESHOLD_HU:g}"
        )


BORDER_WIDTH_FRACTION: Final = 0.05  # of each side
CORNER_SIDE_FRACTION: Final = 0.2
FLAT_RANGE_FRACTION: Final = 0.01  # of the image's range: compression ripples what was one value


def detect_border(image: NDArray[Any]) -> BoolArray:
    """The outermost 5 % of each side, a pixel at least."""
    return ~_combine_axis_masks(
        [(i >= width) & (i < n - width) for i, n, width in _list_axis_positions(image, BORDER_WIDTH_FRACTION)]
    )


def detect_corners(image: NDArray[Any]) -> BoolArray:
    """The squares at the corners, a fifth of each side; of a volume the cubes."""
    return _combine_axis_masks(
        [(i < width) | (i >= n - width) for i, n, width in _list_axis_positions(image, CORNER_SIDE_FRACTION)]
    )


def detect_padding(image: NDArray[Any]) -> BoolArray:
    """The outermost rows and columns, as far as each has one value; of a volume the slices."""
    values = to_gray_values(image)
    flat, box = FLAT_RANGE_FRACTION * (values.max() - values.min()), [[0, n] for n in values.shape]
    while _shrink_box(values, box, flat):
        pass
    inside = tuple(slice(*ends) for ends in box)
    padding = np.ones(values.shape, np.bool_)
    padding[inside] = False
    if not padding.any():
        raise UndefinedError("no padding: the outermost rows and columns are not constant")
    return padding


def _list_axis_positions(image: NDArray[Any], fraction: float) -> list[tuple[NDArray[np.int64], int, int]]:
    """Of each axis its places, its length and this share of it in pixels."""
    return [(np.arange(n), n, max(1, round(n * fraction))) for n in get_spatial_shape(image)]


def _combine_axis_masks(axis_masks: list[BoolArray]) -> BoolArray:
    """(*S): where all axes agree."""
    combined = np.ones((), np.bool_)
    for axis, along in enumerate(axis_masks):
        combined = combined & along.reshape(-1, *[1] * (len(axis_masks) - 1 - axis))
    return np.asarray(combined, np.bool_)


def _shrink_box(values: FloatArray, box: list[list[int]], max_value_range: float) -> bool:
    """Whether an edge of the box was one value, and is now outside of it; an image of one value has nothing left."""
    for axis, ends in enumerate(box):
        for end, step in ((0, 1), (1, -1)):
            if ends[1] - ends[0] < 2:
                continue
            edge = [slice(*other) for other in box]
            at = ends[end] if end == 0 else ends[end] - 1
            edge[axis] = slice(at, at + 1)
            part = values[tuple(edge)]
            if part.max() - part.min() <= max_value_range:
                ends[end] += step
                return True
    return False


SATURATION_TOLERANCE: Final = 0.02  # of the image's range: how far below its maximum a pixel is still saturated
MAX_MARKER_FRACTION: Final = 0.01  # of the image
MIN_MARKER_PIXELS: Final = 4  # smaller parts are noise
MIN_EDGE_STEP: Final = 0.25  # of the image's range: the smallest step at a marker's edge; organs have soft edges
INK_HUE_RANGE: Final = (0.69, 0.87)  # hues of gentian violet, in turns
PEN_HUE_RANGES: Final = ((0.22, 0.50), (0.50, 0.63))  # green and blue; red is also that of blood
MIN_INK_SATURATION: Final = 0.25
MIN_COLORED_FRACTION: Final = 0.0005  # of the image: fewer colored pixels are noise
MIN_STAIN_SATURATION: Final = 0.04  # saturation: a slide without anything more colorful shows no stain


def detect_saturated_markers(image: NDArray[Any]) -> BoolArray:
    """Small parts at the image's maximum with a hard edge: letters, markers, clips."""
    values = to_gray_values(image)
    span = values.max() - values.min()
    bright = values >= values.max() - SATURATION_TOLERANCE * span
    labels, count = import_scipy_ndimage().label(bright, np.ones((3,) * values.ndim))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    ring = np.where(bright, 0, import_skimage("segmentation").expand_labels(labels, 2))
    around = np.bincount(ring.ravel(), values.ravel(), count + 1)
    edges = np.bincount(ring.ravel(), minlength=count + 1)
    level = np.where(edges > 0, around / np.maximum(edges, 1), np.inf)
    fits = (
        (sizes >= MIN_MARKER_PIXELS)
        & (sizes <= max(MIN_MARKER_PIXELS, MAX_MARKER_FRACTION * values.size))
        & (level <= values.max() - MIN_EDGE_STEP * span)
    )
    fits[0] = False
    return np.asarray(fits[labels], np.bool_)


def detect_ink(image: NDArray[Any]) -> BoolArray:
    """Purple and vivid: a surgeon's marker on skin."""
    hue, vivid, light = _convert_to_hsv(image, "ink")
    return _drop_traces(
        (hue >= INK_HUE_RANGE[0])
        & (hue <= INK_HUE_RANGE[1])
        & (vivid >= MIN_INK_SATURATION)
        & (light >= 0.15)
        & (light <= 0.95)
    )


def detect_pen(image: NDArray[Any]) -> BoolArray:
    """Green or blue and vivid, or black: a pathologist's marker on glass."""
    hue, vivid, light = _convert_to_hsv(image, "pen")
    is_colored = np.logical_or.reduce([(hue >= low) & (hue <= high) for low, high in PEN_HUE_RANGES])
    return _drop_traces((is_colored & (vivid >= 0.45) & (light >= 0.1)) | ((light < 0.15) & (vivid < 0.5)))


def detect_outside_tissue(image: NDArray[Any]) -> BoolArray:
    """Not more colorful than Otsu's threshold of the saturation: glass."""
    _, vivid, _ = _convert_to_hsv(image, "tissue")
    if vivid.max() < MIN_STAIN_SATURATION or vivid.min() == vivid.max():
        raise UndefinedError(f"no tissue: nothing in the image has a color (saturation up to {vivid.max():.2f})")
    glass: BoolArray = vivid <= compute_otsu_threshold(vivid)
    return glass


def _convert_to_hsv(image: NDArray[Any], region_name: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Hue in turns, saturation and value, 0..1; floats that reach over 1 are read as 0..255."""
    if not is_color_image(image):
        raise UndefinedError(f"no {region_name}: the image has no colors")
    values = np.asarray(image, np.float64)
    hsv = import_skimage("color").rgb2hsv(np.clip(values / (255 if values.max() > 1 else 1), 0, 1))
    return hsv[..., 0], hsv[..., 1], hsv[..., 2]


def _drop_traces(mask: BoolArray) -> BoolArray:
    """The parts of more than a speck, or nothing where all of them are traces."""
    labels, count = import_scipy_ndimage().label(mask, np.ones((3, 3)))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    is_large = sizes >= max(MIN_MARKER_PIXELS, MIN_COLORED_FRACTION * mask.size)
    is_large[0] = False
    return np.asarray(is_large[labels], np.bool_)


_REGION_DEFINITIONS: Final[tuple[tuple[str, str, RegionDetector], ...]] = (
    ("border", "within 5 % of an edge", detect_border),
    ("corners", "within a fifth of the sides from a corner", detect_corners),
    ("padding", "an outermost row or column of one value", detect_padding),
    ("saturated", "a small, hard-edged part at the maximum", detect_saturated_markers),
    ("outside-body", "outside the largest part above Otsu's threshold", detect_outside_body),
    ("outside-body-ct", "outside the largest part above -500 HU", detect_outside_body_ct),
    ("outside-field", "below -1100 HU, outside the scanner's field", detect_outside_scanner_field),
    ("background", "outside the foreground", detect_background),
    ("shell", "along the edge of the foreground", detect_foreground_shell),
    ("aperture", "outside the round field", detect_outside_aperture),
    ("rim", "along the edge of the round field", detect_aperture_rim),
    ("ink", "purple ink", detect_ink),
    ("outside-tissue", "glass without tissue", detect_outside_tissue),
    ("pen", "green, blue or black pen", detect_pen),
)

REGIONS: Final[Mapping[str, Region]] = MappingProxyType(
    {name: Region(name, words, find) for name, words, find in _REGION_DEFINITIONS}
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


def get_region(name: str) -> Region:
    """By its name; InputError that lists them for another."""
    if name not in REGIONS:
        raise InputError(f"no region {name!r}; expected one of {', '.join(REGIONS)}")
    return REGIONS[name]
