"""Overlay a map's colors on an image, and hatch what the map does not cover."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from camscope.errors import GeometryError, InputError
from camscope.render.colormap import DIVERGING, colorize, get_colormap_minimum
from camscope.render.rgb_image import (
    BACKGROUND_COLOR,
    RGBImage,
    Values,
    check_fraction,
    check_map_values,
    check_rgb_image,
    choose_line_width,
)

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
    """Draw the colors of a map over an image.

    Args:
        image: (H,W,3) uint8 RGB.
        values: (H,W) in 0..1, or in -1..1 with `colormap="diverging"`.
        alpha: Opacity of the strongest value. 0 returns a copy of the image.
        colormap: One of COLORMAPS.
        alpha_by_value: Whether weaker values are more transparent, and zero leaves the image unchanged. Otherwise all
            values have the same opacity.
        covered: (H,W), False where the map has no values. That part is drawn gray, dim and hatched.

    Returns:
        The overlay (H,W,3) uint8 RGB.

    Raises:
        InputError, NonFiniteError, GeometryError: If the arrays are invalid or do not match.

    >>> overlay(np.zeros((2, 2, 3), np.uint8), np.ones((2, 2)), alpha=0.0).shape
    (2, 2, 3)

    """
    numbers = check_map_values(np.asarray(values), image=check_rgb_image(image))
    if check_fraction("alpha", alpha) == 0:
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


def fade_to_gray(image: RGBImage) -> RGBImage:
    """Convert an image (H,W,3) to light grays of less than half its contrast, on which red and blue stand out."""
    import cv2

    gray_table = np.rint(255 - PALE_CONTRAST * (255 - np.arange(256))).astype(np.uint8)
    faded: RGBImage = gray_table[cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)][..., None].repeat(3, axis=2)
    return faded


def hatch_uncovered(image: RGBImage, covered: NDArray[np.bool_]) -> RGBImage:
    """Draw what no map covers gray, dim and hatched behind a thin line. The covered part (H,W) of the image stays unchanged.

    The line lies outside the covered part and hides nothing in it. Raises InputError or GeometryError as `overlay` does.
    """
    import cv2

    check_rgb_image(image)
    if covered.dtype != np.bool_:
        raise InputError(f"covered is {covered.dtype}; expected bool, True where the map has values")
    if covered.shape != image.shape[:2]:
        raise GeometryError(f"covered is {covered.shape} and the image {image.shape[:2]}; expected the same size")
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
    """Return the opacity of values: 0 at 0, 1 at the ends.

    It rises early, so that weak evidence is visible on a bright photo. With the diverging colormap it rises linearly:
    weak values are white there, and would cover the photo like fog.
    """
    strength = np.minimum(np.abs(np.clip(values, get_colormap_minimum(colormap), None)), 1)
    return strength if colormap == DIVERGING else 1 - (1 - strength) ** 2
