"""Three planes through one voxel, as a viewer shows a volume: one scale, true proportions, lines that meet."""

import numpy as np

from camscope.render.compass import View
from camscope.render.panel import padded
from camscope.render.picture import DARK_PAPER, Picture, expect_height, fitted
from camscope.render.slab import drawn
from camscope.render.viewer import (
    accent,
    corner,
    crossed,
    framed,
    letter_size,
    line,
    margin,
    numbered,
    peak_words,
    stacked,
    told,
)
from camscope.render.volume import Volume, Voxel

BARE = 240  # rows of a picture below which words would leave no room for the planes
EDGE = 8


def planes(
    volume: Volume,
    at: tuple[int, int, int] | None = None,
    *,
    size: int | None = None,
    height: int | None = None,
    caption: str = "",
    bar: bool = True,
) -> Picture:
    """(D,H,W) -> (h,w,3): the three slices through voxel `at`, by default the peak's; what is known of it at the top right.

    Axial, coronal and sagittal, turned as radiologists do (the patient's right at the left, the front at the top or left),
    where `labels` or `world` tell which axis is which; else along axis 0, 1 and 2 as they are. Planes that share an axis
    stand in one line. Slices are numbered from 0. `size`: pixels of the volume's longest side; `height`: rows of the whole
    picture instead; `caption`: words to be shown; `bar`: with the colours' bar and the value in numbers.
    """
    if height is not None:
        expect_height("height", height)
    voxel, factor = volume.expected(at), volume.finest(size)
    if height is not None and height < BARE:
        return _bare(volume, voxel, height)
    letters = letter_size(round(factor * max(volume.extent)) if height is None else height // 2)
    factor = factor if height is None else _factor(volume, height, letters)
    first, second, third = (_cell(volume, view, voxel, factor, letters) for view in volume.views)
    head = line("", letters).shape[0]
    words = [caption, *(peak_words(volume, voxel) if bar and volume.alpha > 0 else [])]
    beside = told(volume, letters, factor, first.shape[0] - head, words, bar=bar)
    beside = padded(beside, top=head, left=margin(letters) - letters // 4, paper=DARK_PAPER)
    picture = stacked([[first, beside], [second, third]])
    picture = padded(picture, letters // 2, letters // 2, 0, letters // 2, paper=DARK_PAPER)
    return picture if height is None else fitted(picture, height)


def _bare(volume: Volume, voxel: Voxel, height: int) -> Picture:
    """(height,w,3): the planes alone, for there is no room for words."""
    factor = (height - EDGE) / sum(volume.millimetres(view)[0] for view in volume.views[:2])
    first, second, third = (_marked(volume, view, voxel, factor) for view in volume.views)
    nothing = np.full((first.shape[0], third.shape[1], 3), DARK_PAPER, np.uint8)
    return fitted(stacked([[first, nothing], [second, third]], gap=EDGE // 2), height)


def _factor(volume: Volume, height: int, letters: int) -> float:
    """Pixels a millimetre, so that two planes, one below the other, have so many rows with all that stands around them."""
    around = 2 * corner(letters, known=volume.letters is not None)[0] + letters
    around += 2 * (margin(letters) if volume.letters is not None else 4)
    rows = sum(volume.millimetres(view)[0] for view in volume.views[:2])
    return max(height / 4, height - around) / rows


def _cell(volume: Volume, view: View, voxel: Voxel, factor: float, letters: int) -> Picture:
    """One plane in its frame."""
    plane = _marked(volume, view, voxel, factor)
    return framed(plane, numbered(volume, view, voxel), view.edges(volume.letters), letters)


def _marked(volume: Volume, view: View, voxel: Voxel, factor: float) -> Picture:
    """One plane with its cross hairs."""
    plane = drawn(volume, view, voxel[view.normal], factor)
    ratio = np.divide(plane.shape[:2], (volume.shape[view.rows], volume.shape[view.columns]))
    row, column = np.multiply(view.place(voxel, volume.shape), ratio)
    return crossed(plane, row, column, accent(volume))
