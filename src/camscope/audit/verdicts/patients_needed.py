"""Estimate the number of patients that would decide an open question of the audit."""

import math

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_SINGLE_CLUSTER, MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.shortcuts.intervention_effects_and_reliance import (
    DEFAULT_RELIANCE_PREVALENCE,
    compute_min_patients_to_detect,
)
from camscope.audit.verdicts.verdict_rules import WIDE_INTERVAL_REASON

# An interval that ends at the margin decides in half of all audits. In four of five, its half width has to be smaller by the
# ratio of the normal quantiles z(0.975) and z(0.975) + z(0.8). The number of patients grows with the square of it.
POWER_FACTOR = ((1.959964 + 0.841621) / 1.959964) ** 2
MAX_PATIENTS_NAMED = 10_000  # a larger number says only that the effect equals the margin
HARDLY_DECIDABLE = "the value is so near to it that more patients would hardly decide"
PATIENTS_NEEDED_WORD = "needed"  # of every reason that more patients or images would remove
EQUALITY_QUESTIONS = ("performance by subgroup", "localization by subgroup", "shortcut by subgroup")
TWO_SIDED_QUESTIONS = ("ground truth", "shortcut", *EQUALITY_QUESTIONS)  # compared with the margin in either direction


def add_patients_needed(verdict: Verdict, summary: Summary) -> Verdict:
    """Add the number of patients that would decide the verdict. If no number would, explain this in the reason."""
    needed, reason = estimate_patients_needed(verdict, summary), verdict.reason
    if needed is None and verdict.conclusion == "not decided" and verdict.effect.value is not None:
        reason = reason.replace(WIDE_INTERVAL_REASON.partition(": ")[2], HARDLY_DECIDABLE)
    return verdict.model_copy(update={"patients_needed": needed, "reason": reason})


def estimate_patients_needed(verdict: Verdict, summary: Summary) -> int | None:
    """Estimate how many patients would decide an open verdict in four of five audits. The measured effect is assumed to stay.

    None if the verdict is decided, if nothing was measured, or if more patients would not decide it.
    """
    effect = verdict.effect
    is_short_of_patients = verdict.conclusion == "not decided" and PATIENTS_NEEDED_WORD in verdict.reason
    if not is_short_of_patients or effect.value is None:
        return None
    if verdict.question == "clusters":
        return MIN_PATIENTS_FOR_SINGLE_CLUSTER if effect.n_groups < MIN_PATIENTS_FOR_SINGLE_CLUSTER else None
    smallest = MIN_PATIENTS_FOR_VERDICT
    if verdict.question in ("ground truth", "shortcut", "shortcut by subgroup"):
        prevalence = summary.margins.get("reliance_prevalence", DEFAULT_RELIANCE_PREVALENCE)
        smallest = max(smallest, compute_min_patients_to_detect(prevalence))
    projected = _estimate_patients_from_interval(verdict)
    if projected is None:
        return smallest if effect.n_groups < smallest else None
    if projected <= effect.n_groups >= smallest:  # the interval alone decides, so that the reason is another one
        return None
    needed = max(smallest, projected)
    return needed if needed <= MAX_PATIENTS_NAMED else None


def _estimate_patients_from_interval(verdict: Verdict) -> int | None:
    """Estimate how many patients make the interval exclude the margin, from its width, to two digits.
    Return None if this is unknown.
    """
    effect, margin = verdict.effect, verdict.margin
    value, low, high = effect.value, effect.low, effect.high
    if value is None or low is None or high is None or margin is None or low == high:
        return None
    is_mirrored = verdict.question in TWO_SIDED_QUESTIONS and value < 0
    if is_mirrored:
        value, low, high = -value, -high, -low
    distance = abs(value - margin)
    half_width = value - low if value > margin else high - value
    if distance == 0 or half_width <= 0:
        return None
    exact = effect.n_groups * POWER_FACTOR * (half_width / distance) ** 2
    if not math.isfinite(exact) or exact > MAX_PATIENTS_NAMED:
        return MAX_PATIENTS_NAMED + 1
    digits = 10.0 ** max(0, math.floor(math.log10(max(exact, 1))) - 1)
    return round(math.ceil(exact / digits) * digits)
