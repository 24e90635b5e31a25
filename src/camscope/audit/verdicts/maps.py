"""Maps: whether they lie on the finding, show what the answer depends on, notice training, and stay where they should."""

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

LOCALIZATION_RULE = (
    "supported where the interval lies wholly above the margin, and that of the paired difference from the best control map, "
    "which does not depend on the model, wholly above zero; not supported where the first lies wholly below the margin, or the "
    "second nowhere above zero; not testable where the finding is so large that no map could reach the margin"
)
FAITHFULNESS_VERDICT_METRICS = (
    "deletion",
    "insertion",
    "road",
    "lerf-morf-gap",
)  # what changes as a map's order says, best first or last
FAITHFULNESS_RULE = (
    f"of those of {', '.join(FAITHFULNESS_VERDICT_METRICS)} that were measured: supported where the interval of the paired difference from the "
    "best control map, which does not depend on the model, lies wholly on the better side of zero for all of them, under every "
    "fill; not supported where it does so for none, under no fill, and lies wholly on the worse side for one at least, under "
    "every fill"
)
ROBUSTNESS_CONDITIONS = {
    "stability": "under small shifts, turns and noise",
    "acquisition-stability": "when the picture is windowed, resampled and compressed a little differently",
}
DIRECTION_PHRASES: Mapping[Conclusion, str] = {
    "supported": "for",
    "not supported": "against",
    "not testable": "neither for nor against",
}
SANITY_RULE = (
    "supported where, by every measure of similarity, maps of the untrained model are on average no more like the trained "
    "model's than maps of different images are to one another, at the upper end of their 95 % interval, and less alike than "
    f"{SAME_MAP_SIMILARITY}; not supported where by one of them they are more alike; not testable unless an edge detector fails the same "
    "test on the same images"
)


def judge_localization(summary: Summary) -> Iterator[Verdict]:
    """Whether maps lie on the finding, and on that of every subgroup alike."""
    for finding in summary.resolve.findings:
        own = _select_metric_summaries(summary.localization, ("enrichment",), finding)
        if not own:
            claim, margin = f"The maps lie on {finding} more than chance would have it.", summary.margins["enrichment"]
            why = summary.localization.reason or f"no masks, boxes or points say where {finding} is"
            found: Decision = "not testable", why
            yield build_verdict(
                "localization",
                claim,
                finding,
                found,
                EMPTY_ESTIMATE,
                "localization",
                LOCALIZATION_RULE,
                supported_is_good=True,
                margin=margin,
            )
        for one in own:
            yield _judge_method_localization(summary, one)
        for (name, _, column), levels in group_by_subgroup_column(summary.localization.subgroup_differences).items():
            if name == finding:
                whose = summary.resolve.explainers[0].title if summary.resolve.explainers else "the first method"
                claim = f"The maps of {whose} lie on {finding} to the same extent whatever the {column}."
                yield judge_subgroup_equality(
                    "localization by subgroup", claim, finding, levels, "localization", column
                )


def _select_metric_summaries(stage: MetricsResult, metrics: Iterable[str], finding: str) -> list[MetricSummary]:
    """Of methods."""
    return [
        one for one in stage.metric_summaries if one.metric in metrics and one.finding == finding and not one.control
    ]


def _judge_method_localization(summary: Summary, metric_summary: MetricSummary) -> Verdict:
    margin = summary.margins["enrichment"]
    word, why = _decide_localization(metric_summary, margin)
    inside = _select_metric_summaries(summary.localization, ("energy-inside",), metric_summary.finding)
    share = next(
        (
            each.value.value
            for each in inside
            if (each.method, each.layer) == (metric_summary.method, metric_summary.layer)
        ),
        None,
    )
    said = "" if share is None else f"{share:.2f} of their heat lies inside"
    return build_verdict(
        "localization", f"The maps of {metric_summary.method} lie on {metric_summary.finding} more than chance would have it.", metric_summary.finding,
        (word, "; ".join(filter(None, (why, said)))), metric_summary.value, "localization", LOCALIZATION_RULE, supported_is_good=True, margin=margin,
        qualifier=metric_summary.method,
    )  # fmt: skip


