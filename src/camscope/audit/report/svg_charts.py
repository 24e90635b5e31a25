"""Draw the charts of the report as inline SVG: forest plots, curves and diagrams."""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import EstimateSummary, FindingPerformance, RandomizationSimilarity
from camscope.audit.core.summary_schema import ClusterAnalysis
from camscope.audit.report.number_format import format_value_limits_and_width_note
from camscope.audit.report.verdict_labels_and_groups import sanitize_text
from camscope.optional_packages import require

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Placeholder colors. The style sheet of the page sets them for light and dark mode.
COLOR_CLASS_NAMES = {
    f"#00000{n}": name
    for n, name in enumerate(
        ("text", "muted", "line", "band", "supports", "contradicts", "control", "background"), start=1
    )
}
TEXT, MUTED, LINE, BAND, SUPPORTS, CONTRADICTS, CONTROL, BACKGROUND = COLOR_CLASS_NAMES
DECIMAL_PATTERN = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
VALUES_PREFIX = "values "  # of the id of a text that shows numbers of the summary
# Lengths in pixels; 72 pixels are an inch of matplotlib.
CHART_WIDTH, CURVE_HEIGHT = 460.0, 216.0
ROW_HEIGHT, TWO_LINE_ROW_HEIGHT, AXIS_HEIGHT = 22.0, 33.0, 46.0
LABEL_COLUMN_WIDTH, MIN_VALUE_COLUMN_WIDTH, VALUE_CHARACTER_WIDTH = 142.0, 152.0, 6.4
LEFT_MARGIN, RIGHT_MARGIN = 50.0, 14.0
FONT_SIZE, SMALL_FONT_SIZE = 11.5, 10.5
MAX_LABEL_CHARACTERS = 21  # of a line
DASHES = (0, (4, 3))
ForestRowKind = Literal["method", "control", "unresolved"]
COLORS_BY_KIND: dict[ForestRowKind, tuple[str, str, str, str]] = {
    "method": (TEXT, SUPPORTS, SUPPORTS, TEXT),
    "control": (CONTROL, CONTROL, CONTROL, MUTED),
    "unresolved": (CONTROL, BACKGROUND, CONTROL, MUTED),
}  # of the interval, the inside and the edge of the dot, and the text


@contextmanager
def default_style_scope() -> Iterator[None]:
    """Use matplotlib's default style inside the `with` block. Settings of the user have no effect."""
    matplotlib = require("matplotlib", extra="audit")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "camscope", "path.simplify": False, "text.parse_math": False}
        )
        yield


def to_inline_svg(figure: "Figure", figure_id: str, aria_label: str) -> Markup:
    """Convert a figure to SVG. The page forbids inline styles, so the SVG has none. `figure_id` must be unique on the page.

    A text whose id is `VALUES_PREFIX` and numbers gets these as its attribute `data-values`.
    """
    from xml.etree import ElementTree

    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(stream.getvalue())  # noqa: S314 - written by matplotlib
    for element in list(root.iter()):
        for style_sheet in element.findall("{*}style"):
            element.remove(style_sheet)
        element.tag = _strip_namespace(element.tag)
        element.attrib = dict(_convert_attributes(element, figure_id))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": aria_label, "class": "plot"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 - escaped by ElementTree


def _convert_attributes(element: "Element", figure_id: str) -> Iterator[tuple[str, str]]:
    """Yield the SVG attributes of an element. Ids become unique, numbers are rounded, and styles become attributes."""
    classes = []
    for key, value in element.attrib.items():
        name = _strip_namespace(key)
        if name == "id" and value.startswith(VALUES_PREFIX):
            yield "data-values", value.removeprefix(VALUES_PREFIX)
        elif name == "id" and value.startswith("matplotlib.axis"):
            classes.append("tick")
        elif name == "id" and element.tag in ("path", "clipPath"):  # no other element is referred to
            yield "id", f"{figure_id}-{value}"
        elif name == "style":
            for property_, setting in _parse_style(value):
                if setting in COLOR_CLASS_NAMES:
                    classes.append(f"{property_[0]}-{COLOR_CLASS_NAMES[setting]}")
                else:
                    yield property_, setting
        elif name in ("href", "clip-path"):
            yield name, value.replace("#", f"#{figure_id}-")
        elif name != "id" and not value.startswith("rotate(-0 "):
            yield name, DECIMAL_PATTERN.sub(_round_number, value)
    if classes:
        yield "class", " ".join(sorted(classes))


