"""Verdicts about the model: its performance, the regions it depends on, and its features.

- Performance: detection of each finding, and its differences between subgroups.
- Regions: dependence of the prediction on the finding and on other regions, and the attribution inside regions.
- Features: columns that can be predicted from the features, and clusters of maps.
"""

from collections.abc import Iterable, Iterator, Sequence

from camscope.audit.core.schema import (
    AttributionMass,
    ClusterAnalysis,
    ColumnLeakage,
    EstimateSummary,
    SubgroupDifference,
    Summary,
    Verdict,
)
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_SINGLE_CLUSTER, RARE_CLUSTER_SHARE
from camscope.audit.core.summary_values import round_significant
from camscope.audit.shortcuts.image_edits import MIN_PREFERRED_IMAGES
from camscope.audit.shortcuts.region_samples import FINDING_REGION, ORGAN_REGION
from camscope.audit.shortcuts.reliance import (
    DEFAULT_RELIANCE_PREVALENCE,
    MIN_IMPUTATIONS,
    describe_too_few_for_absence,
    judge_finding_reliance,
    judge_reliance,
    select_reported_effect,
)
from camscope.audit.verdicts.rules import (
    ABOVE_MARGIN_RULE,
    EMPTY_ESTIMATE,
    WIDE_INTERVAL_REASON,
    Decision,
    build_verdict,
    combine_decisions,
    decide_above_margin,
    describe_unreachable_margin,
    find_missing_requirement,
)
from camscope.plurals import plural
from camscope.registry import METHODS

EQUALITY_RULE = (
    "supported if the interval of every level lies within the margin; not supported if one lies wholly beyond it; the "
    "intervals are corrected for the number of levels"
)
EFFECT_EQUALITY_RULE = (
    f"{EQUALITY_RULE}; supported only if both sides of every level have enough patients to detect a reliance in the "
    "declared share "
    "of patients (rule of three)"
)


def judge_performance(summary: Summary) -> Iterator[Verdict]:
    """Judge the AUROC of each finding and its differences between subgroups."""
    for performance in summary.predict.performance:
        margin = summary.margins["useful_auroc"]
        claim = f"The model distinguishes images with {performance.finding} from those without."
        yield build_verdict(
            "performance",
            claim,
            performance.finding,
            decide_above_margin(performance.auroc, margin),
            performance.auroc,
            "performance",
            ABOVE_MARGIN_RULE,
            supported_is_good=True,
            margin=margin,
        )
        for (_, _, column), differences in group_by_subgroup_column(performance.subgroup_differences).items():
            claim = f"The model detects {performance.finding} equally well in all subgroups of {column}."
            yield judge_subgroup_equality(
                "performance by subgroup", claim, performance.finding, differences, "performance", column
            )


def group_by_subgroup_column(
    differences: Iterable[SubgroupDifference],
) -> dict[tuple[str, str, str], list[SubgroupDifference]]:
    """Group differences by (finding, region, column)."""
    groups: dict[tuple[str, str, str], list[SubgroupDifference]] = {}
    for difference in differences:
        groups.setdefault((difference.finding, difference.region, difference.column), []).append(difference)
    return groups


def judge_subgroup_equality(
    question: str,
    claim: str,
    finding: str,
    differences: Sequence[SubgroupDifference],
    section: str,
    column: str,
    prevalence: float | None = None,
) -> Verdict:
    """Judge whether no level differs from the others by more than the margin.

    `prevalence`: for effects that may be rare and large, the smallest share of affected patients that every level must be
    able to detect before levels are called equal.
    """
    testable = [difference for difference in differences if difference.difference.value is not None]
    different = [
        difference for difference in testable if difference.conclusion == "different" and _exceeds_margin(difference)
    ]
    worst = max(
        different or testable, key=lambda difference: abs(difference.difference.value or 0.0), default=differences[0]
    )
    decision: Decision = "not testable", ""
    if different:
        decision = "not supported", f"{worst.level} differs from the others by more than the margin"
    elif {difference.conclusion for difference in differences} == {"equivalent"}:
        too_few = (
            describe_too_few_for_absence(min(map(_count_patients_of_smaller_side, differences)), prevalence)
            if prevalence
            else ""
        )
        decision = ("not testable", too_few) if too_few else ("supported", "")
    else:
        decision = "not testable", "; ".join(dict.fromkeys(_list_open_reasons(differences)))
    rule = EFFECT_EQUALITY_RULE if prevalence else EQUALITY_RULE
    return build_verdict(
        question,
        claim,
        finding,
        decision,
        worst.difference,
        section,
        rule,
        supported_is_good=True,
        margin=worst.margin,
        qualifier=column,
    )


