"""Create the figures of each report section. Tables show the same numbers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import (
    EstimateSummary,
    FindingPerformance,
    MetricsResult,
    MetricSummary,
    SubgroupDifference,
)
from camscope.audit.core.summary_schema import Summary
from camscope.audit.report.data_and_method_sentences import is_uncounted_removal
from camscope.audit.report.svg_charts import (
    ForestRow,
    default_style_scope,
    draw_cluster_stability,
    draw_eigenvalue_spectrum,
    draw_forest_plot,
    draw_randomization_curve,
    draw_reliability_diagram,
    to_inline_svg,
)
from camscope.audit.report.verdict_labels_and_groups import sanitize_text
from camscope.audit.shortcuts.region_names import name_region
from camscope.metrics import METRICS
from camscope.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETTER_DIRECTION_LABELS = {
    "more": "higher is better →",
    "less": "← lower is better",
    "neither": "neither direction is better",
}
INTERVAL_LEGEND = "Dot: value; bar: 95 % interval"
INTERVENTION_TITLES = {
    "insert": "Effect of inserting a region",
    "remove": "Effect of removing a region",
}
CONTROL_TITLE = "control"
TitleParts = tuple[str, ...]  # texts of the summary or of this package
Drawing = tuple[TitleParts, str, "Figure"]  # the title, the caption and the chart


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the report."""

    title_parts: TitleParts
    caption: str
    svg: Markup
    is_control: bool = False


def draw_figures(summary: Summary) -> dict[str, list[ReportFigure]]:
    """Draw the figures of the report. Return section name -> figures."""
    drawings_by_section: dict[str, Iterable[Drawing]] = {
        "performance": _draw_performance(summary),
        "localization": _draw_metrics(summary.localization),
        "faithfulness": _draw_metrics(summary.faithfulness),
        "sanity": _draw_randomization(summary),
        "robustness": _draw_metrics(summary.robustness),
        "attribution_mass": _draw_attribution_mass(summary),
        "interventions": _draw_interventions(summary),
        "masked_auroc": _draw_masked_aurocs(summary),
        "leakage": _draw_aurocs_of_feature_probes(summary),
        "clusters": _draw_eigenvalues_and_cluster_stability(summary),
    }
    figures: dict[str, list[ReportFigure]] = {}
    with default_style_scope():
        for section, drawings in drawings_by_section.items():
            figures[section] = []
            for n, (parts, caption, chart) in enumerate(drawings, start=1):
                title = tuple(map(_display_name, parts))
                svg = to_inline_svg(chart, f"figure-{section}-{n}", sanitize_text(", ".join(title)))
                figures[section].append(ReportFigure(title, caption, svg, is_control=CONTROL_TITLE in parts))
    return figures


def _display_name(name: str) -> str:
    """Return the title of a metric or method. Any other text stays unchanged."""
    return METRICS.replace_names_by_titles(name) if name in METRICS else METHODS.replace_names_by_titles(name)


def _has_values(rows: Iterable[ForestRow]) -> bool:
    return any(row.estimate.value is not None for row in rows)


def _draw_performance(summary: Summary) -> Iterator[Drawing]:
    """Yield the reliability diagrams, then the AUROC of each subgroup and the differences between subgroups."""
    for performance in summary.predict.performance:
        if performance.bins:
            caption = "Bars: 95 % intervals; dot size: number of images; dashed line: perfect calibration"
            yield ("Reliability", performance.finding), caption, draw_reliability_diagram(performance)
    for performance in summary.predict.performance:
        if performance.subgroup_differences:
            rows = [ForestRow("all images", performance.auroc), *_iter_subgroup_rows(performance)]
            caption = (
                f"{INTERVAL_LEGEND}; vertical line: all images; dashed red line: the AUROC that the model must exceed"
            )
            margin = summary.margins.get("useful_auroc")
            if _has_values(rows[1:]):
                chart = draw_forest_plot(rows, "AUROC", reference_value=performance.auroc.value, margin=margin)
                yield ("AUROC by subgroup", performance.finding), caption, chart
            title = "AUROC of a subgroup minus that of the others", performance.finding
            yield from _draw_differences(title, performance.subgroup_differences)


