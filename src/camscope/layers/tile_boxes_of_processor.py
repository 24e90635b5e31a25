"""Measure which part of an image each tile shows that a processor makes of it: a tile, a crop, or the whole image.

The processor receives an image whose colors are its coordinates, so that the tiles state where they come from. This works
for any resizing, cropping, padding and tiling, and for any version of a processor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError

FloatArray = NDArray[np.float64]
PixelArray = NDArray[np.uint8]
ReadTiles = Callable[[PixelArray], NDArray[np.floating[Any]]]  # pixels (H,W,3) -> tiles (M,3,h,w)

EDGE_PIXELS = 2  # of the image; interpolation is not linear there
MAX_RESIDUAL = 0.02  # of the image's side, in addition to one pixel
SNAP_SHARE = 0.01  # of a tile's side; a border so close to that of the image is the same


@dataclass(frozen=True)
class Tile:
    """One tile: its box (top, left, bottom, right) in pixels of the image, and its size (h,w). Padding lies outside the image."""

    box: tuple[float, float, float, float]
    size: tuple[int, int]


def measure_tiles(read_tiles: ReadTiles, image_size: tuple[int, int]) -> list[Tile]:
    """Return the place of each tile on an image of this size (H,W), in the order of the tiles.

    Raise GeometryError if the tiles are not made by resizing, cropping and padding alone.
    """
    height, width = image_size
    rows, columns = ((np.arange(side) + 0.5) / side for side in image_size)
    coordinates = np.zeros((height, width, 3), np.uint8)
    coordinates[..., 0] = np.round(255 * columns)[None, :]
    coordinates[..., 1] = np.round(255 * rows)[:, None]
    black = read_tiles(np.zeros_like(coordinates))
    white, tiles = read_tiles(np.full_like(coordinates, 255)), read_tiles(coordinates)
    if not black.shape == white.shape == tiles.shape or tiles.ndim != 4 or tiles.shape[1] != 3:
        raise GeometryError(f"the processor returned tiles of shape {tiles.shape}; expected (M,3,h,w)")
    spread = white - black
    is_image = spread != 0
    shares = np.divide(tiles - black, spread, out=np.zeros_like(spread), where=is_image)
    size = (tiles.shape[2], tiles.shape[3])
    return [Tile(_fit_box(shares[number], is_image[number, 0], image_size), size) for number in range(len(tiles))]


def _fit_box(
    shares: FloatArray, is_image: NDArray[np.bool_], image_size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Fit the box of a tile. `shares` (3,h,w): columns and rows of the image at each pixel, as shares of the image's sides."""
    if not is_image.any():
        raise GeometryError("a tile of the processor shows nothing of the image")
    top, bottom = _fit_side(shares[1], is_image, image_size[0])
    left, right = _fit_side(shares[0].T, is_image.T, image_size[1])
    return top, left, bottom, right


def _fit_side(shares: FloatArray, is_image: NDArray[np.bool_], length: int) -> tuple[float, float]:
    """Fit a line through the coordinates along the first axis. Return the coordinates of both ends in pixels of the image."""
    used = np.flatnonzero(is_image.any(1))
    values = np.array([shares[row][is_image[row]].mean() for row in used])
    spread = max(float(np.ptp(shares[row][is_image[row]])) for row in used)
    margin = EDGE_PIXELS / length
    inner = (values > margin) & (values < 1 - margin)
    if inner.sum() < max(2, len(values) // 2):
        inner[:] = True
    centers = used + 0.5
    if len(used) < 2:
        raise GeometryError("a tile of the processor has too few pixels to be placed on the image")
    slope, offset = np.polyfit(centers[inner], values[inner], 1)
    residual = float(np.abs(offset + slope * centers[inner] - values[inner]).max())
    if max(residual, spread) > MAX_RESIDUAL + 1 / length or slope <= 0:
        raise GeometryError(
            "a tile of the processor is not a resized part of the image: it is turned, flipped or warped"
        )
    ends = offset * length, (offset + slope * len(shares)) * length
    near = SNAP_SHARE * (ends[1] - ends[0])
    start, stop = (float(next((edge for edge in (0.0, float(length)) if abs(end - edge) <= near), end)) for end in ends)
    return start, stop
