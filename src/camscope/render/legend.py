"""Regions of a picture in colours that can be told apart, and the legend that says what each colour means."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError, InputError
from camscope.render.overlay import BAND, not_covered
from camscope.render.picture import (
    PAPER,
    Colour,
    Picture,
    Values,
    checked_fraction,
    checked_picture,
    checked_values,
)
from camscope.render.text import ELLIPSIS, text_tile
from camscope.wording import plural

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
