"""The dark ground of medical pictures: planes in a frame of letters, cross hairs, what is said beside them."""

from collections.abc import Sequence

import numpy as np

from camscope.render.anatomical_axes import View, axis_of, located
from camscope.render.colormap import DIVERGING
from camscope.render.image_grid import AMBER, colour_bar, padded, written
from camscope.render.legend import cut, key
from camscope.render.rgb_image import DARK_PAPER, LIGHT_INK, Colour, Picture
from camscope.render.text import text_tile
from camscope.render.volume import Volume, Voxel

ACCENT: Colour = (0, 229, 255)  # of the peak and the cross hairs
DEEP: Colour = (0, 96, 120)  # the same on the pale picture below a signed map
GAP = 9  # pixels between a cross hair's arms and its middle: the spot itself stays free
NICE = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # millimetres of a ruler


def line(text: str, size: int, *, ink: Colour = LIGHT_INK, width: int | None = None, lines: int = 1) -> Picture:
    """A text on the dark ground."""
    return text_tile(text, size, ink=ink, paper=DARK_PAPER, width=width, lines=lines)


def letter_size(width: int) -> int:
    """Pixels of a letter in a picture so wide."""
    return min(22, max(11, width // 26))


def margin(size: int) -> int:
    """Pixels between a plane and its title, where letters stand."""
    return round(1.5 * size)


def framed(
    plane: Picture, title: str, edges: tuple[str, str, str, str], size: int, *, ink: Colour = LIGHT_INK
) -> Picture:
    """(h,w,3) -> larger: a plane below its title, with letters at its top, bottom, left and right."""
    edge, head = margin(size), line(title, size, ink=ink)
    known = any(edges)
    out = padded(plane, edge if known else 2, edge if known else 4, edge, edge, paper=DARK_PAPER)
    out = padded(out, top=head.shape[0], right=max(0, edge + head.shape[1] - out.shape[1]), paper=DARK_PAPER)
    put(out, head, 0, edge - max(2, size // 4))
    top, left = out.shape[0] - plane.shape[0] - (edge if known else 4), edge
    middle, centre = top + plane.shape[0] / 2, left + plane.shape[1] / 2
    places = (
        (top - edge / 2, centre),
        (top + plane.shape[0] + edge / 2, centre),
        (middle, edge / 2),
        (middle, left + plane.shape[1] + edge / 2),
    )
    for letter, (row, column) in zip(edges, places, strict=True):
        if letter:
            tile = line(letter, size)
            put(out, tile, round(row - tile.shape[0] / 2), round(column - tile.shape[1] / 2))
    return out


def corner(size: int, known: bool) -> tuple[int, int]:
    """(row, column) of a plane's first pixel in its frame; `known`: with letters."""
    return line("", size).shape[0] + (margin(size) if known else 2), margin(size)


def put(out: Picture, tile: Picture, row: int, column: int) -> None:
    """A tile on `out` itself, cut at its borders."""
    row, column = max(0, row), max(0, column)
    room = out[row : row + tile.shape[0], column : column + tile.shape[1]]
    room[:] = tile[: room.shape[0], : room.shape[1]]


def crossed(plane: Picture, row: float, column: float, colour: Colour) -> Picture:
    """(h,w,3): with thin lines through a point, half transparent, which leave the point itself free."""
    out = plane.copy()
    i, j = min(int(row), plane.shape[0] - 1), min(int(column), plane.shape[1] - 1)
    for arm in (
        np.s_[: max(0, i - GAP), j],
        np.s_[i + GAP + 1 :, j],
        np.s_[i, : max(0, j - GAP)],
        np.s_[i, j + GAP + 1 :],
    ):
        out[arm] = np.rint(0.35 * out[arm] + 0.65 * np.asarray(colour)).astype(np.uint8)
    return out


def accent(volume: Volume) -> Colour:
    """The colour of cross hairs and of the peak's slice, that shows on what lies below."""
    return DEEP if volume.colormap == DIVERGING and volume.alpha > 0 else ACCENT


def stacked(rows: Sequence[Sequence[Picture]], gap: int = 0) -> Picture:
    """Pictures in rows and columns on the dark ground, each at the top left of its place."""
    widths = [max(cell.shape[1] for cell in column) + gap for column in zip(*rows, strict=True)]
    bands = []
    for row in rows:
        tall = max(cell.shape[0] for cell in row) + gap
        cells = [
            padded(cell, bottom=tall - cell.shape[0], right=width - cell.shape[1], paper=DARK_PAPER)
            for cell, width in zip(row, widths, strict=True)
        ]
        bands.append(np.concatenate(cells, axis=1))
    return np.concatenate(bands)


def numbered(volume: Volume, view: View, voxel: Voxel) -> str:
    """A plane's name and number: `axial 17`, `axis 0: 17`, and where it lies."""
    apart = " " if view.name.isalpha() else ": "
    return f"{view.name}{apart}{voxel[view.normal]}{position(volume, voxel, view.normal)}"


def middle(volume: Volume, view: View, number: int) -> Voxel:
    """The voxel in the middle of a slice."""
    depth, row, column = (number if axis == view.normal else length // 2 for axis, length in enumerate(volume.shape))
    return depth, row, column


def position(volume: Volume, voxel: Voxel, normal: int) -> str:
    """Where a slice lies: ` · S 12.0 mm` in the world, ` · 85.0 mm` from the first slice, or nothing."""
    if volume.matrix is not None:
        return f" · {located(volume.matrix, voxel)[axis_of(volume.matrix, normal)]} mm"
    return f" · {voxel[normal] * volume.voxel[normal]:.1f} mm" if volume.measured else ""


def told(volume: Volume, size: int, factor: float, height: int, words: Sequence[str], *, bar: bool = True) -> Picture:
    """(h,w,3), about `height` rows: a warning, the bar with the raw range, words, the masks' legend, a ruler."""
    edge, gap = max(2, size // 4), size // 2
    wide = 12 * size
    above = [] if volume.warning is None else [text_tile(volume.warning, size, width=wide, lines=4, paper=AMBER)]
    below = [line(cut(part), size) for word in words for part in word.split(" · ") if part]
    below += [padded(piece, left=edge, paper=DARK_PAPER) for piece in key(volume.outlines, size)]
    if volume.measured:
        below.append(padded(ruler(factor, wide // 2, size), left=edge, paper=DARK_PAPER))
    if bar and volume.alpha > 0:
        room = height - sum(piece.shape[0] + gap for piece in (*above, *below)) - 2 * gap
        above.append(padded(_bar(volume, size, room), left=edge, bottom=gap // 2, paper=DARK_PAPER))
    pieces = [padded(piece, bottom=gap, paper=DARK_PAPER) for piece in (*above, *below)]
    wide = max([wide, *(piece.shape[1] for piece in pieces)])
    top = np.full((1, wide, 3), DARK_PAPER, np.uint8)
    return np.concatenate([top, *(padded(one, right=wide - one.shape[1], paper=DARK_PAPER) for one in pieces)])


def _bar(volume: Volume, size: int, room: int) -> Picture:
    height = min(260, max(6 * size, room))
    return colour_bar(height, *volume.ends, volume.colormap, width=size, size=size, ink=LIGHT_INK, paper=DARK_PAPER)


def ruler(factor: float, width: int, size: int) -> Picture:
    """(h,w,3): a line as long as so many millimetres, and how many."""
    length = max((one for one in NICE if one * factor <= width), default=NICE[0])
    pixels = max(2, round(length * factor))
    text = line(f"{length} mm", size)
    out = np.full((text.shape[0], pixels + 6 + text.shape[1], 3), DARK_PAPER, np.uint8)
    middle = text.shape[0] // 2
    out[middle : middle + 2, :pixels] = LIGHT_INK
    out[middle - 4 : middle + 6, [0, 1, pixels - 2, pixels - 1]] = LIGHT_INK
    out[:, pixels + 6 :] = text
    return out


def turned(view: View, volume: Volume) -> str:
    """Where the patient's sides are on a slice, in words: for pictures too small for letters at their edges."""
    top, _, left, _ = view.edges(volume.letters)
    return f"top {top}, left {left}" if top and left else ""


def peak_words(volume: Volume, at: Voxel) -> list[str]:
    """What the map says at a voxel, and where that lies."""
    value = float(volume.values[at])
    what = "peak" if at == volume.peak and not volume.warning else "value"
    words = [f"{what} {written(value, value, value)}", f"voxel {at[0]}, {at[1]}, {at[2]}"]
    return words if volume.matrix is None else [*words, f"{'  '.join(located(volume.matrix, at))} mm"]


def of_the_peak(volume: Volume) -> list[str]:
    """The peak's words, of a map that has one and is shown."""
    return peak_words(volume, volume.peak) if volume.alpha > 0 and not volume.warning else []
