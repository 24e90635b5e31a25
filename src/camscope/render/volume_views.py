"""Views of a volume: three planes, slices side by side, and projections.

- Three planes through one voxel, as a viewer shows a volume: one scale, true proportions, lines that meet.
- Slices of a volume side by side, numbered, with one scale.
- A volume seen through: the strongest value along each line of sight.
"""

from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.render.anatomical_axes import View
from camscope.render.animation import MOST, evenly
from camscope.render.colormap import DIVERGING
from camscope.render.image_grid import padded, surrounded
from camscope.render.rgb_image import DARK_PAPER, LIGHT_INK, Picture, Values, expect_height, fitted
from camscope.render.volume import Volume, Voxel, drawn, laid
from camscope.render.volume_annotations import (
    ACCENT,
    accent,
    corner,
    crossed,
    framed,
    letter_size,
    line,
    margin,
    middle,
    numbered,
    of_the_peak,
    peak_words,
    position,
    stacked,
    told,
    turned,
)

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
    first, second, third = (_plane_cell(volume, view, voxel, factor, letters) for view in volume.views)
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


def _plane_cell(volume: Volume, view: View, voxel: Voxel, factor: float, letters: int) -> Picture:
    """One plane in its frame."""
    plane = _marked(volume, view, voxel, factor)
    return framed(plane, numbered(volume, view, voxel), view.edges(volume.letters), letters)


def _marked(volume: Volume, view: View, voxel: Voxel, factor: float) -> Picture:
    """One plane with its cross hairs."""
    plane = drawn(volume, view, voxel[view.normal], factor)
    ratio = np.divide(plane.shape[:2], (volume.shape[view.rows], volume.shape[view.columns]))
    row, column = np.multiply(view.place(voxel, volume.shape), ratio)
    return crossed(plane, row, column, accent(volume))


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
    cells = [_slice_cell(volume, view, number, factor, letters) for number in numbers]
    blank = np.full_like(cells[0], DARK_PAPER)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    rows[-1] += [blank] * (columns - len(rows[-1]))
    grid = stacked(rows, gap=letters // 2)
    said = [caption, *of_the_peak(volume), " · ".join(filter(None, (view.name, turned(view, volume))))]
    beside = told(volume, letters, factor, min(440, grid.shape[0]), said)
    return padded(
        stacked([[grid, padded(beside, left=letters, paper=DARK_PAPER)]]), letters, 0, letters, 0, paper=DARK_PAPER
    )


def _slice_cell(volume: Volume, view: View, number: int, factor: float, letters: int) -> Picture:
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
