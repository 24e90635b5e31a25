"""Figures: the summary of a run, and forest plots.

- The figure of a summary: a row a method, its mean and interval, beside those of maps that know nothing.
- Forest: a row for each method, the same in every panel; a panel for each metric, with means and intervals.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from camscope.errors import InputError
from camscope.evaluation.comparison_statements import has_controls
from camscope.evaluation.summary import MethodSummary
from camscope.metrics import METRICS
from camscope.optional import require

FIGURE_FORMATS = (".png", ".svg", ".pdf")
LITERAL_TEXT_SETTINGS = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
MAX_COLUMNS, METHOD_ROW_INCHES = 3, 0.24  # panels beside one another; inches for a method


def draw_summary_figure(
    summaries: Mapping[str, Sequence[MethodSummary]], suffix: str = ".png", title: str = ""
) -> bytes:
    """A panel for each metric, the best method on top; controls are grey, and the band is the best control's interval.

    `title`: over all of them.
    """
    if suffix not in FIGURE_FORMATS:
        raise InputError(f"no figure of kind {suffix or 'none'}; expected {', '.join(FIGURE_FORMATS)}")
    figures = import_matplotlib_figure()
    known = {
        name: some for name, own in summaries.items() if (some := [one for one in own if one.estimate is not None])
    }
    if not known:
        raise InputError("there is nothing to draw: no value is defined")
    with literal_text_scope():
        return _encode_summary_figure(figures, known, suffix, title)


def import_matplotlib_figure() -> Any:
    """The part of it that draws; MissingExtraError where it is not there."""
    return require("matplotlib.figure", extra="metrics")


@contextmanager
def literal_text_scope() -> Iterator[None]:
    """Texts that are made inside stay as they are: `$`, `args` and `^` in the name of a class, layer or image are no formula."""
    with import_module("matplotlib").rc_context(LITERAL_TEXT_SETTINGS):
        yield


def _encode_summary_figure(
    figure_module: Any, summaries: Mapping[str, Sequence[MethodSummary]], suffix: str, title: str
) -> bytes:
    across = 2 if len(summaries) == 4 else min(MAX_COLUMNS, len(summaries))  # four are a square
    rows, most = -(-len(summaries) // across), max(map(len, summaries.values()))
    size = max(5.4, 4.6 * across), rows * (0.95 + METHOD_ROW_INCHES * most) + 0.3 + 0.35 * bool(title)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    panels = figure.subplots(rows, across, squeeze=False).ravel()
    for panel, (name, own) in zip(panels, summaries.items(), strict=False):
        _draw_metric_panel(panel, name, own)
    for panel in panels[len(summaries) :]:
        panel.set_axis_off()
    draw_legend(figure, any(line.is_control for own in summaries.values() for line in own), is_single_line=across > 1)
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=110)
    return stream.getvalue()


def _draw_metric_panel(axes: Any, name: str, summaries: Sequence[MethodSummary]) -> None:
    for place, line in enumerate(summaries):
        draw_interval(axes, place, line)
    draw_control_band(axes, summaries)
    once = len({line.method for line in summaries}) == len(summaries)  # then nobody needs the layer to tell them apart
    axes.set_yticks(range(len(summaries)), [line.method if once else line.title for line in summaries], fontsize=9)
    axes.tick_params(axis="y", length=0)
    color_control_labels(axes, [(line.title, line.is_control) for line in summaries])
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    draw_panel_title(axes, name, summaries[0])
    style_panel(axes)


METHOD_COLOR, CONTROL_COLOR, BAND_COLOR, GRID_COLOR = "#1f3b73", "#8a8f98", "#e9ebef", "#dddddd"
MAX_PANELS_PER_ROW = 4  # panels beside one another
LEGEND = ("filled: first, or not told from it", "hollow: behind the first (paired; 5 % over all pairs and metrics)")
LEGEND_WITH_CONTROLS = (*LEGEND, "grey: controls, which know nothing of the model; band: the best of them")
MethodRows = Sequence[tuple[str, bool]]  # names from the top down, and which are controls


def sort_methods(
    summaries: Mapping[str, Sequence[MethodSummary]],
    get_name: Any,
    method_names: Sequence[str],
    equivalent_groups: Sequence[Sequence[str]],
) -> MethodRows:
    """The rows: methods by their mean rank over metrics that have controls, then controls by the same; else as they come.

    `equivalent_groups`: of methods that are one, side by side.
    """
    places: dict[tuple[str, bool], list[int]] = {(one, False): [] for one in method_names}
    for own in summaries.values():
        for place, line in enumerate(own):
            there = places.setdefault((get_name(line), line.is_control), [])
            there += [place] if has_controls(line) and line.estimate is not None else []
    order = {row: float(np.mean(own)) if own else np.inf for row, own in places.items()}
    for group in equivalent_groups:
        first = min(group, key=lambda one: order[one, False])
        order |= {(one, False): order[first, False] for one in group}
    firsts = {one: group[0] for group in equivalent_groups for one in group}
    nth = {row: n for n, row in enumerate(places)}
    return sorted(places, key=lambda row: (row[1], order[row], nth[firsts.get(row[0], row[0]), row[1]], nth[row]))


def compute_panel_grid(n_panels: int) -> tuple[int, int]:
    """Rows and columns of so many panels: as few rows as can be, and these filled alike."""
    down = -(-n_panels // MAX_PANELS_PER_ROW)
    return down, -(-n_panels // down)


def draw_forest_plot(
    figure: Any, summaries: Mapping[str, Sequence[MethodSummary]], get_name: Any, rows: MethodRows
) -> None:
    """Draw it into a figure of matplotlib, or a part of one."""
    down, across = compute_panel_grid(len(summaries))
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for panel in panels.ravel()[len(summaries) :]:
        panel.set_axis_off()
    for n, (metric, own) in enumerate(summaries.items()):
        panel = panels.ravel()[n]
        _draw_forest_panel(panel, {(get_name(line), line.is_control): line for line in own}, rows)
        draw_panel_title(panel, metric, own[0])
        panel.tick_params(axis="y", length=0)
        if n % across == 0:
            color_control_labels(panel, rows)
    draw_legend(figure, any(control for _, control in rows))


def draw_legend(figure: Any, has_control_rows: bool, *, is_single_line: bool = True) -> None:
    """What marks, greys and bands mean, under all panels."""
    words = LEGEND_WITH_CONTROLS if has_control_rows else LEGEND
    text = "      ".join(words) if is_single_line else "\n".join(words)
    figure.supxlabel(text, fontsize=8, color=CONTROL_COLOR, x=0.01, ha="left")


def draw_panel_title(axes: Any, title: str, summary: MethodSummary) -> None:
    """The metric's name, and which way is better."""
    way = {True: "more is better →", False: "← less is better", None: ""}[METRICS[summary.metric].higher_is_better]
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold", color="#222222", pad=16 if way else 6)
    axes.annotate(
        way,
        (0, 1),
        xytext=(0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=CONTROL_COLOR,
    )


def draw_interval(axes: Any, row_position: float, summary: MethodSummary) -> None:
    """A line's mean and interval in its row."""
    if (one := summary.estimate) is None:
        return
    ink = CONTROL_COLOR if summary.is_control else METHOD_COLOR
    if np.isfinite(one.low):
        axes.plot([one.low, one.high], [row_position, row_position], color=ink, linewidth=1.6, solid_capstyle="round")
    face = "white" if summary.is_worse_than_best and not summary.is_control else ink
    axes.plot([one.mean], [row_position], "o", markeredgecolor=ink, markerfacecolor=face, markersize=5)


def draw_control_band(axes: Any, summaries: Sequence[MethodSummary]) -> None:
    """The interval of the best control."""
    best = next((line.estimate for line in summaries if line.is_control and line.estimate is not None), None)
    if best is not None and has_controls(summaries[0]) and np.isfinite(best.low):
        axes.axvspan(best.low, best.high, color=BAND_COLOR, zorder=0, linewidth=0)


def style_panel(axes: Any) -> None:
    """Only what is needed to read numbers off."""
    axes.tick_params(axis="x", labelsize=8, color=GRID_COLOR)
    axes.grid(axis="x", color=GRID_COLOR, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)


def color_control_labels(axes: Any, rows: MethodRows) -> None:
    """The labels of controls are grey."""
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
