"""Legends, regions and outlines in colors that can be told apart.

- Regions of a picture in colours that can be told apart, and the legend that says what each colour means.
- Outlines of masks in colours that are told apart with any colour vision and on any heat, and what each stands for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError
from camscope.mask_labels import find_multiple_labels, format_name_list
from camscope.plurals import plural
from camscope.render.image_grid import pad_image
from camscope.render.overlay import ROWS_PER_BAND, hatch_uncovered
from camscope.render.rgb_image import (
    BACKGROUND_COLOR,
    DARK_BACKGROUND_COLOR,
    LIGHT_TEXT_COLOR,
    Color,
    RGBImage,
    Values,
    check_fraction,
    check_rgb_image,
    to_finite_float64,
)
from camscope.render.shapes import draw_polygon, find_contours
from camscope.render.text import ELLIPSIS, draw_text

# The first eight after Okabe & Ito (2008), told apart with any colour vision; more than twelve nobody tells apart.
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
MAX_LINE_LETTERS = 36  # letters of a line


@dataclass(frozen=True)
class LegendEntry:
    """What a colour stands for: a title beside its swatch, and lines below it."""

    color: Color
    title: str
    lines: tuple[str, ...] = ()


def choose_region_colors(count: int) -> tuple[Color, ...]:
    """So many colours that can be told apart; InputError beyond twelve."""
    if not 0 < count <= len(REGION_COLORS):
        raise InputError(f"{plural(count, 'colour')}: expected 1 to {len(REGION_COLORS)}, more cannot be told apart")
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
    """(H,W,3), (H,W) numbers of colours and (H,W) in 0..1 -> (H,W,3): each pixel in its colour, over the picture in grey.

    Grey, so that every colour is one of the legend's. `alpha`: opacity of strength 1; it rises early, as in `overlay`, and
    strength 0 leaves the grey. `covered`: as in `overlay`. InputError, NonFiniteError or GeometryError for arrays that do
    not belong together.
    """
    import cv2

    missing = 1 - to_finite_float64(strength, image=check_rgb_image(image)).clip(0, 1)
    opacity = check_fraction("alpha", alpha) * (1 - missing**2)
    if color_index.shape != opacity.shape:
        raise GeometryError(
            f"the numbers are {color_index.shape} and their strengths {opacity.shape}; expected one size"
        )
    if color_index.min() < 0 or color_index.max() >= len(colors):
        raise InputError(f"numbers {color_index.min()} to {color_index.max()} for {plural(len(colors), 'colour')}")
    gray: RGBImage = np.repeat(
        cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None].astype(np.uint8, copy=False), 3, axis=2
    )
    out = gray.copy() if covered is None else hatch_uncovered(gray, covered)
    table = np.asarray(colors, dtype=np.float64)
    for top in range(0, len(out), ROWS_PER_BAND):
        rows = np.s_[top : top + ROWS_PER_BAND]
        mixed = np.rint(gray[rows] + opacity[rows, :, None] * (table[color_index[rows]] - gray[rows])).astype(np.uint8)
        np.copyto(out[rows], mixed, where=True if covered is None else covered[rows, :, None])
    return out


def draw_region_legend(entries: Sequence[LegendEntry], font_size: int = 16, *, heading: str = "") -> RGBImage:
    """(h,w,3): one entry below the other, its swatch at the left. `font_size`: pixels of a letter; long lines are cut."""
    if not entries:
        raise InputError("a legend without entries")
    blocks = [draw_text(truncate_legend_line(heading), round(0.85 * font_size))] if heading else []
    blocks += [_draw_legend_entry(entry, font_size) for entry in entries]
    width = max(block.shape[1] for block in blocks)
    out = np.full(
        (sum(len(block) for block in blocks) + font_size // 2, width + font_size // 2, 3), BACKGROUND_COLOR, np.uint8
    )
    top = font_size // 2
    for block in blocks:
        out[top : top + len(block), : block.shape[1]] = block
        top += len(block)
    return out


def _draw_legend_entry(entry: LegendEntry, font_size: int) -> RGBImage:
    tiles = [draw_text(truncate_legend_line(entry.title), font_size)] + [
        draw_text(truncate_legend_line(line), round(0.85 * font_size)) for line in entry.lines
    ]
    left, gap = 2 * font_size, font_size // 2
    height = sum(len(tile) for tile in tiles)
    out = np.full((height + gap, left + max(tile.shape[1] for tile in tiles), 3), BACKGROUND_COLOR, np.uint8)
    out[2 : len(tiles[0]) - 2, gap : left - 2] = (120, 120, 120)  # a frame, without which white is no swatch
    out[3 : len(tiles[0]) - 3, gap + 1 : left - 3] = entry.color
    top = 0
    for tile in tiles:
        out[top : top + len(tile), left : left + tile.shape[1]] = tile
        top += len(tile)
    return out


def truncate_legend_line(text: str) -> str:
    """The text in as many letters as a line has."""
    return text if len(text) <= MAX_LINE_LETTERS else text[: MAX_LINE_LETTERS - 1].rstrip() + ELLIPSIS


Masks: TypeAlias = Mapping[str, ArrayLike] | ArrayLike
MaskOutlines: TypeAlias = list[tuple[str, Color, NDArray[np.bool_]]]

# Cyan, lavender, sage, blue: far from inferno and from one another (CIE76 of 25 at least) in each kind of colour vision.
OUTLINE_COLORS: tuple[Color, ...] = ((102, 255, 255), (204, 153, 255), (153, 204, 153), (102, 102, 255))


def prepare_outlines(masks: Masks | None, shape: Sequence[int]) -> MaskOutlines:
    """One mask, or names of masks, of the given size -> (name, colour, where it is True); "" for one without a name.

    0 is outside. GeometryError for another size, InputError for more masks than colours, for several labels, and for NaN.
    """
    if masks is None:
        return []
    named: Mapping[str, ArrayLike] = masks if isinstance(masks, Mapping) else {"": masks}
    if len(named) > len(OUTLINE_COLORS):
        raise InputError(
            f"{plural(len(named), 'mask')}; expected {len(OUTLINE_COLORS)} at most: more colours cannot be told apart"
        )
    return [
        (str(name), color, _check_mask(name, mask, tuple(shape)))
        for (name, mask), color in zip(named.items(), OUTLINE_COLORS, strict=False)
    ]


def draw_outlines(image: RGBImage, outlines: MaskOutlines) -> RGBImage:
    """(H,W,3) -> (H,W,3): each mask's outline along the edges of its pixels. On a larger picture it is scaled with it."""
    out = check_rgb_image(image).copy()
    for _, color, inside in outlines:
        ratio = np.divide(out.shape[:2], inside.shape)
        for polygon in find_contours(inside.astype(np.float32), 1):
            draw_polygon(out, polygon * ratio, color, thin=True)
    return out