def _parse_style(style: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each CSS property. Of font properties, only size and weight are kept."""
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":  # older matplotlib versions write the font shorthand
            yield from [("font-size", size) for size in re.findall(r"([\d.]+)px", value)]
        elif key == "font-size":
            yield key, value.removesuffix("px")
        elif key and not key.startswith("font-"):
            yield key, value


def _round_number(number: re.Match[str]) -> str:
    text = f"{float(number.group()):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _strip_namespace(name: Any) -> str:
    return str(name).rpartition("}")[2]


@dataclass(frozen=True)
class ForestRow:
    """A row of a forest plot: an estimate with its label. `kind` is a method, a control map or a small region.

    `shaded_range`: a range shaded in this row only.
    """

    name: str
    estimate: EstimateSummary
    kind: ForestRowKind = "method"
    shaded_range: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        """The name of the row, broken into at most two lines."""
        lines = textwrap.wrap(sanitize_text(self.name), MAX_LABEL_CHARACTERS, max_lines=2, placeholder="…")
        return "\n".join(lines) or "–"


def draw_forest_plot(
    rows: Sequence[ForestRow],
    axis_label: str,
    *,
    shaded_range: tuple[float, float] | None = None,
    reference_value: float | None = None,
    margin: float | None = None,
    show_baselines: bool = False,
) -> "Figure":
    """Draw a forest plot. Each row shows one estimate with its interval.

    `shaded_range`: irrelevant values, `reference_value`: chance, `margin`: the declared margin.
    """
    edges = list(accumulate((TWO_LINE_ROW_HEIGHT if "\n" in row.label else ROW_HEIGHT for row in rows), initial=0.0))
    n_characters = max((len(format_estimate_and_list_numbers(row.estimate)[0]) for row in rows), default=0)
    value_column_width = max(MIN_VALUE_COLUMN_WIDTH, 14 + VALUE_CHARACTER_WIDTH * n_characters)
    figure, axes = _create_figure_and_axes(
        edges[-1], edges[-1] + AXIS_HEIGHT, LABEL_COLUMN_WIDTH, value_column_width, top=4.0
    )
    axes.grid(axis="x", color=LINE, linewidth=0.7)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel(axis_label, color=MUTED, fontsize=FONT_SIZE - 0.5, labelpad=8)
    axes.set_xlim(*_compute_x_limits(rows, [*(shaded_range or ()), reference_value, margin], show_baselines))
    axes.set_ylim(edges[-1], 0)
    centers = [(top + bottom) / 2 for top, bottom in pairwise(edges)]
    axes.set_yticks(centers, [row.label for row in rows], fontsize=FONT_SIZE)
    axes.tick_params(axis="y", left=False, pad=10)
    if shaded_range is not None:
        axes.axvspan(*shaded_range, color=BAND, linewidth=0, zorder=0)
    if reference_value is not None:
        axes.axvline(reference_value, color=MUTED, linewidth=1, zorder=1)
    if margin is not None:
        axes.axvline(margin, color=CONTRADICTS, linewidth=1, linestyle=DASHES, zorder=1)
    for n, row in enumerate(rows):
        if row.shaded_range is not None:
            axes.fill_betweenx(edges[n : n + 2], *row.shaded_range, color=BAND, linewidth=0, zorder=0)
        axes.get_yticklabels()[n].set_color(COLORS_BY_KIND[row.kind][3])
        _draw_forest_row(axes, row, centers[n], show_baseline=show_baselines)
    return figure


def _draw_forest_row(axes: "Axes", row: ForestRow, y: float, *, show_baseline: bool) -> None:
    """Draw one row of a forest plot: the interval, the value, its text and an optional baseline."""
    line_color, face_color, edge_color, text_color = COLORS_BY_KIND[row.kind]
    estimate = row.estimate
    if show_baseline and estimate.baseline is not None:
        axes.plot(estimate.baseline, y, "D", markersize=5, mfc=BACKGROUND, mec=MUTED, zorder=3)
    if estimate.low is not None and estimate.high is not None:
        ends = [estimate.low, estimate.high]
        axes.plot(ends, [y, y], color=line_color, linewidth=1.8, solid_capstyle="round", zorder=4)
    text, numbers = format_estimate_and_list_numbers(estimate)
    if estimate.value is not None:
        axes.plot(estimate.value, y, "o", markersize=6, mfc=face_color, mec=edge_color, zorder=5)
    axes.annotate(
        text or "no value",
        (1, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        color=text_color if text else MUTED,
        fontsize=FONT_SIZE - 0.5,
        annotation_clip=False,
        gid=f"{VALUES_PREFIX}{' '.join(map(repr, numbers))}" if numbers else None,
    )


def format_estimate_and_list_numbers(estimate: EstimateSummary) -> tuple[str, list[float]]:
    """Format an estimate as text such as `0.83 [0.79, 0.87]`. Also return the numbers that the text contains."""
    texts, width_note = format_value_limits_and_width_note(estimate)
    if width_note:
        return f"{texts[0][1]} [{width_note}]", [texts[0][0]]
    ends = f" [{', '.join(text for _, text in texts[1:])}]" if texts[1:] else ""
    return "".join(text for _, text in texts[:1]) + ends, [number for number, _ in texts]


def _compute_x_limits(
    rows: Sequence[ForestRow], other_values: Sequence[float | None], show_baselines: bool
) -> tuple[float, float]:
    """Return the limits of the x axis. They include all values."""
    values = [*other_values, *(end for row in rows for end in row.shaded_range or ())]
    for estimate in (row.estimate for row in rows):
        values += [estimate.value, estimate.low, estimate.high, estimate.baseline if show_baselines else None]
    present = [value for value in values if value is not None] or [0.0, 1.0]
    pad = 0.06 * (max(present) - min(present)) or 0.5
    return min(present) - pad, max(present) + pad


def _create_figure_and_axes(
    panel_height: float, height: float, left: float, right: float, *, top: float
) -> "tuple[Figure, Axes]":
    """Create a figure with one plot area. Sizes are in pixels. Of the frame, only the bottom line is drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(CHART_WIDTH / 72, height / 72))
    figure.patch.set_visible(False)
    axes = figure.add_axes(
        (left / CHART_WIDTH, 1 - (top + panel_height) / height, 1 - (left + right) / CHART_WIDTH, panel_height / height)
    )
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=MUTED, labelsize=SMALL_FONT_SIZE, length=3, color=LINE)
    axes.set_axisbelow(True)
    return figure, axes


