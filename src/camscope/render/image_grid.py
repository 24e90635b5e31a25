"""Pictures side by side: the colour bar, captions with warnings, and a neat grid of pictures of any size.

A sheet: rows of captioned pictures under a title, with one legend for the colours of them all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colormap import DIVERGING, colourise, lower_bound
from camscope.render.rgb_image import INK, PAPER, Colour, Picture, checked_picture, expect_height, fitted
from camscope.render.text import text_tile

AMBER: Colour = (255, 191, 0)
FRAME: Colour = (150, 150, 150)
CAPTION_LINES = 3


def colour_bar(
    height: int,
    lo: float,
    hi: float,
    colormap: str = "inferno",
    *,
    width: int | None = None,
    size: int | None = None,
    ink: Colour = INK,
    paper: Colour = PAPER,
) -> Picture:
    """(height,w,3): the colours from `hi` down to `lo`, the raw values of the map's 1 and 0, written beside them.

    The diverging map is centred on a raw 0, which is written too. `width`: pixels of the coloured part alone; `size`: of
    a letter. A range of no extent has one colour and one number. NonFiniteError or InputError for a range that is none.
    """
    if not np.isfinite([lo, hi]).all():
        raise NonFiniteError(f"the range of the colour bar is {lo} to {hi}; expected finite numbers")
    if height < 8 or lo > hi:
        raise InputError(
            f"a colour bar of {plural(height, 'row')} from {lo} to {hi}; expected 8 rows at least, and lo <= hi"
        )
    values = _bar_values(height - 2, lo, hi, colormap)
    width = max(6, height // 16) if width is None else width
    bar = surrounded(colourise(np.repeat(values[:, None], width, axis=1), colormap), 1, FRAME)
    size = min(22, max(9, height // 16)) if size is None else size
    numbers = {hi: 0, lo: height} | ({0.0: height * hi / (hi - lo)} if colormap == DIVERGING and lo < 0 < hi else {})
    tiles = {row: text_tile(written(number, lo, hi), size, ink=ink, paper=paper) for number, row in numbers.items()}
    labels = np.full((height, max(tile.shape[1] for tile in tiles.values()), 3), paper, np.uint8)
    for row, tile in tiles.items():
        top = int(np.clip(row - tile.shape[0] / 2, 0, max(0, height - tile.shape[0])))
        labels[top : top + tile.shape[0], : tile.shape[1]] = tile[: height - top]
    return np.concatenate([bar, labels], axis=1)


def beside(*pictures: Picture) -> Picture:
    """Pictures of one height -> (H,w,3): one beside the other, with a thin gap."""
    heights = {checked_picture(picture).shape[0] for picture in pictures}
    if len(heights) != 1:
        raise InputError(f"pictures of {sorted(heights)} rows cannot stand side by side; fit them to one height first")
    gap = max(4, heights.pop() // 40)
    return np.concatenate([padded(p, right=gap) for p in pictures[:-1]] + [pictures[-1]], axis=1)


def levelled(*pictures: Picture) -> list[Picture]:
    """Pictures (H,W,3) of any heights -> the same, all of the tallest one's height, with paper below."""
    tall = max(checked_picture(picture).shape[0] for picture in pictures)
    return [padded(picture, bottom=tall - picture.shape[0]) for picture in pictures]


