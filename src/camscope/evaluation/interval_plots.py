"""Draw metric values as intervals: one panel for each metric, one row for each method."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from camscope import render
from camscope.errors import InputError
from camscope.evaluation.method_summaries import MethodSummary, is_compared_with_controls
from camscope.evaluation.selection.rank_and_drop_candidates import CandidateState
from camscope.metrics import METRICS, Estimate
from camscope.optional_packages import require
from camscope.registry import METHODS
from camscope.render.print_figure import PRINT_SETTINGS

FIGURE_FORMATS = (".png", ".svg", ".pdf")
MAX_SUMMARY_COLUMNS, MAX_FOREST_COLUMNS, METHOD_ROW_INCHES = 3, 4, 0.24  # panels in a row; inches for a method
MAX_TITLE_CHARACTERS_PER_INCH, LEGEND_INCHES = 7.5, 11.0  # of a bold title, and of the whole legend in one line
MM_PER_INCH, MIN_PANEL_MM, LABELS_MM, MIN_SHARED_PANEL_MM = 25.4, 80.0, 45.0, 40.0
TEXT_COLOR, METHOD_COLOR, CONTROL_COLOR, BAND_COLOR, GRID_COLOR = "#222222", "#1f3b73", "#8a8f98", "#e9ebef", "#dddddd"
LEGEND = (
    "filled: first, or not significantly worse",
    "hollow: worse than the first (paired; 5 % over all pairs and metrics)",
)
CONTROL_LEGEND = "gray: controls, which do not depend on the model; band: the best of them"
SELECTION_LEGEND = "dot: mean, line: 95 % interval; hollow: dropped from the race, with the images until then"
MethodRows = Sequence[tuple[str, bool]]  # names from the top down, and whether they are controls
GetName = Callable[[MethodSummary], str]


def draw_summary_figure(
    summaries: Mapping[str, Sequence[MethodSummary]],
    suffix: str = ".png",
    title: str = "",
    *,
    width_mm: float | None = None,
    caption: str = "",
) -> bytes:
    """Draw one panel for each metric, with the best method on top. Return the figure as the bytes of a file.

    Args:
        summaries: The summaries of each metric.
        suffix: ".png", ".svg" or ".pdf".
        title: Title of the figure.
        width_mm: Width in millimeters. Default: as wide as the panels need.
        caption: Text in the metadata of the file.

    Returns:
        The bytes of the file.

    """
    if suffix not in FIGURE_FORMATS:
        raise InputError(f"cannot write a figure with suffix {suffix!r}; expected {', '.join(FIGURE_FORMATS)}")
    figures = import_matplotlib_figure()
    defined = {metric: [line for line in group if line.estimate is not None] for metric, group in summaries.items()}
    defined = {metric: lines for metric, lines in defined.items() if lines}
    if not defined:
        raise InputError("there is nothing to draw: all metric values are undefined")
    max_columns = MAX_SUMMARY_COLUMNS if width_mm is None else max(1, int(width_mm // MIN_PANEL_MM))
    n_columns = 2 if len(defined) == 4 and max_columns > 1 else min(max_columns, len(defined))  # four form a square
    n_rows, n_lines = -(-len(defined) // n_columns), max(map(len, defined.values()))
    width = max(5.4, 4.6 * n_columns) if width_mm is None else width_mm / MM_PER_INCH
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
    return render.encode_figure(figure, suffix, title=title, caption=caption, dpi=110)


def draw_selection_figure(
    candidates: Sequence[CandidateState],
    suffix: str,
    title: str = "",
    *,
    width_mm: float = render.TWO_COLUMNS_MM,
    caption: str = "",
) -> bytes:
    """Draw the candidates of a method selection: one panel for each criterion, one row for each candidate.

    Args:
        candidates: The candidates, the best first.
        suffix: ".png", ".svg" or ".pdf".
        title: Title of the figure.
        width_mm: Width in millimeters.
        caption: Text in the metadata of the file.

    Returns:
        The bytes of the file.

    """
    figures = import_matplotlib_figure()
    metrics = [name for name in candidates[0].metric_values if any(item.estimate_metric(name) for item in candidates)]
    if not metrics:
        raise InputError("there is nothing to draw: all metric values are undefined")
    n_columns = max(1, min(len(metrics), int((width_mm - LABELS_MM) // MIN_SHARED_PANEL_MM)))
    n_rows, width = -(-len(metrics) // n_columns), width_mm / MM_PER_INCH
    title_lines = textwrap.wrap(title, int(MAX_TITLE_CHARACTERS_PER_INCH * width))
    height = n_rows * (0.95 + METHOD_ROW_INCHES * len(candidates)) + 0.25 * len(title_lines) + 0.5
    with literal_text_scope():
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle("\n".join(title_lines), fontsize=11, fontweight="bold", x=0.01, ha="left")
        panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True).ravel()
        for panel, metric in zip(panels, metrics, strict=False):
            _draw_heading(panel, metric, metric)
            for place, candidate in enumerate(candidates):
                if (estimate := candidate.estimate_metric(metric)) is not None:
                    _draw_estimate(panel, place, estimate, METHOD_COLOR, is_filled=not candidate.drop_reason)
            style_rows(panel, [(candidate.title, bool(candidate.drop_reason)) for candidate in candidates])
        for panel in panels[len(metrics) :]:
            panel.set_axis_off()
        figure.supxlabel(SELECTION_LEGEND, fontsize=8, color=CONTROL_COLOR, x=0.01, ha="left")
    return render.encode_figure(figure, suffix, title=title, caption=caption, dpi=300)


def build_metric_caption(
    title: str, names: Sequence[str], metrics: Sequence[str], model: Mapping[str, Any], versions: Mapping[str, str]
) -> str:
    """Return the caption of a figure with metric values. It names the methods, metrics, model and versions.

    Args:
        title: Title of the figure: the model, the layer and the number of images.
        names: Display names of the methods.
        metrics: Names of the metrics.
        model: The entry `model` of run.json, with the digest of the weights.
        versions: Versions of the libraries.

    Returns:
        One paragraph.

    """
    titles = ", ".join(METRICS.replace_names_by_titles(name) for name in metrics)
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("camscope", "torch"))
    sentences = [
        f"{title}.",
        f"Mean over images and 95 % interval of {titles}, for {', '.join(dict.fromkeys(names))}.",
        f"Digest of the weights: {model['digest']}." if model.get("digest") else "",
        f"Software: {software}." if software else "",
    ]
    return " ".join(filter(None, sentences))


def import_matplotlib_figure() -> Any:
    """Import `matplotlib.figure`. Raise a MissingExtraError if matplotlib is not installed."""
    return require("matplotlib.figure", extra="metrics")


@contextmanager
def literal_text_scope() -> Iterator[None]:
    """Draw text literally inside the `with` block. The characters `$`, `_` and `^` then do not start formulas.

    In vector files, text stays text, and nothing depends on the date.
    """
    with import_module("matplotlib").rc_context(PRINT_SETTINGS):
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
    separator = "  ·  " if figure.bbox.width >= LEGEND_INCHES * figure.dpi else "\n"
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
    _draw_heading(axes, title, metric)
    for place, summary in enumerate(row_summaries):
        if summary is not None and summary.estimate is not None:
            color = CONTROL_COLOR if summary.is_control else METHOD_COLOR
            is_filled = summary.is_control or not summary.is_worse_than_best
            _draw_estimate(axes, place, summary.estimate, color, is_filled=is_filled)
    best = next((line.estimate for line in summaries if line.is_control and line.estimate is not None), None)
    if best is not None and is_compared_with_controls(metric) and np.isfinite(best.low):
        axes.axvspan(best.low, best.high, color=BAND_COLOR, zorder=0, linewidth=0)
    style_rows(axes, rows)


def _draw_heading(axes: Any, title: str, metric: str) -> None:
    direction = {True: "higher is better →", False: "← lower is better", None: ""}[METRICS[metric].higher_is_better]
    draw_title_and_subtitle(axes, title, direction)


def _draw_estimate(axes: Any, place: int, estimate: Estimate, color: str, *, is_filled: bool) -> None:
    """Draw a mean as a dot and its interval as a line."""
    if np.isfinite(estimate.low):
        ends = [estimate.low, estimate.high]
        axes.plot(ends, [place, place], color=color, linewidth=1.6, solid_capstyle="round")
    face = color if is_filled else "white"
    axes.plot([estimate.mean], [place], "o", markeredgecolor=color, markerfacecolor=face, markersize=5)


def style_rows(axes: Any, rows: MethodRows) -> None:
    """Label the rows, and remove the frame. A row with True has a gray label."""
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
