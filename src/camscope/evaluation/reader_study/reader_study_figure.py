"""Draw a reader study: accuracy under each condition, and the differences of each reader and of all."""

from math import isfinite
from typing import Any

from camscope import render
from camscope.batch.reader_study.study_design import CONTROL_MAP, WITH_MAP, WITHOUT_MAP
from camscope.errors import InputError
from camscope.evaluation.interval_plots import (
    CONTROL_COLOR,
    FIGURE_FORMATS,
    METHOD_COLOR,
    TEXT_COLOR,
    draw_title_and_subtitle,
    import_matplotlib_figure,
    literal_text_scope,
    style_rows,
)
from camscope.evaluation.reader_study.reader_study_estimates import MeasureEstimate, ReaderStudyEstimates
from camscope.evaluation.reader_study.reader_study_report import CONDITION_TITLES, MEASURES_BY_NAME
from camscope.metrics.mean_estimates import Estimate

PANEL_INCHES, LINE_INCHES, FRAME_INCHES, MAX_COLUMNS = 4.6, 0.3, 0.95, 3
LEGEND = (
    "dark: all readers, with the interval by reader and by patient; gray: each reader, with the interval by patient"
)


def draw_reader_study(result: ReaderStudyEstimates, suffix: str = ".png") -> bytes:
    """Draw accuracy under each condition, and the differences by reader. Return the figure as the bytes of a file."""
    if suffix not in FIGURE_FORMATS:
        raise InputError(f"cannot write a figure with suffix {suffix!r}; expected {', '.join(FIGURE_FORMATS)}")
    comparisons = [
        ("accuracy", WITH_MAP, WITHOUT_MAP, "Accuracy: map - none", "percentage points, higher is better →"),
        ("accuracy", WITH_MAP, CONTROL_MAP, "Accuracy: map - control", "percentage points, higher is better →"),
        ("seconds", WITH_MAP, WITHOUT_MAP, "Time: map / none", "← ratio, lower is faster"),
    ]
    lines = [(result.find(*key), title, subtitle) for *key, title, subtitle in comparisons]
    panels = [(line, title, subtitle) for line, title, subtitle in lines if line is not None]
    levels = [line for name in result.conditions if (line := result.find("accuracy", name)) is not None]
    if not levels:
        raise InputError("there is nothing to draw: no measure is defined")
    figures = import_matplotlib_figure()
    n_panels = 1 + len(panels)
    n_columns = 2 if n_panels > MAX_COLUMNS else n_panels  # four panels form a square
    n_panel_rows = -(-n_panels // n_columns)
    n_lines = max(len(levels), len(levels[0].readers) + 1)
    size = n_columns * PANEL_INCHES, n_panel_rows * (FRAME_INCHES + LINE_INCHES * n_lines)
    with literal_text_scope():
        figure = figures.Figure(figsize=size, layout="constrained")
        axes = figure.subplots(n_panel_rows, n_columns, squeeze=False).ravel()
        _draw_levels(axes[0], levels)
        for panel, (line, title, subtitle) in zip(axes[1:], panels, strict=False):
            _draw_differences(panel, line, title, subtitle)
        figure.supxlabel(LEGEND, fontsize=8, color=CONTROL_COLOR, x=0.01, ha="left")
    return render.encode_figure(figure, suffix, dpi=110)


def _draw_levels(axes: Any, levels: list[MeasureEstimate]) -> None:
    """Draw the accuracy under each condition: all readers as an interval, each reader as a dot."""
    draw_title_and_subtitle(axes, "Accuracy", "percent, higher is better →")
    for place, line in enumerate(levels):
        for estimate in line.estimates.by_reader:
            axes.plot([100 * estimate.mean], [place + 0.22], "o", color=CONTROL_COLOR, markersize=3.5)
        _draw_estimate(axes, place, line.estimates.pooled, 100.0, is_pooled=True)
    style_rows(axes, [(CONDITION_TITLES[line.condition], False) for line in levels])


def _draw_differences(axes: Any, line: MeasureEstimate, title: str, subtitle: str) -> None:
    """Draw the difference of all readers, and that of each reader below."""
    is_time = MEASURES_BY_NAME[line.measure].is_time
    draw_title_and_subtitle(axes, title, subtitle)
    axes.axvline(1.0 if is_time else 0.0, color=TEXT_COLOR, linewidth=0.8)
    factor = 1.0 if is_time else 100.0
    for place, estimate in enumerate((line.estimates.pooled, *line.estimates.by_reader)):
        _draw_estimate(axes, place, estimate, factor, is_pooled=place == 0)
    style_rows(axes, [(name, False) for name in ("all readers", *(f"reader {reader}" for reader in line.readers))])


def _draw_estimate(axes: Any, place: int, estimate: Estimate, factor: float, *, is_pooled: bool) -> None:
    color = METHOD_COLOR if is_pooled else CONTROL_COLOR
    if isfinite(estimate.low):
        ends = [factor * estimate.low, factor * estimate.high]
        axes.plot(ends, [place, place], color=color, linewidth=2.0 if is_pooled else 1.3, solid_capstyle="round")
    axes.plot([factor * estimate.mean], [place], "o", color=color, markersize=6 if is_pooled else 4)
