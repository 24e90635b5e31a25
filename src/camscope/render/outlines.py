"""Outlines of masks in colours that are told apart with any colour vision and on any heat, and what each stands for."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError
from camscope.labels import listed, several_labels
from camscope.render.panel import padded
from camscope.render.picture import DARK_PAPER, LIGHT_INK, Colour, Picture, checked_picture
from camscope.render.shapes import contours, draw_line
from camscope.render.text import text_tile
from camscope.wording import plural

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
