"""The questions of an audit, the claims that answer them, and the rules for verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from camscope.audit.core.convert_to_summary_entries import format_patient_count
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_SINGLE_CLUSTER, MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_schema import Conclusion, Verdict
from camscope.audit.shortcuts.intervention_effects_and_reliance import MIN_IMPUTATIONS
from camscope.audit.shortcuts.region_removal_and_insertion import MIN_PREFERRED_IMAGES
from camscope.metrics.randomization_result import SAME_MAP_SIMILARITY

MIN_PATIENTS_RULE = f"not decided with fewer than {MIN_PATIENTS_FOR_VERDICT} patients"  # part of every rule
FAITHFULNESS_VERDICT_METRICS = ("deletion", "insertion", "road", "lerf-morf-gap")  # of the order of a map's pixels
ABOVE_MARGIN_RULE = "supported if the whole interval lies above the margin, not supported if it lies wholly below"
EQUALITY_RULE = (
    "supported if the interval of every level lies within the margin; not supported if one lies wholly beyond it; the "
    "intervals are corrected for the number of levels"
)
EFFECT_EQUALITY_RULE = (
    f"{EQUALITY_RULE}; supported only if both sides of every level have enough patients to detect a reliance in the "
    "declared share of patients (rule of three)"
)
RELIANCE_RULE = (
    "supported if the interval of an insertion lies wholly beyond the margin, in either direction, in standard deviations of "
    "the log odds (an insertion pastes the region from an image that has it and subtracts the effect of the same pixels from "
    f"an image without; donors have the finding if {MIN_PREFERRED_IMAGES} or more images have both), or if all intervals "
    f"of the removal of a marker do so in one direction under at least {MIN_IMPUTATIONS} imputations; not supported if every "
    "counted interval lies within the margin, with enough patients to detect a reliance in the declared share of patients with "
    "95 % certainty (rule of three); the removal of a region that every image has is not counted, because the model was never "
    "trained on images without it"
)
FINDING_RELIANCE_RULE = (
    f"{RELIANCE_RULE}; the pixels of the finding must increase the log odds: if they decrease them, the verdict is not "
    "supported; if insertion and removal disagree, it is not decided"
)
MASKED_ORGAN_RULE = (
    "tested on the larger of AUROC and 1 - AUROC, because an inverted prediction is informative too: supported if its whole "
    "interval lies above the margin, not supported if both intervals lie wholly below it, under every imputation"
)
LOCALIZATION_RULE = (
    "supported if the whole interval lies above the margin, and the whole interval of the paired difference from the best "
    "control map lies above zero; not supported if the first lies wholly below the margin, or the second nowhere above "
    "zero; not decided if the finding is so large that no map could reach the margin"
)
ATTRIBUTION_MASS_RULE = (
    f"{ABOVE_MARGIN_RULE}; not decided if the interval does not lie above the mean of maps of other patients too, if the "
    "region is smaller than the cells of the map, or if it is so large that no map could reach the margin; whether the "
    "prediction relies on the region is tested by interventions"
)
FAITHFULNESS_RULE = (
    f"tested by the measured metrics of {', '.join(FAITHFULNESS_VERDICT_METRICS)}, on the paired difference from the best "
    "control map: supported if the whole interval lies on the better side of zero for every metric under every imputation; not "
    "supported if it does so for no metric under any imputation, and lies wholly on the worse side for at least one metric "
    "under every imputation"
)
SANITY_RULE = (
    "supported if, by every similarity measure, maps of the randomized model resemble maps of the trained model no more than "
    "maps of different images resemble each other (mean, against the upper end of their 95 % interval), and less than "
    f"{SAME_MAP_SIMILARITY}; not supported if they are more similar by one measure; not decided unless an edge detector "
    "fails the same test on the same images"
)
LEAKAGE_RULE = (
    "supported if the whole interval lies above 0.5, and the AUROC exceeds that of every random permutation of the labels over "
    "patients; not supported if this does not hold and the interval lies wholly below the margin"
)
CLUSTERS_RULE = (
    "supported if some number of clusters is more stable and better separated than expected for a single cluster; not "
    f"supported if none is, among at least {MIN_PATIENTS_FOR_SINGLE_CLUSTER} patients, because two clear clusters are "
    "often missed among fewer"
)
Decision = tuple[Conclusion, str]  # the conclusion and its reason
EMPTY_ESTIMATE = EstimateSummary(reason="there are no data to test it")
ABOVE_MARGIN_REASON = "the whole interval lies above the margin"
BELOW_MARGIN_REASON = "the whole interval lies below the margin"
NO_VARIATION_REASON = "every image has the same value, equal to the margin"
WIDE_INTERVAL_REASON = "the interval includes the margin: more images are needed"


@dataclass(frozen=True)
class Question:
    """A question of the audit: the claim to judge, its rule, and the report section with the numbers.

    `denial`: the sentence that holds if the claim is not supported.
    `topic`: what a verdict counts for or against. `is_good_if_supported`: whether "supported" counts in favor of the topic, None
    if neither conclusion does. `effect_quantity`: what the reported effect measures.
    """

    claim: str
    denial: str
    topic: Literal["model", "maps", "data"]
    section: str
    effect_quantity: str
    rule: str
    is_good_if_supported: bool | None


# fmt: off
QUESTIONS: Mapping[str, Question] = {
    "performance": Question(
        "The model distinguishes images with “{finding}” from those without.",
        "The model does not distinguish images with “{finding}” from those without well enough.",
        "model", "performance", "AUROC", ABOVE_MARGIN_RULE, True),
    "performance by subgroup": Question(
        "The model detects “{finding}” equally well regardless of {column}.",
        "The model does not detect “{finding}” equally well in all subgroups of {column}.",
        "model", "performance", "difference in AUROC", EQUALITY_RULE, True),
    "ground truth": Question(
        "The prediction for “{finding}” uses the area that is marked as “{finding}”.",
        "The prediction for “{finding}” does not use the area that is marked as “{finding}” as it should.",
        "model", "shortcut", "change of the log odds, in SD", FINDING_RELIANCE_RULE, True),
    "shortcut": Question(
        "The prediction for “{finding}” relies on {region}.",
        "The prediction for “{finding}” does not rely on {region}.",
        "model", "shortcut", "change of the log odds, in SD", RELIANCE_RULE, False),
    "shortcut by subgroup": Question(
        "The effect of {region} on the prediction for “{finding}” is the same regardless of {column}.",
        "The effect of {region} on the prediction for “{finding}” differs between subgroups of {column}.",
        "model", "shortcut", "difference in the change, in SD", EFFECT_EQUALITY_RULE, True),
    "masked organ": Question(
        "The model still detects “{finding}” when the organ is masked.",
        "The model no longer detects “{finding}” when the organ is masked.",
        "model", "shortcut", "AUROC of masked images", MASKED_ORGAN_RULE, False),
    "localization": Question(
        "{maps} highlight “{finding}” more than expected by chance.",
        "{maps} do not highlight “{finding}” more than expected by chance.",
        "maps", "localization", "enrichment", LOCALIZATION_RULE, True),
    "localization by subgroup": Question(
        "{maps} highlight “{finding}” equally well regardless of {column}.",
        "{maps} do not highlight “{finding}” equally well in all subgroups of {column}.",
        "maps", "localization", "difference in the share of the map inside the finding", EQUALITY_RULE, True),
    "attribution mass": Question(
        "{maps} for “{finding}” highlight {region}.",
        "{maps} for “{finding}” do not highlight {region}.",
        "maps", "shortcut", "enrichment", ATTRIBUTION_MASS_RULE, None),
    "faithfulness": Question(
        "{maps} show what the prediction for “{finding}” depends on.",
        "{maps} do not show what the prediction for “{finding}” depends on.",
        "maps", "faithfulness", "difference from the best control", FAITHFULNESS_RULE, True),
    "sanity": Question(
        "{maps} for “{finding}” depend on the trained weights.",
        "{maps} for “{finding}” do not depend on the trained weights.",
        "maps", "sanity", "similarity after randomization", SANITY_RULE, True),
    "robustness": Question(
        "{maps} for “{finding}” stay stable {condition}.",
        "{maps} for “{finding}” do not stay stable {condition}.",
        "maps", "robustness", "rank correlation", ABOVE_MARGIN_RULE, True),
    "clusters": Question(
        "{maps} for “{finding}” fall into several clusters.",
        "{maps} for “{finding}” form one cluster.",
        "maps", "clusters", "stability of the clusters", CLUSTERS_RULE, None),
    "leakage": Question(
        "The column {column} can be predicted from the model's features.",
        "The column {column} cannot be predicted from the model's features.",
        "data", "shortcut", "AUROC of the probe", LEAKAGE_RULE, None),
}
# fmt: on


def find_topic(question: str) -> str:
    """Return the topic of a question: "model", "maps" or "data". Unknown questions belong to "model"."""
    return QUESTIONS[question].topic if question in QUESTIONS else "model"


def decide_above_margin(estimate: EstimateSummary, margin: float) -> Decision:
    """Decide whether an estimate lies above a margin. Return the conclusion with its reason."""
    if missing := find_missing_requirement(estimate):
        return "not decided", missing
    if estimate.low is None or estimate.high is None:
        return "not decided", estimate.reason or "there is no interval"
    if estimate.low > margin:
        return "supported", ABOVE_MARGIN_REASON
    if estimate.high < margin:
        return "not supported", BELOW_MARGIN_REASON
    return "not decided", NO_VARIATION_REASON if estimate.low == estimate.high else WIDE_INTERVAL_REASON


def find_missing_requirement(estimate: EstimateSummary) -> str:
    """Say why an estimate cannot decide a verdict: no value, or too few patients. If the estimate can decide, return ""."""
    if estimate.value is None:
        return estimate.reason or "there is no value"
    if estimate.n_groups < MIN_PATIENTS_FOR_VERDICT:
        in_each_role = " in each role" if estimate.n_groups_by_role else ""
        return f"too few patients: {format_patient_count(estimate)}, and {MIN_PATIENTS_FOR_VERDICT}{in_each_role} are needed"
    return ""


def describe_unreachable_margin(max_enrichment: float | None, margin: float) -> str:
    """Say why no map can reach the margin. If a map can reach the margin, return "".

    The region is too large for a high enrichment.
    """
    if max_enrichment is None or max_enrichment > margin:
        return ""
    return (
        f"it covers so much of the images that even a map wholly inside has an enrichment of only {max_enrichment:.2f}, "
        f"and the margin is {margin:g}"
    )


def require_agreement(decisions: Sequence[Decision]) -> Decision:
    """Return the common decision of all imputations. If the imputations disagree, return "not decided"."""
    conclusions = {conclusion for conclusion, _ in decisions}
    if len(conclusions) == 1:
        return decisions[0]
    reason = next((reason for conclusion, reason in decisions if conclusion == "not decided"), "")
    return "not decided", reason or "the imputations disagree"


def write_conclusion_sentence(claim: str, denial: str, conclusion: Conclusion) -> str:
    """State the conclusion about a claim as a sentence."""
    if conclusion == "not decided":
        return f"It is not decided whether {claim[:1].lower()}{claim[1:]}"
    return claim if conclusion == "supported" else denial


def join_reasons(*reasons: str) -> str:
    """Join reasons with semicolons. Empty reasons are skipped."""
    return "; ".join(filter(None, reasons))


def build_verdict(
    question: str,
    finding: str,
    decision: Decision,
    effect: EstimateSummary = EMPTY_ESTIMATE,
    margin: float | None = None,
    qualifier: str = "",
    metric: str = "",
    denial: str = "",
    **claim_fields: str,
) -> Verdict:
    """Build the verdict on a question. If the effect has no value or too few patients, the verdict is "not decided".

    `denial`: the sentence that holds if the claim is not supported, instead of the question's. `claim_fields`: the fields of
    the question's claim besides the finding.
    """
    definition, (conclusion, reason) = QUESTIONS[question], decision
    if conclusion != "not decided" and (missing := find_missing_requirement(effect)):
        conclusion, reason = "not decided", missing
    direction: Literal["supports", "contradicts", "neither"] = "neither"
    if conclusion == "not decided":
        reason = reason or effect.reason or EMPTY_ESTIMATE.reason
    elif definition.is_good_if_supported is not None:
        is_good = (conclusion == "supported") is definition.is_good_if_supported
        direction = "supports" if is_good else "contradicts"
    templates = definition.claim, denial or definition.denial
    claim, denial = (text.format(finding=finding, **claim_fields) for text in templates)
    return Verdict(
        question=question,
        claim=claim,
        answer=write_conclusion_sentence(claim, denial, conclusion),
        finding=finding,
        qualifier=qualifier,
        conclusion=conclusion,
        direction=direction,
        effect=effect,
        margin=margin,
        rule=f"{definition.rule}; {MIN_PATIENTS_RULE}",
        reason=reason,
        section=definition.section,
        metric=metric,
    )
