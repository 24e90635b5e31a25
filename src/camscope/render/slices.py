"""Slices of a volume side by side, numbered, with one scale; and the whole volume seen through."""

from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.render.colour import DIVERGING
from camscope.render.compass import View
from camscope.render.frames import MOST, chosen_frames
from camscope.render.panel import padded, surrounded
from camscope.render.picture import DARK_PAPER, LIGHT_INK, Picture, Values
from camscope.render.viewer import ACCENT, beside_bar, framed, letter_size, line, peak_words, position, stacked, turned
from camscope.render.volume import Volume, Voxel

WIDTH = 1400  # pixels of a grid of slices, unless asked for


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
    numbers = chosen_frames(
        volume.strengths.transpose(view.normal, view.rows, view.columns), count, volume.peak[view.normal]
    )
    columns = columns or _columns(len(numbers), volume.millimetres(view))
    longest = max(volume.millimetres(view))
    factor = volume.finest(None) if size is None else size / longest
    if size is None:
        factor = min(factor, (WIDTH - 200) / columns / volume.millimetres(view)[1])
    letters = letter_size(round(columns * factor * volume.millimetres(view)[1]) // 2)
    cells = [_cell(volume, view, number, factor, letters) for number in numbers]
    blank = np.full_like(cells[0], DARK_PAPER)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    rows[-1] += [blank] * (columns - len(rows[-1]))
    grid = stacked(rows, gap=letters // 2)
    said = [caption, *_words(volume), " · ".join(filter(None, (view.name, turned(view, volume))))]
    beside = beside_bar(volume, letters, factor, min(440, grid.shape[0]), said)
    return padded(
        stacked([[grid, padded(beside, left=letters, paper=DARK_PAPER)]]), letters, 0, letters, 0, paper=DARK_PAPER
    )


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
    beside = beside_bar(volume, letters, factor, tall, [caption, *_words(volume)])
    return padded(stacked([[*cells, beside]], gap=letters // 2), top=letters // 2, paper=DARK_PAPER)


def strongest(values: Values, axis: int, colormap: str) -> Values:
    """(D,H,W) -> the maximum along an axis; with two signs the value of the largest size."""
    if colormap != DIVERGING:
        return np.asarray(values.max(axis))
    high, low = values.max(axis), values.min(axis)
    return np.where(high >= -low, high, low)


def _seen_through(volume: Volume, view: View, behind: str, factor: float, letters: int) -> Picture:
    grey = view.of(volume.grey)
    flat = grey.max(0) if behind == "max" else _stretched(grey.mean(0, dtype=np.float32))
    covered = None if volume.covered is None else view.of(volume.covered).any(0)
    masks = [(name, colour, view.of(inside).any(0)) for name, colour, inside in volume.outlines]
    values = strongest(view.of(volume.values), 0, volume.colormap)
    plane = volume.laid(view, flat, values, covered, masks, factor)
    return framed(plane, f"{view.name}, maximum", view.edges(volume.letters), letters)


def _stretched(mean: Values) -> Picture:
    """Black to white: means of many slices are all of a middling grey."""
    low, high = float(mean.min()), float(mean.max())
    return np.rint((mean - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)


def _cell(volume: Volume, view: View, number: int, factor: float, letters: int) -> Picture:
    plane = volume.drawn(view, number, factor)
    is_peak = number == volume.peak[view.normal] and not volume.warning
    plane = surrounded(plane, 2, ACCENT if is_peak else DARK_PAPER)
    middle = [length // 2 for length in volume.shape]
    middle[view.normal] = number
    voxel: Voxel = (middle[0], middle[1], middle[2])
    head = line(f"{number}{position(volume, voxel, view.normal)}", letters, ink=ACCENT if is_peak else LIGHT_INK)
    wide = max(plane.shape[1], head.shape[1])
    return np.concatenate([padded(part, right=wide - part.shape[1], paper=DARK_PAPER) for part in (head, plane)])


def _words(volume: Volume) -> list[str]:
    return peak_words(volume, volume.peak) if volume.alpha > 0 and not volume.warning else []


def _columns(count: int, size: tuple[float, float]) -> int:
    """So many that the grid is about half as wide again as it is high, and few places stay empty."""
    best = max(1, min(count, round((count * 1.5 * size[0] / size[1]) ** 0.5)))
    return min(range(best, min(count, best + 2) + 1), key=lambda columns: -count % columns)
