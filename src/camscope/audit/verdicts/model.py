"""Verdicts about the model: its performance, the regions it depends on, and its features.

- Answering: whether the model tells a finding, and for whom; and whether any number is the same in every subgroup.
- Regions: whether the answer depends on the finding's pixels, or on others, by interventions; and where the maps lie.
- Features: what can be read off them beside the finding, and whether the maps fall into several ways of looking.
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

EQUALITY_RULE = (
    "supported where the interval of every level lies within the margin, not supported where one lies wholly beyond it; the "
    "intervals of all levels are corrected so that they hold together"
)
EFFECT_EQUALITY_RULE = (
    f"{EQUALITY_RULE}; supported only where either side of every level has so many patients that a reliance of the declared share of "
    "them would have been met (rule of three)"
)


def judge_performance(summary: Summary) -> Iterator[Verdict]:
    """The AUROC of each finding, and its differences between subgroups."""
    for one in summary.predict.performance:
        margin = summary.margins["useful_auroc"]
        claim = f"The model tells images with {one.finding} from those without."
        yield build_verdict(
            "performance", claim, one.finding, decide_above_margin(one.auroc, margin), one.auroc, "performance", ABOVE_MARGIN_RULE,
            supported_is_good=True, margin=margin,
        )  # fmt: skip
        for (_, _, column), own in group_by_subgroup_column(one.subgroup_differences).items():
            claim = f"It tells {one.finding} equally well whatever the {column}."
            yield judge_subgroup_equality("performance by subgroup", claim, one.finding, own, "performance", column)


def group_by_subgroup_column(
    differences: Iterable[SubgroupDifference],
) -> dict[tuple[str, str, str], list[SubgroupDifference]]:
    """[finding, region, column]: its levels."""
    found: dict[tuple[str, str, str], list[SubgroupDifference]] = {}
    for one in differences:
        found.setdefault((one.finding, one.region, one.column), []).append(one)
    return found


def judge_subgroup_equality(
    question: str,
    claim: str,
    finding: str,
    differences: Sequence[SubgroupDifference],
    section: str,
    column: str,
    prevalence: float | None = None,
) -> Verdict:
    """Whether no level differs from the others by more than the margin.

    `prevalence`: of effects that may be rare and large, the share of patients whose effect has to be met in every level before
    levels are called equal.
    """
    testable = [one for one in differences if one.difference.value is not None]
    apart = [one for one in testable if one.conclusion == "different" and _exceeds_margin(one)]
    worst = max(apart or testable, key=lambda one: abs(one.difference.value or 0.0), default=differences[0])
    found: Decision = "not testable", ""
    if apart:
        found = "not supported", f"{worst.level} differs from the others by more than the margin"
    elif {one.conclusion for one in differences} == {"equivalent"}:
        few = (
            describe_too_few_for_absence(min(map(_count_patients_of_smaller_side, differences)), prevalence)
            if prevalence
            else ""
        )
        found = ("not testable", few) if few else ("supported", "")
    else:
        found = "not testable", "; ".join(dict.fromkeys(_list_open_reasons(differences)))
    rule = EFFECT_EQUALITY_RULE if prevalence else EQUALITY_RULE
    return build_verdict(
        question, claim, finding, found, worst.difference, section, rule, supported_is_good=True, margin=worst.margin, qualifier=column
    )  # fmt: skip


def _count_patients_of_smaller_side(difference: SubgroupDifference) -> int:
    """Of the smaller side."""
    return min(difference.value.n_groups, max(0, difference.difference.n_groups - difference.value.n_groups))


def _exceeds_margin(difference: SubgroupDifference) -> bool:
    low, high = difference.difference.low, difference.difference.high
    return low is not None and high is not None and (low > difference.margin or high < -difference.margin)


def _list_open_reasons(differences: Sequence[SubgroupDifference]) -> Iterator[str]:
    """Level by level: what it lacks, or what its interval leaves open."""
    for one in differences:
        if one.conclusion == "different":
            yield f"{one.level} differs, but perhaps by less than the margin: more images are needed to tell"
        elif one.conclusion != "equivalent":
            yield one.difference.reason or WIDE_INTERVAL_REASON


RELIANCE_RULE = (
    "supported where the interval of an insertion (the region from an image that has it, with the finding where "
    f"{MIN_PREFERRED_IMAGES} or more have both, less the same pixels of one without) lies wholly beyond the margin, up or down, in standard "
    "deviations of the log odds, or where those of the removal of a marker all do to one side, under "
    f"{MIN_IMPUTATIONS} fills at least; not supported where every interval that counts lies within the margin, in so many patients that a "
    "reliance of the declared share of them would have been met with 95 % certainty (rule of three); the removal of what every "
    "image has decides nothing, for the model knows no image without it"
)
GROUND_TRUTH_RULE = (
    f"{RELIANCE_RULE}; the finding's own pixels have to move them up: where they move them down, it is not supported, and where "
    "insertion and removal move them to different sides, not testable"
)
MASKED_ORGAN_RULE = (
    "of AUROC and 1 - AUROC, for an inverted answer is an answer, too: supported where the interval of the larger one lies "
    "wholly above the margin, not supported where those of both lie wholly below it, under every fill"
)
INVERTED_REASON = "inverted: the AUROC is below a half, and what is shown is 1 - AUROC"
ATTRIBUTION_MASS_RULE = (
    f"{ABOVE_MARGIN_RULE}; not testable where it does not lie wholly above the mean of maps of other patients, too, where the region is "
    "finer than the cells of the map, or so large that no map could reach the margin; it says where to look: whether the answer "
    "relies on the region, interventions say"
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
)  # that need no other word


def judge_ground_truth_reliance(summary: Summary) -> Iterator[Verdict]:
    """Whether the answer depends on the finding's own pixels."""
    for finding in summary.resolve.findings:
        claim = f"The answer depends on the pixels of {finding} itself."
        yield _judge_reliance(summary, finding, FINDING_REGION, claim, "ground truth", supported_is_good=True)


