"""One plane of a volume as it is drawn: in true proportions, with its part of the map and of the masks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.render.colour import DIVERGING
from camscope.render.compass import View
from camscope.render.outlines import Outlines, draw_outlines
from camscope.render.overlay import overlay, pale
from camscope.render.picture import Picture, Values
from camscope.render.scale import between
from camscope.render.volume import Volume


def drawn(volume: Volume, view: View, index: int, factor: float) -> Picture:
    """(h,w,3): one slice with its part of the map, at `factor` pixels a millimetre."""
    covered = None if volume.covered is None else view.of(volume.covered)[index]
    masks = [(name, colour, view.of(inside)[index]) for name, colour, inside in volume.outlines]
    return laid(volume, view, view.of(volume.grey)[index], view.of(volume.values)[index], covered, masks, factor)


def laid(
    volume: Volume,
    view: View,
    grey: Picture,
    values: Values,
    covered: NDArray[np.bool_] | None,
    masks: Outlines,
    factor: float,
) -> Picture:
    """(h,w) each -> (h,w,3): a picture and a map as `view` shows them, one over the other, as the volume is looked at.

    Numbers are brought to the pixels before they are coloured: between two voxels lies what lies between their values.
    """
    size = tuple(max(1, round(length * factor)) for length in volume.millimetres(view))
    rgb = resized(grey, size)
    rgb = np.repeat(rgb[..., None], 3, axis=2) if rgb.ndim == 2 else rgb
    numbers = resized(between(np.asarray(values, np.float32), *volume.ends, volume.colormap), size)
    known = None if covered is None else resized(covered.astype(np.uint8), size, exact=True) > 0
    if volume.colormap == DIVERGING and volume.alpha > 0:
        rgb = pale(rgb)
    picture = overlay(rgb, numbers, alpha=volume.alpha, colormap=volume.colormap, covered=known)
    return draw_outlines(picture, masks)


def resized(plane: NDArray[Any], size: tuple[int, ...], *, exact: bool = False) -> NDArray[Any]:
    """(h,w) or (h,w,3) at another size: means of pixels where it shrinks, linear where it grows; `exact`: nothing between."""
    import cv2

    rows, columns = plane.shape[:2]
    smaller = size[0] <= rows and size[1] <= columns
    method = cv2.INTER_NEAREST if exact else cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(plane), (size[1], size[0]), interpolation=method), plane.dtype)
