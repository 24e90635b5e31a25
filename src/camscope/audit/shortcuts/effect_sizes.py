"""How much a region says, in standard deviations of the model's log odds."""

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
    """An `DifferenceInterval` as plain numbers."""

    value: float | None
    low: float | None
    high: float | None
    n_groups: int
    reason: str


@dataclass(frozen=True)
class StandardizedEffect:
    """What one intervention does to the log odds of the finding, in units of `log_odds_std`, positive where the region speaks for it.

    `name`: "remove token", "insert token"; `imputation`: what was put in its place, None of an insertion. `estimate`: over n
    images with the region, or pairs of image and donor; None where there is none, and `undefined_reason` then says why.
    `log_odds_std`: the standard deviation of log odds over the audited images, 0 where it is not known. `too_few_reason`: of an insertion, of
    whom there are fewer patients than a word needs.
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
        """As `judge_reliance` takes it."""
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
    """(N,) log odds of the audited images -> their standard deviation; UndefinedError where they do not differ."""
    values = np.asarray(log_odds, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise InputError(f"answers {values.shape}: expected (N,) finite log odds")
    if len(values) < 2 or values.max() == values.min():
        raise UndefinedError(
            "the model's answers do not differ over the images: there is no unit to measure effects in"
        )
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
    """(f(x) - f(x without the region)) / spread, mean over the images (N,) that have it, patients drawn whole."""
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
    """(f(with a donor's region) - f(without)) / spread, mean over the images (N,) that it was pasted into; groups: theirs.

    Without: the image as it is, or, so that pasting itself is no part of it, with the same pixels of another without the region.
    `donors`, `controls` (N,): whose region, and whose pixels without it. One donor's region in a hundred images says what that
    one region does: the interval is of other receivers, donors and others at once, see `estimate_clustered_mean`.
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
    """An intervention that could not be made."""
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
    """Of which kind of patients one has most of the insertions."""
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
        return build_untested_effect(name, imputation, "no image has the region, or lacks it", log_odds_std)
    if not np.isfinite(effects).all():
        return build_untested_effect(name, imputation, "an answer is not finite", log_odds_std)
    estimate = estimator(effects / log_odds_std)
    if estimate.n_groups >= MIN_GROUPS_FOR_INTERVAL and isnan(estimate.low) and not estimate.is_dominated_by_few_groups:
        estimate = replace(
            estimate, low=estimate.mean, high=estimate.mean
        )  # the same for all: of how many patients, `reliance` asks
    return StandardizedEffect(name, imputation, estimate, log_odds_std, estimate.n_values)