def _count_patients_of_smaller_side(difference: SubgroupDifference) -> int:
    """Count the patients of the level, or of all other levels if these are fewer."""
    return min(difference.value.n_groups, max(0, difference.difference.n_groups - difference.value.n_groups))


def _exceeds_margin(difference: SubgroupDifference) -> bool:
    low, high = difference.difference.low, difference.difference.high
    return low is not None and high is not None and (low > difference.margin or high < -difference.margin)


def _list_open_reasons(differences: Sequence[SubgroupDifference]) -> Iterator[str]:
    """Yield, for each undecided level, what is missing or what its interval leaves open."""
    for difference in differences:
        if difference.conclusion == "different":
            yield f"{difference.level} differs, but perhaps by less than the margin: more images are needed"
        elif difference.conclusion != "equivalent":
            yield difference.difference.reason or WIDE_INTERVAL_REASON


RELIANCE_RULE = (
    "supported if the interval of an insertion lies wholly beyond the margin, in either direction, in standard deviations of "
    "the log odds (an insertion pastes the region from an image that has it and subtracts the effect of the same pixels from "
    f"an image without; donors have the finding if {MIN_PREFERRED_IMAGES} or more images have both), or if all intervals "
    "of the removal of a "
    f"marker do so in one direction under at least {MIN_IMPUTATIONS} imputations; not supported if every counted interval "
    "lies within the "
    "margin, with enough patients to detect a reliance in the declared share of patients with 95 % certainty (rule of three); "
    "the removal of a region that every image has is not counted, because the model was never trained on images without it"
)
GROUND_TRUTH_RULE = (
    f"{RELIANCE_RULE}; the pixels of the finding must increase the log odds: if they decrease them, the verdict is not "
    "supported; "
    "if insertion and removal disagree, it is not testable"
)
MASKED_ORGAN_RULE = (
    "tested on the larger of AUROC and 1 - AUROC, because an inverted prediction is informative too: supported if its whole "
    "interval lies above the margin, not supported if both intervals lie wholly below it, under every imputation"
)
INVERTED_REASON = "inverted: the AUROC is below 0.5, and 1 - AUROC is reported"
ATTRIBUTION_MASS_RULE = (
    f"{ABOVE_MARGIN_RULE}; not testable if the interval does not lie above the mean of maps of other patients too, if the "
    "region is "
    "smaller than the cells of the map, or if it is so large that no map could reach the margin; whether the prediction relies "
    "on the region is tested by interventions"
)
REGIONS_WITH_ARTICLE = (
    "background",
    "border",
    "corners",
    "ink",
    "padding",
    "pen",
    "rim",
    "shell",
)  # names that read as a noun after "the"


