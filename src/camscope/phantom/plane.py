"""The drawing plane: coordinates that turn and move with the body, soft edges, smooth clouds, traced curves."""

from dataclasses import dataclass
from functools import lru_cache
from math import cos, sin
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Field = NDArray[np.floating[Any]]  # float32 throughout

TRACE = 128  # curves are traced on at most this many pixels a side, then brought to the size of the image


@dataclass(frozen=True)
class Plane:
    """The body's own coordinates on size x size pixels: `x` to the right and `y` down (H,W), about -1 to 1."""

    size: int
    x: Field
    y: Field
    turn: tuple[float, float]
    shift: tuple[float, float]

    @classmethod
    def random(cls, random: Generator, size: int) -> "Plane":
        """A plane that is turned, scaled and moved a little."""
        angle, scale = random.normal(0, 0.035), random.uniform(0.93, 1.10)
        right, down = random.uniform(-0.06, 0.06), random.uniform(-0.06, 0.06)
        c, s = cos(angle) / scale, sin(angle) / scale
        axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1).astype(np.float32)
        column, row = axis[None, :] - right, axis[:, None] - down
        return cls(size, column * c + row * s, row * c - column * s, (c, s), (right, down))

    def trace(self, x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64]) -> Field:
        """Points at body coordinates, each laid down as a soft dot of that weight: (H,W)."""
        (c, s), (right, down) = self.turn, self.shift
        square, side = c * c + s * s, min(self.size, TRACE)
        column = ((c * x - s * y) / square + right + 1) * (side / 2) - 0.5
        row = ((s * x + c * y) / square + down + 1) * (side / 2) - 0.5
        seen = (column > 1) & (column < side - 2) & (row > 1) & (row < side - 2)
        return resized(_dots(column[seen], row[seen], weight[seen] * (side / TRACE), side), self.size)


def ramp(depth: Field, width: float) -> Field:
    """0 to 1 over `width`, 0.5 where the depth is 0: a soft edge."""
    step: Field = np.clip(depth * (1 / width) + 0.5, 0, 1)
    return step * step * (3 - 2 * step)


def band(distance: Field, width: float, soft: float) -> Field:
    """1 within half a width of distance 0, and 0 outside, with edges `soft` wide."""
    return ramp(width / 2 - np.abs(distance), soft)


def clouds(random: Generator, cells: int, size: int, strength: float) -> Field:
    """A smooth random field (H,W) with cells x cells independent values of standard deviation `strength`."""
    return resized(random.standard_normal((cells, cells), dtype=np.float32) * strength, size)


def resized(field: Field, size: int) -> Field:
    """A square field brought to (size,size), linear between the centres of its cells."""
    if len(field) == size:
        return field
    matrix = _interpolation(len(field), size)
    result: Field = matrix @ field @ matrix.T
    return result


@lru_cache(maxsize=16)
def _interpolation(cells: int, size: int) -> Field:
    at = np.clip((np.arange(size) + 0.5) * cells / size - 0.5, 0, cells - 1)
    weights: Field = np.maximum(1 - np.abs(at[:, None] - np.arange(cells)), 0).astype(np.float32)
    return weights


def _dots(column: NDArray[np.float64], row: NDArray[np.float64], weight: NDArray[np.float64], side: int) -> Field:
    """Each point shared among the four pixels around it, then spread by a 3 x 3 binomial kernel."""
    left, top = column.astype(np.int64), row.astype(np.int64)
    right, down = column - left, row - top
    corner = top * side + left
    index = np.concatenate([corner, corner + 1, corner + side, corner + side + 1])
    shares = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
    dots = np.bincount(index, np.concatenate([share * weight for share in shares]), side * side)
    field = dots.reshape(side, side).astype(np.float32)
    field[:, 1:-1] = 0.5 * field[:, 1:-1] + 0.25 * (field[:, 2:] + field[:, :-2])
    field[1:-1] = 0.5 * field[1:-1] + 0.25 * (field[2:] + field[:-2])
    return field
