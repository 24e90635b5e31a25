"""Draw the channels of a layer as a grid of maps."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colors import DIVERGING, colorize, get_colormap_minimum
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import (
    RGBImage,
    resize_to_fit,
)
from camscope.render.pad_and_stack_images import arrange_tiles, pad_image, paste_tile

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
    """Draw the channels (K,h,w) of a layer as a grid of maps. A label at each row is the number of its first channel.

    The value 0 has the same color in all maps.

    Args:
        features: (K,h,w) activations of one sample.
        columns: Maps in a row. Default: as many as make the grid about square.
        max_channels: Only the first channels are drawn.
        scale: "each": the top color is the strongest value of each channel. "shared": it is the strongest value of all
            channels.
        colormap: One of COLORMAPS. Default: viridis, or diverging where values are negative.

    Returns:
        (H,W,3) uint8.

    Raises:
        InputError: The features are no (K,h,w) array.
        NonFiniteError: A value is not finite.

    >>> draw_channel_grid(np.random.rand(4, 8, 8)).shape[2]
    3

    """
    maps = _select_channels(features, max_channels, scale)
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


def _select_channels(features: NDArray[np.floating[Any]], max_channels: int, scale: str) -> NDArray[np.float64]:
    """Check the features. Return their first `max_channels` channels (K,h,w)."""
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
    """Resize the image of a channel to a readable size. Each pixel becomes a square."""
    longest = max(image.shape[:2])
    if longest > MAX_CHANNEL_PIXELS:
        return resize_to_fit(image, MAX_CHANNEL_PIXELS, MAX_CHANNEL_PIXELS)
    factor = max(1, MIN_CHANNEL_PIXELS // longest)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)