def _create_figure_and_curve_axes(x_label: str, y_label: str, height: float = CURVE_HEIGHT) -> "tuple[Figure, Axes]":
    """Create a figure with square axes for a curve, with a grid and labels."""
    figure, axes = _create_figure_and_axes(height - 58, height, LEFT_MARGIN, RIGHT_MARGIN, top=12.0)
    axes.grid(axis="y", color=LINE, linewidth=0.7)
    axes.locator_params(axis="y", nbins=5)
    axes.set_xlabel(x_label, color=MUTED, fontsize=FONT_SIZE, labelpad=8)
    axes.set_ylabel(y_label, color=MUTED, fontsize=FONT_SIZE)
    return figure, axes


def draw_reliability_diagram(performance: FindingPerformance) -> "Figure":
    """Draw the observed share of a finding for each predicted probability."""
    bins = performance.bins
    figure, axes = _create_figure_and_curve_axes("predicted probability", "share with the finding", 270.0)
    axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DASHES)
    predicted, observed = [point.predicted for point in bins], [point.observed for point in bins]
    axes.vlines(
        predicted, [point.low for point in bins], [point.high for point in bins], color=TEXT, linewidth=1.6,
        capstyle="round", zorder=2,
    )  # fmt: skip
    axes.plot(predicted, observed, color=LINE, linewidth=1)
    max_images = max((point.n_images for point in bins), default=1)
    sizes = [(3 + 9 * (point.n_images / max_images) ** 0.5) ** 2 for point in bins]
    axes.scatter(predicted, observed, sizes, color=SUPPORTS, clip_on=False, zorder=5)
    return figure


