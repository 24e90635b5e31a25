"""Draw a line chart: one curve over named steps with its spread, and a band for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.plurals import plural
from camscope.render.rgb_image import BACKGROUND_COLOR, Color, RGBImage, Values
from camscope.render.text import draw_text

GRID_COLOR: Color = (226, 226, 226)
BAND_COLOR: Color = (247, 224, 176)
SUBPIXEL_BITS = 4  # fractional bits of a point


@dataclass(frozen=True)
class Curve:
    """A curve: `values` (K,), where NaN is a gap. `low` and `high` (K,) are its spread, drawn pale in the same color."""

    values: Values
    low: Values
    high: Values
    color: Color = (38, 84, 160)


def draw_line_chart(
    curve: Curve,
    band: tuple[float, float] | None = None,
    *,
    step_width: int = 96,
    height: int = 120,
    value_range: tuple[float, float] = (0.0, 1.0),
    ticks: Sequence[float] = (0.0, 0.5, 1.0),
) -> RGBImage:
    """Draw K values as a chart (height,K·step,3), each in the middle of its step.

    `value_range` is the bottom and top of the chart, `band` a highlighted range, and `ticks` the horizontal lines.
    """
    import cv2

    count = len(curve.values)
    if not count or not value_range[0] < value_range[1]:
        raise InputError(
            f"a chart of {plural(count, 'value')} from {value_range[0]} to {value_range[1]}; "
            "expected at least one value, and low < high"
        )
    out = np.full((height, count * step_width, 3), BACKGROUND_COLOR, np.uint8)
    columns = (np.arange(count) + 0.5) * step_width
    if band is not None and np.isfinite(band).all():
        bottom, top = (round(float(row)) for row in _map_to_rows(np.array(band), value_range, height))
        out[max(0, min(top, height - 2)) : max(bottom, top + 2)] = BAND_COLOR
    for tick in ticks:
        out[round(float(_map_to_rows(np.array([tick]), value_range, height)[0]))] = GRID_COLOR
    lower, upper = (
        np.column_stack([columns, _map_to_rows(edge, value_range, height)]) for edge in (curve.low, curve.high)
    )
    for start, stop in _find_runs(curve.values):
        pale = out.copy()
        outline = np.concatenate([lower[start:stop], upper[start:stop][::-1]])
        cv2.fillPoly(pale, [_convert_to_subpixels(outline)], curve.color, cv2.LINE_AA, SUBPIXEL_BITS)
        out = np.rint(0.75 * out + 0.25 * pale).astype(np.uint8)
        points = np.column_stack([columns, _map_to_rows(curve.values, value_range, height)])[start:stop]
        cv2.polylines(out, [_convert_to_subpixels(points)], False, curve.color, 2, cv2.LINE_AA, SUBPIXEL_BITS)
        for x, y in _convert_to_subpixels(points)[:, 0]:
            cv2.circle(out, (int(x), int(y)), 3 << SUBPIXEL_BITS, curve.color, -1, cv2.LINE_AA, SUBPIXEL_BITS)
    return out


def draw_chart_axis(
    height: int, value_range: tuple[float, float], ticks: Sequence[float], font_size: int = 12
) -> RGBImage:
    """Draw the tick labels (height,w,3) for the left of a chart."""
    tiles = [draw_text(f"{tick:g}", font_size) for tick in ticks]
    out = np.full((height, max(tile.shape[1] for tile in tiles), 3), BACKGROUND_COLOR, np.uint8)
    for tick, tile in zip(ticks, tiles, strict=True):
        middle = float(_map_to_rows(np.array([tick]), value_range, height)[0])
        top = int(np.clip(middle - tile.shape[0] / 2, 0, height - tile.shape[0]))
        out[top : top + tile.shape[0], out.shape[1] - tile.shape[1] :] = tile
    return out


def _map_to_rows(values: Values, value_range: tuple[float, float], height: int) -> NDArray[np.float64]:
    """Map values to rows, with a margin at the top and bottom."""
    edge = 6
    share = (np.clip(np.asarray(values, np.float64), *value_range) - value_range[0]) / (value_range[1] - value_range[0])
    return np.asarray(height - 1 - edge - share * (height - 1 - 2 * edge))


def _find_runs(values: Values) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of finite values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.isfinite(values), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _convert_to_subpixels(points: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.asarray(np.rint(points * 2**SUBPIXEL_BITS)[:, None], np.int32)
