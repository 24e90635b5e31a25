"""Figures of summaries: one panel for each metric, and forest plots with the same methods in every panel."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from camscope.errors import InputError
from camscope.evaluation.summary import MethodSummary, has_controls
from camscope.metrics import METRICS
from camscope.optional import require

FIGURE_FORMATS = (".png", ".svg", ".pdf")
LITERAL_TEXT_SETTINGS = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
MAX_COLUMNS, METHOD_ROW_INCHES = 3, 0.24  # panels in a row; inches for a method


def draw_summary_figure(
    summaries: Mapping[str, Sequence[MethodSummary]], suffix: str = ".png", title: str = ""
) -> bytes:
    """Draw a panel for each metric with the best method on top, gray controls, and a band for the best control's interval.

    Returns the encoded figure; `title` stands above all panels.
    """
    if suffix not in FIGURE_FORMATS:
        raise InputError(f"no figure of kind {suffix or 'none'}; expected {', '.join(FIGURE_FORMATS)}")
    figures = import_matplotlib_figure()
    defined = {
        metric: lines
        for metric, group in summaries.items()
        if (lines := [summary for summary in group if summary.estimate is not None])
    }
    if not defined:
        raise InputError("there is nothing to draw: no value is defined")
    with literal_text_scope():
        return _encode_summary_figure(figures, defined, suffix, title)


def import_matplotlib_figure() -> Any:
    """Import `matplotlib.figure`; MissingExtraError if it is not installed."""
    return require("matplotlib.figure", extra="metrics")


@contextmanager
def literal_text_scope() -> Iterator[None]:
    """Draw texts literally inside the `with` block: `$`, `_` and `^` in names are not formulas."""
    with import_module("matplotlib").rc_context(LITERAL_TEXT_SETTINGS):
        yield


def _encode_summary_figure(
    figure_module: Any, summaries: Mapping[str, Sequence[MethodSummary]], suffix: str, title: str
) -> bytes:
    n_columns = 2 if len(summaries) == 4 else min(MAX_COLUMNS, len(summaries))  # four panels form a square
    n_rows, n_lines = -(-len(summaries) // n_columns), max(map(len, summaries.values()))
    size = max(5.4, 4.6 * n_columns), n_rows * (0.95 + METHOD_ROW_INCHES * n_lines) + 0.3 + 0.35 * bool(title)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for panel, (name, group) in zip(panels, summaries.items(), strict=False):
        _draw_metric_panel(panel, name, group)
    for panel in panels[len(summaries) :]:
        panel.set_axis_off()
    has_control_rows = any(summary.is_control for group in summaries.values() for summary in group)
    draw_legend(figure, has_control_rows, is_single_line=n_columns > 1)
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=110)
    return stream.getvalue()


def _draw_metric_panel(axes: Any, name: str, summaries: Sequence[MethodSummary]) -> None:
    for place, line in enumerate(summaries):
        draw_interval(axes, place, line)
    draw_control_band(axes, summaries)
    is_unique = len({line.method for line in summaries}) == len(summaries)  # then no layer is shown
    axes.set_yticks(range(len(summaries)), [line.method if is_unique else line.title for line in summaries], fontsize=9)
    axes.tick_params(axis="y", length=0)
    color_control_labels(axes, [(line.title, line.is_control) for line in summaries])
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    draw_panel_title(axes, name, summaries[0])
    style_panel(axes)


METHOD_COLOR, CONTROL_COLOR, BAND_COLOR, GRID_COLOR = "#1f3b73", "#8a8f98", "#e9ebef", "#dddddd"
MAX_PANELS_PER_ROW = 4  # panels in a row of a forest plot
LEGEND = (
    "filled: first, or not significantly worse",
    "hollow: worse than the first (paired; 5 % over all pairs and metrics)",
)
LEGEND_WITH_CONTROLS = (*LEGEND, "gray: controls, which do not depend on the model; band: the best of them")
MethodRows = Sequence[tuple[str, bool]]  # names from the top down, and whether they are controls


def sort_methods(
    summaries: Mapping[str, Sequence[MethodSummary]],
    get_name: Any,
    method_names: Sequence[str],
    equivalent_groups: Sequence[Sequence[str]],
) -> MethodRows:
    """Return the rows of a forest plot: methods by their mean rank, then controls by theirs.

    The mean is over metrics that have controls. Methods in `equivalent_groups` stand side by side.
    """
    places: dict[tuple[str, bool], list[int]] = {(name, False): [] for name in method_names}
    for group in summaries.values():
        for place, line in enumerate(group):
            row_places = places.setdefault((get_name(line), line.is_control), [])
            row_places += [place] if has_controls(line.metric) and line.estimate is not None else []
    order = {row: float(np.mean(row_places)) if row_places else np.inf for row, row_places in places.items()}
    for names in equivalent_groups:
        first = min(names, key=lambda name: order[name, False])
        order |= {(name, False): order[first, False] for name in names}
    firsts = {name: names[0] for names in equivalent_groups for name in names}
    position = {row: n for n, row in enumerate(places)}
    return sorted(
        places, key=lambda row: (row[1], order[row], position[firsts.get(row[0], row[0]), row[1]], position[row])
    )


def compute_panel_grid(n_panels: int) -> tuple[int, int]:
    """Return rows and columns of panels: as few rows as possible, filled evenly."""
    n_rows = -(-n_panels // MAX_PANELS_PER_ROW)
    return n_rows, -(-n_panels // n_rows)


def draw_forest_plot(
    figure: Any, summaries: Mapping[str, Sequence[MethodSummary]], get_name: Any, rows: MethodRows
) -> None:
    """Draw a forest plot into a matplotlib figure or subfigure."""
    n_rows, n_columns = compute_panel_grid(len(summaries))
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True)
    for panel in panels.ravel()[len(summaries) :]:
        panel.set_axis_off()
    for n, (metric, group) in enumerate(summaries.items()):
        panel = panels.ravel()[n]
        _draw_forest_panel(panel, {(get_name(line), line.is_control): line for line in group}, rows)
        draw_panel_title(panel, metric, group[0])
        panel.tick_params(axis="y", length=0)
        if n % n_columns == 0:
            color_control_labels(panel, rows)
    draw_legend(figure, any(control for _, control in rows))


def draw_legend(figure: Any, has_control_rows: bool, *, is_single_line: bool = True) -> None:
    """Draw the explanation of markers, gray labels and bands below all panels."""
    phrases = LEGEND_WITH_CONTROLS if has_control_rows else LEGEND
    text = "      ".join(phrases) if is_single_line else "\n".join(phrases)
    figure.supxlabel(text, fontsize=8, color=CONTROL_COLOR, x=0.01, ha="left")


def draw_panel_title(axes: Any, title: str, summary: MethodSummary) -> None:
    """Draw the metric's name and the better direction."""
    direction = {True: "more is better →", False: "← less is better", None: ""}[
        METRICS[summary.metric].higher_is_better
    ]
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold", color="#222222", pad=16 if direction else 6)
    axes.annotate(
        direction,
        (0, 1),
        xytext=(0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=CONTROL_COLOR,
    )


def draw_interval(axes: Any, row_position: float, summary: MethodSummary) -> None:
    """Draw a summary's mean and interval in its row."""
    if (estimate := summary.estimate) is None:
        return
    ink = CONTROL_COLOR if summary.is_control else METHOD_COLOR
    if np.isfinite(estimate.low):
        axes.plot(
            [estimate.low, estimate.high],
            [row_position, row_position],
            color=ink,
            linewidth=1.6,
            solid_capstyle="round",
        )
    face = "white" if summary.is_worse_than_best and not summary.is_control else ink
    axes.plot([estimate.mean], [row_position], "o", markeredgecolor=ink, markerfacecolor=face, markersize=5)


def draw_control_band(axes: Any, summaries: Sequence[MethodSummary]) -> None:
    """Draw the interval of the best control as a band."""
    best = next((line.estimate for line in summaries if line.is_control and line.estimate is not None), None)
    if best is not None and has_controls(summaries[0].metric) and np.isfinite(best.low):
        axes.axvspan(best.low, best.high, color=BAND_COLOR, zorder=0, linewidth=0)


def style_panel(axes: Any) -> None:
    """Reduce a panel to what is needed for reading numbers."""
    axes.tick_params(axis="x", labelsize=8, color=GRID_COLOR)
    axes.grid(axis="x", color=GRID_COLOR, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)


def color_control_labels(axes: Any, rows: MethodRows) -> None:
    """Draw the labels of controls in gray."""
    for tick, (_, control) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(CONTROL_COLOR if control else "#222222")


def _draw_forest_panel(axes: Any, summaries: Mapping[tuple[str, bool], MethodSummary], rows: MethodRows) -> None:
    for place, row in enumerate(rows):
        if row in summaries:
            draw_interval(axes, place, summaries[row])
    draw_control_band(axes, list(summaries.values()))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    style_panel(axes)