def draw_randomization_curve(
    step_names: tuple[str, ...], similarity: RandomizationSimilarity, *, is_control: bool
) -> "Figure":
    """Draw a curve of weight randomization: the similarity to the original map after each step.

    The band shows the similarity of maps of different images.
    """
    figure, axes = _create_figure_and_curve_axes("weights randomized from the output layer", "similarity")
    last_step = max(1, len(similarity.curve) - 1)
    axes.set_xlim(-0.03 * last_step, 1.03 * last_step)
    names = [sanitize_text(name)[:30] for name in (step_names[0], step_names[-1])] if step_names else ["", ""]
    axes.set_xticks([0, last_step], names)
    axes.tick_params(axis="x", bottom=False)
    for label, alignment in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set(horizontalalignment=alignment)
    if similarity.null_low is not None and similarity.null_high is not None:
        axes.axhspan(similarity.null_low, similarity.null_high, color=BAND, linewidth=0, zorder=0)
    if similarity.null_mean is not None:
        axes.axhline(similarity.null_mean, color=MUTED, linewidth=1, zorder=1)
    color, marker = {None: (CONTROL, "D"), True: (SUPPORTS, "o"), False: (CONTRADICTS, "^")}[similarity.passes]
    if is_control:
        color, marker = CONTROL, "s"
    points = [(n, value) for n, value in enumerate(similarity.curve) if value is not None]
    axes.plot(*_split_into_x_and_y(points), f"-{marker}", color=color, markersize=5, zorder=4)
    y_values = [*(value for _, value in points), similarity.null_low or 0.0, similarity.null_high or 0.0, 1.0, 0.0]
    axes.set_ylim(min(y_values) - 0.06, max(y_values) + 0.06)
    return figure


def draw_eigenvalue_spectrum(analysis: ClusterAnalysis) -> "Figure":
    """Draw the smallest eigenvalues of the neighbor graph. A jump after the k-th value suggests k clusters."""
    n_values = len(analysis.eigenvalues)
    figure, axes = _create_figure_and_curve_axes("number of clusters", "eigenvalue")
    axes.vlines(range(1, n_values + 1), 0, analysis.eigenvalues, color=LINE, linewidth=1.2)
    axes.plot(range(1, n_values + 1), analysis.eigenvalues, "o", color=SUPPORTS, markersize=5.5)
    largest = max(*analysis.eigenvalues, 1e-9)
    axes.set(xlim=(0.4, n_values + 0.6), ylim=(-0.05 * largest, 1.05 * largest))
    axes.locator_params(axis="x", integer=True, nbins=8)
    return figure


def draw_cluster_stability(analysis: ClusterAnalysis) -> "Figure":
    """Draw the stability for each number of clusters. A second curve shows random data with a single cluster."""
    rows = analysis.stability_by_n_clusters
    figure, axes = _create_figure_and_curve_axes("number of clusters", "stability")
    stabilities = [(row.n_clusters, row.stability) for row in rows]
    expected = [(row.n_clusters, row.null_stability) for row in rows if row.null_stability is not None]
    axes.plot(*_split_into_x_and_y(stabilities), "-o", color=SUPPORTS, markersize=5.5)
    axes.plot(*_split_into_x_and_y(expected), "--D", color=CONTROL, markersize=4.5)
    numbers = [row.n_clusters for row in rows]
    axes.set_xticks(numbers)
    lowest = min(0.0, *(value for _, value in (*stabilities, *expected)))
    axes.set(xlim=(min(numbers) - 0.6, max(numbers) + 0.6), ylim=(lowest - 0.05, 1.05))
    return figure


def _split_into_x_and_y(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
