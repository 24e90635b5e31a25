"""A chart: one curve over named steps, with its spread and a band to compare it with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.plurals import plural
from camscope.render.rgb_image import PAPER, Colour, Picture, Values
from camscope.render.text import text_tile

GRID: Colour = (226, 226, 226)
BAND: Colour = (247, 224, 176)
FINE = 4  # fractional bits of a point


@dataclass(frozen=True)
class Curve:
    """`values` (K,): NaN is a gap; `low`, `high` (K,): its spread, drawn pale in the same colour."""

    values: Values
    low: Values
    high: Values
    colour: Colour = (38, 84, 160)


def chart(
    curve: Curve,
    band: tuple[float, float] | None = None,
    *,
    step: int = 96,
    height: int = 120,
    ends: tuple[float, float] = (0.0, 1.0),
    ticks: Sequence[float] = (0.0, 0.5, 1.0),
) -> Picture:
    """K values -> (height,K·step,3), each in the middle of its step. `ends`: bottom and top; `band`: from, to; `ticks`: lines."""
    import cv2

    count = len(curve.values)
    if not count or not ends[0] < ends[1]:
        raise InputError(
            f"a chart of {plural(count, 'value')} from {ends[0]} to {ends[1]}; expected one value at least, and a range"
        )
    out = np.full((height, count * step, 3), PAPER, np.uint8)
    columns = (np.arange(count) + 0.5) * step
    if band is not None and np.isfinite(band).all():
        bottom, top = (round(float(row)) for row in _rows(np.array(band), ends, height))
        out[max(0, min(top, height - 2)) : max(bottom, top + 2)] = BAND
    for tick in ticks:
        out[round(float(_rows(np.array([tick]), ends, height)[0]))] = GRID
    lower, upper = (np.column_stack([columns, _rows(edge, ends, height)]) for edge in (curve.low, curve.high))
    for start, stop in _runs(curve.values):
        pale = out.copy()
        outline = np.concatenate([lower[start:stop], upper[start:stop][::-1]])
        cv2.fillPoly(pale, [_fine(outline)], curve.colour, cv2.LINE_AA, FINE)
        out = np.rint(0.75 * out + 0.25 * pale).astype(np.uint8)
        points = np.column_stack([columns, _rows(curve.values, ends, height)])[start:stop]
        cv2.polylines(out, [_fine(points)], False, curve.colour, 2, cv2.LINE_AA, FINE)
        for x, y in _fine(points)[:, 0]:
            cv2.circle(out, (int(x), int(y)), 3 << FINE, curve.colour, -1, cv2.LINE_AA, FINE)
    return out


def axis(height: int, ends: tuple[float, float], ticks: Sequence[float], size: int = 12) -> Picture:
    """(height,w,3): the numbers of a chart's lines, to stand at its left."""
    tiles = [text_tile(f"{tick:g}", size) for tick in ticks]
    out = np.full((height, max(tile.shape[1] for tile in tiles), 3), PAPER, np.uint8)
    for tick, tile in zip(ticks, tiles, strict=True):
        middle = float(_rows(np.array([tick]), ends, height)[0])
        top = int(np.clip(middle - tile.shape[0] / 2, 0, height - tile.shape[0]))
        out[top : top + tile.shape[0], out.shape[1] - tile.shape[1] :] = tile
    return out


def _rows(values: Values, ends: tuple[float, float], height: int) -> NDArray[np.float64]:
    """Where values lie, a little inside the picture."""
    edge = 6
    share = (np.clip(np.asarray(values, np.float64), *ends) - ends[0]) / (ends[1] - ends[0])
    return np.asarray(height - 1 - edge - share * (height - 1 - 2 * edge))


def _runs(values: Values) -> list[tuple[int, int]]:
    """Stretches without a gap: first, and one behind the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.isfinite(values), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _fine(points: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.asarray(np.rint(points * 2**FINE)[:, None], np.int32)
