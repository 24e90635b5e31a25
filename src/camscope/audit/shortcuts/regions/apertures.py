"""Regions around the round field of an endoscope, a dermatoscope or a fundus camera."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.regions.base import Bools, Floats, filled, grey, largest, skimage
from camscope.errors import UndefinedError

LIGHT: Final = 0.1  # of the way from the darkest to the brightest percentile: the field's own shadows are lighter
ROUND: Final = 0.02  # of the radius: how far the outline may lie from the circle, as a mean
RING: Final = 0.04  # of the radius
NOTCH: Final = 0.04  # of the radius: outline farther from the circle than this is a notch's or an eyelash's


@dataclass(frozen=True)
class Circle:
    """Centre in (row, column), pixel i having its centre at i; radius in pixels."""

    row: float
    column: float
    radius: float

    def off(self, points: Floats) -> Floats:
        """How far points (2,...) lie outside; inside negative."""
        away: Floats = np.hypot(points[0] - self.row, points[1] - self.column) - self.radius
        return away


def aperture(image: NDArray[Any]) -> Bools:
    """Outside the bright circle, which may be cut off by the image's edges."""
    return _circle(image).off(_places(image)) > 0


def rim(image: NDArray[Any]) -> Bools:
    """The ring along the bright circle's edge, 4 % of its radius to either side: there notches and reflections lie."""
    circle = _circle(image)
    return np.abs(circle.off(_places(image))) <= RING * circle.radius


def _places(image: NDArray[Any]) -> Floats:
    return np.indices(image.shape[:2]).astype(np.float64)


def _circle(image: NDArray[Any]) -> Circle:
    """The circle along the edge of the bright part; UndefinedError where that is not round, or its corners not dark."""
    values = grey(image)
    if values.ndim == 3:
        raise UndefinedError("no aperture: a volume has none")
    dark, bright = np.percentile(values, [1, 99])
    field = filled(largest(values > dark + LIGHT * (bright - dark)))
    if min(field.shape) < 2 or field[:: field.shape[0] - 1, :: field.shape[1] - 1].any():
        raise UndefinedError("no aperture: not all corners of the image are dark")
    outline = _outline(field)
    circle = _fitted(outline)
    for _ in range(3):  # without what a notch or a label adds to the outline
        near = np.abs(circle.off(outline.T)) <= NOTCH * circle.radius
        if near.sum() >= len(outline) / 2:
            circle = _fitted(outline[near])
    off = np.abs(circle.off(outline.T))
    if np.median(off) > ROUND * circle.radius:
        raise UndefinedError(
            f"no aperture: the bright part is not round ({np.median(off) / circle.radius:.0%} of the radius off a circle)"
        )
    return circle


def _outline(field: Bools) -> Floats:
    """(M,2): points halfway between the pixels inside and those outside, without what the image's edges cut off."""
    lines = skimage("measure").find_contours(field.astype(np.float64), 0.5)
    points = np.concatenate(lines) if lines else np.empty((0, 2))
    if len(points) < 8:
        raise UndefinedError("no aperture: the bright part has no outline")
    return np.asarray(points, np.float64)


def _fitted(points: Floats) -> Circle:
    """The circle of the least squares of |p|² - 2 c·p - (r² - |c|²) over all points p (Kåsa 1976)."""
    middle = points.mean(0)
    near = points - middle
    solution, *_ = np.linalg.lstsq(np.column_stack([2 * near, np.ones(len(near))]), (near**2).sum(1), rcond=None)
    row, column, rest = solution.tolist()
    return Circle(row + middle[0], column + middle[1], float(np.sqrt(max(rest + row**2 + column**2, 1e-12))))
