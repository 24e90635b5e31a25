"""Charts of the report: forest plots and curves.

- Forest plots: estimates with intervals, baselines and margins.
- Curves: reliability of predictions, similarity during weight randomization, eigenvalues and stability of clusters.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from camscope.audit.core.schema import ClusterAnalysis, EstimateSummary, FindingPerformance, RandomizationSimilarity
from camscope.audit.report.number_format import choose_decimals, ci_width_note, number_to_text
from camscope.audit.report.svg import (
    BACKGROUND_COLOR,
    BAND_COLOR,
    CONTRADICTS_COLOR,
    CONTROL_COLOR,
    FONT_SIZE,
    LINE_COLOR,
    MUTED_COLOR,
    SUPPORTS_COLOR,
    TEXT_COLOR,
    Plot,
)
from camscope.audit.report.verdict_labels import sanitize_text

if TYPE_CHECKING:
    from markupsafe import Markup


CHART_WIDTH, ROW_HEIGHT, TWO_LINE_ROW_HEIGHT = 460.0, 22.0, 33.0  # pixels; a row with one and with two lines
LABEL_COLUMN_WIDTH, MIN_VALUE_COLUMN_WIDTH = 142.0, 152.0  # left column; right column at least
VALUE_CHARACTER_WIDTH = 6.4  # pixels
ForestRowKind = Literal["method", "control", "unresolved"]


@dataclass(frozen=True)
class ForestRow:
    """A row of a forest plot. `kind`: a method, a control map, or a region below the map resolution.

    `shaded_range`: a range shaded in this row only.
    """

    name: str
    estimate: EstimateSummary
    kind: ForestRowKind = "method"
    shaded_range: tuple[float, float] | None = None

    @property
    def label_lines(self) -> list[str]:
        """The name in at most two lines."""
        return textwrap.wrap(sanitize_text(self.name), 21, max_lines=2, placeholder="…", break_long_words=True) or ["–"]

    @property
    def height(self) -> float:
        """The height in pixels."""
        return TWO_LINE_ROW_HEIGHT if len(self.label_lines) > 1 else ROW_HEIGHT


def draw_forest_svg(
    figure_id: str,
    aria_label: str,
    rows: Sequence[ForestRow],
    *,
    axis_label: str,
    shaded_range: tuple[float, float] | None = None,
    reference_value: float | None = None,
    margin: float | None = None,
    show_baselines: bool = False,
) -> "Markup":
    """Draw a forest plot; `shaded_range`: irrelevant values, `reference_value`: chance, `margin`: the declared margin."""
    height, right = sum(row.height for row in rows), CHART_WIDTH - _compute_value_column_width(rows)
    plot = Plot(CHART_WIDTH, height + 46)
    panel = plot.add_axes(LABEL_COLUMN_WIDTH, 4, right - LABEL_COLUMN_WIDTH, height)
    panel.set_xlim(
        *_compute_x_limits(
            rows,
            [*(shaded_range or ()), *(end for row in rows for end in row.shaded_range or ()), reference_value, margin],
            show_baselines,
        )
    )
    panel.set_ylim(height, 0)
    panel.locator_params(axis="x", nbins=4)
    panel.set_yticks([])
    if shaded_range is not None:
        panel.axvspan(*shaded_range, color=BAND_COLOR, linewidth=0, zorder=0)
    if reference_value is not None:
        panel.axvline(reference_value, color=MUTED_COLOR, linewidth=1, zorder=1)
    if margin is not None:
        panel.axvline(margin, color=CONTRADICTS_COLOR, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    y = 0.0
    for row in rows:
        if row.shaded_range is not None:
            panel.axvspan(
                *row.shaded_range,
                1 - (y + row.height) / height,
                1 - y / height,
                color=BAND_COLOR,
                linewidth=0,
                zorder=0,
            )
        _draw_forest_row(plot, panel, row, y + row.height / 2, right + 12, show_baselines)
        y += row.height
    plot.add_text(
        (LABEL_COLUMN_WIDTH + right) / 2,
        height + 37,
        axis_label,
        color=MUTED_COLOR,
        ha="center",
        fontsize=FONT_SIZE - 0.5,
    )
    return plot.to_svg(figure_id, aria_label)


def _draw_forest_row(
    plot: Plot, axes: Any, row: ForestRow, y_center: float, value_x: float, show_baselines: bool
) -> None:
    line_color, estimate = (
        {"method": TEXT_COLOR, "control": CONTROL_COLOR, "unresolved": CONTROL_COLOR}[row.kind],
        row.estimate,
    )
    for n, text in enumerate(row.label_lines):
        style = {"color": TEXT_COLOR if row.kind == "method" else MUTED_COLOR, "fontsize": FONT_SIZE}
        plot.add_text(
            LABEL_COLUMN_WIDTH - 10, 4 + y_center + 13 * (n - (len(row.label_lines) - 1) / 2), text, ha="right", **style
        )
    if show_baselines and estimate.baseline is not None:
        axes.plot(
            [estimate.baseline],
            [y_center],
            "D",
            markersize=5,
            markerfacecolor=BACKGROUND_COLOR,
            markeredgecolor=MUTED_COLOR,
            zorder=3,
        )
    if estimate.value is None:
        plot.add_text(value_x, 4 + y_center, "no value", color=MUTED_COLOR, fontsize=FONT_SIZE - 0.5)
        return
    if estimate.low is not None and estimate.high is not None:
        axes.plot(
            [estimate.low, estimate.high],
            [y_center, y_center],
            color=line_color,
            linewidth=1.8,
            solid_capstyle="round",
            zorder=4,
        )
    face_color = (
        BACKGROUND_COLOR if row.kind == "unresolved" else SUPPORTS_COLOR if row.kind == "method" else CONTROL_COLOR
    )
    edge_color = CONTROL_COLOR if row.kind != "method" else SUPPORTS_COLOR
    axes.plot(
        [estimate.value],
        [y_center],
        "o",
        markersize=6,
        markerfacecolor=face_color,
        markeredgecolor=edge_color,
        zorder=5,
    )
    text, values = format_estimate_text(estimate)
    plot.add_numbers(
        value_x,
        4 + y_center,
        text,
        values,
        color=TEXT_COLOR if row.kind == "method" else MUTED_COLOR,
        fontsize=FONT_SIZE - 0.5,
    )


def format_estimate_text(estimate: EstimateSummary) -> tuple[str, list[float]]:
    """Return a text such as `0.83 [0.79, 0.87]`, and the numbers in it."""
    if estimate.value is None:
        return "", []
    decimals, width_note = choose_decimals(estimate), ci_width_note(estimate)
    value = number_to_text(estimate.value, decimals)
    if estimate.low is None or estimate.high is None or width_note:
        return f"{value} [{width_note}]" if width_note else value, [estimate.value]
    return f"{value} [{number_to_text(estimate.low, decimals)}, {number_to_text(estimate.high, decimals)}]", [
        estimate.value,
        estimate.low,
        estimate.high,
    ]


def _compute_value_column_width(rows: Sequence[ForestRow]) -> float:
    """Return the width of the longest value, or the minimum width."""
    return max(
        MIN_VALUE_COLUMN_WIDTH,
        14 + VALUE_CHARACTER_WIDTH * max((len(format_estimate_text(row.estimate)[0]) for row in rows), default=0),
    )


def _compute_x_limits(
    rows: Sequence[ForestRow], reference_values: Sequence[float | None], show_baselines: bool
) -> tuple[float, float]:
    """Return limits that include all values."""
    estimate_values = [value for row in rows for value in (row.estimate.value, row.estimate.low, row.estimate.high)]
    estimate_values += [row.estimate.baseline for row in rows] if show_baselines else []
    values = [value for value in [*estimate_values, *reference_values] if value is not None] or [0.0, 1.0]
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.5
    return low - pad, high + pad


LEFT_MARGIN, RIGHT_MARGIN = 50.0, 14.0


def draw_reliability_diagram(figure_id: str, aria_label: str, performance: FindingPerformance) -> "Markup":
    """Draw the observed share of the finding over the predicted probability; the diagonal is perfect calibration."""
    plot = Plot(CHART_WIDTH, 270)
    panel = _add_labeled_axes(plot, 212, "predicted probability", "share with the finding")
    panel.set_xlim(-0.02, 1.02)
    panel.set_ylim(-0.02, 1.02)
    panel.plot([0, 1], [0, 1], color=MUTED_COLOR, linewidth=1, linestyle=(0, (4, 3)))
    for point in performance.bins:
        panel.plot(
            [point.predicted] * 2, [point.low, point.high], color=TEXT_COLOR, linewidth=1.6, solid_capstyle="round"
        )
    panel.plot(
        [point.predicted for point in performance.bins],
        [point.observed for point in performance.bins],
        color=LINE_COLOR,
        linewidth=1,
    )
    max_images = max((point.n_images for point in performance.bins), default=1)
    for point in performance.bins:
        size = 4 + 6 * (point.n_images / max_images) ** 0.5
        panel.plot([point.predicted], [point.observed], "o", markersize=size, color=SUPPORTS_COLOR, zorder=5)
    return plot.to_svg(figure_id, aria_label)


def draw_randomization_curve(
    figure_id: str,
    aria_label: str,
    step_names: tuple[str, ...],
    similarity: RandomizationSimilarity,
    *,
    is_control: bool,
) -> "Markup":
    """Draw the similarity to the trained map after each randomization step, with the band of maps of different images."""
    plot = Plot(CHART_WIDTH, 216)
    panel = _add_labeled_axes(plot, 158, "", "similarity")
    points = [(n, value) for n, value in enumerate(similarity.curve) if value is not None]
    last_step = max(1, len(similarity.curve) - 1)
    panel.set_xlim(-0.03 * last_step, 1.03 * last_step)
    panel.set_xticks([])
    if similarity.null_low is not None and similarity.null_high is not None:
        panel.axhspan(similarity.null_low, similarity.null_high, color=BAND_COLOR, linewidth=0, zorder=0)
    if similarity.null_mean is not None:
        panel.axhline(similarity.null_mean, color=MUTED_COLOR, linewidth=1, zorder=1)
    color = (
        CONTROL_COLOR
        if is_control or similarity.passes is None
        else SUPPORTS_COLOR
        if similarity.passes
        else CONTRADICTS_COLOR
    )
    marker = "s" if is_control else "D" if similarity.passes is None else "o" if similarity.passes else "^"
    panel.plot(
        [n for n, _ in points], [value for _, value in points], f"-{marker}", color=color, markersize=5, zorder=4
    )
    y_values = [value for _, value in points] + [similarity.null_low or 0.0, similarity.null_high or 0.0, 1.0]
    panel.set_ylim(min(*y_values, 0.0) - 0.06, max(y_values) + 0.06)
    if step_names:
        plot.add_text(LEFT_MARGIN, 182, sanitize_text(step_names[0])[:30], color=MUTED_COLOR, fontsize=FONT_SIZE - 1)
        plot.add_text(
            CHART_WIDTH - RIGHT_MARGIN,
            182,
            sanitize_text(step_names[-1])[:30],
            color=MUTED_COLOR,
            fontsize=FONT_SIZE - 1,
            ha="right",
        )
    plot.add_text(
        LEFT_MARGIN + (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / 2,
        202,
        "weights randomized from the output layer",
        color=MUTED_COLOR,
        ha="center",
    )
    return plot.to_svg(figure_id, aria_label)


def draw_eigenvalue_spectrum(figure_id: str, aria_label: str, analysis: ClusterAnalysis) -> "Markup":
    """Draw the smallest eigenvalues: a jump after the k-th suggests k clusters."""
    plot = Plot(CHART_WIDTH, 216)
    panel = _add_labeled_axes(plot, 158, "number of clusters", "eigenvalue")
    positions = range(1, len(analysis.eigenvalues) + 1)
    panel.vlines(positions, 0, analysis.eigenvalues, color=LINE_COLOR, linewidth=1.2)
    panel.plot(positions, analysis.eigenvalues, "o", color=SUPPORTS_COLOR, markersize=5.5)
    panel.set_xlim(0.4, len(analysis.eigenvalues) + 0.6)
    panel.set_ylim(-0.05 * max(*analysis.eigenvalues, 1e-9), 1.05 * max(*analysis.eigenvalues, 1e-9))
    _use_integer_ticks(panel)
    return plot.to_svg(figure_id, aria_label)


def draw_cluster_stability(figure_id: str, aria_label: str, analysis: ClusterAnalysis) -> "Markup":
    """Draw the agreement of clusterings of subsamples, and the agreement expected for a single cluster."""
    plot = Plot(CHART_WIDTH, 216)
    panel = _add_labeled_axes(plot, 158, "number of clusters", "stability")
    panel.plot(
        [row.n_clusters for row in analysis.stability_by_n_clusters],
        [row.stability for row in analysis.stability_by_n_clusters],
        "-o",
        color=SUPPORTS_COLOR,
        markersize=5.5,
    )
    null = [
        (row.n_clusters, row.null_stability)
        for row in analysis.stability_by_n_clusters
        if row.null_stability is not None
    ]
    panel.plot([k for k, _ in null], [value for _, value in null], "--D", color=CONTROL_COLOR, markersize=4.5)
    numbers = [row.n_clusters for row in analysis.stability_by_n_clusters]
    panel.set_xlim(min(numbers) - 0.6, max(numbers) + 0.6)
    panel.set_xticks(numbers)
    panel.set_ylim(
        min(0.0, *(row.stability for row in analysis.stability_by_n_clusters), *(value for _, value in null)) - 0.05,
        1.05,
    )
    return plot.to_svg(figure_id, aria_label)


def _add_labeled_axes(plot: Plot, height: float, x_label: str, y_label: str) -> Any:
    """Add axes with labels below and on the left."""
    panel = plot.add_axes(LEFT_MARGIN, 12, plot.width - LEFT_MARGIN - RIGHT_MARGIN, height)
    panel.grid(axis="x", visible=False)
    panel.grid(axis="y", color=LINE_COLOR, linewidth=0.7)
    panel.locator_params(axis="y", nbins=5)
    plot.add_text(12, 12 + height / 2, y_label, color=MUTED_COLOR, rotation=90, ha="center")
    if x_label:
        plot.add_text(
            LEFT_MARGIN + (plot.width - LEFT_MARGIN - RIGHT_MARGIN) / 2,
            height + 46,
            x_label,
            color=MUTED_COLOR,
            ha="center",
        )
    return panel


def _use_integer_ticks(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
