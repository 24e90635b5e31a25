"""Verdicts on the model and the data: performance, reliance on regions, leakage and subgroup differences."""

from collections.abc import Iterable, Iterator, Sequence

from camscope.audit.core.convert_to_summary_entries import round_significant
from camscope.audit.core.stage_result_schema import EstimateSummary, SubgroupDifference
from camscope.audit.core.summary_schema import ColumnLeakage, Summary, Verdict
from camscope.audit.shortcuts.intervention_effects_and_reliance import (
    DEFAULT_RELIANCE_PREVALENCE,
    explain_too_few_patients,
    judge_reliance,
    select_reported_effect,
)
from camscope.audit.shortcuts.load_images_and_region_masks import FINDING_REGION, ORGAN_REGION
from camscope.audit.shortcuts.region_names import format_region
from camscope.audit.verdicts.verdict_rules import (
    BELOW_MARGIN_REASON,
    EMPTY_ESTIMATE,
    WIDE_INTERVAL_REASON,
    Decision,
    build_verdict,
    decide_above_margin,
    find_missing_requirement,
    join_reasons,
    require_agreement,
)

INVERTED_REASON = "inverted: the AUROC is below 0.5, and 1 - AUROC is reported"


def judge_performance(summary: Summary) -> Iterator[Verdict]:
    """Judge the AUROC of each finding. Also judge its differences between subgroups."""
    margin = summary.margins["useful_auroc"]
    for performance in summary.predict.performance:
        decision = decide_above_margin(performance.auroc, margin)
        yield build_verdict("performance", performance.finding, decision, performance.auroc, margin)
        for (_, _, column), differences in group_by_subgroup_column(performance.subgroup_differences).items():
            yield judge_subgroup_equality("performance by subgroup", performance.finding, differences, column)


def group_by_subgroup_column(
    differences: Iterable[SubgroupDifference],
) -> dict[tuple[str, str, str], list[SubgroupDifference]]:
    """Group differences by finding, region and subgroup column."""
    groups: dict[tuple[str, str, str], list[SubgroupDifference]] = {}
    for difference in differences:
        groups.setdefault((difference.finding, difference.region, difference.column), []).append(difference)
    return groups


def judge_subgroup_equality(
    question: str,
    finding: str,
    differences: Sequence[SubgroupDifference],
    column: str,
    prevalence: float | None = None,
    qualifier: str = "",
    **claim_fields: str,
) -> Verdict:
    """Judge whether all subgroup levels are equal within the margin.

    `prevalence`: for effects that may be rare and large, the smallest share of affected patients that every level must be
    able to detect before levels are called equal.
    """
    testable = [level for level in differences if level.difference.value is not None]
    different = [level for level in testable if level.conclusion == "different" and _exceeds_margin(level)]
    worst = max(different or testable, key=lambda level: abs(level.difference.value or 0.0), default=differences[0])
    decision: Decision
    if different:
        decision = "not supported", f"{worst.level} differs from the others by more than the margin"
    elif any(level.conclusion != "equivalent" for level in differences):
        decision = "not decided", "; ".join(dict.fromkeys(_list_open_reasons(differences)))
    else:
        n_patients = min(
            min(level.value.n_groups, max(0, level.difference.n_groups - level.value.n_groups)) for level in differences
        )  # of the level, or of all other levels if these are fewer
        too_few = explain_too_few_patients(n_patients, prevalence) if prevalence else ""
        within = "the interval of every subgroup lies within the margin"
        decision = ("not decided", too_few) if too_few else ("supported", within)
    return build_verdict(
        question, finding, decision, worst.difference, worst.margin, qualifier or column, column=column, **claim_fields
    )


def _exceeds_margin(level: SubgroupDifference) -> bool:
    low, high = level.difference.low, level.difference.high
    return low is not None and high is not None and (low > level.margin or high < -level.margin)


def _list_open_reasons(differences: Sequence[SubgroupDifference]) -> Iterator[str]:
    """Yield, for each undecided level, the reason why it has no conclusion."""
    for level in differences:
        if level.conclusion == "different":
            yield f"{level.level} differs, but perhaps by less than the margin: more images are needed"
        elif level.conclusion != "equivalent":
            yield level.difference.reason or WIDE_INTERVAL_REASON


