"""Color maps: scale their values, apply a colormap, overlay them on images, and hatch the parts without values."""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from camscope.errors import GeometryError, InputError
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    RGBImage,
    Values,
    choose_line_width,
    require_finite_map,
    require_fraction,
    require_rgb_image,
    to_finite_float64,
)

DIVERGING = "diverging"
PERCEPTUAL = ("inferno", "magma", "plasma", "viridis", "cividis")
NON_PERCEPTUAL = ("turbo", "jet")
COLORMAPS = (*PERCEPTUAL, DIVERGING, *NON_PERCEPTUAL)

# CIE Lab of -1, 0 and 1. Both ends are equally dark, so that neither sign dominates.
LAB_BLUE, LAB_WHITE, LAB_RED = (38.0, 14.0, -52.0), (96.0, 0.0, 0.0), (38.0, 58.0, 34.0)


def colorize(values: Values, colormap: str = "inferno") -> RGBImage:
    """Convert a map (H,W) in 0..1 to RGB colors (H,W,3). Values outside of this range are clipped.

    Args:
        values: The map. For "diverging" it is in -1..1, from blue over white at 0 to red.
        colormap: One of COLORMAPS. "turbo" and "jet" are not monotonic in lightness and show edges that are not in the
            values.

    Returns:
        (H,W,3) uint8 RGB.

    Raises:
        InputError: If the colormap is unknown.

    >>> colorize(np.array([[0.0, 1.0]])).tolist()
    [[[0, 0, 4], [252, 255, 164]]]

    """
    table, minimum = _load_color_table(colormap), get_colormap_minimum(colormap)
    position = (np.clip(to_finite_float64(values), minimum, 1.0) - minimum) / (1.0 - minimum)
    colors: RGBImage = table.take(np.rint(position * (len(table) - 1)).astype(np.intp), axis=0)
    return colors


def get_colormap_minimum(colormap: str) -> float:
    """Return the map value to which a colormap gives its first color: -1 for the diverging colormap, 0 for all others."""
    return -1.0 if colormap == DIVERGING else 0.0


@lru_cache
def _load_color_table(colormap: str) -> RGBImage:
    """Return the colors (M,3) of a colormap, in the order from the lowest to the highest value."""
    import cv2

    if colormap == DIVERGING:  # linear in CIE Lab; the odd number makes zero the exact middle
        ends = zip(LAB_BLUE, LAB_WHITE, LAB_RED, strict=True)
        lab = np.stack([np.interp(np.linspace(-1, 1, 511), [-1, 0, 1], channel) for channel in ends], axis=-1)
        rgb = cv2.cvtColor(lab[None].astype(np.float32), cv2.COLOR_Lab2RGB)[0]
        return np.asarray(np.rint(np.clip(rgb, 0, 1) * 255), np.uint8)
    if colormap not in COLORMAPS:
        raise InputError(f"there is no colormap {colormap!r}; choose from {', '.join(COLORMAPS)}")
    ramp = np.arange(256, dtype=np.uint8)[:, None]
    bgr = cv2.applyColorMap(ramp, getattr(cv2, f"COLORMAP_{colormap.upper()}"))
    return np.ascontiguousarray(bgr[:, 0, ::-1])


Scale = Literal["max", "robust", "symmetric"] | tuple[float, float]
ROBUST_QUANTILE = 0.995  # quantile of the top color: a few outliers would leave the other pixels dark
Floats = NDArray[np.floating]


class ScaledMap(NamedTuple):
    """Map values scaled to the range of a colormap, and the lowest and highest raw value of its color bar.

    Args:
        values: The scaled values (H,W).
        value_range: The lowest and the highest raw value.

    >>> ScaledMap(np.zeros((2, 2)), (0.0, 3.5)).value_range
    (0.0, 3.5)

    """

    values: Floats
    value_range: tuple[float, float]


def to_display_range(values: Floats, scale: Scale | None, colormap: str) -> ScaledMap:
    """Scale a map (H,W) to the range of a colormap: -1..1 for the diverging colormap, 0..1 for all others.

    Args:
        values: (H,W), or any other shape.
        scale: "max" (the default, also for None) divides by the maximum and clips to 0..1. "robust" divides by the 99.5
            % quantile of the magnitudes, "symmetric" by the largest magnitude. (lo, hi) maps that range to 0..1.
        colormap: One of COLORMAPS. The diverging colormap is centered on zero in each case.

    Returns:
        The scaled values, and the raw values (low, high) of the color bar.

    Raises:
        InputError: The scale is unknown.

    >>> scaled, ends = to_display_range(np.array([-1.0, 4.0]), "max", "diverging")
    >>> scaled.tolist(), ends
    ([-0.25, 1.0], (-4.0, 4.0))

    """
    low, high = compute_display_range(values, scale, colormap)
    return ScaledMap(normalize_between(values, low, high, colormap), (low, high))


