"""The rule that decides from effect sizes whether a model relies on a region."""

from collections.abc import Mapping, Sequence
from math import ceil, log, log1p
from typing import Final, Literal, Protocol, TypeVar

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.errors import InputError
from camscope.metrics.statistics import compute_min_detectable_prevalence
from camscope.plurals import plural

Conclusion = Literal["supported", "not supported", "not testable"]

DEFAULT_MARGIN_SD: Final = 0.1  # standard deviations of the log odds
DEFAULT_RELIANCE_PREVALENCE: Final = 0.05  # of patients: a reliance in a smaller share may be missed
MIN_IMPUTATIONS: Final = 2  # for a removal, because the effect of one imputation may be its artifact


class SupportsInterval(Protocol):
    """An effect with its interval and its number of patients; None where undefined, for the `reason`."""

    @property
    def value(self) -> float | None:
        """The effect."""

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""

    @property
    def n_groups(self) -> int:
        """The number of patients."""

    @property
    def reason(self) -> str:
        """Why the interval is missing."""


class SupportsEffect(Protocol):
    """An intervention, as `judge_reliance` needs it."""

    @property
    def imputation(self) -> str | None:
        """What replaced the region."""

    @property
    def effect(self) -> SupportsInterval:
        """The effect of the intervention."""


EffectT = TypeVar("EffectT", bound=SupportsEffect)


def judge_reliance(
    insertions: Sequence[SupportsEffect],
    removals: Sequence[SupportsEffect],
    margin: float = DEFAULT_MARGIN_SD,
    prevalence: float = DEFAULT_RELIANCE_PREVALENCE,
    *,
    uncounted_removals: Sequence[SupportsEffect] = (),
) -> tuple[Conclusion, str]:
    """Return whether the model relies on a region, and the reason in words.

    - "supported": the intervals of every insertion, or of the removals under at least two imputations, lie beyond the margin
      on the same side. One of both is enough, because a marker may matter only where it is added or only where it is present.
    - "not supported": all intervals lie within the margin, and there are enough patients to observe a reliance in a share
      `prevalence` of them with 95 % certainty. An interval alone does not exclude rare large effects: if 5 % of patients have
      an effect of 3 SD, 60 % of samples of ten patients contain none of them.
    - "not testable": all other cases, such as fewer than ten patients, imputations that disagree, or intervals that include
      the margin.

    `uncounted_removals`: removals that were measured but do not count, because every image has the region.
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
    """Decide whether the number of patients suffices to claim that there is no reliance."""
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
    """Return why the patients are too few to exclude a reliance in a share `prevalence` of them; "" where they suffice."""
    if compute_min_detectable_prevalence(n_patients) <= prevalence:
        return ""
    are_needed = plural(compute_min_patients_for_absence(prevalence), "patient is", "patients are")
    return f"{_describe_missable_share(compute_min_detectable_prevalence(n_patients))}: {are_needed} needed for {100 * prevalence:g} %"


def compute_min_patients_for_absence(prevalence: float) -> int:
    """Return the number of patients needed to observe a share `prevalence` with 95 % certainty: 59 for 0.05."""
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
    """Return whether a region supports the finding, as the pixels of the finding should.

    The rule is that of `judge_reliance`, with two exceptions. A region that contradicts the finding is "not supported", and
    insertion and removal with opposite signs are "not testable".
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
    """Return the largest of the effects that decide: those beyond the margin, else those that are undecided, else all.

    Effects with at least ten patients come first, and among them insertions. None where there is no effect.
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
    """Return the effects with enough patients, by kind."""
    return {
        "insertion": [e for e in insertions if _has_enough_patients(e)],
        "removal": [e for e in removals if _has_enough_patients(e)],
    }


def _find_direction_by_kind(effects_by_kind: Mapping[str, Sequence[SupportsEffect]], margin: float) -> dict[str, str]:
    """Return the direction of each kind whose intervals all lie beyond the margin; insertion before removal."""
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
    """Return 1 where the whole interval lies above the margin, -1 where it lies below the negative margin, else 0."""
    low, high = intervention.effect.low, intervention.effect.high
    return 0 if low is None or high is None else int(low > margin) - int(high < -margin)


def _is_within_margin(intervention: SupportsEffect, margin: float) -> bool:
    low, high = intervention.effect.low, intervention.effect.high
    return low is not None and high is not None and -margin < low and high < margin


def _find_common_direction(effects: Sequence[SupportsEffect], margin: float) -> str:
    """Return "supports" or "contradicts" where all effects agree, else ""."""
    signs = {_compute_interval_sign(effect, margin) for effect in effects}
    return {1: "supports", -1: "contradicts"}.get(signs.pop(), "") if len(signs) == 1 else ""


def _select_measured(interventions: Sequence[SupportsEffect]) -> list[SupportsEffect]:
    return [intervention for intervention in interventions if intervention.effect.value is not None]


def _describe_uncounted(
    insertions: Sequence[SupportsEffect],
    removals: Sequence[SupportsEffect],
    uncounted_removals: Sequence[SupportsEffect],
) -> dict[str, str]:
    """Return for each kind without a conclusion whether it was not tested or does not count."""
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
    """Return what the other kind of intervention shows."""
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
        return "the imputations disagree"
    if signs - {0} and len({effect.imputation for effect in removals}) < MIN_IMPUTATIONS:
        return f"removal was tested with one imputation, whose artifact the effect may be; {MIN_IMPUTATIONS} are needed"
    return "an interval includes the margin: more images are needed"
