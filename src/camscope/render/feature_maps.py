"""Draw feature maps as a grid of channels, and one-dimensional signals as lines over the colors of their map."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colors import DIVERGING, colorize, get_colormap_minimum
from camscope.render.image_grid import arrange_tiles, pad_image, paste_tile
from camscope.render.rgb_image import BACKGROUND_COLOR, RGBImage, check_fraction, resize_to_fit
from camscope.render.text import draw_text

MIN_CHANNEL_PIXELS, MAX_CHANNEL_PIXELS = 96, 256
CHANNEL_GAP_PIXELS = 2


def draw_channel_grid(
    features: NDArray[np.floating[Any]],
    *,
    columns: int | None = None,
    max_channels: int = 64,
    scale: str = "each",
    colormap: str | None = None,
) -> RGBImage:
    """Draw the first `max_channels` channels (K,h,w) as a grid of maps. Each row is labeled with its first channel's number.

    `columns` is chosen so that the grid is about square. `scale`: the top color is the strongest value of "each" channel or
    one "shared" by all. 0 always has the same color. `colormap` defaults to viridis, or diverging where values are negative.
    Raises InputError or NonFiniteError for invalid features.
    """
    maps = _check_features(features, max_channels, scale)
    colormap = colormap or (DIVERGING if (maps < 0).any() else "viridis")
    sizes = np.abs(maps) if get_colormap_minimum(colormap) < 0 else np.maximum(maps, 0)
    strongest = sizes.max(axis=(1, 2) if scale == "each" else None, keepdims=True)
    values = np.divide(maps, strongest, out=np.zeros_like(maps), where=strongest > 0)  # a zero map stays 0
    K, h, w = maps.shape
    columns = min(K, columns or math.ceil(math.sqrt(K * h / w)))
    cells = [_resize_channel(colorize(value, colormap)) for value in values]
    numbers = [draw_text(str(k), 12) for k in range(0, K, columns)]
    margin = max(tile.shape[1] for tile in numbers)
    rows = [cells[start : start + columns] for start in range(0, K, columns)]
    gap, row_height = CHANNEL_GAP_PIXELS, cells[0].shape[0] + CHANNEL_GAP_PIXELS
    out = pad_image(arrange_tiles(rows, gap), top=gap, left=margin + gap)
    for row, tile in enumerate(numbers):
        paste_tile(out, tile[:row_height], row * row_height + gap, margin - tile.shape[1])
    return out


def _check_features(features: NDArray[np.floating[Any]], max_channels: int, scale: str) -> NDArray[np.float64]:
    """Return the channels to draw (K,h,w)."""
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 3 or array.size == 0:
        raise InputError(f"the features are {array.shape}; expected one sample's channels (K,h,w)")
    if max_channels < 1 or scale not in {"each", "shared"}:
        received = f"max_channels={max_channels}, scale={scale!r}"
        raise InputError(f"{received}; expected at least 1 channel, and scale 'each' or 'shared'")
    array = array[:max_channels]
    if not (finite := np.isfinite(array)).all():
        channel = int(np.argwhere(~finite)[0, 0])
        values = plural((~finite).sum(), "value of the features is", "values of the features are")
        raise NonFiniteError(f"{values} not finite, the first in channel {channel}")
    return array


def _resize_channel(image: RGBImage) -> RGBImage:
    """Enlarge pixels to squares of a readable size, or shrink a map that is too large."""
    longest = max(image.shape[:2])
    if longest > MAX_CHANNEL_PIXELS:
        return resize_to_fit(image, MAX_CHANNEL_PIXELS, MAX_CHANNEL_PIXELS)
    factor = max(1, MIN_CHANNEL_PIXELS // longest)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


SIGNAL_COLOR = (20, 20, 20)
LANE_MARGIN = 0.08  # of a lane, above and below its line
SUBPIXEL_BITS = 4  # fractional bits of a line's points


def draw_signal_trace(
    signals: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    width: int = 960,
    lane_height: int = 160,
) -> RGBImage:
    """Draw signals (C,L) uint8 as lines, one lane each, over the colors of a map (L,) in 0..1 (diverging: -1..1).

    The background is colored as strongly as the map's value. Returns (C·lane,width,3); raises InputError if lengths differ.
    """
    import cv2

    if signals.ndim != 2 or values.shape != signals.shape[1:] or not signals.size:
        raise InputError(f"signals are {signals.shape} and the map {values.shape}; expected (C,L) and (L,)")
    check_fraction("alpha", alpha)
    positions = (np.arange(width) + 0.5) / width * len(values) - 0.5
    column_values = np.interp(positions, np.arange(len(values)), values)
    strength = alpha * np.minimum(np.abs(column_values), 1)[:, None]
    band = np.asarray(BACKGROUND_COLOR) * (1 - strength) + colorize(column_values[None], colormap)[0] * strength
    out = np.repeat(np.rint(band).astype(np.uint8)[None], lane_height * len(signals), axis=0)
    columns = (np.arange(len(values)) + 0.5) / len(values) * width
    for i, signal in enumerate(signals):
        rows = lane_height * (i + 1 - LANE_MARGIN - (1 - 2 * LANE_MARGIN) * signal / 255)
        points = np.rint(np.column_stack([columns, rows]) * 2**SUBPIXEL_BITS).astype(np.int32)
        cv2.polylines(out, [points[:, None]], False, SIGNAL_COLOR, 2, cv2.LINE_AA, SUBPIXEL_BITS)
    return out
