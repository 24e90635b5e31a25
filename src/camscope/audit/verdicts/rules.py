"""Judged: an interval beside a margin, and a verdict of it; no word without a value, of few patients, or without a reason."""

from collections.abc import Sequence
from typing import Literal

from camscope.audit.core.schema import Conclusion, EstimateSummary, Verdict
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_values import format_patient_count

VerdictDirection = Literal["supports", "contradicts", "neither"]
Decision = tuple[Conclusion, str]  # and why it cannot be told

EMPTY_ESTIMATE = EstimateSummary(reason="there is nothing to test it with")
ABOVE_MARGIN_RULE = (
    "supported where the interval lies wholly above the margin, not supported where it lies wholly below"
)
MIN_PATIENTS_RULE = f"not testable with fewer than {MIN_PATIENTS_FOR_VERDICT} patients"  # of every rule
NO_VARIATION_REASON = "every image has the same value, which is the margin"
WIDE_INTERVAL_REASON = "the interval holds the margin: more images are needed to tell"


def decide_above_margin(estimate: EstimateSummary, margin: float) -> Decision:
    """Whether a number lies above a margin, with the reason where it cannot be told."""
    if lacking := find_missing_requirement(estimate):
        return "not testable", lacking
    if estimate.low is None or estimate.high is None:
        return "not testable", estimate.reason or "there is no interval"
    if estimate.low > margin:
        return "supported", ""
    if estimate.high < margin:
        return "not supported", ""
    return "not testable", NO_VARIATION_REASON if estimate.low == estimate.high else WIDE_INTERVAL_REASON


def find_missing_requirement(estimate: EstimateSummary) -> str:
    """What a number lacks for a word to rest on it: a value, or patients; "" where it has both."""
    if estimate.value is None:
        return estimate.reason or "there is no value"
    if estimate.n_groups < MIN_PATIENTS_FOR_VERDICT:
        each = " of each kind" if estimate.n_groups_by_role else ""
        return f"too few patients to tell: {format_patient_count(estimate)}, and {MIN_PATIENTS_FOR_VERDICT}{each} are needed"
    return ""


def describe_unreachable_margin(max_enrichment: float | None, margin: float) -> str:
    """Why an enrichment cannot exceed the margin, whatever a map shows; "" where it can."""
    if max_enrichment is None or max_enrichment > margin:
        return ""
    return f"it takes up so much of the images that a map which is all inside has an enrichment of {max_enrichment:.2f}, within the margin"


def combine_decisions(decisions: Sequence[Decision]) -> Decision:
    """The word on which all fills agree."""
    words = {word for word, _ in decisions}
    if len(words) == 1:
        return decisions[0]
    return "not testable", next((why for word, why in decisions if word == "not testable"), "") or "the fills disagree"


def build_verdict(
    question: str,
    claim: str,
    finding: str,
    decision: Decision,
    effect: EstimateSummary,
    section: str,
    rule: str,
    *,
    supported_is_good: bool | None,
    margin: float | None = None,
    qualifier: str = "",
) -> Verdict:
    """`supported_is_good`: whether "supported" speaks for the model; None: neither does."""
    word, reason = _require_testable_effect(decision, effect)
    direction: VerdictDirection = "neither"
    if supported_is_good is not None and word != "not testable":
        direction = "supports" if (word == "supported") is supported_is_good else "contradicts"
    return Verdict(
        question=question, claim=claim, finding=finding, qualifier=qualifier, conclusion=word, direction=direction, effect=effect,
        margin=margin, rule=f"{rule}; {MIN_PATIENTS_RULE}", reason=reason, section=section,
    )  # fmt: skip


def _require_testable_effect(decision: Decision, effect: EstimateSummary) -> Decision:
    """The word, where what is shown beside it can bear one."""
    word, reason = decision
    if word != "not testable" and (lacking := find_missing_requirement(effect)):
        return "not testable", lacking
    return word, reason or (effect.reason or str(EMPTY_ESTIMATE.reason) if word == "not testable" else "")
