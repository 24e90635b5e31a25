"""Whether what a region says is reliance on it: the rule, and which effect it went by."""

from collections.abc import Mapping, Sequence
from math import ceil, log, log1p
from typing import Final, Literal, Protocol, TypeVar

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.errors import InputError
from camscope.metrics.statistics import compute_min_detectable_prevalence
from camscope.plurals import plural

Conclusion = Literal["supported", "not supported", "not testable"]

DEFAULT_MARGIN_SD: Final = 0.1  # SD of log odds
DEFAULT_RELIANCE_PREVALENCE: Final = 0.05  # of patients: a reliance of fewer of them need not be found
MIN_IMPUTATIONS: Final = 2  # that a removal is seen under: one fill's effect may be its own


class SupportsInterval(Protocol):
    """An effect and its interval, by so many patients; None where there is none, and `reason` says why."""

    @property
    def value(self) -> float | None:
        """The effect."""

    @property
    def low(self) -> float | None:
        """The lower end."""

    @property
    def high(self) -> float | None:
        """The upper end."""

    @property
    def n_groups(self) -> int:
        """Patients."""

    @property
    def reason(self) -> str:
        """Why there is none."""


class SupportsEffect(Protocol):
    """What `judge_reliance` looks at."""

    @property
    def imputation(self) -> str | None:
        """What was put in the region's place."""

    @property
    def effect(self) -> SupportsInterval:
        """What it did."""


EffectT = TypeVar("EffectT", bound=SupportsEffect)


def judge_reliance(
    insertions: Sequence[SupportsEffect],
    removals: Sequence[SupportsEffect],
    margin: float = DEFAULT_MARGIN_SD,
    prevalence: float = DEFAULT_RELIANCE_PREVALENCE,
    *,
    uncounted_removals: Sequence[SupportsEffect] = (),
) -> tuple[Conclusion, str]:
    """Whether the model relies on a region, and why that is said, without numbers: the effects have them.

    "supported": every insertion, or every removal under two fills at least, has its interval beyond the margin on one
    side: for the finding (above) or against it (below). One direction is enough: a marker may speak only where it is
    added, or only where it meets something else. "not supported": every interval that there is lies inside the margins, and
    the insertion or the removal was tried in so many patients that a reliance of a share `prevalence` of them would have been
    met with 95 % certainty. An interval cannot show what is rare and large: where 5 % of patients have an effect of 3 SD, 6
    of 10 samples of ten patients hold none of them. "not testable": anything else: no effect of ten patients or more, fills
    that disagree, intervals across a margin, too few patients for an absence.

    `uncounted_removals`: removals that were measured and do not count, for every image has the region; the reason says so.
    """
    if not 0 < prevalence < 1:
        raise InputError(f"prevalence={prevalence}: expected a share of patients, between 0 and 1")
    effects_by_kind, uncounted_reasons = (
        _select_counted_by_kind(insertions, removals),
        _describe_uncounted(insertions, removals, uncounted_removals),
    )
    if directions := _find_direction_by_kind(effects_by_kind, margin):
        kind, direction = next(iter(directions.items()))
        return (
            "supported",
            f"{kind} {direction} the finding; {_describe_other_kind(effects_by_kind, kind, margin, uncounted_reasons)}",
        )
    counted = [e for effects in effects_by_kind.values() for e in effects]
    if not counted:
        uncounted = f"; {uncounted_reasons['removal']}" if _select_measured(uncounted_removals) else ""
        return "not testable", f"{_explain_no_counted_effect(insertions, removals)}{uncounted}"
    if all(_is_within_margin(e, margin) for e in counted):
        return _judge_absence(effects_by_kind, prevalence, uncounted_reasons)
    return "not testable", _explain_undecided(effects_by_kind["removal"], margin)


