"""Draw one slice of a volume with its map, its uncovered parts and the outlines of its masks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.render.colors import DIVERGING, fade_to_gray, normalize_between, overlay
from camscope.render.draw_regions_and_outlines import MaskOutline, draw_outlines
from camscope.render.image_encoding import RGBImage, Values
from camscope.render.volume_data import AnatomicalView, Volume


def draw_slice(volume: Volume, view: AnatomicalView, slice_index: int, pixels_per_mm: float) -> RGBImage:
    """Draw one slice of a volume as an image (h,w,3), with its map."""
    covered = None if volume.covered is None else view.extract_slices(volume.covered)[slice_index]
    outlines = [outline._replace(mask=view.extract_slices(outline.mask)[slice_index]) for outline in volume.outlines]
    image, values = (
        view.extract_slices(array)[slice_index] for array in (volume.image_as_uint8, volume.colored_values)
    )
    return draw_slice_overlay(volume, view, image, values, covered, outlines, pixels_per_mm)


def draw_slice_overlay(
    volume: Volume,
    view: AnatomicalView,
    image_as_uint8: RGBImage,
    values: Values,
    covered: NDArray[np.bool_] | None,
    outlines: Sequence[MaskOutline],
    pixels_per_mm: float,
) -> RGBImage:
    """Draw a map (h,w) and outlines over an image (h,w). All three have the orientation of `view`.

    The map is interpolated before it is colored.
    """
    size = tuple(max(1, round(length * pixels_per_mm)) for length in volume.get_slice_height_and_width_mm(view))
    rgb = resize_slice(image_as_uint8, size)
    rgb = np.repeat(rgb[..., None], 3, axis=2) if rgb.ndim == 2 else rgb
    normalized = normalize_between(np.asarray(values, np.float32), *volume.value_range, volume.colormap)
    covered_pixels = None if covered is None else resize_slice(covered.astype(np.uint8), size, nearest=True) > 0
    if volume.colormap == DIVERGING and volume.alpha > 0:
        rgb = fade_to_gray(rgb)
    values = resize_slice(normalized, size, nearest=volume.has_cells)
    blended = overlay(rgb, values, alpha=volume.alpha, colormap=volume.colormap, covered=covered_pixels)
    return draw_outlines(blended, outlines)


def resize_slice(pixels: NDArray[Any], size: tuple[int, ...], *, nearest: bool = False) -> NDArray[Any]:
    """Resize a slice (h,w) or (h,w,3). To shrink it, average over areas. To enlarge it, interpolate linearly.

    With `nearest`, copy the nearest pixel in both cases.
    """
    import cv2

    rows, columns = pixels.shape[:2]
    is_reduced = size[0] <= rows and size[1] <= columns
    method = cv2.INTER_NEAREST if nearest else cv2.INTER_AREA if is_reduced else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(pixels), (size[1], size[0]), interpolation=method), pixels.dtype)