def judge_region_reliance(summary: Summary) -> Iterator[Verdict]:
    """Whether it relies on other regions, and on these in every subgroup alike."""
    for finding in summary.resolve.findings:
        for region in _list_other_regions(summary):
            claim = f"The answer for {finding} relies on {_format_region(region)}."
            yield _judge_reliance(summary, finding, region, claim, "shortcut", supported_is_good=False)
    for (finding, region, column), own in group_by_subgroup_column(summary.shortcut.subgroup_differences).items():
        claim = f"What {_format_region(region)} adds to the answer for {finding} is the same whatever the {column}."
        prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
        subject = f"{column}, effect of {region}"
        yield judge_subgroup_equality("shortcut by subgroup", claim, finding, own, "shortcut", subject, prevalence)


def _list_other_regions(summary: Summary) -> list[str]:
    return [name for name in summary.shortcut.region_counts if name not in (FINDING_REGION, ORGAN_REGION)]


def _format_region(region: str) -> str:
    """As it stands in a sentence."""
    if region.startswith("outside"):
        return f"what lies {region.replace('outside-', 'outside the ').removesuffix('-ct')}"
    if region == "saturated":
        return "small saturated parts"
    return f"the {region}" if region in REGIONS_WITH_ARTICLE else f"the region {region}"


