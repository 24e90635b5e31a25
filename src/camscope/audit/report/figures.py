"""Figures: what of the summary is drawn, section by section, each beside the table of the same numbers."""

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

if TYPE_CHECKING:
    from markupsafe import Markup

BETTER_DIRECTION_LABELS = {"more": "more is better →", "less": "← less is better", "neither": "neither way is better"}


@dataclass(frozen=True)
class Figure:
    """`title_parts`: its title, each a text of the summary or of this package; `caption`: to read it."""

    title_parts: tuple[str, ...]
    caption: str
    svg: "Markup"


class FigureFactory:
    """Figures of one report, each with a name of its own."""

    def __init__(self) -> None:
        self._n_figures = 0

    def create_figure(self, title_parts: Sequence[str], caption: str, draw: "Callable[[str, str], Markup]") -> Figure:
        """One more."""
        self._n_figures += 1
        return Figure(
            tuple(title_parts), caption, draw(f"figure-{self._n_figures}", sanitize_text(", ".join(title_parts)))
        )


def draw_figures(summary: Summary) -> dict[str, list[Figure]]:
    """Section -> its figures."""
    all_of = FigureFactory()
    with default_style_scope():
        return {
            "performance": list(_draw_performance_figures(summary, all_of)),
            "localization": list(_draw_metric_figures(summary.localization, all_of)),
            "faithfulness": list(_draw_metric_figures(summary.faithfulness, all_of)),
            "sanity": list(_draw_randomization_figures(summary, all_of)),
            "robustness": list(_draw_metric_figures(summary.robustness, all_of)),
            "attribution_mass": list(_draw_attribution_mass_figures(summary, all_of)),
            "interventions": list(_draw_intervention_figures(summary, all_of)),
            "masked_auroc": list(_draw_masked_auroc_figures(summary, all_of)),
            "leakage": list(_draw_leakage_figures(summary, all_of)),
            "clusters": list(_draw_cluster_figures(summary, all_of)),
        }


INTERVAL_LEGEND = "Dot: value; bar: 95 % interval"


def _draw_performance_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    for one in summary.predict.performance:
        if one.bins:
            how = (
                "Bars: 95 % intervals; the larger a dot, the more images; broken line: what the model says is the share"
            )
            yield factory.create_figure(
                ("Reliability", one.finding), how, partial(draw_reliability_diagram, performance=one)
            )
    for one in summary.predict.performance:
        if one.subgroup_differences:
            rows = [ForestRow("all images", one.auroc), *_iter_subgroup_rows(one)]
            how = f"{INTERVAL_LEGEND}; each subgroup by itself; upright line: all images; red, broken: what the model has to exceed"
            margin = summary.margins.get("useful_auroc")
            draw = partial(
                draw_forest_svg, rows=rows, axis_label="AUROC", reference_value=one.auroc.value, margin=margin
            )
            yield factory.create_figure(("AUROC by subgroup", one.finding), how, draw)
            yield _draw_difference_figure(
                factory, ("AUROC of a subgroup less that of the others", one.finding), one.subgroup_differences
            )


def _iter_subgroup_rows(performance: FindingPerformance) -> Iterator[ForestRow]:
    """Each subgroup's own AUROC; of one that was held against another alone, the other's too."""
    known = {(group.column, group.level): group.auroc for group in performance.subgroups}
    for level in performance.subgroup_differences:
        other = level.value.baseline_name
        name = level.level.removesuffix(f" against {other}")
        own = [(name, level.value)]
        if name != level.level:
            own.append((other, EstimateSummary(value=level.value.baseline)))
        for name, number in own:
            found = known.get((level.column, name))
            yield ForestRow(f"{level.column}: {name}", number if found is None or found.value is None else found)


def _draw_difference_figure(
    factory: FigureFactory, title_parts: Sequence[str], differences: Sequence[SubgroupDifference]
) -> Figure:
    margin, rows = differences[0].margin, [ForestRow(_format_level(level), level.difference) for level in differences]
    draw = partial(
        draw_forest_svg, rows=rows, axis_label="difference", shaded_range=(-margin, margin), reference_value=0.0
    )
    return factory.create_figure(
        title_parts, f"{INTERVAL_LEGEND}; shaded: differences that were declared not to matter", draw
    )


def _format_level(difference: SubgroupDifference) -> str:
    return f"{difference.column}: {difference.level}"


def _draw_metric_figures(stage: MetricsResult, factory: FigureFactory) -> Iterator[Figure]:
    """One for each metric and finding: methods, then maps that know nothing."""
    for finding, metric in dict.fromkeys((one.finding, one.metric) for one in stage.metric_summaries):
        own = [one for one in stage.metric_summaries if (one.metric, one.finding) == (metric, finding)]
        controls = any(one.control for one in own)
        fills = ", fill by fill" if len({one.imputation for one in own}) > 1 else ""
        how = (
            f"{INTERVAL_LEGEND}; grey: maps that know nothing of the model; shaded: the best of them{fills}"
            if controls
            else INTERVAL_LEGEND
        )
        draw = partial(
            draw_forest_svg,
            rows=list(_iter_metric_rows(own)),
            axis_label=BETTER_DIRECTION_LABELS[own[0].better_direction],
        )
        yield factory.create_figure((metric, finding), how, draw)
    for finding in dict.fromkeys(one.finding for one in stage.subgroup_differences):
        levels = [one for one in stage.subgroup_differences if one.finding == finding]
        yield _draw_difference_figure(factory, ("Share inside in a subgroup less that in the others", finding), levels)


