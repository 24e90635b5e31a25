"""Effect sizes of interventions on regions, in standard deviations of the model's log odds."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import isnan

import numpy as np
from numpy.typing import ArrayLike

from camscope.audit.core.schema import EstimateSummary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_values import summarize_estimate
from camscope.metrics.base import FloatArray
from camscope.metrics.cluster_variance import MIN_EFFECTIVE_GROUPS, count_effective_groups
from camscope.metrics.clustered_mean import estimate_clustered_mean
from camscope.metrics.statistics import N_RESAMPLES, Estimate, estimate_mean, index_groups
from camscope.plurals import plural

GroupLabels = Sequence[Hashable] | None
NO_EFFECT_BASELINE = 0.0, "no effect"


def estimate_removal_effect(
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    patients: GroupLabels = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> EstimateSummary:
    """Return the mean of (f(x) - f(x without the region)) / `log_odds_std` over N images, with its interval by patient."""
    effects = np.asarray(original_log_odds, np.float64) - np.asarray(edited_log_odds, np.float64)

    def estimate(values: FloatArray) -> Estimate:
        return estimate_mean(values, patients, n_resamples=n_resamples, seed=seed)

    return _summarize_effect(effects, log_odds_std, estimate)


def estimate_insertion_effect(
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    receivers: GroupLabels = None,
    donors: GroupLabels = None,
    controls: GroupLabels = None,
) -> EstimateSummary:
    """Return the mean of (f(with the region) - f(without)) / `log_odds_std` over N insertions.

    To exclude the effect of pasting, "without" is the receiver with the same pixels of a control image. The interval accounts
    for other receivers, donors and controls (patients, each (N,)): see `estimate_clustered_mean`.
    """
    effects = np.asarray(edited_log_odds, np.float64) - np.asarray(original_log_odds, np.float64)
    labels = {
        "receivers": range(len(effects)) if receivers is None else receivers,
        "donors": donors,
        "controls": controls,
    }
    roles = {name: patients for name, patients in labels.items() if patients is not None}
    counts = {name: len(set(patients)) for name, patients in roles.items()}

    def estimate(values: FloatArray) -> Estimate:
        return replace(estimate_clustered_mean(values, *roles.values()), n_groups_by_role=tuple(counts.items()))

    return _summarize_effect(effects, log_odds_std, estimate, roles)


def build_undefined_effect(reason: str, log_odds_std: float) -> EstimateSummary:
    """Return the effect of an intervention that is impossible."""
    if log_odds_std <= 0:
        reason = "the model gives every image the same score"
    return summarize_estimate(None, *NO_EFFECT_BASELINE, reason)


def _summarize_effect(
    effects: FloatArray,
    log_odds_std: float,
    estimate_effect: Callable[[FloatArray], Estimate],
    roles: Mapping[str, Sequence[Hashable]] | None = None,
) -> EstimateSummary:
    if log_odds_std <= 0 or not len(effects):
        return build_undefined_effect("no image has the region, or every image has it", log_odds_std)
    estimate = estimate_effect(effects / log_odds_std)
    reason = _describe_few_patients(roles, is_dominated=estimate.is_dominated_by_few_groups) if roles else ""
    if isnan(estimate.low):  # all effects are equal, unless there are too few patients for an interval
        estimate = replace(estimate, low=estimate.mean, high=estimate.mean)
    return summarize_estimate(estimate, *NO_EFFECT_BASELINE, reason)


def _describe_few_patients(roles: Mapping[str, Sequence[Hashable]], *, is_dominated: bool) -> str:
    """Return which roles have too few patients, or which role is dominated by one patient. "" for neither."""
    counts = {name: len(set(patients)) for name, patients in roles.items()}
    few = [plural(n, name.removesuffix("s")) for name, n in counts.items() if n < MIN_PATIENTS_FOR_VERDICT]
    if few:
        return f"{MIN_PATIENTS_FOR_VERDICT} patients of each kind are needed, and there are {' and '.join(few)}"
    if not is_dominated:
        return ""
    sizes = {name: np.bincount(index_groups(patients, len(patients))) for name, patients in roles.items()}
    worst = min(sizes, key=lambda name: count_effective_groups(sizes[name]))
    share, effective = sizes[worst].max() / sizes[worst].sum(), count_effective_groups(sizes[worst])
    return (
        f"one of the {worst} has {100 * share:.0f} % of the insertions: they weigh as {effective:.1f} {worst} of equal size, "
        f"and {MIN_EFFECTIVE_GROUPS:g} are needed for an interval"
    )