def _judge_reliance(
    summary: Summary, finding: str, region: str, claim: str, question: str, *, supported_is_good: bool
) -> Verdict:
    own = [one for one in summary.shortcut.interventions if one.region == region and one.finding == finding]
    margin = summary.margins["effect"]
    insert, remove = ([one for one in own if one.kind == kind] for kind in ("insert", "remove"))
    if all(one.effect.value is None for one in (*insert, *remove)):
        reason = summary.shortcut.reason or next(
            (one.effect.reason for one in own), "no image has such a region, or no mask says so"
        )
        found: Decision = "not testable", reason
        effect = EMPTY_ESTIMATE
    else:
        marker = region in summary.shortcut.markers_by_finding.get(finding, ())
        judge, ways = (
            judge_finding_reliance if region == FINDING_REGION else judge_reliance,
            (insert, remove if marker else []),
        )
        prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
        found = judge(*ways, margin, prevalence, uncounted_removals=[] if marker else remove)
        shown = select_reported_effect(*ways, margin) or select_reported_effect([], remove, margin)
        effect = EMPTY_ESTIMATE if shown is None else shown.effect
    rule = GROUND_TRUTH_RULE if region == FINDING_REGION else RELIANCE_RULE
    return build_verdict(
        question, claim, finding, found, effect, "shortcut", rule, supported_is_good=supported_is_good, margin=margin, qualifier=region
    )  # fmt: skip


def judge_masked_organ(summary: Summary) -> Iterator[Verdict]:
    """Whether the model answers without the organ."""
    margin = summary.margins["masked_auroc"]
    for finding in summary.resolve.findings:
        own = [
            one
            for one in summary.shortcut.masked_auroc
            if (one.region, one.kind, one.finding) == (ORGAN_REGION, "blank", finding)
        ]
        if own:
            claim = f"The model still answers for {finding} when the organ is blanked."
            word, why = combine_decisions([_decide_masked_auroc(one.auroc, margin) for one in own])
            most = max((one.auroc for one in own), key=_compute_distance_from_chance)
            reason = "; ".join(filter(None, (why, INVERTED_REASON if _is_inverted(most) else "")))
            yield build_verdict(
                "masked organ", claim, finding, (word, reason), _orient_auroc(most), "shortcut", MASKED_ORGAN_RULE, supported_is_good=False,
                margin=margin, qualifier=ORGAN_REGION,
            )  # fmt: skip


def _decide_masked_auroc(auroc: EstimateSummary, margin: float) -> Decision:
    """Whether an AUROC is beyond a margin on either side of chance; within it only where both ends are."""
    found, turned = (
        decide_above_margin(_orient_auroc(auroc), margin),
        auroc if _is_inverted(auroc) else _invert_auroc(auroc),
    )
    if found[0] == "not supported" and decide_above_margin(turned, margin)[0] != "not supported":
        return "not testable", WIDE_INTERVAL_REASON
    return found


def _orient_auroc(auroc: EstimateSummary) -> EstimateSummary:
    return _invert_auroc(auroc) if _is_inverted(auroc) else auroc


def _is_inverted(auroc: EstimateSummary) -> bool:
    return auroc.value is not None and auroc.value < 0.5


def _invert_auroc(auroc: EstimateSummary) -> EstimateSummary:
    """1 - AUROC, with the ends of the interval exchanged."""
    value, low, high = (
        None if one is None else round_significant(1 - one) for one in (auroc.value, auroc.high, auroc.low)
    )
    return auroc.model_copy(update={"value": value, "low": low, "high": high})


def _compute_distance_from_chance(auroc: EstimateSummary) -> float:
    return -1.0 if auroc.value is None else abs(auroc.value - 0.5)


