"""What every region is made of: one function of an image's pixels, and a reason where the image has no such region."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError, MissingExtraError, UndefinedError

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Find = Callable[[NDArray[Any]], Bools]


@dataclass(frozen=True)
class Region:
    """A part of an image that its pixels tell: `name`, what it is in `words`, and how it is found.

    Called with (H,W), (H,W,3) or a volume (D,H,W), uint8 or numbers, it gives (*S) bool: some of the image, never none of
    it and never all. UndefinedError, with the reason, where the image has no such part.
    """

    name: str
    words: str
    find: Find

    def __call__(self, image: NDArray[Any]) -> Bools:
        """(*S) bool."""
        given = np.asarray(image)
        if given.ndim not in (2, 3) or not given.size:
            raise InputError(f"an image of shape {given.shape}; expected (H,W), (H,W,3) or a volume (D,H,W)")
        if given.dtype.kind == "f" and not np.isfinite(given).all():
            raise UndefinedError(f"no region {self.name!r}: the image holds NaN or infinity")
        found = self.find(given)
        if not found.any():
            raise UndefinedError(f"no region {self.name!r}: nothing in the image is {self.words}")
        if found.all():
            raise UndefinedError(f"no region {self.name!r}: all of the image would be {self.words}")
        return found


def is_colour(image: NDArray[Any]) -> bool:
    """Whether the last axis is that of red, green and blue: a volume three voxels wide is none that anybody has."""
    return image.ndim == 3 and image.shape[-1] == 3


def grey(image: NDArray[Any]) -> Floats:
    """(*S) float64: of a colour image the mean of its channels; UndefinedError where all pixels have one value."""
    values = np.asarray(image, np.float64)
    values = values.mean(-1) if is_colour(image) else values
    if values.min() == values.max():
        raise UndefinedError("the image has one value everywhere")
    return values


def size_of(image: NDArray[Any]) -> tuple[int, ...]:
    """*S."""
    return image.shape[:2] if is_colour(image) else image.shape


def largest(mask: Bools) -> Bools:
    """Its largest connected part, corners touching; the mask itself where it is empty."""
    labels, count = scipy_images().label(mask, np.ones((3,) * mask.ndim))
    if count < 2:
        return mask
    found: Bools = labels == 1 + np.bincount(labels.ravel())[1:].argmax()
    return found


def filled(mask: Bools) -> Bools:
    """With its holes; of a volume slice by slice, for what is hollow opens somewhere in three dimensions."""
    fill = scipy_images().binary_fill_holes
    return np.stack([fill(one) for one in mask]) if mask.ndim == 3 else np.asarray(fill(mask), np.bool_)


def otsu(values: NDArray[Any]) -> float:
    """The threshold that parts the values best in two (Otsu 1979)."""
    return float(skimage("filters").threshold_otsu(values))


def scipy_images() -> Any:
    """scipy.ndimage, or the error that says how to have it."""
    try:
        return import_module("scipy.ndimage")
    except ImportError as error:
        raise MissingExtraError("scipy", "audit") from error


def skimage(part: str) -> Any:
    """A part of scikit-image, or the error that says how to have it."""
    try:
        return import_module(f"skimage.{part}")
    except ImportError as error:
        raise MissingExtraError("scikit-image", "audit") from error