def _iter_subgroup_rows(performance: FindingPerformance) -> Iterator[ForestRow]:
    """Yield forest plot rows with the AUROC of each subgroup level."""
    aurocs = {(group.column, group.level): group.auroc for group in performance.subgroups}
    for level in performance.subgroup_differences:
        other_level = level.value.baseline_name
        name = level.level.removesuffix(f" against {other_level}")
        estimates = {name: level.value}
        if name != level.level:
            estimates[other_level] = EstimateSummary(value=level.value.baseline)
        for name, estimate in estimates.items():
            auroc = aurocs.get((level.column, name), estimate)
            yield ForestRow(f"{level.column}: {name}", estimate if auroc.value is None else auroc)


def _draw_differences(title: TitleParts, differences: Sequence[SubgroupDifference]) -> Iterator[Drawing]:
    margin = differences[0].margin
    rows = [ForestRow(f"{level.column}: {level.level}", level.difference) for level in differences]
    if _has_values(rows):
        chart = draw_forest_plot(rows, "difference", shaded_range=(-margin, margin), reference_value=0.0)
        yield title, f"{INTERVAL_LEGEND}; shaded: differences within the margin", chart


def _draw_metrics(stage: MetricsResult) -> Iterator[Drawing]:
    """Draw one figure for each metric and finding. Methods are listed above the control maps."""
    lines_by_key: dict[tuple[str, str], list[MetricSummary]] = {}
    for line in stage.metric_summaries:
        lines_by_key.setdefault((line.metric, line.finding), []).append(line)
    for (metric, finding), lines in lines_by_key.items():
        control_legend = "; gray: control maps; shaded: the best control map"
        caption = INTERVAL_LEGEND + (control_legend if any(line.control for line in lines) else "")
        chart = draw_forest_plot(list(_iter_metric_rows(lines)), BETTER_DIRECTION_LABELS[lines[0].better_direction])
        yield (metric, finding), caption, chart
    for finding in dict.fromkeys(level.finding for level in stage.subgroup_differences):
        levels = [level for level in stage.subgroup_differences if level.finding == finding]
        yield from _draw_differences(("Share inside in a subgroup minus that in the others", finding), levels)


def _iter_metric_rows(lines: Sequence[MetricSummary]) -> Iterator[ForestRow]:
    """Yield forest plot rows for each imputation: methods first, then control maps. The best control map's interval is shaded."""
    for imputation in dict.fromkeys(line.imputation for line in lines):
        selected = [line for line in lines if line.imputation == imputation]
        shaded_range = _find_best_control_interval(selected)
        for line in sorted(selected, key=lambda line: line.control):
            name = ", ".join(filter(None, (METHODS.replace_names_by_titles(line.method), imputation)))
            yield ForestRow(name, line.value, "control" if line.control else "method", shaded_range)


def _find_best_control_interval(lines: Sequence[MetricSummary]) -> tuple[float, float] | None:
    sign = {"more": 1, "less": -1, "neither": 0}[lines[0].better_direction]
    controls = [line.value for line in lines if line.control and line.value.value is not None]
    best = max(controls, key=lambda estimate: sign * (estimate.value or 0.0), default=EstimateSummary())
    return None if best.low is None or best.high is None or not sign else (best.low, best.high)


def _draw_randomization(summary: Summary) -> Iterator[Drawing]:
    caption = "Shaded: similarity of maps of different images, which a map must fall to; line: their mean"
    for test in summary.sanity.tests:
        for similarity in test.similarities:
            title = (test.method, similarity.name, *([CONTROL_TITLE] if test.control else []))
            yield title, caption, draw_randomization_curve(test.part_names, similarity, is_control=test.control)