def compute_display_range(values: Floats, scale: Scale | None, colormap: str) -> tuple[float, float]:
    """Return the raw values at the two ends of the color bar. `scale` is as in `to_display_range`."""
    scale, signed = scale or "max", colormap == DIVERGING
    low, high = compute_clipping_range(values, "symmetric" if signed and scale == "max" else scale)
    return (0.0, high) if not signed and scale in ("robust", "symmetric") else (low, high)


def normalize_between(values: Floats, low: float, high: float, colormap: str) -> Floats:
    """Scale raw values to the range of a colormap. `low` and `high` get the colors at the ends of the color bar."""
    center, span = (0.0, max(-low, high)) if colormap == DIVERGING else (low, high - low)
    return (values.clip(low, high) - center) / span if span > 0 else np.zeros_like(values)


def apply_scale(values: Floats, scale: Scale) -> Floats:
    """Scale a map (H,W) to 0..1, or to -1..1 for "symmetric" and "robust". `scale` is as in `to_display_range`.

    Args:
        values: (H,W), or any other shape.
        scale: As in `to_display_range`.

    Returns:
        The scaled values, of the same shape.

    Raises:
        InputError: The scale is unknown.

    >>> apply_scale(np.array([-1.0, 2.0, 4.0]), "max").tolist()
    [0.0, 0.5, 1.0]

    """
    if scale in ("robust", "symmetric"):
        return to_display_range(values, scale, DIVERGING)[0]
    return to_display_range(values, scale, "")[0]


def compute_clipping_range(values: Floats, scale: Scale) -> tuple[float, float]:
    """Return the lowest and the highest raw value that a scale shows without clipping."""
    if scale == "max":
        return 0.0, float(values.max(initial=0.0))
    if scale in ("robust", "symmetric"):
        robust = float(np.quantile(abs(values), ROBUST_QUANTILE)) if scale == "robust" and values.size else 0.0
        limit = robust or float(abs(values).max(initial=0.0))
        return -limit, limit
    if not isinstance(scale, tuple | list) or len(scale) != 2:
        raise InputError(f"scale={scale!r}: expected 'auto', 'max', 'robust', 'symmetric' or (lo, hi)")
    low, high = map(float, scale)
    if not low < high:
        raise InputError(f"scale={scale}: expected (lo, hi) with lo < hi")
    return low, high


# Uncovered pixels: lightness times contrast plus brightness, neither black nor white; stripes are lighter.
UNCOVERED_CONTRAST, UNCOVERED_BRIGHTNESS, HATCH_BRIGHTNESS = 0.30, 38.0, 30.0
# Share of the contrast that is kept under a signed map.
PALE_CONTRAST = 0.45
# Rows blended at a time: a large photo needs little more memory than the result.
ROWS_PER_BAND = 256


def overlay(
    image: RGBImage,
    values: Values,
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    alpha_by_value: bool = True,
    covered: NDArray[np.bool_] | None = None,
) -> RGBImage:
    """Draw a map in colors over an image.

    Args:
        image: (H,W,3) uint8 RGB.
        values: (H,W) in 0..1, or in -1..1 with `colormap="diverging"`.
        alpha: Opacity of the strongest value. 0 returns a copy of the image.
        colormap: One of COLORMAPS.
        alpha_by_value: Whether weaker values are more transparent, so that zero leaves the image unchanged. Otherwise all
            values have the same opacity.
        covered: (H,W), False where the map has no values. There the image is drawn gray, dim and hatched.

    Returns:
        The overlay (H,W,3) uint8 RGB.

    Raises:
        InputError, NonFiniteError, GeometryError: If the arrays are invalid or do not match.

    >>> overlay(np.zeros((2, 2, 3), np.uint8), np.ones((2, 2)), alpha=0.0).shape
    (2, 2, 3)

    """
    numbers = require_finite_map(np.asarray(values), image=require_rgb_image(image))
    if require_fraction("alpha", alpha) == 0:
        return image.copy()
    out = image.copy() if covered is None else hatch_uncovered(image, covered)
    for top in range(0, len(out), ROWS_PER_BAND):
        rows = np.s_[top : top + ROWS_PER_BAND]
        band = numbers[rows].astype(np.float64)
        opacity = alpha * _compute_opacity(band, colormap) if alpha_by_value else np.full_like(band, alpha)
        if covered is not None:
            opacity *= covered[rows]
        blended = np.subtract(colorize(band, colormap), out[rows], dtype=np.float32)
        blended *= opacity.astype(np.float32)[..., None]
        blended += out[rows]
        out[rows] = np.rint(blended, out=blended).astype(np.uint8)
    return out


