"""Verdicts on the maps: localization, attribution in regions, faithfulness, sanity, robustness and clusters."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from camscope.audit.core.stage_result_schema import EstimateSummary, MetricsResult, MetricSummary, RandomizationTest
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_SINGLE_CLUSTER, RARE_CLUSTER_SHARE
from camscope.audit.core.summary_schema import AttributionMass, ClusterAnalysis, Conclusion, Summary, Verdict
from camscope.audit.shortcuts.load_images_and_region_masks import FINDING_REGION, ORGAN_REGION
from camscope.audit.shortcuts.region_names import format_region
from camscope.audit.verdicts.model_and_data_verdicts import group_by_subgroup_column, judge_subgroup_equality
from camscope.audit.verdicts.verdict_rules import (
    BELOW_MARGIN_REASON,
    EMPTY_ESTIMATE,
    FAITHFULNESS_VERDICT_METRICS,
    Decision,
    build_verdict,
    decide_above_margin,
    describe_unreachable_margin,
    find_missing_requirement,
    join_reasons,
    require_agreement,
)
from camscope.metrics import METRICS
from camscope.plurals import plural
from camscope.registry import METHODS

ROBUSTNESS_CONDITIONS = {
    "stability": "under small shifts, rotations and noise",
    "acquisition-stability": "under small changes of windowing, resampling and compression",
}
CONTROL_DESCRIPTIONS = {
    "center": "a map that only marks the image center",
    "edges": "a map of the edges in the image",
    "random": "a random map",
    "uniform": "a map that is the same everywhere",
}  # by the name of a control
CONTROL_COMPARISONS: Mapping[Conclusion, str] = {
    "supported": "better than the best control map",
    "not supported": "worse than the best control map",
    "not decided": "not clearly different",
}


def judge_localization(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps highlight the finding. Also judge whether they do so equally in every subgroup."""
    stage, margin = summary.localization, summary.margins["enrichment"]
    for finding in summary.resolve.findings:
        enrichments = _select_metrics(stage, ("enrichment",), finding)
        if not enrichments:
            reason = stage.reason or f"no masks, boxes or points mark “{finding}”"
            yield build_verdict("localization", finding, ("not decided", reason), margin=margin, maps="The maps")
        shares = {
            (line.method, line.layer): line.value.value for line in _select_metrics(stage, ("energy-inside",), finding)
        }
        for line in enrichments:
            conclusion, reason = _decide_localization(line, margin)
            share = shares.get((line.method, line.layer))
            share_note = "" if share is None else f"{share:.2f} of their attribution lies inside"
            decision = conclusion, join_reasons(reason, share_note)
            fields = {
                "maps": _format_maps_name(line.method),
                "denial": _describe_maps_no_better_than_control(line, reason),
            }
            yield build_verdict("localization", finding, decision, line.value, margin, line.method, **fields)
        title = next((explainer.title for explainer in summary.resolve.explainers), "the first method")
        for (name, _, column), levels in group_by_subgroup_column(stage.subgroup_differences).items():
            if name == finding:
                yield judge_subgroup_equality(
                    "localization by subgroup", finding, levels, column, maps=_format_maps_name(title)
                )


def _describe_maps_no_better_than_control(line: MetricSummary, reason: str) -> str:
    """Return the sentence "the maps are no better than a control map". If the maps failed for another reason, return ""."""
    if reason == BELOW_MARGIN_REASON:
        return ""
    name = line.value.baseline_name
    return f"{{maps}} highlight “{{finding}}” no better than {CONTROL_DESCRIPTIONS.get(name, 'a control map')} does."


def _format_maps_name(method: str) -> str:
    return f"The maps of {METHODS.replace_names_by_titles(method)}"


def _select_metrics(stage: MetricsResult, metrics: Iterable[str], finding: str) -> list[MetricSummary]:
    """Select the metric summaries of a finding. Control maps are left out."""
    return [
        line
        for line in stage.metric_summaries
        if line.metric in metrics and line.finding == finding and not line.control
    ]


