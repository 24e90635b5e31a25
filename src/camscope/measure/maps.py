"""The arrays that metrics judge: a map and its mask on what the model was shown, and maps that know nothing. Any axes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.explainers.controls import centre_gaussian, edges
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.images.photo import read_photo
from camscope.images.scan_pixels import grey
from camscope.images.scans import is_scan, read_scan

Floats = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]
ALONG = 14  # regions along the shortest side: single pixels, here and there, upset a model whatever they show
FLOORS = ("uniform", "centre", "edges", "random")  # what every method is held against


def shown(one: Explanation, mask: Mask | None) -> tuple[Floats, Mask, tuple[slice, ...]]:
    """The map (*s) in score units on the image's pixels, and the mask, both cut to what the model was shown.

    What the preprocessing cropped away no map can reach: it is no background to be right about. UndefinedError where
    nothing of the evidence was shown, or the map's place is unknown. Without a mask: an empty one.
    """
    if one.placement is None:
        raise UndefinedError("where the map lies on the image is unknown")
    if not np.isfinite(one.heat).all():
        raise UndefinedError("the map holds NaN or infinity")
    heat, covered = one.placement.project(one.heat)
    window = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(covered))
    if mask is None:
        return heat[window], np.zeros_like(covered[window]), window
    inside = mask[window] & covered[window]
    if mask.any() and not inside.any():
        raise UndefinedError("none of the evidence was shown to the model")
    return heat[window], inside, window


def floors(x: Tensor, one: Explanation) -> Mapping[str, Floats]:
    """Maps (*S) of an image x (C,*S) by name that know nothing of the model: they are what a metric gives for nothing."""
    plain = x.detach().cpu().double()[None]
    seed = int.from_bytes(one.name.encode()[-8:], "little")
    drawn = np.random.default_rng(seed).random(one.grid)
    size = tuple(plain.shape[2:])
    made = (
        np.ones(size),
        centre_gaussian(plain)[0].numpy(),
        edges(plain)[0].numpy(),
        Placement.identity(size).project(drawn)[0],
    )
    return dict(zip(FLOORS, made, strict=True))


def side_of(x: Tensor) -> int:
    """The side in pixels of what is removed of an input (C,*S) at a time, where nobody says otherwise."""
    return max(1, min(x.shape[1:]) // ALONG)


def picture(source: Any) -> Tensor:
    """(C,*S): what an image shows; of what already is a model's input that."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return source.detach()
    if isinstance(source, Path) or is_scan(source):
        values = torch.from_numpy(grey(read_scan(source)))
        return values.movedim(-1, 0) if values.shape[-1] == 3 else values[None]
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(read_photo(source).pixels, -1, 0)))
