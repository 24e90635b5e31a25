"""Effect sizes of interventions, and the rule that decides whether a model relies on a region."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, isnan, log, log1p
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_schema import Conclusion, InterventionEffect
from camscope.metrics.intervals_and_p_values import compute_min_detectable_prevalence, index_groups
from camscope.metrics.jackknife_variance import MIN_EFFECTIVE_GROUPS, count_effective_groups
from camscope.metrics.mean_estimates import N_RESAMPLES, Estimate, estimate_mean
from camscope.metrics.metric_registry import FloatArray
from camscope.metrics.multiway_clustered_mean import estimate_clustered_mean
from camscope.plurals import plural

GroupLabels = Sequence[Hashable] | None
NO_EFFECT_BASELINE = 0.0, "no effect"
DEFAULT_MARGIN_SD: Final = 0.1  # standard deviations of the log odds
DEFAULT_RELIANCE_PREVALENCE: Final = 0.05  # of patients: a reliance in a smaller share may be missed
MIN_IMPUTATIONS: Final = 2  # for a removal, because the effect of one imputation may be its artifact
EFFECT_DESCRIPTIONS: Final = {
    ("insertion", "supports"): "inserting {region} raises the score",
    ("insertion", "contradicts"): "inserting {region} lowers the score",
    ("removal", "supports"): "removing {region} lowers the score",
    ("removal", "contradicts"): "removing {region} raises the score",
}  # by the kind of intervention and the direction of its effect
Effects = Sequence[InterventionEffect]


def estimate_removal_effect(
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    patients: GroupLabels = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> EstimateSummary:
    """Return by how much removing a region lowers the log odds: the mean with an interval, in standard deviations.

    The effect on an image is (f(x) - f(x without the region)) / `log_odds_std`.
    """
    effects = np.asarray(original_log_odds, np.float64) - np.asarray(edited_log_odds, np.float64)
    estimate = partial(estimate_mean, groups=patients, n_resamples=n_resamples, seed=seed)
    return _summarize_effect(effects, log_odds_std, estimate)


def estimate_insertion_effect(
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    receivers: GroupLabels = None,
    donors: GroupLabels = None,
    controls: GroupLabels = None,
) -> EstimateSummary:
    """Return by how much inserting a region raises the log odds: the mean with an interval, in standard deviations.

    The effect on an image is (f(with the region) - f(without)) / `log_odds_std`. To exclude the effect of pasting,
    "without" is the receiver with the same pixels of a control image. The interval accounts for other receivers, donors and
    controls (patients, each (N,)): see `estimate_clustered_mean`.
    """
    effects = np.asarray(edited_log_odds, np.float64) - np.asarray(original_log_odds, np.float64)
    labels = {
        "receivers": range(len(effects)) if receivers is None else receivers,
        "donors": donors,
        "controls": controls,
    }
    roles = {name: patients for name, patients in labels.items() if patients is not None}
    counts = {name: len(set(patients)) for name, patients in roles.items()}

    def estimate_mean_clustered_by_roles(values: FloatArray) -> Estimate:
        """Estimate the mean effect. Effects that share a patient in a role are not independent."""
        return replace(estimate_clustered_mean(values, *roles.values()), n_groups_by_role=tuple(counts.items()))

    return _summarize_effect(effects, log_odds_std, estimate_mean_clustered_by_roles, roles)


def build_undefined_effect(reason: str, log_odds_std: float) -> EstimateSummary:
    """Return a summary entry that holds a reason instead of a value."""
    if log_odds_std <= 0:
        reason = "the model gives every image the same score"
    return summarize_estimate(None, *NO_EFFECT_BASELINE, reason)


def _summarize_effect(
    effects: FloatArray,
    log_odds_std: float,
    estimate_effect: Callable[[FloatArray], Estimate],
    roles: Mapping[str, Sequence[Hashable]] | None = None,
) -> EstimateSummary:
    """Summarize the effects in standard deviations of the log odds. Give the reason if there are too few patients."""
    if log_odds_std <= 0 or not len(effects):
        return build_undefined_effect("no image has the region, or every image has it", log_odds_std)
    estimate = estimate_effect(effects / log_odds_std)
    reason = _describe_few_patients(roles, is_dominated=estimate.is_dominated_by_few_groups) if roles else ""
    if isnan(estimate.low):  # all effects are equal, unless there are too few patients for an interval
        estimate = replace(estimate, low=estimate.mean, high=estimate.mean)
    return summarize_estimate(estimate, *NO_EFFECT_BASELINE, reason)


def _describe_few_patients(roles: Mapping[str, Sequence[Hashable]], *, is_dominated: bool) -> str:
    """Name the roles that have too few patients, or the role that one patient dominates.
    If no role has such a problem, return "".
    """
    counts = {name: len(set(patients)) for name, patients in roles.items()}
    few = [plural(n, name.removesuffix("s")) for name, n in counts.items() if n < MIN_PATIENTS_FOR_VERDICT]
    if few:
        are = "is" if few[0].startswith("1 ") else "are"
        counts_text = f"{', '.join(few[:-1])} and {few[-1]}" if len(few) > 1 else few[0]
        return f"{MIN_PATIENTS_FOR_VERDICT} patients in each role are needed, and there {are} {counts_text}"
    if not is_dominated:
        return ""
    sizes = {name: np.bincount(index_groups(patients, len(patients))) for name, patients in roles.items()}
    worst = min(sizes, key=lambda name: count_effective_groups(sizes[name]))
    share, effective = sizes[worst].max() / sizes[worst].sum(), count_effective_groups(sizes[worst])
    return (
        f"one of the {worst} has {100 * share:.0f} % of the insertions: they weigh as {effective:.1f} {worst} of equal size, "
        f"and {MIN_EFFECTIVE_GROUPS:g} are needed for an interval"
    )


def judge_reliance(
    insertions: Effects,
    removals: Effects,
    margin: float = DEFAULT_MARGIN_SD,
    prevalence: float = DEFAULT_RELIANCE_PREVALENCE,
    *,
    uncounted_removals: Effects = (),
    must_support: bool = False,
) -> tuple[Conclusion, str]:
    """Decide whether the model relies on a region. Return the conclusion and the reason.

    - "supported": the intervals of every insertion, or of the removals under at least two imputations, lie beyond the margin
      on the same side. One of both is enough, because a marker may matter only where it is added or only where it is present.
    - "not supported": all intervals lie within the margin, and there are enough patients to observe a reliance in a share
      `prevalence` of them with 95 % certainty. An interval alone does not exclude rare large effects: if 5 % of patients have
      an effect of 3 SD, 60 % of samples of ten patients contain none of them.
    - "not decided": all other cases, such as fewer than ten patients, imputations that disagree, or intervals that include
      the margin.

    `uncounted_removals`: removals that were measured but do not count, because every image has the region. `must_support`: the
    region is the finding itself. Then "not supported" where it contradicts the finding, and "not decided" where insertion and
    removal have opposite signs.
    """
    counted = _group_counted_effects_by_kind(insertions, removals)
    uncounted_reasons = _explain_uncounted_effects(insertions, removals, uncounted_removals)
    if directions := _find_direction_by_kind(counted, margin):
        kind, direction = next(iter(directions.items()))
        change = (
            f"{EFFECT_DESCRIPTIONS[kind, direction].format(region='the region')} of the finding by more than the margin"
        )
        reason = f"{change}; {_describe_other_kind(counted, kind, margin, uncounted_reasons)}"
        if must_support and len(set(directions.values())) == 2:
            return "not decided", f"insertion and removal contradict one another: {reason}"
        if must_support and direction == "contradicts":
            return "not supported", f"these pixels count against the finding: {reason}"
        return "supported", reason
    effects = [*counted["insertion"], *counted["removal"]]
    if not effects:
        uncounted = f"; {uncounted_reasons['removal']}" if _select_effects_with_value(uncounted_removals) else ""
        return "not decided", f"{_explain_no_counted_effect(insertions, removals)}{uncounted}"
    if not all(_is_within_margin(effect, margin) for effect in effects):
        return "not decided", _explain_undecided(counted["removal"], margin)
    n_patients = max(min(item.effect.n_groups for item in kind) for kind in counted.values() if kind)
    untested_kinds = "".join(f"; {uncounted_reasons[kind]}" for kind, items in counted.items() if not items)
    if reason := explain_too_few_patients(n_patients, prevalence):
        return "not decided", f"every effect that counts lies within the margin, but {reason}{untested_kinds}"
    missable = _describe_undetectable_share(compute_min_detectable_prevalence(n_patients))
    allowed = f"with {plural(n_patients, 'patient')}, {missable}, and the config allows up to {100 * prevalence:g} %"
    return "not supported", f"every effect that counts lies within the margin{untested_kinds}; {allowed}"


def explain_too_few_patients(n_patients: int, prevalence: float) -> str:
    """Say why there are too few patients to rule out reliance on a rare region. With enough patients, return "".

    A rare reliance affects a share `prevalence` of patients.
    """
    if compute_min_detectable_prevalence(n_patients) <= prevalence:
        return ""
    are_needed = plural(compute_min_patients_to_detect(prevalence), "patient is", "patients are")
    missable = _describe_undetectable_share(compute_min_detectable_prevalence(n_patients))
    goal = f"to detect {100 * prevalence:g} %, as the config asks"
    return f"with {plural(n_patients, 'patient')}, {missable}: {are_needed} needed {goal}"


def compute_min_patients_to_detect(prevalence: float) -> int:
    """Return how many patients are needed to see a rare effect with 95 % certainty. A prevalence of 0.05 needs 59."""
    return ceil(log(0.05) / log1p(-prevalence))


def _describe_undetectable_share(share: float) -> str:
    return f"a reliance in fewer than {100 * share:.1f} % of patients could have been missed"


def select_reported_effect(
    insertions: Effects, removals: Effects, margin: float = DEFAULT_MARGIN_SD
) -> InterventionEffect | None:
    """Return the effect to report: the largest of the effects that decide the conclusion.

    These are the effects beyond the margin, else the undecided effects, else all. Effects with at least ten patients come
    first, and among them insertions. None where there is no effect.
    """
    effects_by_kind = _group_counted_effects_by_kind(insertions, removals)
    counted = [*effects_by_kind["insertion"], *effects_by_kind["removal"]]
    deciding_kind = next(iter(_find_direction_by_kind(effects_by_kind, margin)), "")
    choices = (
        effects_by_kind.get(deciding_kind, []),
        [effect for effect in counted if not _is_within_margin(effect, margin)],
        *effects_by_kind.values(),
        _select_effects_with_value(insertions),
        _select_effects_with_value(removals),
    )
    effects = next((effect for effect in choices if effect), [])
    return max(effects, key=lambda item: abs(item.effect.value or 0.0), default=None)


def _group_counted_effects_by_kind(insertions: Effects, removals: Effects) -> dict[str, list[InterventionEffect]]:
    """Return a dict from intervention kind to the effects that count.
    An effect counts if it has an interval and enough patients.
    """
    return {
        kind: [e for e in effects if e.effect.low is not None and e.effect.n_groups >= MIN_PATIENTS_FOR_VERDICT]
        for kind, effects in (("insertion", insertions), ("removal", removals))
    }


def _find_direction_by_kind(effects_by_kind: Mapping[str, Effects], margin: float) -> dict[str, str]:
    """Return a dict from intervention kind to direction. It holds the kinds whose intervals all lie beyond the margin."""
    directions = {kind: _find_common_direction(effects, margin) for kind, effects in effects_by_kind.items()}
    if len({effect.imputation for effect in effects_by_kind["removal"]}) < MIN_IMPUTATIONS:
        del directions["removal"]
    return {kind: direction for kind, direction in directions.items() if direction}


def _compute_interval_sign(effect: InterventionEffect, margin: float) -> int:
    """Return 1 for an interval above the margin, -1 for an interval below the negative margin, and 0 otherwise."""
    low, high = effect.effect.low, effect.effect.high
    return 0 if low is None or high is None else int(low > margin) - int(high < -margin)


def _is_within_margin(effect: InterventionEffect, margin: float) -> bool:
    low, high = effect.effect.low, effect.effect.high
    return low is not None and high is not None and -margin < low and high < margin


def _find_common_direction(effects: Effects, margin: float) -> str:
    """Return "supports" or "contradicts" if all effects agree in this direction. Otherwise return ""."""
    signs = {_compute_interval_sign(effect, margin) for effect in effects}
    return {1: "supports", -1: "contradicts"}.get(signs.pop(), "") if len(signs) == 1 else ""


def _select_effects_with_value(effects: Effects) -> list[InterventionEffect]:
    return [item for item in effects if item.effect.value is not None]


def _explain_uncounted_effects(insertions: Effects, removals: Effects, uncounted_removals: Effects) -> dict[str, str]:
    """Return a dict from intervention kind to the reason why the effects of this kind are missing or do not count."""
    descriptions = {
        kind: f"{kind} was measured in too few patients to count"
        if _select_effects_with_value(effects)
        else f"{kind} was not tested"
        for kind, effects in (("insertion", insertions), ("removal", removals))
    }
    if _select_effects_with_value(uncounted_removals):
        descriptions["removal"] = (
            "removal was measured but does not count, because every image of this test has such a region"
        )
    return descriptions


def _describe_other_kind(
    effects_by_kind: Mapping[str, Effects], decided_kind: str, margin: float, uncounted_reasons: Mapping[str, str]
) -> str:
    """Describe the effect of removal if insertion decided the verdict, and of insertion if removal decided it."""
    other = next(kind for kind in effects_by_kind if kind != decided_kind)
    effects = effects_by_kind[other]
    if not effects:
        return uncounted_reasons[other]
    if direction := _find_common_direction(effects, margin):
        return f"{EFFECT_DESCRIPTIONS[other, direction].format(region='it')} by more than the margin"
    is_absent = all(_is_within_margin(effect, margin) for effect in effects)
    return f"the effect of {other} lies within the margin" if is_absent else f"{other} alone decides nothing"


def _explain_no_counted_effect(insertions: Effects, removals: Effects) -> str:
    """Say why none of the insertions and removals can be counted, such as too few patients."""
    if measured := _select_effects_with_value(insertions):
        best = max(measured, key=lambda item: item.effect.n_groups).effect
        few = (
            f"fewer than {MIN_PATIENTS_FOR_VERDICT} patients are given the region, have it, or lack it: {best.n_groups}"
        )
        return best.reason.partition("; ")[0] or few
    if measured := _select_effects_with_value(removals):
        n_patients = max(item.effect.n_groups for item in measured)
        return f"there are fewer than {MIN_PATIENTS_FOR_VERDICT} patients with the region: {n_patients}"
    reasons = dict.fromkeys(item.effect.reason for item in (*insertions, *removals) if item.effect.reason)
    return "; ".join(reasons) or "there is no insertion or removal that counts"


def _explain_undecided(removals: Effects, margin: float) -> str:
    """Give the reason why the removals decide nothing: disagreement, a single imputation, or wide intervals."""
    signs = {_compute_interval_sign(effect, margin) for effect in removals}
    if len(signs) > 1:
        return "the imputations disagree"
    if signs - {0} and len({effect.imputation for effect in removals}) < MIN_IMPUTATIONS:
        return f"removal was tested with one imputation, whose artifact the effect may be; {MIN_IMPUTATIONS} are needed"
    return "an interval includes the margin: more images are needed"
