"""Draw images with captions in a grid, or as a contact sheet with a title and a legend."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from camscope.errors import InputError
from camscope.plurals import plural
from camscope.render.color_bar import draw_color_strip
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import (
    BACKGROUND_COLOR,
    Color,
    RGBImage,
    check_image_height,
    require_rgb_image,
    resize_to_fit,
)
from camscope.render.pad_and_stack_images import arrange_tiles, pad_image, paste_tile, stack_vertically

WARNING_COLOR: Color = (255, 191, 0)


def add_caption(
    image: RGBImage, caption: str, *, flag: str | None = None, font_size: int | None = None, width: int | None = None
) -> RGBImage:
    """Add a caption below an image (H,W,3). A caption of more than three lines ends with an ellipsis.

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
    height, columns = require_rgb_image(image).shape[:2]
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
    """Draw images (H,W,3) of any sizes in a grid, with captions.

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
        raise InputError(f"received {counts}; expected one caption and flag per image")
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
    """Draw rows of captioned images on one sheet (h,w,3). A long row continues on the next line.

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
    images = [require_rgb_image(cell.image) for row in rows for cell in row if cell is not None]
    if not images or not all(rows):
        raise InputError("the contact sheet has an empty row or no image; expected at least one image in each row")
    empty_cell = CaptionedImage(np.full_like(images[0], BACKGROUND_COLOR[0]), "")
    if columns is None:
        widths = [min(2 * height, round(height * int(image.shape[1]) / int(image.shape[0]))) for image in images]
        columns = _choose_n_sheet_columns(max(map(len, rows)), max(widths), height)
    bodies = []
    for row in rows:
        pictures, captions, flags = zip(*(empty_cell if cell is None else cell for cell in row), strict=True)
        bodies.append(draw_image_grid(pictures, captions, columns=columns, height=height, flags=flags))
    body = stack_vertically(bodies)
    return np.concatenate([*_draw_sheet_header(title, legend, colormap, body.shape[1], height), body])


def _draw_sheet_header(
    title: str, legend: tuple[str, str] | None, colormap: str, width: int, height: int
) -> list[RGBImage]:
    """Draw the title and the legend of a contact sheet: in one line if there is room, otherwise in two lines."""
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
    """Draw a line of tiles: some at the left edge, the others at the right edge."""
    line_height = max(tile.shape[0] for tile in (*left, *right))
    out = np.full((line_height + gap, width, 3), BACKGROUND_COLOR, np.uint8)
    positions = [*((tile, gap) for tile in left), *((tile, width - gap - tile.shape[1]) for tile in right)]
    for tile, column in positions:
        paste_tile(out, tile, gap + (line_height - tile.shape[0]) // 2, column)
    return out


def _choose_n_sheet_columns(n_images: int, width: int, height: int) -> int:
    """Choose the number of columns of a contact sheet. The sheet must fit the page and have few empty cells."""
    max_columns = min(MAX_SHEET_COLUMNS, max(3, MAX_SHEET_WIDTH // (width + max(4, height // 20))))
    if n_images <= max_columns:
        return n_images
    return min(range(max_columns, 2, -1), key=lambda columns: -n_images % columns)
