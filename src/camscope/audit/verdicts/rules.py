"""Rules of verdicts: compare an estimate with its margin, combine decisions, and build the verdict."""

from collections.abc import Sequence
from typing import Literal

from camscope.audit.core.schema import Conclusion, EstimateSummary, Verdict
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_values import format_patient_count
from camscope.audit.verdicts.questions import MIN_PATIENTS_RULE, QUESTIONS

Decision = tuple[Conclusion, str]  # the conclusion and its reason

EMPTY_ESTIMATE = EstimateSummary(reason="there are no data to test it")
NO_VARIATION_REASON = "every image has the same value, equal to the margin"
WIDE_INTERVAL_REASON = "the interval includes the margin: more images are needed"


def decide_above_margin(estimate: EstimateSummary, margin: float) -> Decision:
    """Decide whether an estimate lies above a margin, with the reason if this cannot be decided."""
    if missing := find_missing_requirement(estimate):
        return "not testable", missing
    if estimate.low is None or estimate.high is None:
        return "not testable", estimate.reason or "there is no interval"
    if estimate.low > margin:
        return "supported", ""
    if estimate.high < margin:
        return "not supported", ""
    return "not testable", NO_VARIATION_REASON if estimate.low == estimate.high else WIDE_INTERVAL_REASON


def find_missing_requirement(estimate: EstimateSummary) -> str:
    """Describe what an estimate lacks for a verdict, a value or patients; "" if nothing."""
    if estimate.value is None:
        return estimate.reason or "there is no value"
    if estimate.n_groups < MIN_PATIENTS_FOR_VERDICT:
        of_each_kind = " of each kind" if estimate.n_groups_by_role else ""
        return f"too few patients: {format_patient_count(estimate)}, and {MIN_PATIENTS_FOR_VERDICT}{of_each_kind} are needed"
    return ""


def describe_unreachable_margin(max_enrichment: float | None, margin: float) -> str:
    """Describe why no map could have an enrichment above the margin; "" if one could."""
    if max_enrichment is None or max_enrichment > margin:
        return ""
    return (
        f"it covers so much of the images that a map wholly inside reaches an enrichment of only {max_enrichment:.2f}, "
        "within the margin"
    )


def require_agreement(decisions: Sequence[Decision]) -> Decision:
    """Return the decision on which all imputations agree; else "not testable"."""
    conclusions = {conclusion for conclusion, _ in decisions}
    if len(conclusions) == 1:
        return decisions[0]
    reason = next((reason for conclusion, reason in decisions if conclusion == "not testable"), "")
    return "not testable", reason or "the imputations disagree"


def join_reasons(*reasons: str) -> str:
    """Join the reasons that are not empty."""
    return "; ".join(filter(None, reasons))


def build_verdict(
    question: str,
    finding: str,
    decision: Decision,
    effect: EstimateSummary = EMPTY_ESTIMATE,
    margin: float | None = None,
    qualifier: str = "",
    **claim_fields: str,
) -> Verdict:
    """Build the verdict on a question; the decision needs an effect with a value and enough patients.

    `claim_fields`: the fields of the question's claim besides the finding.
    """
    definition, (conclusion, reason) = QUESTIONS[question], decision
    if conclusion != "not testable" and (missing := find_missing_requirement(effect)):
        conclusion, reason = "not testable", missing
    direction: Literal["supports", "contradicts", "neither"] = "neither"
    if conclusion == "not testable":
        reason = reason or effect.reason or EMPTY_ESTIMATE.reason
    elif definition.is_good_if_supported is not None:
        is_good = (conclusion == "supported") is definition.is_good_if_supported
        direction = "supports" if is_good else "contradicts"
    return Verdict(
        question=question,
        claim=definition.claim.format(finding=finding, **claim_fields),
        finding=finding,
        qualifier=qualifier,
        conclusion=conclusion,
        direction=direction,
        effect=effect,
        margin=margin,
        rule=f"{definition.rule}; {MIN_PATIENTS_RULE}",
        reason=reason,
        section=definition.section,
    )
