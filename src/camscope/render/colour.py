"""Colour maps: numbers in 0..1, or signed numbers in -1..1, as colours whose lightness follows the number."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.render.picture import Picture, Values, checked_values

DIVERGING = "diverging"
PERCEPTUAL = ("inferno", "magma", "plasma", "viridis", "cividis")
BY_NAME_ONLY = ("turbo", "jet")
COLORMAPS = (*PERCEPTUAL, DIVERGING, *BY_NAME_ONLY)

# CIE Lab of -1, 0 and 1. Both ends are equally dark, so neither sign shouts louder.
BLUE, WHITE, RED = (38.0, 14.0, -52.0), (96.0, 0.0, 0.0), (38.0, 58.0, 34.0)


def colourise(values: Values, colormap: str = "inferno") -> Picture:
    """(H,W) in 0..1 -> (H,W,3) RGB: 0 has the map's bottom colour, 1 its top colour; what is beyond is clipped.

    `colormap`: one of COLORMAPS. `"diverging"` takes -1..1: blue, white at 0, red. `"turbo"` and `"jet"` are not
    monotonic in lightness: they draw edges where the values have none. InputError for another name.

    >>> colourise(np.array([[0.0, 1.0]])).tolist()
    [[[0, 0, 4], [252, 255, 164]]]
    """
    table, lowest = _table(colormap), lower_bound(colormap)
    position = (np.clip(checked_values(values), lowest, 1.0) - lowest) / (1.0 - lowest)
    colours: Picture = table.take(np.rint(position * (len(table) - 1)).astype(np.intp), axis=0)
    return colours


def lower_bound(colormap: str) -> float:
    """The value of a map's bottom colour: -1 for the diverging map, 0 for all others."""
    return -1.0 if colormap == DIVERGING else 0.0


@lru_cache
def _table(colormap: str) -> Picture:
    """(M,3): a map's colours, from the bottom to the top."""
    import cv2

    if colormap == DIVERGING:
        return _diverging()
    if colormap not in COLORMAPS:
        raise InputError(f"no colour map {colormap!r}; choose from {', '.join(COLORMAPS)}")
    ramp = np.arange(256, dtype=np.uint8)[:, None]
    bgr = cv2.applyColorMap(ramp, getattr(cv2, f"COLORMAP_{colormap.upper()}"))
    return np.ascontiguousarray(bgr[:, 0, ::-1])


def _diverging() -> Picture:
    """(511,3): straight lines in CIE Lab, an odd number of colours so that zero is exactly the middle one."""
    import cv2

    lab: NDArray[np.float32] = np.stack(
        [np.interp(np.linspace(-1, 1, 511), [-1, 0, 1], channel) for channel in zip(BLUE, WHITE, RED, strict=True)],
        axis=-1,
    ).astype(np.float32)
    rgb = cv2.cvtColor(lab[None], cv2.COLOR_Lab2RGB)[0]
    colours: Picture = np.rint(np.clip(rgb, 0, 1) * 255).astype(np.uint8)
    return colours
