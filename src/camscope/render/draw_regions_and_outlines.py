"""Draw colored regions and mask outlines on images, and draw their legends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError
from camscope.mask_labels import find_multiple_labels, format_count_and_names
from camscope.plurals import plural
from camscope.render.colors import ROWS_PER_BAND, hatch_uncovered
from camscope.render.contours_and_boxes import draw_polygon, find_contours
from camscope.render.draw_text import ELLIPSIS, draw_text
from camscope.render.image_encoding import (
    DARK_BACKGROUND_COLOR,
    LIGHT_TEXT_COLOR,
    Color,
    RGBImage,
    Values,
    require_fraction,
    require_rgb_image,
    to_finite_float64,
)
from camscope.render.pad_and_stack_images import arrange_tiles, pad_image, paste_tile, stack_vertically

# The first eight are after Okabe & Ito (2008), distinguishable with any color vision; more than twelve are not.
REGION_COLORS: tuple[Color, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (204, 121, 167),
    (213, 94, 0),
    (0, 114, 178),
    (153, 153, 153),
    (120, 94, 240),
    (166, 118, 29),
    (255, 255, 255),
    (17, 119, 51),
)
MAX_LINE_LETTERS = 36  # characters


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a legend: a color, a title, and lines of text below the title.

    Attributes:
        color: (red, green, blue), each 0..255.
        title: First line.
        lines: Further lines.

    >>> LegendEntry((230, 25, 75), "lungs").title
    'lungs'

    """

    color: Color
    title: str
    lines: tuple[str, ...] = ()


def choose_region_colors(count: int) -> tuple[Color, ...]:
    """Return the first colors of REGION_COLORS, which are easy to distinguish.

    Args:
        count: Number of colors, 1 to 12.

    Returns:
        (red, green, blue) tuples, each number 0..255.

    Raises:
        InputError: `count` is larger than the number of colors that readers can distinguish.

    >>> len(choose_region_colors(3))
    3

    """
    if not 0 < count <= len(REGION_COLORS):
        raise InputError(
            f"received {plural(count, 'color')}; expected 1 to {len(REGION_COLORS)}, because more colors are hard to distinguish"
        )
    return REGION_COLORS[:count]


def draw_regions(
    image: RGBImage,
    color_index: NDArray[np.integer],
    strength: Values,
    colors: Sequence[Color],
    *,
    alpha: float = 0.8,
    covered: NDArray[np.bool_] | None = None,
) -> RGBImage:
    """Draw colored regions over a gray copy of an image (H,W,3).

    Stronger pixels are more opaque, as in `overlay`. Strength 0 leaves the gray image.

    Args:
        image: (H,W,3) uint8 RGB.
        color_index: (H,W) integers, the index of each pixel's color.
        strength: (H,W) in 0..1.
        colors: (red, green, blue) tuples.
        alpha: Opacity of strength 1.
        covered: As in `overlay`.

    Returns:
        (H,W,3) uint8.

    Raises:
        InputError: An index has no color, or an array is invalid.
        NonFiniteError: A strength is not finite.
        GeometryError: The arrays differ in size.

    >>> image, index = np.zeros((8, 8, 3), np.uint8), np.eye(8, dtype=int)
    >>> draw_regions(image, index, np.ones((8, 8)), choose_region_colors(2)).shape
    (8, 8, 3)

    """
    import cv2

    missing = 1 - to_finite_float64(strength, image=require_rgb_image(image)).clip(0, 1)
    opacity = require_fraction("alpha", alpha) * (1 - missing**2)
    if color_index.shape != opacity.shape:
        received = f"the color indices are {color_index.shape} and their strengths {opacity.shape}"
        raise GeometryError(f"{received}; expected the same size")
    if color_index.min() < 0 or color_index.max() >= len(colors):
        received = (
            f"color_index has indices {color_index.min()} to {color_index.max()} for {plural(len(colors), 'color')}"
        )
        raise InputError(f"{received}; expected indices below {len(colors)}")
    gray = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)[..., None].repeat(3, axis=2)
    out = gray.copy() if covered is None else hatch_uncovered(gray, covered)
    table = np.asarray(colors, dtype=np.float64)
    for top in range(0, len(out), ROWS_PER_BAND):
        rows = np.s_[top : top + ROWS_PER_BAND]
        mixed = np.rint(gray[rows] + opacity[rows, :, None] * (table[color_index[rows]] - gray[rows])).astype(np.uint8)
        np.copyto(out[rows], mixed, where=True if covered is None else covered[rows, :, None])
    return out


