"""Colour maps: numbers in 0..1, or signed numbers in -1..1, as colours whose lightness follows the number.

Scales: raw numbers of a map as what a colour map takes, 0..1, or -1..1 for a diverging one.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.render.rgb_image import RGBImage, Values, to_finite_float64

DIVERGING = "diverging"
PERCEPTUAL = ("inferno", "magma", "plasma", "viridis", "cividis")
NON_PERCEPTUAL = ("turbo", "jet")
COLORMAPS = (*PERCEPTUAL, DIVERGING, *NON_PERCEPTUAL)

# CIE Lab of -1, 0 and 1. Both ends are equally dark, so neither sign shouts louder.
LAB_BLUE, LAB_WHITE, LAB_RED = (38.0, 14.0, -52.0), (96.0, 0.0, 0.0), (38.0, 58.0, 34.0)


def colorize(values: Values, colormap: str = "inferno") -> RGBImage:
    """(H,W) in 0..1 -> (H,W,3) RGB: 0 has the map's bottom colour, 1 its top colour; what is beyond is clipped.

    `colormap`: one of COLORMAPS. `"diverging"` takes -1..1: blue, white at 0, red. `"turbo"` and `"jet"` are not
    monotonic in lightness: they draw edges where the values have none. InputError for another name.

    >>> colourise(np.array([[0.0, 1.0]])).tolist()
    [[[0, 0, 4], [252, 255, 164]]]
    """
    table, minimum = _load_color_table(colormap), get_colormap_minimum(colormap)
    position = (np.clip(to_finite_float64(values), minimum, 1.0) - minimum) / (1.0 - minimum)
    colors: RGBImage = table.take(np.rint(position * (len(table) - 1)).astype(np.intp), axis=0)
    return colors


def get_colormap_minimum(colormap: str) -> float:
    """The value of a map's bottom colour: -1 for the diverging map, 0 for all others."""
    return -1.0 if colormap == DIVERGING else 0.0


@lru_cache
def _load_color_table(colormap: str) -> RGBImage:
    """(M,3): a map's colours, from the bottom to the top."""
    import cv2

    if colormap == DIVERGING:
        return _build_diverging_table()
    if colormap not in COLORMAPS:
        raise InputError(f"no colour map {colormap!r}; choose from {', '.join(COLORMAPS)}")
    ramp = np.arange(256, dtype=np.uint8)[:, None]
    bgr = cv2.applyColorMap(ramp, getattr(cv2, f"COLORMAP_{colormap.upper()}"))
    return np.ascontiguousarray(bgr[:, 0, ::-1])


def _build_diverging_table() -> RGBImage:
    """(511,3): straight lines in CIE Lab, an odd number of colours so that zero is exactly the middle one."""
    import cv2

    lab: NDArray[np.float32] = np.stack(
        [
            np.interp(np.linspace(-1, 1, 511), [-1, 0, 1], channel)
            for channel in zip(LAB_BLUE, LAB_WHITE, LAB_RED, strict=True)
        ],
        axis=-1,
    ).astype(np.float32)
    rgb = cv2.cvtColor(lab[None], cv2.COLOR_Lab2RGB)[0]
    colors: RGBImage = np.rint(np.clip(rgb, 0, 1) * 255).astype(np.uint8)
    return colors


Scale = Literal["max", "robust", "symmetric"] | tuple[float, float]
ROBUST_QUANTILE = 0.995  # of the pixels are no stronger than the top colour: a few outliers would leave the rest dark
Floats = NDArray[np.floating]


def to_display_range(values: Floats, scale: Scale | None, colormap: str) -> tuple[Floats, tuple[float, float]]:
    """(H,W) -> what a colour map is given, and the raw values at the ends of its bar. No scale: "max".

    "max" divides by the maximum and clips to 0..1; "robust" by what 99.5 % of the values do not exceed in size;
    "symmetric" by the largest size; (lo, hi) maps that range to 0..1. The diverging map is centred on zero in each.
    """
    low, high = compute_display_range(values, scale, colormap)
    return normalize_between(values, low, high, colormap), (low, high)


def compute_display_range(values: Floats, scale: Scale | None, colormap: str) -> tuple[float, float]:
    """The raw values at the ends of a colour bar, as `to_display_range` says: of a volume once, then `normalize_between` slice by slice."""
    scale, signed = scale or "max", colormap == DIVERGING
    low, high = compute_scale_range(values, "symmetric" if signed and scale == "max" else scale)
    return (0.0, high) if not signed and scale in ("robust", "symmetric") else (low, high)


def normalize_between(values: Floats, low: float, high: float, colormap: str) -> Floats:
    """What a colour map is given of raw values whose bar reaches from `low` to `high`."""
    if colormap == DIVERGING:
        return divide_or_zero(values.clip(low, high), max(-low, high))
    return divide_or_zero(values.clip(low, high) - low, high - low)


def apply_scale(values: Floats, scale: Scale) -> Floats:
    """(H,W) -> 0..1, or -1..1 under "symmetric" and "robust"; see `to_display_range`."""
    if scale in ("robust", "symmetric"):
        return to_display_range(values, scale, DIVERGING)[0]
    return to_display_range(values, scale, "")[0]


def compute_scale_range(values: Floats, scale: Scale) -> tuple[float, float]:
    """The raw values between which a scale shows differences."""
    if scale == "max":
        return 0.0, float(values.max(initial=0.0))
    if scale in ("robust", "symmetric"):
        limit = compute_robust_maximum(values) if scale == "robust" else float(abs(values).max(initial=0.0))
        return -limit, limit
    if not isinstance(scale, tuple | list) or len(scale) != 2:
        raise InputError(f"scale={scale!r}: expected 'auto', 'max', 'robust', 'symmetric' or (lo, hi)")
    low, high = map(float, scale)
    if not low < high:
        raise InputError(f"scale={scale}: expected (lo, hi) with lo < hi")
    return low, high


def divide_or_zero(values: Floats, span: float) -> Floats:
    """Zeros by a span of zero."""
    return values / span if span > 0 else np.zeros_like(values)


def compute_robust_maximum(values: Floats) -> float:
    """The size that 99.5 % of the values do not exceed; where that is zero, the largest."""
    size = float(np.quantile(abs(values), ROBUST_QUANTILE)) if values.size else 0.0
    return size if size > 0 else float(abs(values).max(initial=0.0))
