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
from camscope.mask_labels import listed, several_labels
from camscope.plurals import plural
from camscope.render.image_grid import padded
from camscope.render.overlay import BAND, not_covered
from camscope.render.rgb_image import (
    DARK_PAPER,
    LIGHT_INK,
    PAPER,
    Colour,
    Picture,
    Values,
    checked_fraction,
    checked_picture,
    checked_values,
)
from camscope.render.shapes import contours, draw_line
from camscope.render.text import ELLIPSIS, text_tile

# The first eight after Okabe & Ito (2008), told apart with any colour vision; more than twelve nobody tells apart.
SWATCHES: tuple[Colour, ...] = (
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
LONGEST = 36  # letters of a line


@dataclass(frozen=True)
class Entry:
    """What a colour stands for: a title beside its swatch, and lines below it."""

    colour: Colour
    title: str
    lines: tuple[str, ...] = ()


def swatches(count: int) -> tuple[Colour, ...]:
    """So many colours that can be told apart; InputError beyond twelve."""
    if not 0 < count <= len(SWATCHES):
        raise InputError(f"{plural(count, 'colour')}: expected 1 to {len(SWATCHES)}, more cannot be told apart")
    return SWATCHES[:count]


def regions(
    image: Picture,
    numbers: NDArray[np.integer],
    strength: Values,
    colours: Sequence[Colour],
    *,
    alpha: float = 0.8,
    covered: NDArray[np.bool_] | None = None,
) -> Picture:
    """(H,W,3), (H,W) numbers of colours and (H,W) in 0..1 -> (H,W,3): each pixel in its colour, over the picture in grey.

    Grey, so that every colour is one of the legend's. `alpha`: opacity of strength 1; it rises early, as in `overlay`, and
    strength 0 leaves the grey. `covered`: as in `overlay`. InputError, NonFiniteError or GeometryError for arrays that do
    not belong together.
    """
    import cv2

    missing = 1 - checked_values(strength, over=checked_picture(image)).clip(0, 1)
    opacity = checked_fraction("alpha", alpha) * (1 - missing**2)
    if numbers.shape != opacity.shape:
        raise GeometryError(f"the numbers are {numbers.shape} and their strengths {opacity.shape}; expected one size")
    if numbers.min() < 0 or numbers.max() >= len(colours):
        raise InputError(f"numbers {numbers.min()} to {numbers.max()} for {plural(len(colours), 'colour')}")
    grey: Picture = np.repeat(
        cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None].astype(np.uint8, copy=False), 3, axis=2
    )
    out = grey.copy() if covered is None else not_covered(grey, covered)
    table = np.asarray(colours, dtype=np.float64)
    for top in range(0, len(out), BAND):
        rows = np.s_[top : top + BAND]
        mixed = np.rint(grey[rows] + opacity[rows, :, None] * (table[numbers[rows]] - grey[rows])).astype(np.uint8)
        np.copyto(out[rows], mixed, where=True if covered is None else covered[rows, :, None])
    return out