def _draw_attribution_mass(summary: Summary) -> Iterator[Drawing]:
    """Yield a chart for each finding and method: how much attribution lies in each region, compared with its area."""
    caption = (
        f"{INTERVAL_LEGEND}; diamond: maps of other patients; line: chance; dashed red line: margin; hollow: smaller than "
        "the cells of the map, which can show neither use nor its absence"
    )
    regions = summary.shortcut.attribution_mass
    for key in dict.fromkeys((mass.finding, mass.method) for mass in regions):
        rows = [
            ForestRow(name_region(mass.region), mass.enrichment, "method" if mass.is_resolvable else "unresolved")
            for mass in regions
            if (mass.finding, mass.method) == key
        ]
        margin, axis_label = summary.margins.get("enrichment"), "share of the map over share of the image"
        chart = draw_forest_plot(rows, axis_label, reference_value=1.0, margin=margin, show_baselines=True)
        yield ("Enrichment in regions", *key), caption, chart


def _draw_interventions(summary: Summary) -> Iterator[Drawing]:
    """Yield a chart of the effects of insertions and removals for each finding."""
    interventions, margin = summary.shortcut.interventions, summary.margins.get("effect", 0.0)
    for finding in dict.fromkeys(intervention.finding for intervention in interventions):
        for kind, title in INTERVENTION_TITLES.items():
            rows = [
                ForestRow(_format_intervention("", intervention.region, intervention.imputation), intervention.effect)
                for intervention in interventions
                if (intervention.finding, intervention.kind) == (finding, kind)
                and not is_uncounted_removal(intervention, summary)
            ]
            if _has_values(rows):
                axis_label = "change of the log odds, in SD"
                chart = draw_forest_plot(rows, axis_label, shaded_range=(-margin, margin), reference_value=0.0)
                yield (title, finding), f"{INTERVAL_LEGEND}; shaded: effects within the margin", chart


def _draw_masked_aurocs(summary: Summary) -> Iterator[Drawing]:
    """Yield a chart for each finding: the AUROC after masking, compared with that of the whole image."""
    caption = f"{INTERVAL_LEGEND}; line: chance; dashed red line: margin for detection without the organ"
    margin = summary.margins.get("masked_auroc")
    for performance in summary.predict.performance:
        rows = [
            ForestRow(_format_intervention(masked.kind, masked.region, masked.imputation), masked.auroc)
            for masked in summary.shortcut.masked_auroc
            if (masked.finding, masked.kind) == (performance.finding, "mask")
        ]
        if _has_values(rows):
            rows.insert(0, ForestRow("the whole image", performance.auroc))
            chart = draw_forest_plot(rows, "AUROC", reference_value=0.5, margin=margin)
            yield ("AUROC of masked images", performance.finding), caption, chart


def _format_intervention(intervention_kind: str, region: str, imputation: str | None) -> str:
    return f"{intervention_kind} {name_region(region)}".strip() + (f", {imputation}" if imputation else "")


def _draw_aurocs_of_feature_probes(summary: Summary) -> Iterator[Drawing]:
    rows = [ForestRow(probe.column, probe.auroc) for probe in summary.shortcut.leakage]
    if _has_values(rows):
        chart = draw_forest_plot(rows, "AUROC of a linear probe", reference_value=0.5)
        yield ("Columns predicted from the features",), f"{INTERVAL_LEGEND}; line: chance", chart


def _draw_eigenvalues_and_cluster_stability(summary: Summary) -> Iterator[Drawing]:
    """Yield the eigenvalues and the stability of the clusters for each finding and method."""
    for analysis in summary.shortcut.cluster_analyses:
        key = analysis.finding, analysis.method
        if analysis.eigenvalues:
            caption = "A jump after a number suggests that many clusters"
            yield ("Eigenvalues", *key), caption, draw_eigenvalue_spectrum(analysis)
        if len(analysis.stability_by_n_clusters) > 1:
            caption = "Dots: these maps; diamonds: expected for a single cluster"
            yield ("Stability of clusters", *key), caption, draw_cluster_stability(analysis)