def draw_outline_keys(outlines: MaskOutlines, font_size: int, *, width: int | None = None) -> list[RGBImage]:
    """Pieces of a legend on a dark ground: a line in a mask's colour, and the mask's name. Those without one are left out."""
    return [_draw_outline_key(name, color, font_size, width) for name, color, _ in outlines if name]


def add_outline_legend(image: RGBImage, outlines: MaskOutlines) -> RGBImage:
    """(H,W,3) -> (H+h,W,3): the picture over the legend of its outlines; as it is where none has a name."""
    height, width = image.shape[:2]
    size = min(28, max(11, min(height, width) // 28))
    rows: list[list[RGBImage]] = [[]]
    for piece in draw_outline_keys(outlines, size, width=width):
        spaced = pad_image(piece, left=size // 2, background=DARK_BACKGROUND_COLOR)
        if rows[-1] and sum(piece.shape[1] for piece in rows[-1]) + spaced.shape[1] > width:
            rows.append([])
        rows[-1].append(spaced)
    strips = [_draw_key_row(row, width) for row in rows if row]
    return np.concatenate([image, *strips])


def _check_mask(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    array: NDArray[Any] = np.asarray(mask)
    description = f"the mask {name}".rstrip()
    if array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise InputError(f"{description} holds {array.dtype} or NaN; expected True and False, or numbers")
    if array.shape != shape:
        raise GeometryError(f"{description} is {array.shape} and the picture {shape}; expected one size")
    if names := find_multiple_labels(array):
        raise InputError(
            f"{description} holds {format_name_list(names)}; expected one region: pass each by its name, as {{'{names[0]}': mask == {names[0]}}}, "
            "or mask != 0 for all"
        )
    return np.asarray(array != 0)


def _draw_outline_key(name: str, color: Color, font_size: int, width: int | None) -> RGBImage:
    text = draw_text(name, font_size, text_color=LIGHT_TEXT_COLOR, background=DARK_BACKGROUND_COLOR)
    line_length = round(1.5 * font_size)
    out = np.full((text.shape[0], line_length + text.shape[1], 3), DARK_BACKGROUND_COLOR, np.uint8)
    middle, line_width = text.shape[0] // 2, max(2, font_size // 5)
    out[middle - line_width // 2 :][:line_width, :line_length] = color
    out[:, line_length:] = text
    return out if width is None else out[:, :width]


def _draw_key_row(keys: Sequence[RGBImage], width: int) -> RGBImage:
    out = np.full((keys[0].shape[0], width, 3), DARK_BACKGROUND_COLOR, np.uint8)
    row = np.concatenate(keys, axis=1)[:, :width]
    out[:, : row.shape[1]] = row
    return out
