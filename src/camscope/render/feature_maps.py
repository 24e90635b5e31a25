"""Feature maps and one-dimensional signals as pictures.

- Feature maps as a picture: the channels of one layer in a grid.
- The trace: signals as lines over the colours of a map of their one axis.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colormap import DIVERGING, colourise, lower_bound
from camscope.render.rgb_image import PAPER, Picture, checked_fraction, fitted
from camscope.render.text import text_tile

READABLE, LARGEST = 96, 256
GAP = 2


def channel_grid(
    features: NDArray[np.floating[Any]],
    *,
    columns: int | None = None,
    limit: int = 64,
    scale: str = "each",
    colormap: str | None = None,
) -> Picture:
    """(K,h,w) -> (H,W,3): the first `limit` channels as maps in rows, each row under the number of its first channel.

    `columns`: chosen so that the picture is about square. `scale`: the strongest value of `"each"` channel, or the one
    `"shared"` by all that are drawn, has the map's top colour; 0 is always the same colour. `colormap`: viridis, or the
    diverging map where a value is negative. InputError or NonFiniteError for features that are no maps.
    """
    maps = _checked(features, limit, scale)
    colormap = colormap or (DIVERGING if (maps < 0).any() else "viridis")
    values = _scaled(maps, scale, colormap)
    K, h, w = maps.shape
    columns = min(K, columns or math.ceil(math.sqrt(K * h / w)))
    cells = [_cell(colourise(value, colormap)) for value in values]
    height, width = cells[0].shape[0] + GAP, cells[0].shape[1] + GAP
    numbers = [text_tile(str(k), 12) for k in range(0, K, columns)]
    margin = max(tile.shape[1] for tile in numbers)
    out = np.full((len(numbers) * height + GAP, margin + columns * width + GAP, 3), PAPER, np.uint8)
    for k, cell in enumerate(cells):
        top, left = GAP + k // columns * height, margin + GAP + k % columns * width
        out[top : top + height - GAP, left : left + width - GAP] = cell
    for row, tile in enumerate(numbers):
        top = row * height + GAP
        out[top : top + min(height, tile.shape[0]), margin - tile.shape[1] : margin] = tile[:height]
    return out


def _checked(features: NDArray[np.floating[Any]], limit: int, scale: str) -> NDArray[np.float64]:
    """(K,h,w): the channels to draw."""
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 3 or array.size == 0:
        raise InputError(f"the features are {array.shape}; expected one sample's channels (K,h,w)")
    if limit < 1 or scale not in {"each", "shared"}:
        raise InputError(f"limit={limit}, scale={scale!r}; expected 1 channel at least, and 'each' or 'shared'")
    array = array[:limit]
    if not (finite := np.isfinite(array)).all():
        channel = int(np.argwhere(~finite)[0, 0])
        raise NonFiniteError(
            f"{plural((~finite).sum(), 'value of the features is', 'values of the features are')} not finite, "
            f"the first in channel {channel}"
        )
    return array


def _scaled(maps: NDArray[np.float64], scale: str, colormap: str) -> NDArray[np.float64]:
    """(K,h,w): each map over its strongest value, or over the strongest of all; a map of nothing stays 0."""
    sizes = np.abs(maps) if lower_bound(colormap) < 0 else np.maximum(maps, 0)
    strongest = sizes.max(axis=(1, 2) if scale == "each" else None, keepdims=True)
    values: NDArray[np.float64] = np.divide(maps, strongest, out=np.zeros_like(maps), where=strongest > 0)
    return values


def _cell(picture: Picture) -> Picture:
    """Pixels as squares of a readable size; a map larger than any need is made smaller."""
    longest = max(picture.shape[:2])
    if longest > LARGEST:
        return fitted(picture, LARGEST, LARGEST)
    factor = max(1, READABLE // longest)
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


INK = (20, 20, 20)
MARGIN = 0.08  # of a lane, above and below its line
FINE = 4  # fractional bits of a line's points


def trace(
    signals: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    width: int = 960,
    lane: int = 160,
) -> Picture:
    """(C,L) uint8 and (L,) in 0..1 (`colormap="diverging"`: -1..1) -> (C·lane,width,3): a lane for each signal.

    The map colours the background, as strong as its value says; the line lies on it. InputError where lengths differ.
    """
    import cv2

    if signals.ndim != 2 or values.shape != signals.shape[1:] or not signals.size:
        raise InputError(f"signals are {signals.shape} and the map {values.shape}; expected (C,L) and (L,)")
    checked_fraction("alpha", alpha)
    places = (np.arange(width) + 0.5) / width * len(values) - 0.5
    across = np.interp(places, np.arange(len(values)), values)
    strength = alpha * np.minimum(np.abs(across), 1)[:, None]
    band = np.asarray(PAPER) * (1 - strength) + colourise(across[None], colormap)[0] * strength
    out = np.repeat(np.rint(band).astype(np.uint8)[None], lane * len(signals), axis=0)
    columns = (np.arange(len(values)) + 0.5) / len(values) * width
    for i, signal in enumerate(signals):
        rows = lane * (i + 1 - MARGIN - (1 - 2 * MARGIN) * signal / 255)
        points = np.rint(np.column_stack([columns, rows]) * 2**FINE).astype(np.int32)
        cv2.polylines(out, [points[:, None]], isClosed=False, color=INK, thickness=2, lineType=cv2.LINE_AA, shift=FINE)
    return out
