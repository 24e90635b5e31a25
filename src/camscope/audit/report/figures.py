"""Figures of the report, section by section; the same numbers are also in a table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from camscope.audit.core.schema import (
    EstimateSummary,
    FindingPerformance,
    MetricsResult,
    MetricSummary,
    SubgroupDifference,
    Summary,
)
from camscope.audit.report.charts import (
    ForestRow,
    draw_cluster_stability,
    draw_eigenvalue_spectrum,
    draw_forest_svg,
    draw_randomization_curve,
    draw_reliability_diagram,
)
from camscope.audit.report.svg import default_style_scope
from camscope.audit.report.verdict_labels import sanitize_text
from camscope.registry import METHODS

if TYPE_CHECKING:
    from markupsafe import Markup

BETTER_DIRECTION_LABELS = {"more": "more is better →", "less": "← less is better", "neither": "neither way is better"}


@dataclass(frozen=True)
class Figure:
    """A figure of the report; `title_parts`: texts of the summary or of this package."""

    title_parts: tuple[str, ...]
    caption: str
    svg: "Markup"


class FigureFactory:
    """Creates the figures of one report with unique ids."""

    def __init__(self) -> None:
        self._n_figures = 0

    def create_figure(self, title_parts: Sequence[str], caption: str, draw: "Callable[[str, str], Markup]") -> Figure:
        """Create the next figure."""
        self._n_figures += 1
        return Figure(
            tuple(title_parts), caption, draw(f"figure-{self._n_figures}", sanitize_text(", ".join(title_parts)))
        )


def draw_figures(summary: Summary) -> dict[str, list[Figure]]:
    """Draw all figures, by section."""
    factory = FigureFactory()
    with default_style_scope():
        return {
            "performance": list(_draw_performance_figures(summary, factory)),
            "localization": list(_draw_metric_figures(summary.localization, factory)),
            "faithfulness": list(_draw_metric_figures(summary.faithfulness, factory)),
            "sanity": list(_draw_randomization_figures(summary, factory)),
            "robustness": list(_draw_metric_figures(summary.robustness, factory)),
            "attribution_mass": list(_draw_attribution_mass_figures(summary, factory)),
            "interventions": list(_draw_intervention_figures(summary, factory)),
            "masked_auroc": list(_draw_masked_auroc_figures(summary, factory)),
            "leakage": list(_draw_leakage_figures(summary, factory)),
            "clusters": list(_draw_cluster_figures(summary, factory)),
        }


INTERVAL_LEGEND = "Dot: value; bar: 95 % interval"


def _draw_performance_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    for performance in summary.predict.performance:
        if performance.bins:
            caption = "Bars: 95 % intervals; dot size: number of images; dashed line: perfect calibration"
            yield factory.create_figure(
                ("Reliability", performance.finding),
                caption,
                partial(draw_reliability_diagram, performance=performance),
            )
    for performance in summary.predict.performance:
        if performance.subgroup_differences:
            rows = [ForestRow("all images", performance.auroc), *_iter_subgroup_rows(performance)]
            caption = (
                f"{INTERVAL_LEGEND}; vertical line: all images; dashed red line: the AUROC that the model must exceed"
            )
            margin = summary.margins.get("useful_auroc")
            draw = partial(
                draw_forest_svg, rows=rows, axis_label="AUROC", reference_value=performance.auroc.value, margin=margin
            )
            yield factory.create_figure(("AUROC by subgroup", performance.finding), caption, draw)
            yield _draw_difference_figure(
                factory,
                ("AUROC of a subgroup minus that of the others", performance.finding),
                performance.subgroup_differences,
            )


def _iter_subgroup_rows(performance: FindingPerformance) -> Iterator[ForestRow]:
    """Yield the AUROC of each subgroup, and of both subgroups where two were compared directly."""
    aurocs_by_level = {(group.column, group.level): group.auroc for group in performance.subgroups}
    for level in performance.subgroup_differences:
        other_level = level.value.baseline_name
        name = level.level.removesuffix(f" against {other_level}")
        estimates = [(name, level.value)]
        if name != level.level:
            estimates.append((other_level, EstimateSummary(value=level.value.baseline)))
        for name, estimate in estimates:
            subgroup_auroc = aurocs_by_level.get((level.column, name))
            yield ForestRow(
                f"{level.column}: {name}",
                estimate if subgroup_auroc is None or subgroup_auroc.value is None else subgroup_auroc,
            )


def _draw_difference_figure(
    factory: FigureFactory, title_parts: Sequence[str], differences: Sequence[SubgroupDifference]
) -> Figure:
    margin, rows = differences[0].margin, [ForestRow(_format_level(level), level.difference) for level in differences]
    draw = partial(
        draw_forest_svg, rows=rows, axis_label="difference", shaded_range=(-margin, margin), reference_value=0.0
    )
    return factory.create_figure(title_parts, f"{INTERVAL_LEGEND}; shaded: differences within the margin", draw)


def _format_level(difference: SubgroupDifference) -> str:
    return f"{difference.column}: {difference.level}"


def _draw_metric_figures(stage: MetricsResult, factory: FigureFactory) -> Iterator[Figure]:
    """Draw a figure for each metric and finding: methods, then control maps."""
    for finding, metric in dict.fromkeys(
        (metric_summary.finding, metric_summary.metric) for metric_summary in stage.metric_summaries
    ):
        metric_summaries = [
            metric_summary
            for metric_summary in stage.metric_summaries
            if (metric_summary.metric, metric_summary.finding) == (metric, finding)
        ]
        has_controls = any(metric_summary.control for metric_summary in metric_summaries)
        per_imputation = (
            ", by imputation" if len({metric_summary.imputation for metric_summary in metric_summaries}) > 1 else ""
        )
        caption = (
            f"{INTERVAL_LEGEND}; gray: control maps; shaded: the best control map{per_imputation}"
            if has_controls
            else INTERVAL_LEGEND
        )
        draw = partial(
            draw_forest_svg,
            rows=list(_iter_metric_rows(metric_summaries)),
            axis_label=BETTER_DIRECTION_LABELS[metric_summaries[0].better_direction],
        )
        yield factory.create_figure((metric, finding), caption, draw)
    for finding in dict.fromkeys(metric_summary.finding for metric_summary in stage.subgroup_differences):
        levels = [metric_summary for metric_summary in stage.subgroup_differences if metric_summary.finding == finding]
        yield _draw_difference_figure(factory, ("Share inside in a subgroup minus that in the others", finding), levels)


def _iter_metric_rows(metric_summaries: Sequence[MetricSummary]) -> Iterator[ForestRow]:
    """Yield the rows by imputation: methods, then control maps, with the best control shaded."""
    for imputation in dict.fromkeys(summary.imputation for summary in metric_summaries):
        summaries = [summary for summary in metric_summaries if summary.imputation == imputation]
        for summary in sorted(summaries, key=lambda summary: summary.control):
            name = ", ".join(filter(None, (METHODS.display_name(summary.method), imputation)))
            yield ForestRow(
                name, summary.value, "control" if summary.control else "method", _find_best_control_interval(summaries)
            )


def _find_best_control_interval(metric_summaries: Sequence[MetricSummary]) -> tuple[float, float] | None:
    """Return the interval of the best control map."""
    controls = [summary.value for summary in metric_summaries if summary.control and summary.value.value is not None]
    if not controls or metric_summaries[0].better_direction == "neither":
        return None
    best_control = (max if metric_summaries[0].better_direction == "more" else min)(
        controls, key=lambda summary: summary.value or 0.0
    )
    return None if best_control.low is None or best_control.high is None else (best_control.low, best_control.high)


def _draw_randomization_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    caption = "Shaded: similarity of maps of different images, which a map must fall to; line: their mean"
    for test in summary.sanity.tests:
        for similarity in test.similarities:
            title_parts = (METHODS.display_name(test.method), similarity.name, *(["control"] if test.control else []))
            yield factory.create_figure(
                title_parts,
                caption,
                partial(
                    draw_randomization_curve, step_names=test.part_names, similarity=similarity, is_control=test.control
                ),
            )


def _draw_attribution_mass_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    rows_of_regions, margin = summary.shortcut.attribution_mass, summary.margins.get("enrichment")
    caption = (
        f"{INTERVAL_LEGEND}; diamond: maps of other patients; line: chance; dashed red line: margin; "
        "hollow: smaller than "
        "the cells of the map, which can show neither use nor its absence"
    )
    for finding, method in dict.fromkeys((mass.finding, mass.method) for mass in rows_of_regions):
        masses = [mass for mass in rows_of_regions if (mass.finding, mass.method) == (finding, method)]
        rows = [
            ForestRow(mass.region, mass.enrichment, "method" if mass.is_resolvable else "unresolved") for mass in masses
        ]
        draw = partial(
            draw_forest_svg,
            rows=rows,
            axis_label="share of the map over share of the image",
            reference_value=1.0,
            margin=margin,
        )
        yield factory.create_figure(
            ("Enrichment in regions", finding, METHODS.display_name(method)),
            caption,
            partial(draw, show_baselines=True),
        )


INTERVENTION_TITLES = {
    "insert": "Effect of inserting a region",
    "remove": "Effect of removing a region",
    "keep only": "Effect of keeping only a region",
}


def _draw_intervention_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    interventions, margin = summary.shortcut.interventions, summary.margins.get("effect", 0.0)
    caption = f"{INTERVAL_LEGEND}; shaded: effects within the margin"
    for finding in dict.fromkeys(intervention.finding for intervention in interventions):
        for kind, title in INTERVENTION_TITLES.items():
            selected = [
                intervention
                for intervention in interventions
                if (intervention.finding, intervention.kind) == (finding, kind)
            ]
            rows = [
                ForestRow(_format_intervention("", intervention.region, intervention.imputation), intervention.effect)
                for intervention in selected
            ]
            if rows:
                draw = partial(
                    draw_forest_svg,
                    rows=rows,
                    axis_label="change of the log odds, in SD",
                    shaded_range=(-margin, margin),
                    reference_value=0.0,
                )
                yield factory.create_figure((title, finding), caption, draw)


def _draw_masked_auroc_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    caption = f"{INTERVAL_LEGEND}; line: chance; dashed red line: margin for detection without the organ"
    for performance in summary.predict.performance:
        masked_results = [masked for masked in summary.shortcut.masked_auroc if masked.finding == performance.finding]
        rows = [
            ForestRow("the whole image", performance.auroc),
            *(
                ForestRow(_format_intervention(masked.kind, masked.region, masked.imputation), masked.auroc)
                for masked in masked_results
            ),
        ]
        if masked_results:
            draw = partial(
                draw_forest_svg,
                rows=rows,
                axis_label="AUROC",
                reference_value=0.5,
                margin=summary.margins.get("masked_auroc"),
            )
            yield factory.create_figure(("AUROC of masked images", performance.finding), caption, draw)


def _format_intervention(kind: str, region: str, imputation: str | None) -> str:
    return f"{kind} {region}".strip() + (f", {imputation}" if imputation else "")


def _draw_leakage_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    rows = [ForestRow(leakage.column, leakage.auroc) for leakage in summary.shortcut.leakage]
    if rows:
        draw = partial(draw_forest_svg, rows=rows, axis_label="AUROC of a linear probe", reference_value=0.5)
        yield factory.create_figure(("Columns predicted from the features",), f"{INTERVAL_LEGEND}; line: chance", draw)


def _draw_cluster_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    eigenvalue_caption = "A jump after a number suggests that many clusters"
    stability_caption = "Dots: these maps; diamonds: expected for a single cluster"
    for analysis in summary.shortcut.cluster_analyses:
        if analysis.eigenvalues:
            yield factory.create_figure(
                ("Eigenvalues", analysis.finding, METHODS.display_name(analysis.method)),
                eigenvalue_caption,
                partial(draw_eigenvalue_spectrum, analysis=analysis),
            )
        if analysis.stability_by_n_clusters:
            yield factory.create_figure(
                ("Stability of clusters", analysis.finding, METHODS.display_name(analysis.method)),
                stability_caption,
                partial(draw_cluster_stability, analysis=analysis),
            )
