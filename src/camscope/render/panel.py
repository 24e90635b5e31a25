"""Pictures side by side: the colour bar, captions with warnings, and a neat grid of pictures of any size."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, NonFiniteError
from camscope.render.colour import DIVERGING, colourise
from camscope.render.picture import INK, PAPER, Colour, Picture, checked_picture, expect_height, fitted
from camscope.render.text import text_tile
from camscope.wording import plural

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
