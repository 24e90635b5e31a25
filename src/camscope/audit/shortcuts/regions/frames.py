"""Regions at the edges of an image: its border, its corners, and what it was padded with."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.regions.base import Bools, Floats, grey, size_of
from camscope.errors import UndefinedError

FRAME: Final = 0.05  # of each side
CORNER: Final = 0.2
FLAT: Final = 0.01  # of the image's range: compression ripples what was one value


def border(image: NDArray[Any]) -> Bools:
    """The outermost 5 % of each side, a pixel at least."""
    return ~_all_axes([(i >= width) & (i < n - width) for i, n, width in _along(image, FRAME)])


def corners(image: NDArray[Any]) -> Bools:
    """The squares at the corners, a fifth of each side; of a volume the cubes."""
    return _all_axes([(i < width) | (i >= n - width) for i, n, width in _along(image, CORNER)])


def padding(image: NDArray[Any]) -> Bools:
    """The outermost rows and columns, as far as each has one value; of a volume the slices."""
    values = grey(image)
    flat, box = FLAT * (values.max() - values.min()), [[0, n] for n in values.shape]
    while _shrunk(values, box, flat):
        pass
    inside = tuple(slice(*ends) for ends in box)
    found = np.ones(values.shape, np.bool_)
    found[inside] = False
    if not found.any():
        raise UndefinedError("no padding: the outermost rows and columns are not constant")
    return found


def _along(image: NDArray[Any], share: float) -> list[tuple[NDArray[np.int64], int, int]]:
    """Of each axis its places, its length and this share of it in pixels."""
    return [(np.arange(n), n, max(1, round(n * share))) for n in size_of(image)]


def _all_axes(inside: list[Bools]) -> Bools:
    """(*S): where all axes agree."""
    found = np.ones((), np.bool_)
    for axis, along in enumerate(inside):
        found = found & along.reshape(-1, *[1] * (len(inside) - 1 - axis))
    return np.asarray(found, np.bool_)


def _shrunk(values: Floats, box: list[list[int]], flat: float) -> bool:
    """Whether an edge of the box was one value, and is now outside of it; an image of one value has nothing left."""
    for axis, ends in enumerate(box):
        for end, step in ((0, 1), (1, -1)):
            if ends[1] - ends[0] < 2:
                continue
            edge = [slice(*other) for other in box]
            at = ends[end] if end == 0 else ends[end] - 1
            edge[axis] = slice(at, at + 1)
            part = values[tuple(edge)]
            if part.max() - part.min() <= flat:
                ends[end] += step
                return True
    return False