def _judge_absence(
    effects_by_kind: Mapping[str, Sequence[SupportsEffect]], prevalence: float, uncounted_reasons: Mapping[str, str]
) -> tuple[Conclusion, str]:
    """Whether so many patients would have shown a reliance, were it there."""
    patients = {
        kind: min(effect.effect.n_groups for effect in effects) for kind, effects in effects_by_kind.items() if effects
    }
    untested_kinds = "".join(f"; {uncounted_reasons[kind]}" for kind, effects in effects_by_kind.items() if not effects)
    if reason := describe_too_few_for_absence(max(patients.values()), prevalence):
        return "not testable", f"every effect that counts lies within the margin, but {reason}{untested_kinds}"
    missed = compute_min_detectable_prevalence(max(patients.values()))
    return (
        "not supported",
        f"every effect that counts lies within the margin{untested_kinds}; {_describe_missable_share(missed)}",
    )


def describe_too_few_for_absence(n_patients: int, prevalence: float) -> str:
    """Why so many patients cannot show that nothing occurs in a share `prevalence` of them; "" where they can."""
    if compute_min_detectable_prevalence(n_patients) <= prevalence:
        return ""
    are_needed = plural(compute_min_patients_for_absence(prevalence), "patient is", "patients are")
    return f"{_describe_missable_share(compute_min_detectable_prevalence(n_patients))}: {are_needed} needed for {100 * prevalence:g} %"


def compute_min_patients_for_absence(prevalence: float) -> int:
    """How many patients it takes to meet, with 95 % certainty, what a share `prevalence` of them has: 59 for 0.05."""
    return ceil(log(0.05) / log1p(-prevalence))


def _describe_missable_share(share: float) -> str:
    return f"a reliance in fewer than {100 * share:.1f} % of patients could have been missed"


def judge_finding_reliance(
    insertions: Sequence[SupportsEffect],
    removals: Sequence[SupportsEffect],
    margin: float = DEFAULT_MARGIN_SD,
    prevalence: float = DEFAULT_RELIANCE_PREVALENCE,
    *,
    uncounted_removals: Sequence[SupportsEffect] = (),
) -> tuple[Conclusion, str]:
    """Whether a region speaks for the finding, as its own pixels should: `judge_reliance` of which only one side is "supported".

    "not supported": also where the region speaks against the finding. "not testable": also where insertion and removal speak
    for different sides.
    """
    directions = set(_find_direction_by_kind(_select_counted_by_kind(insertions, removals), margin).values())
    conclusion, reason = judge_reliance(insertions, removals, margin, prevalence, uncounted_removals=uncounted_removals)
    if len(directions) == 2:
        return "not testable", f"insertion and removal contradict one another: {reason}"
    if directions == {"contradicts"}:
        return "not supported", f"these pixels contradict it: {reason}"
    return conclusion, reason


def select_reported_effect(
    insertions: Sequence[EffectT], removals: Sequence[EffectT], margin: float = DEFAULT_MARGIN_SD
) -> EffectT | None:
    """Of the effects that gave the word the largest: of those that speak, else of those that leave it open, else of all.

    Effects of ten patients or more come first, of these insertions; None where there is no effect.
    """
    effects_by_kind = _select_counted_by_kind(insertions, removals)
    counted = [*effects_by_kind["insertion"], *effects_by_kind["removal"]]
    deciding_kind = next(iter(_find_direction_by_kind(effects_by_kind, margin)), "")
    choices = (
        effects_by_kind.get(deciding_kind, []),
        [effect for effect in counted if not _is_within_margin(effect, margin)],
        *effects_by_kind.values(),
        *([effect for effect in effects if effect.effect.value is not None] for effects in (insertions, removals)),
    )
    effects = next((effect for effect in choices if effect), [])
    return max(effects, key=lambda effect: abs(effect.effect.value or 0.0), default=None)


def _select_counted_by_kind(insertions: Sequence[EffectT], removals: Sequence[EffectT]) -> dict[str, list[EffectT]]:
    """What enough patients vouch for."""
    return {
        "insertion": [e for e in insertions if _has_enough_patients(e)],
        "removal": [e for e in removals if _has_enough_patients(e)],
    }


def _find_direction_by_kind(effects_by_kind: Mapping[str, Sequence[SupportsEffect]], margin: float) -> dict[str, str]:
    """Which ways have all their intervals beyond the margin, and for which side they speak; insertion before removal."""
    if not 0 < margin < float("inf"):
        raise InputError(f"margin={margin}: expected a positive number of standard deviations")
    directions = {kind: _find_common_direction(effects, margin) for kind, effects in effects_by_kind.items()}
    if len({effect.imputation for effect in effects_by_kind["removal"]}) < MIN_IMPUTATIONS:
        del directions["removal"]
    return {kind: direction for kind, direction in directions.items() if direction}