def _decide_localization(line: MetricSummary, margin: float) -> Decision:
    """Decide whether a metric of localization exceeds the margin and the best control."""
    if reason := describe_unreachable_margin(line.max_value, margin):
        return "not decided", reason
    above_margin, above_control = decide_above_margin(line.value, margin), _decide_above_control(line)
    if above_margin[0] == "supported" and above_control[0] == "supported":
        return "supported", join_reasons(above_margin[1], above_control[1])
    decides_control = above_margin[0] == "supported" or above_control[0] == "not supported"
    return above_control if decides_control else above_margin


def _decide_above_control(line: MetricSummary) -> Decision:
    """Compare the metric of a method with the best control map, and decide which is better."""
    description = CONTROL_DESCRIPTIONS.get(line.value.baseline_name, "a control map")
    difference = line.difference_to_control
    if difference is None or difference.value is None:
        return "not decided", f"it was not compared with {description}"
    if missing := find_missing_requirement(difference):
        return "not decided", missing
    if difference.low is None or difference.high is None:
        reason = f": {difference.reason}" if difference.reason else ""
        return "not decided", f"its difference from {description} has no interval{reason}"
    if difference.low > 0:
        best = description if line.value.baseline_name else "the best control map"
        return "supported", f"the maps score higher than {best}"
    if difference.high <= 0:
        score = "" if line.value.baseline is None else f" ({line.value.baseline:.2f})"
        return "not supported", f"{description} gets {'a higher' if difference.high < 0 else 'as high a'} score{score}"
    return "not decided", f"it does not differ clearly from {description}: more images are needed"


