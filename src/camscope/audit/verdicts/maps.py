"""Verdicts on the maps: localization, faithfulness, sanity and robustness."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from camscope.audit.core.schema import (
    Conclusion,
    EstimateSummary,
    MetricsResult,
    MetricSummary,
    RandomizationSimilarity,
    RandomizationTest,
    Summary,
    Verdict,
)
from camscope.audit.verdicts.model import group_by_subgroup_column, judge_subgroup_equality
from camscope.audit.verdicts.rules import (
    ABOVE_MARGIN_RULE,
    EMPTY_ESTIMATE,
    Decision,
    build_verdict,
    combine_decisions,
    decide_above_margin,
    describe_unreachable_margin,
    find_missing_requirement,
)
from camscope.metrics.randomization_result import SAME_MAP_SIMILARITY
from camscope.registry import METHODS

LOCALIZATION_RULE = (
    "supported if the whole interval lies above the margin, and the whole interval of the paired difference from the best "
    "control map lies above zero; not supported if the first lies wholly below the margin, or the second nowhere above "
    "zero; not testable if the finding is so large that no map could reach the margin"
)
FAITHFULNESS_VERDICT_METRICS = (
    "deletion",
    "insertion",
    "road",
    "lerf-morf-gap",
)  # metrics of the order in which a map ranks pixels
FAITHFULNESS_RULE = (
    f"tested by the measured metrics of {', '.join(FAITHFULNESS_VERDICT_METRICS)}, on the paired difference from the best "
    "control map: "
    "supported if the whole interval lies on the better side of zero for every metric under every imputation; not supported "
    "if it does so for no metric under any imputation, and lies wholly on the worse side for at least one metric under every "
    "imputation"
)
ROBUSTNESS_CONDITIONS = {
    "stability": "under small shifts, rotations and noise",
    "acquisition-stability": "under small changes of windowing, resampling and compression",
}
DIRECTION_VERBS: Mapping[Conclusion, tuple[str, str]] = {
    "supported": ("supports", "support"),
    "not supported": ("contradicts", "contradict"),
    "not testable": ("neither supports nor contradicts", "neither support nor contradict"),
}
SANITY_RULE = (
    "supported if, by every similarity measure, maps of the randomized model resemble maps of the trained model no more than "
    "maps of different images resemble each other (mean, against the upper end of their 95 % interval), and less than "
    f"{SAME_MAP_SIMILARITY}; not supported if they are more similar by one measure; not testable unless an edge detector "
    "fails the same "
    "test on the same images"
)


def judge_localization(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps highlight the finding, and equally well in every subgroup."""
    for finding in summary.resolve.findings:
        metric_summaries = _select_metric_summaries(summary.localization, ("enrichment",), finding)
        if not metric_summaries:
            claim, margin = f"The maps highlight {finding} more than expected by chance.", summary.margins["enrichment"]
            reason = summary.localization.reason or f"no masks, boxes or points mark {finding}"
            decision: Decision = "not testable", reason
            yield build_verdict(
                "localization",
                claim,
                finding,
                decision,
                EMPTY_ESTIMATE,
                "localization",
                LOCALIZATION_RULE,
                supported_is_good=True,
                margin=margin,
            )
        for metric_summary in metric_summaries:
            yield _judge_method_localization(summary, metric_summary)
        for (name, _, column), levels in group_by_subgroup_column(summary.localization.subgroup_differences).items():
            if name == finding:
                explainers = summary.resolve.explainers
                method = METHODS.display_name(explainers[0].title) if explainers else "the first method"
                claim = f"The maps of {method} highlight {finding} equally well in all subgroups of {column}."
                yield judge_subgroup_equality(
                    "localization by subgroup", claim, finding, levels, "localization", column
                )


def _select_metric_summaries(stage: MetricsResult, metrics: Iterable[str], finding: str) -> list[MetricSummary]:
    """Return the summaries of these metrics for a finding, without the control maps."""
    return [
        summary
        for summary in stage.metric_summaries
        if summary.metric in metrics and summary.finding == finding and not summary.control
    ]


def _judge_method_localization(summary: Summary, metric_summary: MetricSummary) -> Verdict:
    margin = summary.margins["enrichment"]
    conclusion, reason = _decide_localization(metric_summary, margin)
    inside_summaries = _select_metric_summaries(summary.localization, ("energy-inside",), metric_summary.finding)
    share = next(
        (
            inside_summary.value.value
            for inside_summary in inside_summaries
            if (inside_summary.method, inside_summary.layer) == (metric_summary.method, metric_summary.layer)
        ),
        None,
    )
    share_note = "" if share is None else f"{share:.2f} of their attribution lies inside"
    return build_verdict(
        "localization",
        f"The maps of {METHODS.display_name(metric_summary.method)} highlight {metric_summary.finding} more than expected by "
        "chance.",
        metric_summary.finding,
        (conclusion, "; ".join(filter(None, (reason, share_note)))),
        metric_summary.value,
        "localization",
        LOCALIZATION_RULE,
        supported_is_good=True,
        margin=margin,
        qualifier=metric_summary.method,
    )


