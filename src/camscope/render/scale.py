"""Scales: raw numbers of a map as what a colour map takes, 0..1, or -1..1 for a diverging one."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.render.colour import DIVERGING

Scale = Literal["max", "robust", "symmetric"] | tuple[float, float]
ROBUST = 0.995  # of the pixels are no stronger than the top colour: a few outliers would leave the rest dark
Floats = NDArray[np.floating]


def shown(values: Floats, scale: Scale | None, colormap: str) -> tuple[Floats, tuple[float, float]]:
    """(H,W) -> what a colour map is given, and the raw values at the ends of its bar. No scale: "max".

    "max" divides by the maximum and clips to 0..1; "robust" by what 99.5 % of the values do not exceed in size;
    "symmetric" by the largest size; (lo, hi) maps that range to 0..1. The diverging map is centred on zero in each.
    """
    low, high = shown_ends(values, scale, colormap)
    return between(values, low, high, colormap), (low, high)


def shown_ends(values: Floats, scale: Scale | None, colormap: str) -> tuple[float, float]:
    """The raw values at the ends of a colour bar, as `shown` says: of a volume once, then `between` slice by slice."""
    scale, signed = scale or "max", colormap == DIVERGING
    low, high = ends(values, "symmetric" if signed and scale == "max" else scale)
    return (0.0, high) if not signed and scale in ("robust", "symmetric") else (low, high)


def between(values: Floats, low: float, high: float, colormap: str) -> Floats:
    """What a colour map is given of raw values whose bar reaches from `low` to `high`."""
    if colormap == DIVERGING:
        return divided(values.clip(low, high), max(-low, high))
    return divided(values.clip(low, high) - low, high - low)


def scaled(values: Floats, scale: Scale) -> Floats:
    """(H,W) -> 0..1, or -1..1 under "symmetric" and "robust"; see `shown`."""
    if scale in ("robust", "symmetric"):
        return shown(values, scale, DIVERGING)[0]
    return shown(values, scale, "")[0]


def ends(values: Floats, scale: Scale) -> tuple[float, float]:
    """The raw values between which a scale shows differences."""
    if scale == "max":
        return 0.0, float(values.max(initial=0.0))
    if scale in ("robust", "symmetric"):
        top = strong(values) if scale == "robust" else float(abs(values).max(initial=0.0))
        return -top, top
    if not isinstance(scale, tuple | list) or len(scale) != 2:
        raise InputError(f"scale={scale!r}: expected 'auto', 'max', 'robust', 'symmetric' or (lo, hi)")
    low, high = map(float, scale)
    if not low < high:
        raise InputError(f"scale={scale}: expected (lo, hi) with lo < hi")
    return low, high


def divided(values: Floats, span: float) -> Floats:
    """Zeros by a span of zero."""
    return values / span if span > 0 else np.zeros_like(values)


def strong(values: Floats) -> float:
    """The size that 99.5 % of the values do not exceed; where that is zero, the largest."""
    size = float(np.quantile(abs(values), ROBUST)) if values.size else 0.0
    return size if size > 0 else float(abs(values).max(initial=0.0))