def judge_attribution_mass(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps highlight regions outside of the finding."""
    margin = summary.margins["enrichment"]
    for mass in summary.shortcut.attribution_mass:
        if mass.region not in (FINDING_REGION, ORGAN_REGION):
            yield build_verdict(
                "attribution mass",
                mass.finding,
                _decide_attribution_mass(mass, margin),
                mass.enrichment,
                margin,
                f"{mass.region} · {mass.method}",
                maps=_format_maps_name(mass.method),
                region=format_region(mass.region),
            )


def _decide_attribution_mass(mass: AttributionMass, margin: float) -> Decision:
    """Decide whether a region has more attribution than the margin and than maps of other patients."""
    if not mass.is_resolvable:
        return "not decided", f"{mass.reason}: the map can neither show nor exclude it"
    if reason := describe_unreachable_margin(mass.max_enrichment, margin):
        return "not decided", reason
    decision, baseline = decide_above_margin(mass.enrichment, margin), mass.enrichment.baseline
    if decision[0] == "supported" and baseline is not None and (mass.enrichment.low or 0.0) <= baseline:
        return "not decided", "maps of other patients have as much attribution in the same place"
    return decision


def judge_faithfulness(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps show the pixels on which the prediction depends."""
    stage = summary.faithfulness
    for finding in summary.resolve.findings:
        lines = _select_metrics(stage, FAITHFULNESS_VERDICT_METRICS, finding)
        if not lines:
            reason = stage.reason or f"no map of “{finding}” was tested"
            yield build_verdict("faithfulness", finding, ("not decided", reason), maps="The maps")
        for method in dict.fromkeys(line.method for line in lines):
            decision, reported = combine_metrics_and_find_weakest([line for line in lines if line.method == method])
            effect = reported.difference_to_control or EMPTY_ESTIMATE
            decision = decision[0], join_reasons(decision[1], _describe_stop(stage, finding, method))
            yield build_verdict("faithfulness", finding, decision, effect, 0.0, method, maps=_format_maps_name(method))


def combine_metrics_and_find_weakest(lines: Sequence[MetricSummary]) -> tuple[Decision, MetricSummary]:
    """Combine the metrics of a method into one decision. Also return the weakest of the deciding metrics."""
    judged = [(line, decide_above_margin(line.difference_to_control or EMPTY_ESTIMATE, 0.0)) for line in lines]
    decisions = {
        name: require_agreement([decision for line, decision in judged if line.metric == name])
        for name in FAITHFULNESS_VERDICT_METRICS
        if any(line.metric == name for line in lines)
    }
    conclusion, reason = _combine_metric_decisions(decisions, {conclusion for _, (conclusion, _) in judged})
    deciding = [name for name, (decided, _) in decisions.items() if decided == conclusion] or list(decisions)
    weakest = min((line for line in lines if line.metric in deciding), key=_get_control_difference)
    imputation = f" with the imputation {weakest.imputation}" if weakest.imputation else ""
    note = f"shown is the weakest metric, {METRICS.replace_names_by_titles(weakest.metric)}{imputation}"
    return (conclusion, join_reasons(reason, note)), weakest


def _get_control_difference(line: MetricSummary) -> float:
    return (line.difference_to_control and line.difference_to_control.value) or 0.0


def _combine_metric_decisions(
    decisions: Mapping[str, Decision], conclusions_with_imputations: Collection[Conclusion]
) -> Decision:
    """Combine the decisions of several metrics into one.

    `conclusions_with_imputations`: the conclusions of all metrics under each imputation. A metric is decided if they agree.
    """
    metrics_by_conclusion: dict[Conclusion, list[str]] = {conclusion: [] for conclusion in CONTROL_COMPARISONS}
    for name, (conclusion, _) in decisions.items():
        metrics_by_conclusion[conclusion].append(METRICS.replace_names_by_titles(name))
    sides = ", ".join(
        f"{CONTROL_COMPARISONS[conclusion]} by {_join_names(names)}"
        for conclusion, names in metrics_by_conclusion.items()
        if names
    )
    n_metrics = len(decisions)
    if len(metrics_by_conclusion["supported"]) == n_metrics:
        return "supported", "by every metric, the maps are better than the best control map"
    if metrics_by_conclusion["not supported"] and "supported" not in conclusions_with_imputations:
        return "not supported", f"the maps are {sides}"
    if len(metrics_by_conclusion["not decided"]) < n_metrics:
        return "not decided", f"the metrics do not all agree: {sides}"
    if set(conclusions_with_imputations) != {"not decided"}:
        return "not decided", "no metric is better or worse than the best control map under every imputation"
    return next(iter(decisions.values()))


def _join_names(names: Sequence[str]) -> str:
    """Join names to `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def judge_sanity(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps depend on the trained weights. The test only counts if an edge detector fails it."""
    for finding in summary.resolve.findings:
        tests = [test for test in summary.sanity.tests if test.finding == finding]
        if not tests:
            reason = summary.sanity.reason or f"too few images with “{finding}” share a size"
            yield build_verdict("sanity", finding, ("not decided", reason), maps="The maps")
        control = next((test for test in tests if test.control), None)
        for test in tests:
            if not test.control:
                decision, effect = _decide_sanity(test, control), _find_deciding_similarity(test)
                maps = _format_maps_name(test.method)
                yield build_verdict("sanity", finding, decision, effect, qualifier=test.method, maps=maps)


def _decide_sanity(test: RandomizationTest, control: RandomizationTest | None) -> Decision:
    """Decide whether the maps depend on the weights. The edge detector must fail the test."""
    if test.passes is None:
        return "not decided", test.reason
    if control is None or control.passes is None:
        return "not decided", "the test has no result for the edge detector, which has to fail it"
    if control.passes:
        reason = "the edge detector passed, although it does not depend on the model: the test is too weak here"
        return "not decided", reason
    if test.passes:
        return (
            "supported",
            "with randomized weights, maps resemble the originals no more than maps of different images do",
        )
    return (
        "not supported",
        "even with randomized weights, maps resemble the originals more than maps of different images do",
    )


def _find_deciding_similarity(test: RandomizationTest) -> EstimateSummary:
    """Return the similarity that decided the sanity test of a method."""
    similarity = next((similarity for similarity in test.similarities if similarity.passes is test.passes), None)
    if similarity is None:
        return EMPTY_ESTIMATE
    reason = join_reasons(f"{similarity.name} after the last step", similarity.final_similarity.reason)
    fields = {"baseline": similarity.null_high, "baseline_name": "maps of different images, at most", "reason": reason}
    return similarity.final_similarity.model_copy(update=fields)


def judge_robustness(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps stay stable under irrelevant changes of the image."""
    margin, stage = summary.margins["robustness_correlation"], summary.robustness
    for finding in summary.resolve.findings:
        lines = _select_metrics(stage, ROBUSTNESS_CONDITIONS, finding)
        if not lines:
            decision: Decision = "not decided", stage.reason or f"no map of “{finding}” was tested"
            condition = "under irrelevant changes of the image"
            yield build_verdict("robustness", finding, decision, maps="The maps", condition=condition)
        for line in lines:
            conclusion, reason = decide_above_margin(line.value, margin)
            stop = _describe_stop(stage, finding, line.method) if conclusion == "not decided" else ""
            yield build_verdict(
                "robustness",
                finding,
                (conclusion, join_reasons(reason, stop)),
                line.value,
                margin,
                line.method,
                maps=_format_maps_name(line.method),
                metric=line.metric,
                condition=ROBUSTNESS_CONDITIONS[line.metric],
            )


def _describe_stop(stage: MetricsResult, finding: str, method: str) -> str:
    """Return a note for a test that stopped early because a verdict was unlikely. Otherwise return ""."""
    for look in stage.stopping_looks:
        if (look.finding, look.method, look.reason) == (finding, method, "undecidable"):
            return f"stopped after {look.n_images} of {plural(look.max_images, 'image')}, as the others would hardly decide it"
    return ""


def judge_whether_maps_form_clusters(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps of a method fall into several clusters."""
    for analysis in summary.shortcut.cluster_analyses:
        decision, effect = _decide_clusters(analysis), _find_reported_stability(analysis)
        maps = _format_maps_name(analysis.method)
        yield build_verdict("clusters", analysis.finding, decision, effect, qualifier=analysis.method, maps=maps)


def _decide_clusters(analysis: ClusterAnalysis) -> Decision:
    """Decide whether the maps form more than one cluster."""
    if analysis.reason:
        return "not decided", analysis.reason
    if analysis.n_clusters > 1:
        return "supported", "the clusters reappear in subsamples more often than expected for a single cluster"
    if analysis.n_patients < MIN_PATIENTS_FOR_SINGLE_CLUSTER:
        reason = (
            f"one cluster was found, but among {plural(analysis.n_patients, 'patient')} two clusters are often missed: "
            f"{MIN_PATIENTS_FOR_SINGLE_CLUSTER} are needed"
        )
        return "not decided", reason
    return "not supported", (
        "no number of clusters reappears in subsamples more often than expected for a single cluster; a cluster of fewer "
        f"than {100 * RARE_CLUSTER_SHARE:.0f} % of the maps is often missed"
    )


def _find_reported_stability(analysis: ClusterAnalysis) -> EstimateSummary:
    """Return the stability of the reported clusters. For a single cluster, return the stability of a split into two."""
    for row in analysis.stability_by_n_clusters:
        if row.n_clusters == max(2, analysis.n_clusters):
            return EstimateSummary(
                value=row.stability,
                n_values=analysis.n_maps,
                n_groups=analysis.n_patients,
                baseline=row.null_stability,
                baseline_name="a single cluster",
                reason="adjusted Rand index between subsamples of the patients; it has no interval",
            )
    return EMPTY_ESTIMATE