def _decide_localization(metric_summary: MetricSummary, margin: float) -> Decision:
    if reason := describe_unreachable_margin(metric_summary.max_value, margin):
        return "not testable", reason
    above_margin, above_control = (
        decide_above_margin(metric_summary.value, margin),
        _decide_above_control(metric_summary),
    )
    if above_margin[0] != "supported" and above_control[0] == "not supported":
        return above_control
    return above_control if above_margin[0] == "supported" else above_margin


def _decide_above_control(metric_summary: MetricSummary) -> Decision:
    """Decide whether a map scores better than the best control map, which does not depend on the model."""
    name = metric_summary.value.baseline_name or "a control map"
    if metric_summary.difference_to_control is None or metric_summary.difference_to_control.value is None:
        return "not testable", f"it was not compared with {name}, a control map"
    if missing := find_missing_requirement(metric_summary.difference_to_control):
        return "not testable", missing
    if metric_summary.difference_to_control.low is None or metric_summary.difference_to_control.high is None:
        missing = (
            f": {metric_summary.difference_to_control.reason}" if metric_summary.difference_to_control.reason else ""
        )
        return "not testable", f"its difference to {name}, a control map, has no interval{missing}"
    if metric_summary.difference_to_control.low > 0:
        return "supported", ""
    if metric_summary.difference_to_control.high <= 0:
        return "not supported", f"{name}, a control map, scores as well"
    return "not testable", f"it does not differ clearly from {name}, a control map: more images are needed"