def _has_enough_patients(intervention: SupportsEffect) -> bool:
    return (
        intervention.effect.low is not None
        and intervention.effect.high is not None
        and intervention.effect.n_groups >= MIN_PATIENTS_FOR_VERDICT
    )


def _compute_interval_sign(intervention: SupportsEffect, margin: float) -> int:
    """1, -1: the whole interval is above the margin, or below it; 0: neither."""
    low, high = intervention.effect.low, intervention.effect.high
    return 0 if low is None or high is None else int(low > margin) - int(high < -margin)


def _is_within_margin(intervention: SupportsEffect, margin: float) -> bool:
    low, high = intervention.effect.low, intervention.effect.high
    return low is not None and high is not None and -margin < low and high < margin


def _find_common_direction(effects: Sequence[SupportsEffect], margin: float) -> str:
    """For or against the finding, where all of them say so; else nothing."""
    signs = {_compute_interval_sign(effect, margin) for effect in effects}
    return {1: "supports", -1: "contradicts"}.get(signs.pop(), "") if len(signs) == 1 else ""


def _select_measured(interventions: Sequence[SupportsEffect]) -> list[SupportsEffect]:
    return [intervention for intervention in interventions if intervention.effect.value is not None]


def _describe_uncounted(
    insertions: Sequence[SupportsEffect],
    removals: Sequence[SupportsEffect],
    uncounted_removals: Sequence[SupportsEffect],
) -> dict[str, str]:
    """What is said of a way that gives no word: it was not tested, or was measured and does not count."""
    descriptions = {
        kind: f"{kind} was measured in too few patients to count"
        if _select_measured(effects)
        else f"{kind} was not tested"
        for kind, effects in (("insertion", insertions), ("removal", removals))
    }
    if _select_measured(uncounted_removals):
        descriptions["removal"] = "removal was measured but does not count, because every image has this region"
    return descriptions


def _describe_other_kind(
    effects_by_kind: Mapping[str, Sequence[SupportsEffect]],
    decided_kind: str,
    margin: float,
    uncounted_reasons: Mapping[str, str],
) -> str:
    """What the other direction says."""
    other = next(kind for kind in effects_by_kind if kind != decided_kind)
    effects = effects_by_kind[other]
    if not effects:
        return uncounted_reasons[other]
    if direction := _find_common_direction(effects, margin):
        return f"{other} {direction} it"
    return (
        f"{other} does not show it" if all(_is_within_margin(e, margin) for e in effects) else f"{other} leaves it open"
    )


def _explain_no_counted_effect(insertions: Sequence[SupportsEffect], removals: Sequence[SupportsEffect]) -> str:
    insertion_effects, removal_effects = (
        [effect.effect for effect in interventions if effect.effect.value is not None]
        for interventions in (insertions, removals)
    )
    if insertion_effects:
        best = max(insertion_effects, key=lambda effect: effect.n_groups)
        return (
            best.reason
            or f"fewer than {MIN_PATIENTS_FOR_VERDICT} patients are given the region, have it, or lack it: {best.n_groups}"
        )
    if removal_effects:
        return f"there are fewer than {MIN_PATIENTS_FOR_VERDICT} patients with the region: {max(effect.n_groups for effect in removal_effects)}"
    reasons = dict.fromkeys(effect.effect.reason for effect in (*insertions, *removals) if effect.effect.reason)
    return "; ".join(reasons) or "there is no insertion or removal that counts"


def _explain_undecided(removals: Sequence[SupportsEffect], margin: float) -> str:
    signs = {_compute_interval_sign(effect, margin) for effect in removals}
    if len(signs) > 1:
        return "the fills disagree"
    if signs - {0} and len({effect.imputation for effect in removals}) < MIN_IMPUTATIONS:
        return f"removal was seen under one fill, whose own doing it may be; {MIN_IMPUTATIONS} are needed"
    return "an interval reaches over the margin: more images would tell"
