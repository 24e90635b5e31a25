"""The base of the region detectors, and the projection of regions from an image to the model's input."""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError, InputError, UndefinedError
from camscope.geometry import Placement, project_mask_to_input
from camscope.optional import require

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
RegionDetector = Callable[[NDArray[Any]], BoolArray]


@dataclass(frozen=True)
class Region:
    """A part of an image that its pixels tell: `name`, what it is in `description`, and how it is found.

    Called with (H,W), (H,W,3) or a volume (D,H,W), uint8 or numbers, it gives (*S) bool: some of the image, never none of
    it and never all. UndefinedError, with the reason, where the image has no such part.
    """

    name: str
    description: str
    detect: RegionDetector

    def __call__(self, image: NDArray[Any]) -> BoolArray:
        """(*S) bool."""
        values = np.asarray(image)
        if values.ndim not in (2, 3) or not values.size:
            raise InputError(f"an image of shape {values.shape}; expected (H,W), (H,W,3) or a volume (D,H,W)")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UndefinedError(f"no region {self.name!r}: the image holds NaN or infinity")
        mask = self.detect(values)
        if not mask.any():
            raise UndefinedError(f"no region {self.name!r}: nothing in the image is {self.description}")
        if mask.all():
            raise UndefinedError(f"no region {self.name!r}: all of the image would be {self.description}")
        return mask


def is_color_image(image: NDArray[Any]) -> bool:
    """Whether the last axis is that of red, green and blue: a volume three voxels wide is none that anybody has."""
    return image.ndim == 3 and image.shape[-1] == 3


def to_gray_values(image: NDArray[Any]) -> FloatArray:
    """(*S) float64: of a color image the mean of its channels; UndefinedError where all pixels have one value."""
    values = np.asarray(image, np.float64)
    values = values.mean(-1) if is_color_image(image) else values
    if values.min() == values.max():
        raise UndefinedError("the image has one value everywhere")
    return values


def get_spatial_shape(image: NDArray[Any]) -> tuple[int, ...]:
    """*S."""
    return image.shape[:2] if is_color_image(image) else image.shape


def select_largest_component(mask: BoolArray) -> BoolArray:
    """Its largest connected part, corners touching; the mask itself where it is empty."""
    labels, count = import_scipy_ndimage().label(mask, np.ones((3,) * mask.ndim))
    if count < 2:
        return mask
    largest: BoolArray = labels == 1 + np.bincount(labels.ravel())[1:].argmax()
    return largest


def fill_holes(mask: BoolArray) -> BoolArray:
    """With its holes; of a volume slice by slice, for what is hollow opens somewhere in three dimensions."""
    fill = import_scipy_ndimage().binary_fill_holes
    return np.stack([fill(slice_mask) for slice_mask in mask]) if mask.ndim == 3 else np.asarray(fill(mask), np.bool_)


def import_scipy_ndimage() -> Any:
    """scipy.ndimage, or the error that says how to have it."""
    return require("scipy.ndimage", extra="audit")


def import_skimage(submodule: str) -> Any:
    """A part of scikit-image, or the error that says how to have it."""
    return require(f"skimage.{submodule}", extra="audit")


def project_region_to_input(
    mask: NDArray[np.bool_], placement: Placement | None, *, include_touched: bool = False
) -> BoolArray:
    """(*S) of the image -> (*S) of the model's input: True where a pixel's center lies on the mask.

    What lies outside the image is False. `placement` None: the model sees the image as it is. `include_touched`: also every pixel
    that holds the center of one of the mask's, so that of a thin region nothing is lost where the input is coarser.
    """
    image_mask = np.asarray(mask)
    if image_mask.dtype != np.bool_:
        raise InputError(f"a mask of {image_mask.dtype}; expected bool")
    if placement is None:
        return image_mask.copy()
    if image_mask.shape != placement.image_size:
        raise GeometryError(f"a mask {image_mask.shape} of an image {placement.image_size}: expected one size")
    projected = project_mask_to_input(image_mask, placement.input_size, placement.to_image)
    if include_touched:
        reached = np.floor(placement.to_input(np.argwhere(image_mask) + 0.5)).astype(np.int64)
        reached = reached[((reached >= 0) & (reached < projected.shape)).all(1)]
        projected[tuple(reached.T)] = True
    return projected


def equivalent_diameter(mask: NDArray[np.bool_]) -> float:
    """Pixels: of the disc as large as the mask's largest part, in 3-D of the ball; UndefinedError for an empty mask."""
    region = np.asarray(mask, np.bool_)
    if region.ndim not in (2, 3):
        raise InputError(f"a mask {region.shape}; expected (H,W) or (D,H,W)")
    if not region.any():
        raise UndefinedError("the region is empty: it has no diameter")
    size = float(select_largest_component(region).sum())
    return float(2 * (size / pi) ** 0.5 if region.ndim == 2 else 2 * (3 * size / (4 * pi)) ** (1 / 3))
