"""Draw metric values as intervals: one panel for each metric, one row for each method."""

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from camscope.errors import InputError
from camscope.evaluation.method_summaries import MethodSummary, is_compared_with_controls
from camscope.metrics import METRICS
from camscope.optional_packages import require
from camscope.registry import METHODS

FIGURE_FORMATS = (".png", ".svg", ".pdf")
LITERAL_TEXT_SETTINGS = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
MAX_SUMMARY_COLUMNS, MAX_FOREST_COLUMNS, METHOD_ROW_INCHES = 3, 4, 0.24  # panels in a row; inches for a method
MAX_TITLE_CHARACTERS_PER_INCH, LEGEND_INCHES = 7.5, 11.0  # of a bold title, and of the whole legend in one line
TEXT_COLOR, METHOD_COLOR, CONTROL_COLOR, BAND_COLOR, GRID_COLOR = "#222222", "#1f3b73", "#8a8f98", "#e9ebef", "#dddddd"
LEGEND = (
    "filled: first, or not significantly worse",
    "hollow: worse than the first (paired; 5 % over all pairs and metrics)",
)
CONTROL_LEGEND = "gray: controls, which do not depend on the model; band: the best of them"
MethodRows = Sequence[tuple[str, bool]]  # names from the top down, and whether they are controls
GetName = Callable[[MethodSummary], str]