def draw_map_layer(
    values: Values, *, alpha: float = 0.85, colormap: str = "inferno", covered: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """Draw a map as colors with an opacity, without an image. Over an image, it looks like `overlay`.

    Args:
        values: (H,W) in 0..1, or in -1..1 with `colormap="diverging"`.
        alpha: Opacity of the strongest value.
        colormap: One of COLORMAPS.
        covered: (H,W), False where the map has no values. There it is transparent.

    Returns:
        (H,W,4) uint8, red, green, blue and opacity.

    Raises:
        InputError, NonFiniteError: The map is invalid.

    >>> draw_map_layer(np.array([[0.0, 1.0]]), alpha=1.0)[..., 3].tolist()
    [[0, 255]]

    """
    numbers = to_finite_float64(values)
    opacity = require_fraction("alpha", alpha) * _compute_opacity(numbers, colormap)
    if covered is not None:
        opacity = opacity * covered
    return np.dstack([colorize(numbers, colormap), np.rint(255 * opacity).astype(np.uint8)])


def fade_to_gray(image: RGBImage) -> RGBImage:
    """Convert an image (H,W,3) to light gray with low contrast. A red and blue map is then easy to see on it.

    Args:
        image: (H,W,3) uint8 RGB.

    Returns:
        (H,W,3) uint8, with equal channels.

    >>> fade_to_gray(np.zeros((1, 1, 3), np.uint8)).tolist()
    [[[140, 140, 140]]]

    """
    import cv2

    gray_table = np.rint(255 - PALE_CONTRAST * (255 - np.arange(256))).astype(np.uint8)
    faded: RGBImage = gray_table[cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)][..., None].repeat(3, axis=2)
    return faded


def hatch_uncovered(image: RGBImage, covered: NDArray[np.bool_]) -> RGBImage:
    """Draw the pixels where `covered` (H,W) is False in dim gray with hatching. Leave all other pixels unchanged.

    A thin line separates both parts. It hides no covered pixel.

    Args:
        image: (H,W,3) uint8 RGB.
        covered: (H,W) bool, False where the map has no values.

    Returns:
        (H,W,3) uint8.

    Raises:
        InputError: The mask is not bool, or the image is no RGB image.
        GeometryError: The mask has another size.

    >>> image = np.full((8, 8, 3), 200, np.uint8)
    >>> bool((hatch_uncovered(image, np.ones((8, 8), bool)) == image).all())
    True

    """
    import cv2

    require_rgb_image(image)
    if covered.dtype != np.bool_:
        raise InputError(f"the mask covered is {covered.dtype}; expected bool, with True where the map has values")
    if covered.shape != image.shape[:2]:
        raise GeometryError(
            f"the mask covered is {covered.shape} and the image is {image.shape[:2]}; expected the same size"
        )
    width = choose_line_width(image)
    diagonal = np.arange(sum(image.shape[:2])) // width % 10 == 0
    stripes = sliding_window_view(diagonal.astype(np.uint8), image.shape[1])[: image.shape[0]]
    gray = cv2.addWeighted(
        cv2.cvtColor(image, cv2.COLOR_RGB2GRAY),
        UNCOVERED_CONTRAST,
        np.ascontiguousarray(stripes),
        HATCH_BRIGHTNESS,
        UNCOVERED_BRIGHTNESS,
    )
    dim: RGBImage = np.asarray(cv2.cvtColor(gray, cv2.COLOR_GRAY2RGB), np.uint8)
    dilated = cv2.dilate(covered.astype(np.uint8), np.ones((2 * width + 1, 2 * width + 1), np.uint8))
    dim[(dilated > 0) & ~covered] = BACKGROUND_COLOR
    cv2.copyTo(image, covered.astype(np.uint8), dim)
    return dim


def _compute_opacity(values: NDArray[np.float64], colormap: str) -> NDArray[np.float64]:
    """Return how opaque each map value in 0..1 is drawn.

    It is linear for the diverging colormap, whose weak values are white. Otherwise it rises early, to be visible on a
    bright photo.
    """
    strength = np.minimum(np.abs(np.clip(values, get_colormap_minimum(colormap), None)), 1)
    return strength if colormap == DIVERGING else 1 - (1 - strength) ** 2
