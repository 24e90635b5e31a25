"""Three planes through one voxel, as a viewer shows a volume: one scale, true proportions, lines that meet."""

import numpy as np

from camscope.render.compass import View
from camscope.render.panel import padded
from camscope.render.picture import DARK_PAPER, Picture
from camscope.render.viewer import (
    accent,
    beside_bar,
    crossed,
    framed,
    letter_size,
    line,
    margin,
    peak_words,
    position,
    stacked,
)
from camscope.render.volume import Volume, Voxel


def planes(
    volume: Volume, at: tuple[int, int, int] | None = None, *, size: int | None = None, caption: str = ""
) -> Picture:
    """(D,H,W) -> (h,w,3): the three slices through voxel `at`, by default the peak's; what is known of it at the top right.

    Axial, coronal and sagittal, turned as radiologists do (the patient's right at the left, the front at the top or left),
    where `labels` or `world` tell which axis is which; else along axis 0, 1 and 2 as they are. Planes that share an axis
    stand in one line. Slices are numbered from 0. `size`: pixels of the volume's longest side; `caption`: words to be shown.
    """
    voxel, factor = volume.expected(at), volume.finest(size)
    letters = letter_size(round(factor * max(n * one for n, one in zip(volume.shape, volume.voxel, strict=True))))
    first, second, third = (_cell(volume, view, voxel, factor, letters) for view in volume.views)
    words = [caption, *(peak_words(volume, voxel) if volume.alpha > 0 else [])]
    head = line("", letters).shape[0]
    beside = beside_bar(volume, letters, factor, first.shape[0] - head, words)
    beside = padded(beside, top=head, left=margin(letters) - letters // 4, paper=DARK_PAPER)
    picture = stacked([[first, beside], [second, third]])
    return padded(picture, letters // 2, letters // 2, 0, letters // 2, paper=DARK_PAPER)


def _cell(volume: Volume, view: View, voxel: Voxel, factor: float, letters: int) -> Picture:
    """One plane in its frame."""
    plane = volume.drawn(view, voxel[view.normal], factor)
    ratio = np.divide(plane.shape[:2], (volume.shape[view.rows], volume.shape[view.columns]))
    row, column = np.multiply(view.place(voxel, volume.shape), ratio)
    title = f"{view.name} {voxel[view.normal]}" if view.name.isalpha() else f"{view.name}: {voxel[view.normal]}"
    marked = crossed(plane, row, column, accent(volume))
    return framed(marked, title + position(volume, voxel, view.normal), view.edges(volume.letters), letters)
