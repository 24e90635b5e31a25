"""Effect sizes of interventions on regions, in standard deviations of the model's log odds."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.errors import InputError, UndefinedError
from camscope.metrics.cluster_variance import MIN_EFFECTIVE_GROUPS, count_effective_groups
from camscope.metrics.clustered_mean import estimate_clustered_mean
from camscope.metrics.statistics import MIN_GROUPS_FOR_INTERVAL, N_RESAMPLES, Estimate, estimate_mean, index_groups
from camscope.plurals import plural

GroupLabels = Sequence[Hashable] | None


@dataclass(frozen=True)
class EffectInterval:
    """An effect and its interval, as plain numbers."""

    value: float | None
    low: float | None
    high: float | None
    n_groups: int
    reason: str


@dataclass(frozen=True)
class StandardizedEffect:
    """The effect of an intervention on the log odds of the finding; positive where the region supports the finding.

    Attributes:
        name: The intervention, as "remove marker" or "insert marker".
        imputation: What replaces the region; None for insertions.
        estimate: The mean effect in units of `log_odds_std`; None where it is undefined.
        log_odds_std: The standard deviation of the log odds over the audited images; 0 if unknown.
        n_values: The number of images with the region, or of insertions.
        undefined_reason: Why there is no estimate.
        too_few_reason: For insertions, which roles have too few patients for a verdict.

    """

    name: str
    imputation: str | None
    estimate: Estimate | None
    log_odds_std: float
    n_values: int
    undefined_reason: str | None = None
    too_few_reason: str = ""

    @property
    def effect(self) -> EffectInterval:
        """The effect in the form that `judge_reliance` needs."""
        if self.estimate is None:
            return EffectInterval(None, None, None, 0, self.undefined_reason or "")
        low, high = (None if isnan(end) else end for end in (self.estimate.low, self.estimate.high))
        reason = self.too_few_reason or self.estimate.describe_dominance("patient")
        return EffectInterval(self.estimate.mean, low, high, self.estimate.n_groups, reason)

    def __str__(self) -> str:
        return (
            f"{self.name}{f' ({self.imputation})' if self.imputation else ''}: {self.undefined_reason or self.estimate}"
        )


def compute_log_odds_std(log_odds: ArrayLike) -> float:
    """Return the standard deviation of the log odds (N,) of the audited images; UndefinedError where all are equal."""
    values = np.asarray(log_odds, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise InputError(f"log odds {values.shape}: expected (N,) finite numbers")
    if len(values) < 2 or values.max() == values.min():
        raise UndefinedError("the log odds do not differ between the images, so that effects have no unit")
    return float(values.std(ddof=1))


def estimate_removal_effect(
    region: str,
    imputation: str,
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    groups: GroupLabels = None,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> StandardizedEffect:
    """Return the mean of (f(x) - f(x without the region)) / `log_odds_std` over N images, with its interval by patient."""
    effects = np.asarray(original_log_odds, np.float64) - np.asarray(edited_log_odds, np.float64)
    return _build_effect(
        f"remove {region}",
        imputation,
        effects,
        log_odds_std,
        lambda values: estimate_mean(values, groups, n_resamples=n_resamples, seed=seed),
    )


def estimate_insertion_effect(
    region: str,
    original_log_odds: ArrayLike,
    edited_log_odds: ArrayLike,
    log_odds_std: float,
    groups: GroupLabels = None,
    *,
    donors: GroupLabels = None,
    controls: GroupLabels = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> StandardizedEffect:
    """Return the mean of (f(with the region) - f(without)) / `log_odds_std` over N insertions.

    To exclude the effect of pasting, "without" is the receiver with the same pixels of a control image.

    Args:
        region: The name of the region.
        original_log_odds: The log odds (N,) without the region.
        edited_log_odds: The log odds (N,) with the region of a donor.
        log_odds_std: The unit of effects.
        groups: The patients (N,) of the receivers.
        donors: The patients (N,) of the donors.
        controls: The patients (N,) of the control images.
        n_resamples: The number of bootstrap resamples where only the receivers are given.
        seed: The seed of the bootstrap.

    Returns:
        The effect. Its interval accounts for other receivers, donors and controls: see `estimate_clustered_mean`.

    """
    effects = np.asarray(edited_log_odds, np.float64) - np.asarray(original_log_odds, np.float64)
    other_groups = [kind for kind in (donors, controls) if kind is not None]
    receivers = range(len(effects)) if groups is None else groups
    roles = {"receivers": receivers, "donors": donors, "controls": controls}
    counts = {name: len(set(some)) for name, some in roles.items() if some is not None}

    def estimate(values: NDArray[np.float64]) -> Estimate:
        if not other_groups:
            return estimate_mean(values, groups, n_resamples=n_resamples, seed=seed)
        return replace(
            estimate_clustered_mean(values, receivers, *other_groups), n_groups_by_role=tuple(counts.items())
        )

    insertion = _build_effect(f"insert {region}", None, effects, log_odds_std, estimate)
    is_dominated = insertion.estimate is not None and insertion.estimate.is_dominated_by_few_groups
    return replace(
        insertion,
        too_few_reason=_describe_too_few_patients(counts) or (_describe_role_dominance(roles) if is_dominated else ""),
    )


def build_untested_effect(
    name: str, imputation: str | None, reason: str, log_odds_std: float = 0.0
) -> StandardizedEffect:
    """Return the effect of an intervention that is impossible."""
    return StandardizedEffect(name, imputation, None, log_odds_std, 0, reason)


def _describe_too_few_patients(patient_counts: Mapping[str, int]) -> str:
    short_counts = [
        plural(count, name.removesuffix("s"))
        for name, count in patient_counts.items()
        if count < MIN_PATIENTS_FOR_VERDICT
    ]
    return (
        f"{MIN_PATIENTS_FOR_VERDICT} patients of each kind are needed, and there are {' and '.join(short_counts)}"
        if short_counts
        else ""
    )


def _describe_role_dominance(groups_by_role: Mapping[str, GroupLabels]) -> str:
    """Return which role is dominated by one patient."""
    sizes = {
        name: np.bincount(index_groups(some, len(some))) for name, some in groups_by_role.items() if some is not None
    }
    worst = min(sizes, key=lambda name: count_effective_groups(sizes[name]))
    share, effective = sizes[worst].max() / sizes[worst].sum(), count_effective_groups(sizes[worst])
    return (
        f"one of the {worst} has {100 * share:.0f} % of the insertions: they weigh as {effective:.1f} {worst} of equal size, "
        f"and {MIN_EFFECTIVE_GROUPS:g} are needed for an interval"
    )


def _build_effect(
    name: str,
    imputation: str | None,
    effects: NDArray[np.float64],
    log_odds_std: float,
    estimator: Callable[[NDArray[np.float64]], Estimate],
) -> StandardizedEffect:
    if not (isfinite(log_odds_std) and log_odds_std > 0):
        raise InputError(f"log_odds_std={log_odds_std}: expected the standard deviation of log odds, above 0")
    if not len(effects):
        return build_untested_effect(name, imputation, "no image has the region, or every image has it", log_odds_std)
    if not np.isfinite(effects).all():
        return build_untested_effect(name, imputation, "a prediction is not finite", log_odds_std)
    estimate = estimator(effects / log_odds_std)
    if estimate.n_groups >= MIN_GROUPS_FOR_INTERVAL and isnan(estimate.low) and not estimate.is_dominated_by_few_groups:
        estimate = replace(
            estimate, low=estimate.mean, high=estimate.mean
        )  # all equal: the verdict checks the number of patients
    return StandardizedEffect(name, imputation, estimate, log_odds_std, estimate.n_values)