def judge_faithfulness(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the prediction depends on what the maps show, by every metric of the pixel order."""
    stage = summary.faithfulness
    for finding in summary.resolve.findings:
        metric_summaries = _select_metric_summaries(stage, FAITHFULNESS_VERDICT_METRICS, finding)
        if not metric_summaries:
            claim = f"The maps show what the prediction for {finding} depends on."
            yield _build_untested_verdict(
                "faithfulness", claim, finding, stage.reason or f"no map of {finding} was tested", FAITHFULNESS_RULE
            )
        for method in dict.fromkeys(metric_summary.method for metric_summary in metric_summaries):
            method_summaries = [
                metric_summary for metric_summary in metric_summaries if metric_summary.method == method
            ]
            decision, reported = _combine_metrics(method_summaries)
            claim = f"The maps of {METHODS.display_name(method)} show what the prediction for {finding} depends on."
            yield build_verdict(
                "faithfulness",
                claim,
                finding,
                decision,
                reported.difference_to_control or EMPTY_ESTIMATE,
                "faithfulness",
                FAITHFULNESS_RULE,
                supported_is_good=True,
                margin=0.0,
                qualifier=method,
            )


def _build_untested_verdict(question: str, claim: str, finding: str, reason: str, rule: str) -> Verdict:
    """Build the verdict of a question that was not tested."""
    return build_verdict(
        question, claim, finding, ("not testable", reason), EMPTY_ESTIMATE, question, rule, supported_is_good=True
    )


def _combine_metrics(metric_summaries: Sequence[MetricSummary]) -> tuple[Decision, MetricSummary]:
    """Combine the metrics to one decision; also return the weakest result among those that gave it."""
    names = [
        name
        for name in FAITHFULNESS_VERDICT_METRICS
        if any(metric_summary.metric == name for metric_summary in metric_summaries)
    ]
    decisions = {
        name: combine_decisions(
            [
                _decide_faithfulness(metric_summary)
                for metric_summary in metric_summaries
                if metric_summary.metric == name
            ]
        )
        for name in names
    }
    decision = _combine_metric_decisions(
        decisions, any(_decide_faithfulness(metric_summary)[0] == "supported" for metric_summary in metric_summaries)
    )
    deciding_names = [name for name in names if decisions[name][0] == decision[0]] or names
    weakest = min(
        (metric_summary for metric_summary in metric_summaries if metric_summary.metric in deciding_names),
        key=lambda metric_summary: (
            (metric_summary.difference_to_control and metric_summary.difference_to_control.value) or 0.0
        ),
    )
    note = f"reported: {weakest.metric}{f' under {weakest.imputation}' if weakest.imputation else ''}"
    return (decision[0], "; ".join(filter(None, (decision[1], note)))), weakest


def _decide_faithfulness(metric_summary: MetricSummary) -> Decision:
    """Decide whether a metric is better than that of the best control map."""
    return decide_above_margin(metric_summary.difference_to_control or EMPTY_ESTIMATE, 0.0)


def _combine_metric_decisions(decisions: Mapping[str, Decision], any_supported: bool) -> Decision:
    """Combine the decisions of all metrics; `any_supported`: whether any metric is better under any imputation."""
    conclusions = [conclusion for conclusion, _ in decisions.values()]
    sides = "; ".join(
        _describe_metrics_with_conclusion(decisions, conclusion)
        for conclusion in DIRECTION_VERBS
        if conclusion in conclusions
    )
    if set(conclusions) == {"supported"}:
        return "supported", ""
    if "not supported" in conclusions and not any_supported:
        return "not supported", sides
    if "supported" in conclusions or len(set(conclusions)) > 1:
        return "not testable", f"the metrics do not all agree: {sides}"
    return "not testable", next(reason for conclusion, reason in decisions.values() if conclusion == "not testable")


def _describe_metrics_with_conclusion(decisions: Mapping[str, Decision], conclusion: Conclusion) -> str:
    """Name the metrics with a conclusion, as text."""
    names = [name for name, (decided, _) in decisions.items() if decided == conclusion]
    return f"{' and '.join(names)} {DIRECTION_VERBS[conclusion][len(names) > 1]} the maps"


def judge_sanity(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps depend on the trained weights, where an edge detector fails the same test."""
    for finding in summary.resolve.findings:
        tests = [test for test in summary.sanity.tests if test.finding == finding]
        if not tests:
            claim = f"The maps for {finding} depend on the trained weights."
            reason = summary.sanity.reason or f"too few images with {finding} share a size"
            yield _build_untested_verdict("sanity", claim, finding, reason, SANITY_RULE)
        control = next((test for test in tests if test.control), None)
        for test in tests:
            if not test.control:
                claim, (decision, effect) = (
                    f"The maps of {METHODS.display_name(test.method)} depend on the trained weights.",
                    _decide_sanity(test, control),
                )
                yield build_verdict(
                    "sanity",
                    claim,
                    finding,
                    decision,
                    effect,
                    "sanity",
                    SANITY_RULE,
                    supported_is_good=True,
                    qualifier=test.method,
                )


def _decide_sanity(test: RandomizationTest, control: RandomizationTest | None) -> tuple[Decision, EstimateSummary]:
    """Decide whether a method passes the randomization test; also return the similarity that decided."""
    similarity = next((candidate for candidate in test.similarities if candidate.passes is test.passes), None)
    effect = EMPTY_ESTIMATE if similarity is None else _build_similarity_effect(similarity)
    if test.passes is None:
        return ("not testable", test.reason), effect
    if control is None or control.passes is None:
        reason = "the test has no result for the edge detector, which has to fail it"
        return ("not testable", reason), effect
    if control.passes:
        reason = "the edge detector passed, although it does not depend on the model: the test is too weak here"
        return ("not testable", reason), effect
    return ("supported" if test.passes else "not supported", ""), effect


def _build_similarity_effect(similarity: RandomizationSimilarity) -> EstimateSummary:
    reason = "; ".join(filter(None, (f"{similarity.name} after the last step", similarity.final_similarity.reason)))
    fields = {"baseline": similarity.null_high, "baseline_name": "maps of different images, at most", "reason": reason}
    return similarity.final_similarity.model_copy(update=fields)


def judge_robustness(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps stay stable under irrelevant changes of the image."""
    margin, stage = summary.margins["robustness_correlation"], summary.robustness
    for finding in summary.resolve.findings:
        metric_summaries = _select_metric_summaries(stage, ROBUSTNESS_CONDITIONS, finding)
        if not metric_summaries:
            claim = f"The maps for {finding} stay stable under irrelevant changes of the image."
            yield _build_untested_verdict(
                "robustness", claim, finding, stage.reason or f"no map of {finding} was tested", ABOVE_MARGIN_RULE
            )
        for metric_summary in metric_summaries:
            claim = (
                f"The maps of {METHODS.display_name(metric_summary.method)} for {finding} stay stable "
                f"{ROBUSTNESS_CONDITIONS[metric_summary.metric]}."
            )
            yield build_verdict(
                "robustness",
                claim,
                finding,
                decide_above_margin(metric_summary.value, margin),
                metric_summary.value,
                "robustness",
                ABOVE_MARGIN_RULE,
                supported_is_good=True,
                margin=margin,
                qualifier=metric_summary.method,
            )