def _iter_metric_rows(metric_summaries: Sequence[MetricSummary]) -> Iterator[ForestRow]:
    """Fill by fill: methods, then maps that know nothing, the best of them shaded beside all."""
    for fill in dict.fromkeys(line.imputation for line in metric_summaries):
        own = [line for line in metric_summaries if line.imputation == fill]
        for line in sorted(own, key=lambda one: one.control):
            words = line.method if fill is None else f"{line.method}, {fill}"
            yield ForestRow(words, line.value, "control" if line.control else "method", _find_best_control_interval(own))


def _find_best_control_interval(metric_summaries: Sequence[MetricSummary]) -> tuple[float, float] | None:
    """The interval of the best map that knows nothing."""
    controls = [one.value for one in metric_summaries if one.control and one.value.value is not None]
    if not controls or metric_summaries[0].better_direction == "neither":
        return None
    best = (max if metric_summaries[0].better_direction == "more" else min)(controls, key=lambda one: one.value or 0.0)
    return None if best.low is None or best.high is None else (best.low, best.high)


def _draw_randomization_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    how = "Shaded: maps of different images, which a map has to fall to; line in it: their mean"
    for test in summary.sanity.tests:
        for one in test.similarities:
            parts = (test.method, one.name, *(["control"] if test.control else []))
            yield factory.create_figure(
                parts,
                how,
                partial(draw_randomization_curve, step_names=test.part_names, similarity=one, is_control=test.control),
            )


def _draw_attribution_mass_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    masses, margin = summary.shortcut.attribution_mass, summary.margins.get("enrichment")
    how = (
        f"{INTERVAL_LEGEND}; diamond: maps of other patients; line: chance; red, broken: what was declared to count; hollow: finer than "
        "the cells of the map, which can show neither use nor its absence"
    )
    for finding, method in dict.fromkeys((one.finding, one.method) for one in masses):
        own = [one for one in masses if (one.finding, one.method) == (finding, method)]
        rows = [ForestRow(one.region, one.enrichment, "method" if one.is_resolvable else "unresolved") for one in own]
        draw = partial(
            draw_forest_svg,
            rows=rows,
            axis_label="share of the map over share of the image",
            reference_value=1.0,
            margin=margin,
        )
        yield factory.create_figure(
            ("Enrichment of the maps in regions", finding, method), how, partial(draw, show_baselines=True)
        )


INTERVENTION_TITLES = {
    "insert": "What a region of an image with the finding adds, pasted in",
    "remove": "What is lost without a region",
    "keep only": "What is lost where only a region is left",
}


def _draw_intervention_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    every, margin = summary.shortcut.interventions, summary.margins.get("effect", 0.0)
    how = f"{INTERVAL_LEGEND}; shaded: effects that were declared not to count"
    for finding in dict.fromkeys(one.finding for one in every):
        for kind, words in INTERVENTION_TITLES.items():
            own = [one for one in every if (one.finding, one.kind) == (finding, kind)]
            rows = [ForestRow(_format_intervention("", one.region, one.imputation), one.effect) for one in own]
            if rows:
                draw = partial(
                    draw_forest_svg,
                    rows=rows,
                    axis_label="change of the log odds, in SD",
                    shaded_range=(-margin, margin),
                    reference_value=0.0,
                )
                yield factory.create_figure((words, finding), how, draw)


def _draw_masked_auroc_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    how = f"{INTERVAL_LEGEND}; line: chance; red, broken: above it a model without the organ still answers"
    for one in summary.predict.performance:
        own = [each for each in summary.shortcut.masked_auroc if each.finding == one.finding]
        rows = [
            ForestRow("the whole image", one.auroc),
            *(ForestRow(_format_intervention(each.kind, each.region, each.imputation), each.auroc) for each in own),
        ]
        if own:
            draw = partial(
                draw_forest_svg,
                rows=rows,
                axis_label="AUROC",
                reference_value=0.5,
                margin=summary.margins.get("masked_auroc"),
            )
            yield factory.create_figure(("AUROC of what is left of the image", one.finding), how, draw)


def _format_intervention(kind: str, region: str, imputation: str | None) -> str:
    return f"{kind} {region}".strip() + (f", {imputation}" if imputation else "")


def _draw_leakage_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    rows = [ForestRow(one.column, one.auroc) for one in summary.shortcut.leakage]
    if rows:
        draw = partial(draw_forest_svg, rows=rows, axis_label="AUROC of a linear probe", reference_value=0.5)
        yield factory.create_figure(("What can be read off the features",), f"{INTERVAL_LEGEND}; line: chance", draw)


def _draw_cluster_figures(summary: Summary, factory: FigureFactory) -> Iterator[Figure]:
    hint = "A jump after a number is a hint of that many groups, no more"
    trials = "Round: these maps; diamonds: what one way of looking would give by itself"
    for one in summary.shortcut.cluster_analyses:
        if one.eigenvalues:
            yield factory.create_figure(
                ("Eigenvalues", one.finding, one.method), hint, partial(draw_eigenvalue_spectrum, analysis=one)
            )
        if one.stability_by_n_clusters:
            yield factory.create_figure(
                ("Stability of clusters", one.finding, one.method),
                trials,
                partial(draw_cluster_stability, analysis=one),
            )