def judge_ground_truth_reliance(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the prediction depends on the pixels of the finding."""
    for finding in summary.resolve.findings:
        claim = f"The prediction for {finding} depends on the pixels of {finding}."
        yield _judge_reliance(summary, finding, FINDING_REGION, claim, "ground truth", supported_is_good=True)


def judge_region_reliance(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the prediction relies on other regions, and equally in every subgroup."""
    for finding in summary.resolve.findings:
        for region in _list_other_regions(summary):
            claim = f"The prediction for {finding} relies on {_format_region(region)}."
            yield _judge_reliance(summary, finding, region, claim, "shortcut", supported_is_good=False)
    for (finding, region, column), differences in group_by_subgroup_column(
        summary.shortcut.subgroup_differences
    ).items():
        claim = (
            f"The effect of {_format_region(region)} on the prediction for {finding} is the same in all subgroups of "
            f"{column}."
        )
        prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
        qualifier = f"{column}, effect of {region}"
        yield judge_subgroup_equality(
            "shortcut by subgroup", claim, finding, differences, "shortcut", qualifier, prevalence
        )


def _list_other_regions(summary: Summary) -> list[str]:
    return [name for name in summary.shortcut.region_counts if name not in (FINDING_REGION, ORGAN_REGION)]


def _format_region(region: str) -> str:
    """Format the name of a region for a sentence."""
    if region.startswith("outside"):
        return f"the area {region.replace('outside-', 'outside the ').removesuffix('-ct')}"
    if region == "saturated":
        return "small saturated parts"
    return f"the {region}" if region in REGIONS_WITH_ARTICLE else f"the region {region}"


def _judge_reliance(
    summary: Summary, finding: str, region: str, claim: str, question: str, *, supported_is_good: bool
) -> Verdict:
    interventions = [
        intervention
        for intervention in summary.shortcut.interventions
        if intervention.region == region and intervention.finding == finding
    ]
    margin = summary.margins["effect"]
    insertions, removals = (
        [intervention for intervention in interventions if intervention.kind == kind] for kind in ("insert", "remove")
    )
    if all(intervention.effect.value is None for intervention in (*insertions, *removals)):
        reason = summary.shortcut.reason or next(
            (intervention.effect.reason for intervention in interventions),
            "no image has a mask of this region",
        )
        decision: Decision = "not testable", reason
        effect = EMPTY_ESTIMATE
    else:
        is_marker = region in summary.shortcut.markers_by_finding.get(finding, ())
        judge, counted_interventions = (
            judge_finding_reliance if region == FINDING_REGION else judge_reliance,
            (insertions, removals if is_marker else []),
        )
        prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
        decision = judge(*counted_interventions, margin, prevalence, uncounted_removals=[] if is_marker else removals)
        reported = select_reported_effect(*counted_interventions, margin) or select_reported_effect(
            [], removals, margin
        )
        effect = EMPTY_ESTIMATE if reported is None else reported.effect
    rule = GROUND_TRUTH_RULE if region == FINDING_REGION else RELIANCE_RULE
    return build_verdict(
        question,
        claim,
        finding,
        decision,
        effect,
        "shortcut",
        rule,
        supported_is_good=supported_is_good,
        margin=margin,
        qualifier=region,
    )


def judge_masked_organ(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the model still detects a finding when the organ is masked."""
    margin = summary.margins["masked_auroc"]
    for finding in summary.resolve.findings:
        organ_results = [
            masked
            for masked in summary.shortcut.masked_auroc
            if (masked.region, masked.kind, masked.finding) == (ORGAN_REGION, "mask", finding)
        ]
        if organ_results:
            claim = f"The model still detects {finding} when the organ is masked."
            conclusion, why = combine_decisions(
                [_decide_masked_auroc(masked.auroc, margin) for masked in organ_results]
            )
            largest = max((masked.auroc for masked in organ_results), key=_compute_distance_from_chance)
            reason = "; ".join(filter(None, (why, INVERTED_REASON if _is_inverted(largest) else "")))
            yield build_verdict(
                "masked organ",
                claim,
                finding,
                (conclusion, reason),
                _orient_auroc(largest),
                "shortcut",
                MASKED_ORGAN_RULE,
                supported_is_good=False,
                margin=margin,
                qualifier=ORGAN_REGION,
            )


def _decide_masked_auroc(auroc: EstimateSummary, margin: float) -> Decision:
    """Decide whether an AUROC lies beyond the margin on either side of chance."""
    decision, inverted = (
        decide_above_margin(_orient_auroc(auroc), margin),
        auroc if _is_inverted(auroc) else _invert_auroc(auroc),
    )
    if decision[0] == "not supported" and decide_above_margin(inverted, margin)[0] != "not supported":
        return "not testable", WIDE_INTERVAL_REASON
    return decision


def _orient_auroc(auroc: EstimateSummary) -> EstimateSummary:
    return _invert_auroc(auroc) if _is_inverted(auroc) else auroc


def _is_inverted(auroc: EstimateSummary) -> bool:
    return auroc.value is not None and auroc.value < 0.5


def _invert_auroc(auroc: EstimateSummary) -> EstimateSummary:
    """Return 1 - AUROC with the ends of the interval exchanged."""
    value, low, high = (
        None if number is None else round_significant(1 - number) for number in (auroc.value, auroc.high, auroc.low)
    )
    return auroc.model_copy(update={"value": value, "low": low, "high": high})


def _compute_distance_from_chance(auroc: EstimateSummary) -> float:
    return -1.0 if auroc.value is None else abs(auroc.value - 0.5)


def judge_attribution_mass(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps highlight regions other than the finding."""
    margin = summary.margins["enrichment"]
    for attribution_mass in summary.shortcut.attribution_mass:
        if attribution_mass.region not in (FINDING_REGION, ORGAN_REGION):
            claim = (
                f"The maps of {METHODS.display_name(attribution_mass.method)} for {attribution_mass.finding} highlight "
                f"{_format_region(attribution_mass.region)}."
            )
            yield build_verdict(
                "attribution mass",
                claim,
                attribution_mass.finding,
                _decide_attribution_mass(attribution_mass, margin),
                attribution_mass.enrichment,
                "shortcut",
                ATTRIBUTION_MASS_RULE,
                supported_is_good=None,
                margin=margin,
                qualifier=f"{attribution_mass.region} · {attribution_mass.method}",
            )


def _decide_attribution_mass(attribution_mass: AttributionMass, margin: float) -> Decision:
    if not attribution_mass.is_resolvable:
        return "not testable", f"{attribution_mass.reason}: the map can neither show nor exclude it"
    if reason := describe_unreachable_margin(attribution_mass.max_enrichment, margin):
        return "not testable", reason
    decision, baseline = decide_above_margin(attribution_mass.enrichment, margin), attribution_mass.enrichment.baseline
    if decision[0] == "supported" and baseline is not None and (attribution_mass.enrichment.low or 0.0) <= baseline:
        return "not testable", "maps of other patients have as much attribution in the same place"
    return decision


LEAKAGE_RULE = (
    "supported if the whole interval lies above 0.5, and the AUROC exceeds that of every random permutation of the labels over "
    "patients; not supported if this does not hold and the interval lies wholly below the margin"
)
CLUSTERS_RULE = (
    "supported if some number of clusters is more stable and better separated than expected for a single cluster; not "
    f"supported if none is, among at least {MIN_PATIENTS_FOR_SINGLE_CLUSTER} patients, because two clear clusters are "
    "often missed among fewer"
)


def judge_leakage(summary: Summary) -> Iterator[Verdict]:
    """Judge whether columns can be predicted from the model's features."""
    margin = summary.margins["leakage_auroc"]
    for leakage in summary.shortcut.leakage:
        claim = f"The {leakage.column} can be predicted from the model's features."
        yield build_verdict(
            "leakage",
            claim,
            "",
            _decide_leakage(leakage, margin),
            leakage.auroc,
            "shortcut",
            LEAKAGE_RULE,
            supported_is_good=None,
            margin=margin,
            qualifier=leakage.column,
        )


def _decide_leakage(leakage: ColumnLeakage, margin: float) -> Decision:
    if missing := find_missing_requirement(leakage.auroc):
        return "not testable", missing
    if leakage.is_decodable:
        return (
            "supported",
            "above the AUROC of every permutation of the labels; the margin applies to the opposite conclusion",
        )
    if leakage.auroc.high is not None and leakage.auroc.high < margin:
        return "not supported", ""
    return "not testable", f"{_describe_chance(leakage)}, and the interval is not wholly below the margin"


def _describe_chance(leakage: ColumnLeakage) -> str:
    """Describe why the AUROC of a probe is not above chance."""
    if leakage.auroc.low is None or leakage.auroc.low <= 0.5:
        return "the interval includes 0.5, which is chance"
    if leakage.null_max is not None and (leakage.auroc.value or 0.0) <= leakage.null_max:
        return f"permuted labels reach up to {leakage.null_max:.2f}"
    return "the probe is not above chance"


def judge_clusters(summary: Summary) -> Iterator[Verdict]:
    """Judge whether the maps of a method fall into several clusters."""
    for analysis in summary.shortcut.cluster_analyses:
        claim = (
            f"The maps of {METHODS.display_name(analysis.method)} for {analysis.finding} fall into several clusters."
        )
        yield build_verdict(
            "clusters",
            claim,
            analysis.finding,
            _decide_clusters(analysis),
            _build_stability_effect(analysis),
            "clusters",
            CLUSTERS_RULE,
            supported_is_good=None,
            qualifier=analysis.method,
        )


def _decide_clusters(analysis: ClusterAnalysis) -> Decision:
    if analysis.reason:
        return "not testable", analysis.reason
    if analysis.n_clusters > 1:
        return "supported", ""
    if analysis.n_patients < MIN_PATIENTS_FOR_SINGLE_CLUSTER:
        return (
            "not testable",
            f"one cluster was found, but among {plural(analysis.n_patients, 'patient')} two clusters are often missed: "
            f"{MIN_PATIENTS_FOR_SINGLE_CLUSTER} are needed",
        )
    return (
        "not supported",
        f"a cluster of fewer than {100 * RARE_CLUSTER_SHARE:.0f} % of the maps is often missed",
    )


def _build_stability_effect(analysis: ClusterAnalysis) -> EstimateSummary:
    """Build the stability of the reported number of clusters, or of two clusters if one was found."""
    stability = next(
        (
            candidate
            for candidate in analysis.stability_by_n_clusters
            if candidate.n_clusters == max(2, analysis.n_clusters)
        ),
        None,
    )
    reason = "adjusted Rand index between subsamples of the patients; it has no interval"
    return (
        EMPTY_ESTIMATE
        if stability is None
        else EstimateSummary(
            value=stability.stability,
            n_values=analysis.n_maps,
            n_groups=analysis.n_patients,
            baseline=stability.null_stability,
            baseline_name="a single cluster",
            reason=reason,
        )
    )