def judge_attribution_mass(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps lie on other regions."""
    margin = summary.margins["enrichment"]
    for one in summary.shortcut.attribution_mass:
        if one.region not in (FINDING_REGION, ORGAN_REGION):
            claim = f"The maps of {one.method} for {one.finding} lie on {_format_region(one.region)}."
            yield build_verdict(
                "attribution mass", claim, one.finding, _decide_attribution_mass(one, margin), one.enrichment, "shortcut", ATTRIBUTION_MASS_RULE, supported_is_good=None,
                margin=margin, qualifier=f"{one.region} · {one.method}",
            )  # fmt: skip


def _decide_attribution_mass(attribution_mass: AttributionMass, margin: float) -> Decision:
    if not attribution_mass.is_resolvable:
        return "not testable", f"{attribution_mass.reason}: what a map does not show says nothing of the region"
    if why := describe_unreachable_margin(attribution_mass.max_enrichment, margin):
        return "not testable", why
    found, base = decide_above_margin(attribution_mass.enrichment, margin), attribution_mass.enrichment.baseline
    if found[0] == "supported" and base is not None and (attribution_mass.enrichment.low or 0.0) <= base:
        return "not testable", "it cannot be told from what maps of other patients have in the same place"
    return found


LEAKAGE_RULE = (
    "supported where the interval lies wholly above a half, and the AUROC above that of labels dealt to patients at random, in "
    "every deal; not supported where it is not supported, and the interval lies wholly below the margin"
)
CLUSTERS_RULE = (
    "supported where some number of clusters is more stable and more separate than one way of looking would give by itself; not "
    f"supported where none is, among {MIN_PATIENTS_FOR_SINGLE_CLUSTER} patients or more: among fewer two clear ways would often not have been found"
)


def judge_leakage(summary: Summary) -> Iterator[Verdict]:
    """Whether columns can be read off the model's features."""
    margin = summary.margins["leakage_auroc"]
    for one in summary.shortcut.leakage:
        claim = f"The {one.column} can be read off the model's features."
        yield build_verdict(
            "leakage", claim, "", _decide_leakage(one, margin), one.auroc, "shortcut", LEAKAGE_RULE, supported_is_good=None, margin=margin,
            qualifier=one.column,
        )  # fmt: skip


def _decide_leakage(leakage: ColumnLeakage, margin: float) -> Decision:
    if lacking := find_missing_requirement(leakage.auroc):
        return "not testable", lacking
    if leakage.is_decodable:
        return "supported", "above what any deal of the labels gave; the margin is for saying that it cannot be read"
    if leakage.auroc.high is not None and leakage.auroc.high < margin:
        return "not supported", ""
    return "not testable", f"{_describe_chance(leakage)}, and the interval is not wholly below the margin"


def _describe_chance(leakage: ColumnLeakage) -> str:
    """Why a probe's AUROC is not above chance, by the numbers beside it."""
    if leakage.auroc.low is None or leakage.auroc.low <= 0.5:
        return "the interval includes 0.5, which is chance"
    if leakage.null_max is not None and (leakage.auroc.value or 0.0) <= leakage.null_max:
        return f"labels dealt at random gave as much, {leakage.null_max:.2f} at most"
    return "the probe was not judged to be above chance"


def judge_clusters(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps of a method fall into several ways of looking."""
    for one in summary.shortcut.cluster_analyses:
        claim = f"The maps of {one.method} for {one.finding} fall into several ways of looking."
        yield build_verdict(
            "clusters", claim, one.finding, _decide_clusters(one), _build_stability_effect(one), "clusters", CLUSTERS_RULE, supported_is_good=None, qualifier=one.method
        )  # fmt: skip


def _decide_clusters(analysis: ClusterAnalysis) -> Decision:
    if analysis.reason:
        return "not testable", analysis.reason
    if analysis.n_clusters > 1:
        return "supported", ""
    if analysis.n_patients < MIN_PATIENTS_FOR_SINGLE_CLUSTER:
        return (
            "not testable",
            f"none was found, but among {plural(analysis.n_patients, 'patient')} two ways would often not have been: "
            f"{MIN_PATIENTS_FOR_SINGLE_CLUSTER} are needed",
        )
    return (
        "not supported",
        f"a way that fewer than {100 * RARE_CLUSTER_SHARE:.0f} % of the maps show would often not have been found",
    )


def _build_stability_effect(analysis: ClusterAnalysis) -> EstimateSummary:
    """Of the number of clusters that is claimed, or of the first that would be."""
    best = next(
        (trial for trial in analysis.stability_by_n_clusters if trial.n_clusters == max(2, analysis.n_clusters)), None
    )
    why = "adjusted Rand index between draws of the patients: there is one such number, and no interval"
    return EMPTY_ESTIMATE if best is None else EstimateSummary(
        value=best.stability, n_values=analysis.n_maps, n_groups=analysis.n_patients, baseline=best.null_stability, baseline_name="one way of looking", reason=why
    )  # fmt: skip
