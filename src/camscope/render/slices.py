"""Slices of a volume side by side, numbered, with one scale."""

import numpy as np

from camscope.errors import InputError
from camscope.render.compass import View
from camscope.render.frames import MOST, evenly
from camscope.render.panel import padded, surrounded
from camscope.render.picture import DARK_PAPER, LIGHT_INK, Picture, expect_height
from camscope.render.slab import drawn
from camscope.render.viewer import ACCENT, letter_size, line, middle, of_the_peak, position, stacked, told, turned
from camscope.render.volume import Volume

WIDTH = 1200  # pixels of a grid of slices, unless asked for


def slices(
    volume: Volume,
    axis: int | str | None = None,
    *,
    count: int = MOST,
    columns: int | None = None,
    size: int | None = None,
    caption: str = "",
) -> Picture:
    """(D,H,W) -> (h,w,3): `count` slices along an axis, evenly spread, the peak's among them and in a frame; one scale.

    `axis`: 0, 1, 2, or "axial", "coronal", "sagittal" where `labels` or `world` tell which is which; by default the first
    or the axial one. Numbered from 0. `size`: pixels of a slice's longer side; `columns`: slices side by side.
    """
    if count < 1:
        raise InputError(f"count={count}: expected 1 slice at least")
    view = volume.view(axis)
    numbers = evenly(volume.shape[view.normal], count, volume.peak[view.normal])
    height, width = volume.millimetres(view)
    columns = min(columns or _columns(len(numbers), height / width), len(numbers))
    if size is not None:
        expect_height("size", size)
    factor = min(volume.finest(None), WIDTH / columns / width) if size is None else size / max(height, width)
    letters = letter_size(round(0.4 * columns * factor * width))
    cells = [_cell(volume, view, number, factor, letters) for number in numbers]
    blank = np.full_like(cells[0], DARK_PAPER)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    rows[-1] += [blank] * (columns - len(rows[-1]))
    grid = stacked(rows, gap=letters // 2)
    said = [caption, *of_the_peak(volume), " · ".join(filter(None, (view.name, turned(view, volume))))]
    beside = told(volume, letters, factor, min(440, grid.shape[0]), said)
    return padded(
        stacked([[grid, padded(beside, left=letters, paper=DARK_PAPER)]]), letters, 0, letters, 0, paper=DARK_PAPER
    )


def _cell(volume: Volume, view: View, number: int, factor: float, letters: int) -> Picture:
    plane = drawn(volume, view, number, factor)
    is_peak = number == volume.peak[view.normal] and not volume.warning
    plane = surrounded(plane, 2, ACCENT if is_peak else DARK_PAPER)
    head = line(
        f"{number}{position(volume, middle(volume, view, number), view.normal)}",
        letters,
        ink=ACCENT if is_peak else LIGHT_INK,
    )
    wide = max(plane.shape[1], head.shape[1])
    return np.concatenate([padded(part, right=wide - part.shape[1], paper=DARK_PAPER) for part in (head, plane)])


def _columns(count: int, ratio: float) -> int:
    """So many that the grid is about half as wide again as it is high, and few places stay empty. `ratio`: of a slice."""
    best = max(1, min(count, round((count * 1.5 * ratio) ** 0.5)))
    near = range(max(1, best - 1), min(count, best + 1) + 1)
    return min(near, key=lambda columns: (-count % columns, abs(columns - best), -columns))
