"""The figure of a randomization test: the maps of one image step by step, above the similarity curves of all images."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from camscope.render.colormap import DIVERGING, colorize, to_display_range
from camscope.render.image_grid import pad_image
from camscope.render.line_chart import Curve, draw_chart_axis, draw_line_chart
from camscope.render.rgb_image import RGBImage, resize_to_fit
from camscope.render.text import draw_text

FloatArray = npt.NDArray[np.floating[Any]]
FIGURE_WIDTH_PX = 1400
GREEN, RED, GRAY = (30, 120, 60), (176, 42, 42), (110, 110, 110)
ROW_GAP_PX = 6


class CurveOutcome(NamedTuple):
    """The outcome beside a curve; `passes` is None for no verdict."""

    passes: bool | None
    numbers: str
    reason: str


class SimilarityCurve(NamedTuple):
    """One similarity over the steps of a test.

    Attributes:
        name: The name of the similarity.
        mean_values: (1 + steps,) the mean over images and seeds.
        seed_low: (1 + steps,) the lowest mean of a seed.
        seed_high: (1 + steps,) the highest mean of a seed.
        null_interval: Low end, mean and high end for maps of different images.
        outcome: The outcome to print beside the curve; None for none.

    """

    name: str
    mean_values: FloatArray
    seed_low: FloatArray
    seed_high: FloatArray
    null_interval: tuple[float, float, float]
    outcome: CurveOutcome | None


def draw_randomization_figure(
    title: str, part_names: Sequence[str], maps: FloatArray, curves: Sequence[SimilarityCurve]
) -> RGBImage:
    """Draw the figure (H,W,3): a column for each step, a row of maps of the first image, and a row for each curve.

    `maps` (1 + steps,*S) begin with the trained model's map.
    """
    column_names = ["trained", *_shorten_names(part_names)]
    column_width = int(np.clip(FIGURE_WIDTH_PX // len(column_names), 64, 128))
    lowest = min(float(np.nanmin(curve.seed_low, initial=0.0)) for curve in curves)
    y_range = (-1.0 if lowest < -0.5 else -0.5 if lowest < -0.1 else -0.1, 1.0)
    thumbnails = [_draw_thumbnail(attribution, column_width) for attribution in maps]
    body = [_compose_row("first image", np.concatenate(thumbnails, axis=1))]
    for curve in curves:
        body += [_make_blank_image(ROW_GAP_PX, 1), _draw_curve_row(curve, column_width, y_range)]
    labels = [_draw_column_label(name, column_width) for name in column_names]
    body.append(_compose_row("", np.concatenate(labels, axis=1)))
    width = max(part.shape[1] for part in body)
    rows = [pad_image(part, right=width - part.shape[1]) for part in body]
    legend = "pale: range of the seeds · orange: maps of different images, 95 % interval of their mean similarity"
    header = [
        draw_text(title, 20, width=width, max_lines=2),
        draw_text(legend, 13, width=width, max_lines=2, text_color=GRAY),
    ]
    return pad_image(np.concatenate([*header, *rows]), 8, 8, 8, 8)


def _draw_curve_row(similarity_curve: SimilarityCurve, column_width: int, y_range: tuple[float, float]) -> RGBImage:
    """Draw one curve with its outcome at the right."""
    ticks = [tick for tick in (-1.0, -0.5, 0.0, 0.5, 1.0) if y_range[0] <= tick]
    curve, null_band = (
        Curve(similarity_curve.mean_values, similarity_curve.seed_low, similarity_curve.seed_high),
        (similarity_curve.null_interval[0], similarity_curve.null_interval[2]),
    )
    chart = draw_line_chart(curve, null_band, step_width=column_width, height=120, value_range=y_range, ticks=ticks)
    return _compose_row(similarity_curve.name, chart, similarity_curve.outcome, draw_chart_axis(120, y_range, ticks))


def _compose_row(
    title: str, image: RGBImage, outcome: CurveOutcome | None = None, axis_image: RGBImage | None = None
) -> RGBImage:
    """Compose a row of its title, its axis, the image, and the outcome at the right."""
    height, left, right = image.shape[0], 118, 190
    margin = _make_blank_image(height, left)
    if title:
        tile = draw_text(title, 14, width=left - (0 if axis_image is None else axis_image.shape[1]), max_lines=2)
        margin[(height - tile.shape[0]) // 2 :][: tile.shape[0], : tile.shape[1]] = tile
    if axis_image is not None:
        margin[:, left - axis_image.shape[1] :] = axis_image
    return np.concatenate([margin, image, _draw_outcome(outcome, height, right)], axis=1)


def _draw_outcome(outcome: CurveOutcome | None, height: int, width: int) -> RGBImage:
    """Draw the outcome as a word."""
    canvas = _make_blank_image(height, width)
    if outcome is None:
        return canvas
    tiles = [
        _draw_passes(outcome.passes, width),
        draw_text(outcome.numbers, 13, width=width),
        draw_text(outcome.reason, 12, width=width, max_lines=2, text_color=GRAY),
    ]
    column = np.concatenate(tiles)[:height]
    canvas[(height - column.shape[0]) // 2 :][: column.shape[0]] = column
    return canvas


def _draw_passes(passes: bool | None, width: int) -> RGBImage:
    """In a word."""
    if passes is None:
        return draw_text("no verdict", 16, width=width, text_color=GRAY)
    return draw_text("passes" if passes else "fails", 16, width=width, text_color=GREEN if passes else RED)


def _shorten_names(part_names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or the last two if the last is a number."""
    parts = [name.split(".") for name in part_names]
    return [".".join(part[-2:] if part[-1].isdigit() else part[-1:]) for part in parts]


def _draw_column_label(name: str, width: int) -> RGBImage:
    tile = draw_text(name, 12, width=width, max_lines=2)
    return pad_image(tile, bottom=max(0, 40 - tile.shape[0]))


def _draw_thumbnail(attribution: FloatArray, side: int) -> RGBImage:
    """Draw a map (*S) divided by its own maximum (side,side,3); a volume is averaged along its depth."""
    flat = np.nan_to_num(attribution, nan=0.0, posinf=0.0, neginf=0.0)
    while flat.ndim > 2:
        flat = flat.mean(0)
    flat = np.repeat(flat[None], max(1, len(flat) // 4), 0) if flat.ndim == 1 else flat
    colormap = DIVERGING if (flat < 0).any() else "inferno"
    thumbnail = resize_to_fit(colorize(to_display_range(flat, "max", colormap)[0], colormap), side - 4, side - 4)
    rows, columns = side - thumbnail.shape[0], side - thumbnail.shape[1]
    return pad_image(thumbnail, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)


def _make_blank_image(height: int, width: int) -> RGBImage:
    return np.full((height, width, 3), 255, np.uint8)
