"""The arrays that metrics judge: a map and its mask on the pixels that the model was shown, and maps that know nothing."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from camscope.errors import UndefinedError
from camscope.explainers.controls import centre_gaussian, edges
from camscope.explanation import Explanation, Pixels
from camscope.geometry import Placement

Floats = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]
FLOORS = ("uniform", "centre", "edges", "random")  # what every method is held against


def shown(one: Explanation, mask: Mask) -> tuple[Floats, Mask, tuple[slice, ...]]:
    """The map (h,w) in score units on the image's pixels, and the mask, both cut to what the model was shown.

    What the preprocessing cropped away no map can reach: it is no background to be right about. UndefinedError where
    nothing of the evidence was shown, or the map's place is unknown.
    """
    if one.placement is None:
        raise UndefinedError("where the map lies on the image is unknown")
    if not np.isfinite(one.heat).all():
        raise UndefinedError("the map holds NaN or infinity")
    heat, covered = one.placement.project(one.heat)
    window = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(covered))
    inside = mask[window] & covered[window]
    if mask.any() and not inside.any():
        raise UndefinedError("none of the evidence was shown to the model")
    return heat[window], inside, window


def floors(one: Explanation, pixels: Pixels, window: tuple[slice, ...]) -> Iterator[tuple[str, Floats]]:
    """Maps of an image by name that know nothing of the model: they are what a metric gives for nothing."""
    x = torch.from_numpy(np.ascontiguousarray(pixels[window])).permute(2, 0, 1)[None].double()
    yield "uniform", np.ones(x.shape[2:])
    yield "centre", centre_gaussian(x)[0].numpy()
    yield "edges", edges(x)[0].numpy()
    seed = int.from_bytes(one.name.encode()[-8:], "little")
    drawn = np.random.default_rng(seed).random(one.grid)
    yield "random", Placement.identity(tuple(x.shape[2:])).project(drawn)[0]