def draw_region_legend(entries: Sequence[LegendEntry], font_size: int = 16, *, heading: str = "") -> RGBImage:
    """Draw a legend with one colored swatch for each entry. `font_size` is in pixels. Long lines are truncated.

    Args:
        entries: The entries, from top to bottom.
        font_size: In pixels.
        heading: Text above the entries.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: There is no entry.

    >>> draw_region_legend([LegendEntry((230, 25, 75), "lungs"), LegendEntry((60, 180, 75), "heart")]).shape[2]
    3

    """
    if not entries:
        raise InputError("the legend has no entries; expected at least one")
    small = round(0.85 * font_size)
    blocks = [draw_text(truncate_legend_line(heading), small)] if heading else []
    for entry in entries:
        tiles = [draw_text(truncate_legend_line(entry.title), font_size)]
        tiles += [draw_text(truncate_legend_line(line), small) for line in entry.lines]
        left, gap, height = 2 * font_size, font_size // 2, len(tiles[0])
        block = pad_image(stack_vertically(tiles), bottom=gap, left=left)
        block[2 : height - 2, gap : left - 2] = (120, 120, 120)  # a frame makes a white swatch visible
        block[3 : height - 3, gap + 1 : left - 3] = entry.color
        blocks.append(block)
    return pad_image(stack_vertically(blocks), top=font_size // 2, right=font_size // 2)


def truncate_legend_line(text: str) -> str:
    """Truncate a text to the maximum length of a legend line."""
    return text if len(text) <= MAX_LINE_LETTERS else text[: MAX_LINE_LETTERS - 1].rstrip() + ELLIPSIS


Masks: TypeAlias = Mapping[str, ArrayLike] | ArrayLike


class MaskOutline(NamedTuple):
    """A named mask and the color of its outline.

    Args:
        name: The name in the legend.
        color: The color of the outline, RGB.
        mask: The mask (H,W).

    >>> MaskOutline("lesion", (0, 255, 255), np.ones((2, 2), bool)).name
    'lesion'

    """

    name: str
    color: Color
    mask: NDArray[np.bool_]


# Cyan, lavender, sage, blue: distinct from inferno and each other (CIE76 of at least 25) for every type of color vision.
OUTLINE_COLORS: tuple[Color, ...] = ((102, 255, 255), (204, 153, 255), (153, 204, 153), (102, 102, 255))


def prepare_outlines(masks: Masks | None, shape: Sequence[int]) -> list[MaskOutline]:
    """Check that masks have the given shape. Choose a color for each mask.

    Args:
        masks: One mask, which gets the name "", or a mapping of named masks. 0 is outside. None gives no outlines.
        shape: Size that each mask must have.

    Returns:
        A `MaskOutline` (name, color, boolean mask) for each mask.

    Raises:
        InputError: There are too many masks, or a mask has several labels or NaN.
        GeometryError: A mask has another shape.

    >>> [(name, mask.dtype) for name, _, mask in prepare_outlines({"lungs": np.eye(4)}, (4, 4))]
    [('lungs', dtype('bool'))]

    """
    if masks is None:
        return []
    named: Mapping[str, ArrayLike] = masks if isinstance(masks, Mapping) else {"": masks}
    if len(named) > len(OUTLINE_COLORS):
        n_masks, limit = plural(len(named), "mask"), len(OUTLINE_COLORS)
        raise InputError(
            f"expected at most {plural(limit, 'mask')}, because more colors are hard to distinguish; got {n_masks}"
        )
    return [
        MaskOutline(str(name), color, _to_boolean_mask(name, mask, tuple(shape)))
        for (name, mask), color in zip(named.items(), OUTLINE_COLORS, strict=False)
    ]


def draw_outlines(image: RGBImage, outlines: Sequence[MaskOutline]) -> RGBImage:
    """Draw the outline of each mask on an image (H,W,3). Masks are scaled to the size of the image.

    Args:
        image: (H,W,3) uint8 RGB.
        outlines: The outlines that `prepare_outlines` returned.

    Returns:
        (H,W,3) uint8.

    >>> outlines = prepare_outlines(np.eye(32, dtype=bool), (32, 32))
    >>> draw_outlines(np.zeros((32, 32, 3), np.uint8), outlines).shape
    (32, 32, 3)

    """
    out = require_rgb_image(image).copy()
    for _, color, inside in outlines:
        ratio = np.divide(out.shape[:2], inside.shape)
        for polygon in find_contours(inside.astype(np.float32), 1):
            draw_polygon(out, polygon * ratio, color, thin=True)
    return out


def draw_outline_legend_items(
    outlines: Sequence[MaskOutline], font_size: int, *, width: int | None = None
) -> list[RGBImage]:
    """Draw one legend item for each named mask: a line in the color of the mask, and the name."""
    keys = []
    for name, color, _ in outlines:
        if name:
            text = draw_text(name, font_size, text_color=LIGHT_TEXT_COLOR, background=DARK_BACKGROUND_COLOR)
            line_length, line_width = round(1.5 * font_size), max(2, font_size // 5)
            key = pad_image(text, left=line_length, background=DARK_BACKGROUND_COLOR)
            key[text.shape[0] // 2 - line_width // 2 :][:line_width, :line_length] = color
            keys.append(key[:, :width])
    return keys


def add_outline_legend(image: RGBImage, outlines: Sequence[MaskOutline]) -> RGBImage:
    """Add a legend of the named masks below an image. If no mask has a name, return the image unchanged.

    Args:
        image: (H,W,3) uint8 RGB.
        outlines: The outlines that `prepare_outlines` returned.

    Returns:
        (h,w,3) uint8.

    >>> image, mask = np.zeros((64, 64, 3), np.uint8), np.eye(64, dtype=bool)
    >>> add_outline_legend(image, prepare_outlines({"lungs": mask}, (64, 64))).shape[0] > 64
    True

    """
    height, width = image.shape[:2]
    size = min(28, max(11, min(height, width) // 28))
    rows: list[list[RGBImage]] = [[]]
    for piece in draw_outline_legend_items(outlines, size, width=width):
        spaced = pad_image(piece, left=size // 2, background=DARK_BACKGROUND_COLOR)
        if rows[-1] and sum(key.shape[1] for key in rows[-1]) + spaced.shape[1] > width:
            rows.append([])
        rows[-1].append(spaced)
    out = [image]
    for row in filter(None, rows):
        out.append(np.full((row[0].shape[0], width, 3), DARK_BACKGROUND_COLOR, np.uint8))
        paste_tile(out[-1], arrange_tiles([row]), 0, 0)
    return np.concatenate(out)


def _to_boolean_mask(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Convert a mask to booleans. Raise an error for another size, NaN or several labels."""
    array: NDArray[Any] = np.asarray(mask)
    description = f"the mask {name}".rstrip()
    if array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise InputError(
            f"{description} of type {array.dtype} is not numeric or contains NaN; expected booleans or numbers"
        )
    if array.shape != shape:
        raise GeometryError(f"{description} is {array.shape} and the image is {shape}; expected the same size")
    if names := find_multiple_labels(array):
        advice = f"pass each by its name, as {{'{names[0]}': mask == {names[0]}}}, or mask != 0 for all"
        raise InputError(f"{description} holds {format_count_and_names(names)}; expected one region: {advice}")
    return np.asarray(array != 0)
