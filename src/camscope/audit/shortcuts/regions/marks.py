"""Regions that somebody wrote, stuck or drew on an image: burned-in tokens, ink, pens; and slides without tissue."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.audit.shortcuts.regions.base import Bools, Floats, grey, is_colour, otsu, scipy_images, skimage
from camscope.errors import UndefinedError

TOP: Final = 0.02  # of the image's range: how far below its maximum a pixel is still saturated
SMALL: Final = 0.01  # of the image: a token is smaller
SPECK: Final = 4  # pixels: a token is larger
STEP: Final = 0.25  # of the image's range: what a token's edge steps down at least; a bright organ ends softly
INK: Final = (0.69, 0.87)  # hues of gentian violet, in turns
PENS: Final = ((0.22, 0.50), (0.50, 0.63))  # green and blue; red is also that of blood
VIVID: Final = 0.25
TRACES: Final = 0.0005  # of the image: fewer coloured pixels are noise
PALE: Final = 0.04  # saturation: a slide without anything more colourful shows no stain


def saturated(image: NDArray[Any]) -> Bools:
    """Small parts at the image's maximum with a hard edge: letters, markers, clips."""
    values = grey(image)
    span = values.max() - values.min()
    bright = values >= values.max() - TOP * span
    labels, count = scipy_images().label(bright, np.ones((3,) * values.ndim))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    ring = np.where(bright, 0, skimage("segmentation").expand_labels(labels, 2))
    around = np.bincount(ring.ravel(), values.ravel(), count + 1)
    edges = np.bincount(ring.ravel(), minlength=count + 1)
    level = np.where(edges > 0, around / np.maximum(edges, 1), np.inf)
    fits = (sizes >= SPECK) & (sizes <= max(SPECK, SMALL * values.size)) & (level <= values.max() - STEP * span)
    fits[0] = False
    return np.asarray(fits[labels], np.bool_)


def ink(image: NDArray[Any]) -> Bools:
    """Purple and vivid: a surgeon's marker on skin."""
    hue, vivid, light = _hsv(image, "ink")
    return _more_than_traces((hue >= INK[0]) & (hue <= INK[1]) & (vivid >= VIVID) & (light >= 0.15) & (light <= 0.95))


def pen(image: NDArray[Any]) -> Bools:
    """Green or blue and vivid, or black: a pathologist's marker on glass."""
    hue, vivid, light = _hsv(image, "pen")
    coloured = np.logical_or.reduce([(hue >= low) & (hue <= high) for low, high in PENS])
    return _more_than_traces((coloured & (vivid >= 0.45) & (light >= 0.1)) | ((light < 0.15) & (vivid < 0.5)))


def outside_tissue(image: NDArray[Any]) -> Bools:
    """Not more colourful than Otsu's threshold of the saturation: glass."""
    _, vivid, _ = _hsv(image, "tissue")
    if vivid.max() < PALE or vivid.min() == vivid.max():
        raise UndefinedError(f"no tissue: nothing in the image has a colour (saturation up to {vivid.max():.2f})")
    found: Bools = vivid <= otsu(vivid)
    return found


def _hsv(image: NDArray[Any], what: str) -> tuple[Floats, Floats, Floats]:
    """Hue in turns, saturation and value, 0..1; floats that reach over 1 are read as 0..255."""
    if not is_colour(image):
        raise UndefinedError(f"no {what}: the image has no colours")
    values = np.asarray(image, np.float64)
    colours = skimage("color").rgb2hsv(np.clip(values / (255 if values.max() > 1 else 1), 0, 1))
    return colours[..., 0], colours[..., 1], colours[..., 2]


def _more_than_traces(found: Bools) -> Bools:
    """The parts of more than a speck, or nothing where all of them are traces."""
    labels, count = scipy_images().label(found, np.ones((3, 3)))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    kept = sizes >= max(SPECK, TRACES * found.size)
    kept[0] = False
    return np.asarray(kept[labels], np.bool_)
