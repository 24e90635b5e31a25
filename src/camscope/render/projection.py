"""A volume seen through: the strongest value along each line of sight."""

from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.render.colour import DIVERGING
from camscope.render.compass import View
from camscope.render.panel import padded
from camscope.render.picture import DARK_PAPER, Picture, Values
from camscope.render.slab import laid
from camscope.render.viewer import framed, letter_size, of_the_peak, stacked, told
from camscope.render.volume import Volume


def projection(
    volume: Volume,
    axis: int | str | None = None,
    *,
    behind: Literal["mean", "max"] = "mean",
    size: int | None = None,
    caption: str = "",
) -> Picture:
    """(D,H,W) -> (h,w,3): the strongest value along an axis over the picture's mean, or maximum, along it.

    Three side by side, at one size of a millimetre, unless an `axis` is named (as in `slices`). Of a signed map the value
    of the largest size keeps its sign. What is covered anywhere along the way is covered.
    """
    if behind not in ("mean", "max"):
        raise InputError(f"behind={behind!r}: expected 'mean' or 'max'")
    factor = volume.finest(size)
    chosen = volume.views if axis is None else (volume.view(axis),)
    letters = letter_size(round(factor * max(max(volume.millimetres(view)) for view in chosen)))
    cells = [_seen_through(volume, view, behind, factor, letters) for view in chosen]
    tall = max(cell.shape[0] for cell in cells)
    beside = told(volume, letters, factor, tall, [caption, *of_the_peak(volume)])
    return padded(stacked([[*cells, beside]], gap=letters // 2), top=letters // 2, paper=DARK_PAPER)


def strongest(values: Values, axis: int, colormap: str) -> Values:
    """(D,H,W) -> the maximum along an axis; with two signs the value of the largest size."""
    if colormap != DIVERGING:
        return np.asarray(values.max(axis))
    high, low = values.max(axis), values.min(axis)
    return np.asarray(np.where(high >= -low, high, low))


def _seen_through(volume: Volume, view: View, behind: str, factor: float, letters: int) -> Picture:
    grey = view.of(volume.grey)
    flat = grey.max(0) if behind == "max" else _stretched(grey.mean(0, dtype=np.float32))
    covered = None if volume.covered is None else np.asarray(view.of(volume.covered).any(0))
    masks = [(name, colour, np.asarray(view.of(inside).any(0))) for name, colour, inside in volume.outlines]
    values = strongest(view.of(volume.values), 0, volume.colormap)
    plane = laid(volume, view, flat, values, covered, masks, factor)
    return framed(plane, f"{view.name}, maximum", view.edges(volume.letters), letters)


def _stretched(mean: Values) -> Picture:
    """Black to white: means of many slices are all of a middling grey."""
    low, high = float(mean.min()), float(mean.max())
    return np.asarray(np.rint((mean - low) * (255 / (high - low) if high > low else 0)), np.uint8)
