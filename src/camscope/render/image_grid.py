"""Arrange images in grids and contact sheets, with captions, color bars and legends."""

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colors import DIVERGING, colorize, get_colormap_minimum
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    TEXT_COLOR,
    Color,
    RGBImage,
    check_image_height,
    check_rgb_image,
    resize_to_fit,
)

WARNING_COLOR: Color = (255, 191, 0)
FRAME_COLOR: Color = (150, 150, 150)


def draw_color_bar(
    height: int,
    lo: float,
    hi: float,
    colormap: str = "inferno",
    *,
    width: int | None = None,
    font_size: int | None = None,
    text_color: Color = TEXT_COLOR,
    background: Color = BACKGROUND_COLOR,
) -> RGBImage:
    """Draw a vertical color bar (height,w,3) with numbers.

    The diverging colormap is centered on 0, which is labeled too. If `lo` equals `hi`, the bar has one color and one number.

    Args:
        height: Rows, at least 8.
        lo: Raw value at the bottom.
        hi: Raw value at the top.
        colormap: One of COLORMAPS.
        width: Columns of the colored part. Default: in proportion to the height.
        font_size: In pixels. Default: in proportion to the height.
        text_color: (red, green, blue).
        background: (red, green, blue).

    Returns:
        (height,w,3) uint8.

    Raises:
        InputError: The height is below 8, or `lo` is above `hi`.
        NonFiniteError: An end is not finite.

    >>> draw_color_bar(128, 0.0, 2.5).shape[0]
    128

    """
    if not np.isfinite([lo, hi]).all():
        raise NonFiniteError(f"the color bar goes from {lo} to {hi}; expected finite numbers")
    if height < 8 or lo > hi:
        received = f"a color bar of {plural(height, 'row')} from {lo} to {hi}"
        raise InputError(f"{received}; expected at least 8 rows, and lo <= hi")
    values = _compute_bar_values(height - 2, lo, hi, colormap)
    width = max(6, height // 16) if width is None else width
    bar = pad_image(colorize(np.repeat(values[:, None], width, axis=1), colormap), 1, 1, 1, 1, background=FRAME_COLOR)
    font_size = min(22, max(9, height // 16)) if font_size is None else font_size
    numbers = {hi: 0, lo: height} | ({0.0: height * hi / (hi - lo)} if colormap == DIVERGING and lo < 0 < hi else {})
    tiles = {
        row: draw_text(format_range_number(number, lo, hi), font_size, text_color=text_color, background=background)
        for number, row in numbers.items()
    }
    labels = np.full((height, max(tile.shape[1] for tile in tiles.values()), 3), background, np.uint8)
    for row, tile in tiles.items():
        paste_tile(labels, tile, int(np.clip(row - tile.shape[0] / 2, 0, max(0, height - tile.shape[0]))), 0)
    return np.concatenate([bar, labels], axis=1)


def join_horizontally(*images: RGBImage) -> RGBImage:
    """Join images of equal height side by side, with a thin gap between them.

    Args:
        *images: (H,W,3) uint8 RGB, of equal height.

    Returns:
        (H,w,3) uint8.

    Raises:
        InputError: The heights differ.

    >>> join_horizontally(np.zeros((8, 4, 3), np.uint8), np.zeros((8, 6, 3), np.uint8)).shape[0]
    8

    """
    heights = {check_rgb_image(image).shape[0] for image in images}
    if len(heights) != 1:
        raise InputError(f"the images have {sorted(heights)} rows; resize all of them to one height first")
    gap = max(4, heights.pop() // 40)
    return np.concatenate([*(pad_image(image, right=gap) for image in images[:-1]), images[-1]], axis=1)


def pad_to_height(*images: RGBImage) -> list[RGBImage]:
    """Pad images (H,W,3) at the bottom to the height of the tallest image.

    Args:
        *images: (H,W,3) uint8 RGB.

    Returns:
        The images, all of the same height.

    >>> [image.shape[0] for image in pad_to_height(np.zeros((4, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8))]
    [9, 9]

    """
    max_height = max(check_rgb_image(image).shape[0] for image in images)
    return [pad_image(image, bottom=max_height - image.shape[0]) for image in images]


def add_caption(
    image: RGBImage, caption: str, *, flag: str | None = None, font_size: int | None = None, width: int | None = None
) -> RGBImage:
    """Add a caption below an image (H,W,3). A caption of more than three lines ends in an ellipsis.

    Args:
        image: (H,W,3) uint8 RGB.
        caption: The text.
        flag: A warning, which is highlighted above the caption. Default: no warning.
        font_size: In pixels. Default: in proportion to the image.
        width: The text is centered below this number of columns from the left, such as those of an image with a color bar
            at its right. Default: all columns.

    Returns:
        (h,W,3) uint8, higher than the image.

    >>> image = np.zeros((64, 64, 3), np.uint8)
    >>> add_caption(image, "nodule").shape[0] > 64
    True

    """
    height, columns = check_rgb_image(image).shape[:2]
    width = columns if width is None else width
    font_size = min(36, max(11, min(height, width) // 18)) if font_size is None else font_size
    lines = [] if flag is None else [draw_text(flag, font_size, width=width, max_lines=3, background=WARNING_COLOR)]
    lines.append(draw_text(caption, font_size, width=width, max_lines=3))
    return np.concatenate([image, *(pad_image(line, right=columns - width) for line in lines)])


def draw_image_grid(
    images: Sequence[RGBImage],
    captions: Sequence[str],
    *,
    columns: int | None = None,
    height: int = 256,
    flags: Sequence[str | None] | None = None,
    bar_widths: Sequence[int] | None = None,
) -> RGBImage:
    """Draw images (H,W,3) of any size in a grid with captions.

    Args:
        images: The images.
        captions: One text per image.
        columns: Images in a row. Default: as many as leave few cells empty.
        height: Each image is scaled to this number of rows. An image wider than twice its height gets a width of twice
            `height` instead.
        flags: A warning or None per image. Default: no warnings.
        bar_widths: Columns of the color bar at the right of each image. Captions are centered below the other columns.
            Default: no color bars.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: The numbers of images and texts differ, or `columns` is below 1.

    >>> draw_image_grid([np.zeros((8, 8, 3), np.uint8)] * 3, ["a", "b", "c"], columns=3, height=32).shape[2]
    3

    """
    flags = [None] * len(images) if flags is None else flags
    if not images or not len(images) == len(captions) == len(flags):
        counts = f"{plural(len(images), 'image')}, {plural(len(captions), 'caption')}, {plural(len(flags), 'flag')}"
        raise InputError(f"{counts}; expected one caption and flag per image")
    if columns is None:
        columns = 4 if len(images) <= 4 else min((4, 3, 5, 6), key=lambda columns: -len(images) % columns)
    columns = min(columns, len(images))
    if columns < 1:
        raise InputError(f"columns={columns}; expected at least 1")
    check_image_height("height", height)
    scaled = [resize_to_fit(image, height, 2 * height) for image in images]
    font_size, gap = min(36, max(11, height // 16)), max(4, height // 20)
    widths = [max(image.shape[1] for image in scaled[column::columns]) for column in range(columns)]
    bars = [0] * len(images) if bar_widths is None else bar_widths
    cells = []
    for i, image in enumerate(scaled):
        centered = _center_image(image, height, widths[i % columns])
        bar = round(bars[i] * image.shape[1] / images[i].shape[1])
        width = centered.shape[1] - bar
        cells.append(add_caption(centered, captions[i], flag=flags[i], font_size=font_size, width=width))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    return pad_image(arrange_tiles(rows, gap), top=gap, left=gap)


def _center_image(image: RGBImage, height: int, width: int) -> RGBImage:
    rows, columns = height - image.shape[0], width - image.shape[1]
    return pad_image(image, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)


def arrange_tiles(
    rows: Sequence[Sequence[RGBImage]], gap: int = 0, *, background: Color = BACKGROUND_COLOR
) -> RGBImage:
    """Arrange images in a grid, each at the top left of its cell. Rows may have different numbers of images."""
    columns = zip_longest(*rows)
    widths = [max(tile.shape[1] for tile in column if tile is not None) + gap for column in columns]
    bands = []
    for row in rows:
        band = np.full((max(tile.shape[0] for tile in row) + gap, sum(widths), 3), background, np.uint8)
        for tile, left in zip(row, accumulate(widths, initial=0), strict=False):
            paste_tile(band, tile, 0, left)
        bands.append(band)
    return np.concatenate(bands)


def stack_tiles(tiles: Sequence[RGBImage], *, background: Color = BACKGROUND_COLOR) -> RGBImage:
    """Stack images vertically, aligned at the left."""
    return arrange_tiles([[tile] for tile in tiles], background=background)


def paste_tile(out: RGBImage, tile: RGBImage, row: int, column: int) -> None:
    """Paste a small image into `out` in place. Parts beyond the borders are cropped."""
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


def _compute_bar_values(rows: int, lo: float, hi: float, colormap: str) -> NDArray[np.float64]:
    """Return the scaled map value (rows,) of each row of a color bar, from top to bottom.

    For the diverging colormap, 0 stays 0, and the end with the larger magnitude is 1 or -1.
    """
    if colormap == DIVERGING:
        strongest = max(abs(lo), abs(hi))
        return np.linspace(hi, lo, rows) / strongest if strongest else np.zeros(rows)
    return np.linspace(1, 0, rows) if hi > lo else np.full(rows, float(hi > 0))


def format_range_number(number: float, lo: float, hi: float) -> str:
    """Format a number with three significant digits. Use more digits if `lo` and `hi` would look equal."""
    digits = next((n for n in range(3, 17) if lo == hi or f"{lo:.{n}g}" != f"{hi:.{n}g}"), 17)
    return f"{number + 0.0:.{digits}g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


MAX_SHEET_WIDTH, MAX_SHEET_COLUMNS = 1900, 7  # defaults


class CaptionedImage(NamedTuple):
    """An image (H,W,3) with its caption and an optional warning.

    Attributes:
        image: (H,W,3) uint8 RGB.
        caption: Text below the image.
        flag: Warning above the caption, or None.

    >>> CaptionedImage(np.zeros((8, 8, 3), np.uint8), "nodule", flag="flat").flag
    'flat'

    """

    image: RGBImage
    caption: str
    flag: str | None = None


def draw_contact_sheet(
    rows: Sequence[Sequence[CaptionedImage | None]],
    *,
    title: str = "",
    legend: tuple[str, str] | None = None,
    colormap: str = "inferno",
    columns: int | None = None,
    height: int = 256,
) -> RGBImage:
    """Draw rows of captioned images as one sheet (h,w,3). A long row continues on the next line.

    Args:
        rows: Images row by row. A cell None stays empty.
        title: One line at the top.
        legend: Texts of the bottom and the top color of all maps. Default: no legend.
        colormap: One of COLORMAPS, for the legend.
        columns: Images in a line. Default: as many as fit a screen and leave few cells empty.
        height: Rows of each image.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: A row is empty, or there is no image.

    >>> cell = CaptionedImage(np.zeros((64, 64, 3), np.uint8), "nodule")
    >>> draw_contact_sheet([[cell, None], [cell, cell]], height=64).shape[2]
    3

    """
    images = [check_rgb_image(cell.image) for row in rows for cell in row if cell is not None]
    if not images or not all(rows):
        raise InputError("the contact sheet has an empty row or no image; expected at least one image in each row")
    empty_cell = CaptionedImage(np.full_like(images[0], BACKGROUND_COLOR[0]), "")
    if columns is None:
        widths = [min(2 * height, round(height * int(image.shape[1]) / int(image.shape[0]))) for image in images]
        columns = _choose_sheet_columns(max(map(len, rows)), max(widths), height)
    bodies = []
    for row in rows:
        pictures, captions, flags = zip(*(empty_cell if cell is None else cell for cell in row), strict=True)
        bodies.append(draw_image_grid(pictures, captions, columns=columns, height=height, flags=flags))
    body = stack_tiles(bodies)
    return np.concatenate([*_draw_sheet_header(title, legend, colormap, body.shape[1], height), body])


def draw_color_strip(low_label: str, high_label: str, colormap: str = "inferno", *, font_size: int = 16) -> RGBImage:
    """Draw a horizontal color bar with a label at each end. `font_size` is in pixels."""
    left, right = draw_text(low_label, font_size), draw_text(high_label, font_size)
    ramp = np.linspace(get_colormap_minimum(colormap), 1, 9 * font_size)
    colors = colorize(np.repeat(ramp[None], max(6, 3 * font_size // 4), axis=0), colormap)
    bar = pad_image(colors, 1, 1, 1, 1, background=FRAME_COLOR)
    spare = left.shape[0] - bar.shape[0]
    bar = pad_image(bar, top=spare // 2, bottom=spare - spare // 2)
    return np.concatenate([left, bar, right], axis=1)


def _draw_sheet_header(
    title: str, legend: tuple[str, str] | None, colormap: str, width: int, height: int
) -> list[RGBImage]:
    """Draw the title and legend of a contact sheet, in one line if both fit, otherwise in two."""
    font_size, gap = min(36, max(11, height // 14)), max(4, height // 20)
    available_width = width - 2 * gap
    right = [] if legend is None else [draw_color_strip(*legend, colormap, font_size=min(32, max(11, height // 16)))]
    left = [draw_text(title, font_size)] if title else []
    lines = [(left, right)]
    if left and right and left[0].shape[1] + right[0].shape[1] > available_width:
        left = [draw_text(title, font_size, width=min(available_width, left[0].shape[1]), max_lines=2)]
        lines = [(left, []), (right, [])]
    return [_draw_header_line(*line, width, gap) for line in lines if any(line)]


def _draw_header_line(left: Sequence[RGBImage], right: Sequence[RGBImage], width: int, gap: int) -> RGBImage:
    line_height = max(tile.shape[0] for tile in (*left, *right))
    out = np.full((line_height + gap, width, 3), BACKGROUND_COLOR, np.uint8)
    positions = [*((tile, gap) for tile in left), *((tile, width - gap - tile.shape[1]) for tile in right)]
    for tile, column in positions:
        paste_tile(out, tile, gap + (line_height - tile.shape[0]) // 2, column)
    return out


def _choose_sheet_columns(n_images: int, width: int, height: int) -> int:
    """Choose a number of columns at which a contact sheet fits the page and leaves few cells empty."""
    max_columns = min(MAX_SHEET_COLUMNS, max(3, MAX_SHEET_WIDTH // (width + max(4, height // 20))))
    if n_images <= max_columns:
        return n_images
    return min(range(max_columns, 2, -1), key=lambda columns: -n_images % columns)


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
    """Draw the channels (K,h,w) of a layer as a grid of maps. Each row is labeled with the number of its first channel.

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
    """Check the features and return their first `max_channels` channels (K,h,w)."""
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
    """Resize the image of a channel to a readable size. Its pixels become squares."""
    longest = max(image.shape[:2])
    if longest > MAX_CHANNEL_PIXELS:
        return resize_to_fit(image, MAX_CHANNEL_PIXELS, MAX_CHANNEL_PIXELS)
    factor = max(1, MIN_CHANNEL_PIXELS // longest)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)
