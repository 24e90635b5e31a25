"""A sheet: rows of captioned pictures under a title, with one legend for the colours of them all."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from camscope.errors import InputError
from camscope.render.colour import colourise, lower_bound
from camscope.render.panel import FRAME, padded, panel, surrounded
from camscope.render.picture import PAPER, Picture, checked_picture
from camscope.render.text import text_tile

WIDTH, MOST = 1900, 7  # pixels of a sheet, and pictures side by side, unless asked for


class Cell(NamedTuple):
    """A picture (H,W,3) with its caption, and a warning if there is one."""

    picture: Picture
    caption: str
    flag: str | None = None


def sheet(
    rows: Sequence[Sequence[Cell | None]],
    *,
    title: str = "",
    legend: tuple[str, str] | None = None,
    colormap: str = "inferno",
    columns: int | None = None,
    height: int = 256,
) -> Picture:
    """Rows of cells -> (h,w,3): each row begins a new line, and goes on in further ones where it is long; None is a hole.

    `title`: one line over all; `legend`: what the bottom and the top colour of all maps mean, in words. `columns`:
    pictures side by side, chosen so that the sheet fits a screen and few places stay empty. `height`: rows of a picture.
    """
    pictures = [checked_picture(cell.picture) for row in rows for cell in row if cell is not None]
    if not pictures or not all(rows):
        raise InputError("a sheet needs rows, and each row a picture")
    hole = Cell(np.full_like(pictures[0], PAPER[0]), "")
    filled = [[hole if cell is None else cell for cell in row] for row in rows]
    columns = columns or _columns(max(map(len, rows)), max(_width(p, height) for p in pictures), height)
    bodies = [_body(row, columns, height) for row in filled]
    wide = max(body.shape[1] for body in bodies)
    parts = [padded(body, right=wide - body.shape[1]) for body in bodies]
    return np.concatenate([*_header(title, legend, colormap, wide, height), *parts])


def strip(low: str, high: str, colormap: str = "inferno", *, size: int = 16) -> Picture:
    """(h,w,3): a colour map from its bottom to its top, between the words for its ends. `size`: pixels of a letter."""
    left, right = text_tile(low, size), text_tile(high, size)
    ramp = np.linspace(lower_bound(colormap), 1, 9 * size)
    bar = surrounded(colourise(np.repeat(ramp[None], max(6, 3 * size // 4), axis=0), colormap), 1, FRAME)
    spare = left.shape[0] - bar.shape[0]
    bar = padded(bar, top=spare // 2, bottom=spare - spare // 2)
    return np.concatenate([left, bar, right], axis=1)


def _header(title: str, legend: tuple[str, str] | None, colormap: str, wide: int, height: int) -> list[Picture]:
    """The title at the left and the legend at the right, in one line, or one under the other."""
    size, gap = min(36, max(11, height // 14)), max(4, height // 20)
    room = wide - 2 * gap
    right = [] if legend is None else [strip(*legend, colormap, size=min(32, max(11, height // 16)))]
    left = [text_tile(title, size)] if title else []
    if left and right and left[0].shape[1] + right[0].shape[1] > room:
        left = [text_tile(title, size, width=min(room, left[0].shape[1]), lines=2)]
        return [_line(left, [], wide, gap), _line(right, [], wide, gap)]
    return [_line(left, right, wide, gap)] if left or right else []


def _line(left: Sequence[Picture], right: Sequence[Picture], wide: int, gap: int) -> Picture:
    tall = max(tile.shape[0] for tile in (*left, *right))
    out = np.full((tall + gap, wide, 3), PAPER, np.uint8)
    for tile in left:
        out[gap + (tall - tile.shape[0]) // 2 :, gap:][: tile.shape[0], : tile.shape[1]] = tile[:, : wide - gap]
    for tile in right:
        start = max(0, wide - gap - tile.shape[1])
        out[gap + (tall - tile.shape[0]) // 2 :, start:][: tile.shape[0], : tile.shape[1]] = tile[:, : wide - start]
    return out


def _body(row: Sequence[Cell], columns: int, height: int) -> Picture:
    pictures, captions, flags = zip(*row, strict=True)
    return panel(pictures, captions, columns=columns, height=height, flags=flags)


def _width(picture: Picture, height: int) -> int:
    """Pixels of a picture scaled as a panel does it."""
    return min(2 * height, round(height * int(picture.shape[1]) / int(picture.shape[0])))


def _columns(count: int, width: int, height: int) -> int:
    """As many as fit, or the number below that leaves the fewest places empty."""
    most = min(MOST, max(3, WIDTH // (width + max(4, height // 20))))
    return count if count <= most else min(range(most, 2, -1), key=lambda columns: -count % columns)