def legend(entries: Sequence[Entry], size: int = 16, *, heading: str = "") -> Picture:
    """(h,w,3): one entry below the other, its swatch at the left. `size`: pixels of a letter; long lines are cut."""
    if not entries:
        raise InputError("a legend without entries")
    blocks = [text_tile(cut(heading), round(0.85 * size))] if heading else []
    blocks += [_block(entry, size) for entry in entries]
    width = max(block.shape[1] for block in blocks)
    out = np.full((sum(len(block) for block in blocks) + size // 2, width + size // 2, 3), PAPER, np.uint8)
    top = size // 2
    for block in blocks:
        out[top : top + len(block), : block.shape[1]] = block
        top += len(block)
    return out


def _block(entry: Entry, size: int) -> Picture:
    tiles = [text_tile(cut(entry.title), size)] + [text_tile(cut(line), round(0.85 * size)) for line in entry.lines]
    left, gap = 2 * size, size // 2
    tall = sum(len(tile) for tile in tiles)
    out = np.full((tall + gap, left + max(tile.shape[1] for tile in tiles), 3), PAPER, np.uint8)
    out[2 : len(tiles[0]) - 2, gap : left - 2] = (120, 120, 120)  # a frame, without which white is no swatch
    out[3 : len(tiles[0]) - 3, gap + 1 : left - 3] = entry.colour
    top = 0
    for tile in tiles:
        out[top : top + len(tile), left : left + tile.shape[1]] = tile
        top += len(tile)
    return out


def cut(text: str) -> str:
    """The text in as many letters as a line has."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + ELLIPSIS


Masks: TypeAlias = Mapping[str, ArrayLike] | ArrayLike
Outlines: TypeAlias = list[tuple[str, Colour, NDArray[np.bool_]]]

# Cyan, lavender, sage, blue: far from inferno and from one another (CIE76 of 25 at least) in each kind of colour vision.
OUTLINE: tuple[Colour, ...] = ((102, 255, 255), (204, 153, 255), (153, 204, 153), (102, 102, 255))


def outlines(masks: Masks | None, size: Sequence[int]) -> Outlines:
    """One mask, or names of masks, of the given size -> (name, colour, where it is True); "" for one without a name.

    0 is outside. GeometryError for another size, InputError for more masks than colours, for several labels, and for NaN.
    """
    if masks is None:
        return []
    named: Mapping[str, ArrayLike] = masks if isinstance(masks, Mapping) else {"": masks}
    if len(named) > len(OUTLINE):
        raise InputError(
            f"{plural(len(named), 'mask')}; expected {len(OUTLINE)} at most: more colours cannot be told apart"
        )
    return [
        (str(name), colour, _inside(name, mask, tuple(size)))
        for (name, mask), colour in zip(named.items(), OUTLINE, strict=False)
    ]


def draw_outlines(image: Picture, found: Outlines) -> Picture:
    """(H,W,3) -> (H,W,3): each mask's outline along the edges of its pixels. On a larger picture it is scaled with it."""
    out = checked_picture(image).copy()
    for _, colour, inside in found:
        ratio = np.divide(out.shape[:2], inside.shape)
        for polygon in contours(inside.astype(np.float32), 1):
            draw_line(out, polygon * ratio, colour, thin=True)
    return out


def key(found: Outlines, size: int, *, width: int | None = None) -> list[Picture]:
    """Pieces of a legend on a dark ground: a line in a mask's colour, and the mask's name. Those without one are left out."""
    return [_piece(name, colour, size, width) for name, colour, _ in found if name]


def key_below(image: Picture, found: Outlines) -> Picture:
    """(H,W,3) -> (H+h,W,3): the picture over the legend of its outlines; as it is where none has a name."""
    height, width = image.shape[:2]
    size = min(28, max(11, min(height, width) // 28))
    rows: list[list[Picture]] = [[]]
    for piece in key(found, size, width=width):
        spaced = padded(piece, left=size // 2, paper=DARK_PAPER)
        if rows[-1] and sum(one.shape[1] for one in rows[-1]) + spaced.shape[1] > width:
            rows.append([])
        rows[-1].append(spaced)
    strips = [_strip(row, width) for row in rows if row]
    return np.concatenate([image, *strips])


def _inside(name: str, mask: ArrayLike, size: tuple[int, ...]) -> NDArray[np.bool_]:
    array: NDArray[Any] = np.asarray(mask)
    what = f"the mask {name}".rstrip()
    if array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise InputError(f"{what} holds {array.dtype} or NaN; expected True and False, or numbers")
    if array.shape != size:
        raise GeometryError(f"{what} is {array.shape} and the picture {size}; expected one size")
    if names := several_labels(array):
        raise InputError(
            f"{what} holds {listed(names)}; expected one region: pass each by its name, as {{'{names[0]}': mask == {names[0]}}}, "
            "or mask != 0 for all"
        )
    return np.asarray(array != 0)


def _piece(name: str, colour: Colour, size: int, width: int | None) -> Picture:
    text = text_tile(name, size, ink=LIGHT_INK, paper=DARK_PAPER)
    long = round(1.5 * size)
    out = np.full((text.shape[0], long + text.shape[1], 3), DARK_PAPER, np.uint8)
    middle, thick = text.shape[0] // 2, max(2, size // 5)
    out[middle - thick // 2 :][:thick, :long] = colour
    out[:, long:] = text
    return out if width is None else out[:, :width]


def _strip(pieces: Sequence[Picture], width: int) -> Picture:
    out = np.full((pieces[0].shape[0], width, 3), DARK_PAPER, np.uint8)
    row = np.concatenate(pieces, axis=1)[:, :width]
    out[:, : row.shape[1]] = row
    return out
