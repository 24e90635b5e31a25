"""Pad images, and put them side by side, on top of each other or in a table."""

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import numpy as np

from camscope.errors import InputError
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    Color,
    RGBImage,
    require_rgb_image,
)


def join_horizontally(*images: RGBImage) -> RGBImage:
    """Join images of equal height side by side, with thin gaps between them.

    Args:
        *images: (H,W,3) uint8 RGB, of equal height.

    Returns:
        (H,w,3) uint8.

    Raises:
        InputError: The heights differ.

    >>> join_horizontally(np.zeros((8, 4, 3), np.uint8), np.zeros((8, 6, 3), np.uint8)).shape[0]
    8

    """
    heights = {require_rgb_image(image).shape[0] for image in images}
    if len(heights) != 1:
        raise InputError(f"the images have {sorted(heights)} rows; resize all of them to one height first")
    gap = max(4, heights.pop() // 40)
    return np.concatenate([*(pad_image(image, right=gap) for image in images[:-1]), images[-1]], axis=1)


def pad_to_height(*images: RGBImage) -> list[RGBImage]:
    """Pad images (H,W,3) at the bottom, until all are as high as the tallest.

    Args:
        *images: (H,W,3) uint8 RGB.

    Returns:
        The images, all of the same height.

    >>> [image.shape[0] for image in pad_to_height(np.zeros((4, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8))]
    [9, 9]

    """
    max_height = max(require_rgb_image(image).shape[0] for image in images)
    return [pad_image(image, bottom=max_height - image.shape[0]) for image in images]


def arrange_tiles(
    rows: Sequence[Sequence[RGBImage]], gap: int = 0, *, background: Color = BACKGROUND_COLOR
) -> RGBImage:
    """Arrange images in a grid, aligned at the top left of their cells. Rows may have different numbers of images."""
    columns = zip_longest(*rows)
    widths = [max(tile.shape[1] for tile in column if tile is not None) + gap for column in columns]
    bands = []
    for row in rows:
        band = np.full((max(tile.shape[0] for tile in row) + gap, sum(widths), 3), background, np.uint8)
        for tile, left in zip(row, accumulate(widths, initial=0), strict=False):
            paste_tile(band, tile, 0, left)
        bands.append(band)
    return np.concatenate(bands)


def stack_vertically(tiles: Sequence[RGBImage], *, background: Color = BACKGROUND_COLOR) -> RGBImage:
    """Stack images vertically, aligned at the left."""
    return arrange_tiles([[tile] for tile in tiles], background=background)


def paste_tile(out: RGBImage, tile: RGBImage, row: int, column: int) -> None:
    """Paste a small image into `out` in place. Crop the parts that lie beyond the borders."""
    row, column = max(0, row), max(0, column)
    target = out[row : row + tile.shape[0], column : column + tile.shape[1]]
    target[:] = tile[: target.shape[0], : target.shape[1]]


def pad_image(
    image: RGBImage,
    top: int = 0,
    bottom: int = 0,
    left: int = 0,
    right: int = 0,
    *,
    background: Color = BACKGROUND_COLOR,
) -> RGBImage:
    """Pad an image (H,W,3) with rows and columns of the background color.

    Args:
        image: (H,W,3) uint8 RGB.
        top: Rows above.
        bottom: Rows below.
        left: Columns before.
        right: Columns after.
        background: (red, green, blue).

    Returns:
        (H + top + bottom,W + left + right,3) uint8.

    >>> pad_image(np.zeros((8, 8, 3), np.uint8), top=2, left=1).shape
    (10, 9, 3)

    """
    out = np.full((image.shape[0] + top + bottom, image.shape[1] + left + right, 3), background, np.uint8)
    out[top : top + image.shape[0], left : left + image.shape[1]] = image
    return out