def _decide_localization(metric_summary: MetricSummary, margin: float) -> Decision:
    if why := describe_unreachable_margin(metric_summary.max_value, margin):
        return "not testable", why
    chance, control = decide_above_margin(metric_summary.value, margin), _decide_above_control(metric_summary)
    if chance[0] != "supported" and control[0] == "not supported":
        return control
    return control if chance[0] == "supported" else chance


def _decide_above_control(metric_summary: MetricSummary) -> Decision:
    """Whether it does better than the best of the maps that know nothing of the model."""
    name = metric_summary.value.baseline_name or "a map"
    if metric_summary.difference_to_control is None or metric_summary.difference_to_control.value is None:
        return "not testable", f"it was not compared with {name}, which knows nothing of the model"
    if lacking := find_missing_requirement(metric_summary.difference_to_control):
        return "not testable", lacking
    if metric_summary.difference_to_control.low is None or metric_summary.difference_to_control.high is None:
        lacking = (
            f": {metric_summary.difference_to_control.reason}" if metric_summary.difference_to_control.reason else ""
        )
        return "not testable", f"its difference to {name}, which knows nothing of the model, has no interval{lacking}"
    if metric_summary.difference_to_control.low > 0:
        return "supported", ""
    if metric_summary.difference_to_control.high <= 0:
        return "not supported", f"{name}, which knows nothing of the model, does as well"
    return "not testable", f"it cannot be told from {name}, which knows nothing of the model: more images would tell"


def judge_faithfulness(summary: Summary) -> Iterator[Verdict]:
    """Whether the answer changes as the maps say, by every metric that goes by their order."""
    stage = summary.faithfulness
    for finding in summary.resolve.findings:
        own = _select_metric_summaries(stage, FAITHFULNESS_VERDICT_METRICS, finding)
        if not own:
            claim = f"The maps show what the answer for {finding} depends on."
            yield _build_untested_verdict(
                "faithfulness", claim, finding, stage.reason or f"no map of {finding} was tested", FAITHFULNESS_RULE
            )
        for method in dict.fromkeys(one.method for one in own):
            mine = [one for one in own if one.method == method]
            found, shown = _combine_metrics(mine)
            claim = f"The maps of {method} show what the answer for {finding} depends on."
            yield build_verdict(
                "faithfulness", claim, finding, found, shown.difference_to_control or EMPTY_ESTIMATE, "faithfulness", FAITHFULNESS_RULE, supported_is_good=True,
                margin=0.0, qualifier=method,
            )  # fmt: skip


def _build_untested_verdict(question: str, claim: str, finding: str, reason: str, rule: str) -> Verdict:
    """Of what was not tested."""
    return build_verdict(
        question, claim, finding, ("not testable", reason), EMPTY_ESTIMATE, question, rule, supported_is_good=True
    )


def _combine_metrics(metric_summaries: Sequence[MetricSummary]) -> tuple[Decision, MetricSummary]:
    """What the metrics say together, and of the lines that gave the word the one that speaks least for the maps."""
    names = [name for name in FAITHFULNESS_VERDICT_METRICS if any(one.metric == name for one in metric_summaries)]
    said = {
        name: combine_decisions([_decide_faithfulness(one) for one in metric_summaries if one.metric == name])
        for name in names
    }
    found = _combine_metric_decisions(
        said, any(_decide_faithfulness(one)[0] == "supported" for one in metric_summaries)
    )
    gave = [name for name in names if said[name][0] == found[0]] or names
    least = min(
        (one for one in metric_summaries if one.metric in gave),
        key=lambda one: (one.difference_to_control and one.difference_to_control.value) or 0.0,
    )
    shown = f"shown: {least.metric}{f' under {least.imputation}' if least.imputation else ''}"
    return (found[0], "; ".join(filter(None, (found[1], shown)))), least