def judge_finding_region(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the prediction depends on the pixels of the finding."""
    for finding in summary.resolve.findings:
        yield _judge_reliance(summary, finding, FINDING_REGION, "ground truth")


def judge_other_regions(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the prediction relies on regions outside of the finding. Subgroups are judged separately."""
    for finding in summary.resolve.findings:
        for region in summary.shortcut.region_counts:
            if region not in (FINDING_REGION, ORGAN_REGION):
                yield _judge_reliance(summary, finding, region, "shortcut")
    prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
    groups = group_by_subgroup_column(summary.shortcut.subgroup_differences)
    for (finding, region, column), differences in groups.items():
        yield judge_subgroup_equality(
            "shortcut by subgroup",
            finding,
            differences,
            column,
            prevalence,
            f"{column}, effect of {region}",
            region=format_region(region),
        )


def _judge_reliance(summary: Summary, finding: str, region: str, question: str) -> Verdict:
    """Judge whether the predictions depend on a region, from the effects of insertions and removals."""
    margin = summary.margins["effect"]
    prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
    effects = [
        effect for effect in summary.shortcut.interventions if (effect.region, effect.finding) == (region, finding)
    ]
    insertions, removals = ([effect for effect in effects if effect.kind == kind] for kind in ("insert", "remove"))
    if all(effect.effect.value is None for effect in (*insertions, *removals)):
        reasons = (effect.effect.reason for effect in effects)
        reason = summary.shortcut.reason or next(reasons, "no image has a mask of this region")
        decision: Decision = "not decided", reason
        reported = None
    else:
        is_marker = region in summary.shortcut.markers_by_finding.get(finding, ())
        counted, uncounted = (insertions, removals if is_marker else []), [] if is_marker else removals
        must_support = region == FINDING_REGION
        decision = judge_reliance(*counted, margin, prevalence, uncounted_removals=uncounted, must_support=must_support)
        reported = select_reported_effect(*counted, margin) or select_reported_effect([], removals, margin)
    effect = EMPTY_ESTIMATE if reported is None else reported.effect
    return build_verdict(question, finding, decision, effect, margin, region, region=format_region(region))


def judge_masked_organ(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the model still detects a finding after the organ is masked."""
    margin = summary.margins["masked_auroc"]
    for finding in summary.resolve.findings:
        aurocs = [
            masked.auroc
            for masked in summary.shortcut.masked_auroc
            if (masked.region, masked.kind, masked.finding) == (ORGAN_REGION, "mask", finding)
        ]
        if aurocs:
            conclusion, reason = require_agreement([_decide_masked_auroc(auroc, margin) for auroc in aurocs])
            farthest = max(aurocs, key=lambda auroc: -1.0 if auroc.value is None else abs(auroc.value - 0.5))
            decision = conclusion, join_reasons(reason, INVERTED_REASON if _is_inverted(farthest) else "")
            yield build_verdict(
                "masked organ", finding, decision, _orient_auroc_above_half(farthest), margin, ORGAN_REGION
            )


def _decide_masked_auroc(auroc: EstimateSummary, margin: float) -> Decision:
    """Decide whether an AUROC differs from chance by more than the margin, in either direction."""
    decision = decide_above_margin(_orient_auroc_above_half(auroc), margin)
    opposite = auroc if _is_inverted(auroc) else _invert_auroc(auroc)
    if decision[0] == "not supported" and decide_above_margin(opposite, margin)[0] != "not supported":
        return "not decided", WIDE_INTERVAL_REASON
    return decision


def _is_inverted(auroc: EstimateSummary) -> bool:
    return auroc.value is not None and auroc.value < 0.5


def _orient_auroc_above_half(auroc: EstimateSummary) -> EstimateSummary:
    return _invert_auroc(auroc) if _is_inverted(auroc) else auroc


def _invert_auroc(auroc: EstimateSummary) -> EstimateSummary:
    """Return 1 - AUROC. The interval limits trade places."""
    value, low, high = (
        None if number is None else round_significant(1 - number) for number in (auroc.value, auroc.high, auroc.low)
    )
    return auroc.model_copy(update={"value": value, "low": low, "high": high})


def judge_leakage(summary: Summary) -> Iterator[Verdict]:
    """Judge whether subgroup columns can be predicted from the model's features."""
    margin = summary.margins["leakage_auroc"]
    for probe in summary.shortcut.leakage:
        decision = _decide_leakage(probe, margin)
        yield build_verdict("leakage", "", decision, probe.auroc, margin, probe.column, column=probe.column)


def _decide_leakage(probe: ColumnLeakage, margin: float) -> Decision:
    """Decide whether a column can be predicted from the features of the model."""
    if missing := find_missing_requirement(probe.auroc):
        return "not decided", missing
    if probe.is_decodable:
        return "supported", "the whole interval lies above chance, and no permutation of the labels reaches the AUROC"
    if probe.auroc.high is not None and probe.auroc.high < margin:
        return "not supported", BELOW_MARGIN_REASON
    if probe.auroc.low is None or probe.auroc.high is None:
        return "not decided", probe.auroc.reason or "there is no interval"
    interval = f"the interval from {probe.auroc.low:.2f} to {probe.auroc.high:.2f}"
    if probe.auroc.low <= 0.5:
        reason = f"{interval} includes chance (0.5), and"
    elif probe.null_max is not None and (probe.auroc.value or 0.0) <= probe.null_max:
        reason = f"permuted labels reach an AUROC of {probe.null_max:.2f}, and {interval}"
    else:
        reason = f"the probe is not above chance, and {interval}"
    return "not decided", f"{reason} does not lie wholly below the margin of {margin:g}"