def draw_summary_figure(
    summaries: Mapping[str, Sequence[MethodSummary]], suffix: str = ".png", title: str = ""
) -> bytes:
    """Draw one panel for each metric, with the best method on top. Return the figure as the bytes of a file."""
    if suffix not in FIGURE_FORMATS:
        raise InputError(f"cannot write a figure with suffix {suffix!r}; expected {', '.join(FIGURE_FORMATS)}")
    figures = import_matplotlib_figure()
    defined = {metric: [line for line in group if line.estimate is not None] for metric, group in summaries.items()}
    defined = {metric: lines for metric, lines in defined.items() if lines}
    if not defined:
        raise InputError("there is nothing to draw: all metric values are undefined")
    n_columns = 2 if len(defined) == 4 else min(MAX_SUMMARY_COLUMNS, len(defined))  # four panels form a square
    n_rows, n_lines = -(-len(defined) // n_columns), max(map(len, defined.values()))
    width = max(5.4, 4.6 * n_columns)
    title_lines = textwrap.wrap(title, int(MAX_TITLE_CHARACTERS_PER_INCH * width))
    margins = 0.15 + 0.1 * bool(title) + 0.25 * len(title_lines) + 0.15 * (1 if width >= LEGEND_INCHES else 3)
    size = width, n_rows * (0.95 + METHOD_ROW_INCHES * n_lines) + margins
    with literal_text_scope():
        figure = figures.Figure(figsize=size, layout="constrained")
        if title:
            figure.suptitle("\n".join(title_lines), fontsize=13, fontweight="bold", x=0.01, ha="left")
        panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
        for panel, (metric, lines) in zip(panels, defined.items(), strict=False):
            is_unique = len({line.method for line in lines}) == len(lines)  # then no layer is shown
            rows = [
                (METHODS.replace_names_by_titles(line.method) if is_unique else line.title, line.is_control)
                for line in lines
            ]
            _draw_panel(panel, metric, lines, rows, lines)
        for panel in panels[len(defined) :]:
            panel.set_axis_off()
        has_control_rows = any(line.is_control for lines in defined.values() for line in lines)
        _draw_legend(figure, has_control_rows)
        stream = io.BytesIO()
        figure.savefig(stream, format=suffix[1:], dpi=110)
    return stream.getvalue()


def import_matplotlib_figure() -> Any:
    """Import `matplotlib.figure`. Raise a MissingExtraError if matplotlib is not installed."""
    return require("matplotlib.figure", extra="metrics")


@contextmanager
def literal_text_scope() -> Iterator[None]:
    """Draw text literally inside the `with` block. The characters `$`, `_` and `^` then do not start formulas."""
    with import_module("matplotlib").rc_context(LITERAL_TEXT_SETTINGS):
        yield


def sort_methods(
    summaries: Mapping[str, Sequence[MethodSummary]],
    get_name: GetName,
    method_names: Sequence[str],
    equivalent_groups: Sequence[Sequence[str]],
) -> MethodRows:
    """Sort methods by their mean rank over metrics. Control methods come last. Methods with the same maps stay adjacent."""
    places: dict[tuple[str, bool], list[int]] = {(name, False): [] for name in method_names}
    for group in summaries.values():
        for place, line in enumerate(group):
            row_places = places.setdefault((get_name(line), line.is_control), [])
            row_places += [place] if is_compared_with_controls(line.metric) and line.estimate is not None else []
    order = {row: float(np.mean(row_places)) if row_places else np.inf for row, row_places in places.items()}
    for names in equivalent_groups:
        first = min(names, key=lambda name: order[name, False])
        order |= {(name, False): order[first, False] for name in names}
    firsts = {name: names[0] for names in equivalent_groups for name in names}
    position = {row: n for n, row in enumerate(places)}
    return sorted(
        places, key=lambda row: (row[1], order[row], position[firsts.get(row[0], row[0]), row[1]], position[row])
    )


def compute_panel_rows_and_columns(n_panels: int) -> tuple[int, int]:
    """Return how many rows and columns of panels a forest plot has."""
    n_rows = -(-n_panels // MAX_FOREST_COLUMNS)
    return n_rows, -(-n_panels // n_rows)


def draw_forest_plot(
    figure: Any, summaries: Mapping[str, Sequence[MethodSummary]], get_name: GetName, rows: MethodRows
) -> None:
    """Draw one panel for each metric into a matplotlib figure. In all panels, a method has the same row."""
    n_rows, n_columns = compute_panel_rows_and_columns(len(summaries))
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True).ravel()
    for panel in panels[len(summaries) :]:
        panel.set_axis_off()
    for panel, (metric, group) in zip(panels, summaries.items(), strict=False):
        by_row = {(get_name(line), line.is_control): line for line in group}
        _draw_panel(panel, metric, group, rows, [by_row.get(row) for row in rows])
    _draw_legend(figure, any(is_control for _, is_control in rows))


def draw_title_and_subtitle(axes: Any, title: str, subtitle: str) -> None:
    """Draw a bold title with a small subtitle below it."""
    axes.set_title(
        METRICS.replace_names_by_titles(title),
        fontsize=10,
        loc="left",
        fontweight="bold",
        color=TEXT_COLOR,
        pad=16 if subtitle else 6,
    )
    place = {"xytext": (0, 4), "xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(subtitle, (0, 1), fontsize=8, color=CONTROL_COLOR, **place)


def _draw_legend(figure: Any, has_control_rows: bool) -> None:
    """Draw a legend below all panels. It explains markers, gray labels and bands. A narrow figure gets several lines."""
    phrases = [*LEGEND, CONTROL_LEGEND] if has_control_rows else LEGEND
    separator = "      " if figure.bbox.width >= LEGEND_INCHES * figure.dpi else "\n"
    figure.supxlabel(separator.join(phrases), fontsize=8, color=CONTROL_COLOR, x=0.01, ha="left")


def _draw_panel(
    axes: Any,
    title: str,
    summaries: Sequence[MethodSummary],
    rows: MethodRows,
    row_summaries: Sequence[MethodSummary | None],
) -> None:
    """Draw the panel of one metric: the interval of each method, and a band for the best control method."""
    metric = summaries[0].metric
    direction = {True: "higher is better →", False: "← lower is better", None: ""}[METRICS[metric].higher_is_better]
    draw_title_and_subtitle(axes, title, direction)
    for place, summary in enumerate(row_summaries):
        if summary is not None and summary.estimate is not None:
            estimate, color = summary.estimate, CONTROL_COLOR if summary.is_control else METHOD_COLOR
            if np.isfinite(estimate.low):
                ends = [estimate.low, estimate.high]
                axes.plot(ends, [place, place], color=color, linewidth=1.6, solid_capstyle="round")
            face = "white" if summary.is_worse_than_best and not summary.is_control else color
            axes.plot([estimate.mean], [place], "o", markeredgecolor=color, markerfacecolor=face, markersize=5)
    best = next((line.estimate for line in summaries if line.is_control and line.estimate is not None), None)
    if best is not None and is_compared_with_controls(metric) and np.isfinite(best.low):
        axes.axvspan(best.low, best.high, color=BAND_COLOR, zorder=0, linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for tick, (_, is_control) in zip(axes.get_yticklabels(), rows, strict=False):
        tick.set_color(CONTROL_COLOR if is_control else TEXT_COLOR)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color=GRID_COLOR)
    axes.grid(axis="x", color=GRID_COLOR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)