def captioned(image: Picture, caption: str, *, flag: str | None = None, size: int | None = None) -> Picture:
    """(H,W,3) -> (H+h,W,3): the picture over its caption; a `flag` is a warning that stands out between them.

    `size`: pixels of a letter. Captions of more than three lines are cut with an ellipsis; their text is only drawn.
    """
    height, width = checked_picture(image).shape[:2]
    size = min(36, max(11, min(height, width) // 18)) if size is None else size
    below = [] if flag is None else [text_tile(flag, size, width=width, lines=CAPTION_LINES, paper=AMBER)]
    below.append(text_tile(caption, size, width=width, lines=CAPTION_LINES))
    return np.concatenate([image, *below])


def panel(
    images: Sequence[Picture],
    captions: Sequence[str],
    *,
    columns: int | None = None,
    height: int = 256,
    flags: Sequence[str | None] | None = None,
) -> Picture:
    """Pictures (H,W,3) of any sizes -> (h,w,3): a grid of them, each scaled to `height` rows, over its caption.

    A picture wider than twice its height is scaled to that width. `columns`: chosen so that few cells stay empty.
    `flags`: a warning, or None, for each picture. InputError where the numbers of pictures and texts differ.
    """
    flags = [None] * len(images) if flags is None else flags
    if not images or not len(images) == len(captions) == len(flags):
        raise InputError(
            f"{plural(len(images), 'picture')}, {plural(len(captions), 'caption')}, "
            f"{plural(len(flags), 'flag')}; expected one of each a picture"
        )
    columns = _columns(len(images)) if columns is None else min(columns, len(images))
    if columns < 1:
        raise InputError(f"columns={columns}; expected 1 at least")
    expect_height("height", height)
    scaled = [fitted(image, height, 2 * height) for image in images]
    size, gap = min(36, max(11, height // 16)), max(4, height // 20)
    widths = [max(picture.shape[1] for picture in scaled[column::columns]) for column in range(columns)]
    cells = [
        captioned(_centred(picture, height, widths[i % columns]), captions[i], flag=flags[i], size=size)
        for i, picture in enumerate(scaled)
    ]
    rows = [_row(cells[start : start + columns], gap) for start in range(0, len(cells), columns)]
    wide = max(row.shape[1] for row in rows)
    return padded(np.concatenate([padded(row, right=wide - row.shape[1]) for row in rows]), top=gap, left=gap)


def _row(cells: Sequence[Picture], gap: int) -> Picture:
    tall = max(cell.shape[0] for cell in cells)
    return np.concatenate([padded(c, bottom=tall - c.shape[0] + gap, right=gap) for c in cells], axis=1)


def _columns(count: int) -> int:
    return count if count <= 4 else min((4, 3, 5, 6), key=lambda columns: -count % columns)


def _centred(image: Picture, height: int, width: int) -> Picture:
    rows, columns = height - image.shape[0], width - image.shape[1]
    return padded(image, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)


def padded(
    image: Picture, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0, *, paper: Colour = PAPER
) -> Picture:
    """(H,W,3) -> larger by so many rows and columns of paper."""
    out = np.full((image.shape[0] + top + bottom, image.shape[1] + left + right, 3), paper, np.uint8)
    out[top : top + image.shape[0], left : left + image.shape[1]] = image
    return out


def surrounded(image: Picture, edge: int, colour: Colour) -> Picture:
    """(H,W,3) -> larger by a frame `edge` pixels wide."""
    out = np.full((image.shape[0] + 2 * edge, image.shape[1] + 2 * edge, 3), colour, np.uint8)
    out[edge:-edge, edge:-edge] = image
    return out


def _bar_values(rows: int, lo: float, hi: float, colormap: str) -> NDArray[np.float64]:
    """(rows,): the map's values down the bar; of the diverging map, raw 0 is 0 and the stronger end 1 or -1."""
    if colormap == DIVERGING:
        strongest = max(abs(lo), abs(hi))
        return np.linspace(hi, lo, rows) / strongest if strongest else np.zeros(rows)
    return np.linspace(1, 0, rows) if hi > lo else np.full(rows, float(hi > 0))


def written(number: float, lo: float, hi: float) -> str:
    """The number in the fewest digits, three at least, that tell the two ends apart."""
    digits = next((n for n in range(3, 17) if lo == hi or f"{lo:.{n}g}" != f"{hi:.{n}g}"), 17)
    return f"{number + 0.0:.{digits}g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


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
    columns = columns or _sheet_columns(max(map(len, rows)), max(_width(p, height) for p in pictures), height)
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


def _sheet_columns(count: int, width: int, height: int) -> int:
    """As many as fit, or the number below that leaves the fewest places empty."""
    most = min(MOST, max(3, WIDTH // (width + max(4, height // 20))))
    return count if count <= most else min(range(most, 2, -1), key=lambda columns: -count % columns)