def _decide_faithfulness(metric_summary: MetricSummary) -> Decision:
    """Whether it is better than of every map that knows nothing."""
    return decide_above_margin(metric_summary.difference_to_control or EMPTY_ESTIMATE, 0.0)


def _combine_metric_decisions(decisions: Mapping[str, Decision], any_supported: bool) -> Decision:
    """The word of all metrics; `any_supported`: whether one is better under any fill."""
    words = [word for word, _ in decisions.values()]
    sides = "; ".join(_describe_metrics_with_conclusion(decisions, word) for word in DIRECTION_PHRASES if word in words)
    if set(words) == {"supported"}:
        return "supported", ""
    if "not supported" in words and not any_supported:
        return "not supported", sides
    if "supported" in words or len(set(words)) > 1:
        return "not testable", f"the metrics do not all agree: {sides}"
    return "not testable", next(why for word, why in decisions.values() if word == "not testable")


def _describe_metrics_with_conclusion(decisions: Mapping[str, Decision], conclusion: Conclusion) -> str:
    """Which metrics say so."""
    names = [name for name, (word, _) in decisions.items() if word == conclusion]
    return f"{' and '.join(names)} {'speak' if len(names) > 1 else 'speaks'} {DIRECTION_PHRASES[conclusion]} the maps"


def judge_sanity(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps of each finding notice that the training is gone, where an edge detector fails to."""
    for finding in summary.resolve.findings:
        own = [one for one in summary.sanity.tests if one.finding == finding]
        if not own:
            claim = f"The maps for {finding} depend on what the model has learnt."
            why = summary.sanity.reason or f"too few images with {finding} share a size"
            yield _build_untested_verdict("sanity", claim, finding, why, SANITY_RULE)
        control = next((one for one in own if one.control), None)
        for one in own:
            if not one.control:
                claim, (found, effect) = (
                    f"The maps of {one.method} depend on what the model has learnt.",
                    _decide_sanity(one, control),
                )
                yield build_verdict(
                    "sanity", claim, finding, found, effect, "sanity", SANITY_RULE, supported_is_good=True, qualifier=one.method
                )  # fmt: skip


def _decide_sanity(test: RandomizationTest, control: RandomizationTest | None) -> tuple[Decision, EstimateSummary]:
    """The word, and the similarity that gave it."""
    last = next((each for each in test.similarities if each.passes is test.passes), None)
    effect = EMPTY_ESTIMATE if last is None else _build_similarity_effect(last)
    if test.passes is None:
        return ("not testable", test.reason), effect
    if control is None or control.passes is None:
        why = "the test has no result for the edge detector, which has to fail it"
        return ("not testable", why), effect
    if control.passes:
        why = "the edge detector, which knows nothing of the model, did not fail: the test is too weak here"
        return ("not testable", why), effect
    return ("supported" if test.passes else "not supported", ""), effect


def _build_similarity_effect(similarity: RandomizationSimilarity) -> EstimateSummary:
    why = "; ".join(filter(None, (f"{similarity.name} after the last step", similarity.final_similarity.reason)))
    beside = {"baseline": similarity.null_high, "baseline_name": "maps of different images, at most", "reason": why}
    return similarity.final_similarity.model_copy(update=beside)


def judge_robustness(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps stay where they are under changes that do not matter."""
    margin, stage = summary.margins["robustness_correlation"], summary.robustness
    for finding in summary.resolve.findings:
        own = _select_metric_summaries(stage, ROBUSTNESS_CONDITIONS, finding)
        if not own:
            claim = f"The maps for {finding} stay where they are under changes that do not matter."
            yield _build_untested_verdict(
                "robustness", claim, finding, stage.reason or f"no map of {finding} was tested", ABOVE_MARGIN_RULE
            )
        for one in own:
            claim = f"The maps of {one.method} for {finding} stay where they are {ROBUSTNESS_CONDITIONS[one.metric]}."
            yield build_verdict(
                "robustness", claim, finding, decide_above_margin(one.value, margin), one.value, "robustness", ABOVE_MARGIN_RULE, supported_is_good=True,
                margin=margin, qualifier=one.method,
            )  # fmt: skip
