"""From an image to the model's input, and how large a region is there."""

from math import pi

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.regions.base import Bools, largest
from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.geometry import Placement
from camscope.measure.choosing.samples import on_input as middles


def on_input(mask: NDArray[np.bool_], placement: Placement | None, *, touching: bool = False) -> Bools:
    """(*S) of the image -> (*S) of the model's input: True where a pixel's centre lies on the mask.

    What lies outside the image is False. `placement` None: the model sees the image as it is. `touching`: also every pixel
    that holds the centre of one of the mask's, so that of a thin region nothing is lost where the input is coarser.
    """
    given = np.asarray(mask)
    if given.dtype != np.bool_:
        raise InputError(f"a mask of {given.dtype}; expected bool")
    if placement is None:
        return given.copy()
    if given.shape != placement.image_size:
        raise GeometryError(f"a mask {given.shape} of an image {placement.image_size}: expected one size")
    found = middles(given, placement)
    if touching:
        reached = np.floor(placement.to_input(np.argwhere(given) + 0.5)).astype(np.int64)
        reached = reached[((reached >= 0) & (reached < found.shape)).all(1)]
        found[tuple(reached.T)] = True
    return found


def equivalent_diameter(mask: NDArray[np.bool_]) -> float:
    """Pixels: of the disc as large as the mask's largest part, in 3-D of the ball; UndefinedError for an empty mask."""
    given = np.asarray(mask, np.bool_)
    if given.ndim not in (2, 3):
        raise InputError(f"a mask {given.shape}; expected (H,W) or (D,H,W)")
    if not given.any():
        raise UndefinedError("the region is empty: it has no diameter")
    whole = float(largest(given).sum())
    return float(2 * (whole / pi) ** 0.5 if given.ndim == 2 else 2 * (3 * whole / (4 * pi)) ** (1 / 3))
