"""How much a region says, in standard deviations of the model's log odds."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.audit.core.subgroup_levels import FOR_A_WORD
from camscope.errors import InputError, UndefinedError
from camscope.metrics.cluster_variance import MIN_EFFECTIVE, effective_groups
from camscope.metrics.clustered_mean import multiway
from camscope.metrics.statistics import MIN_GROUPS, REPLICATES, Estimate, estimated, numbered
from camscope.plurals import plural

Groups = Sequence[Hashable] | None


@dataclass(frozen=True)
class Span:
    """An `Interval` as plain numbers."""

    value: float | None
    low: float | None
    high: float | None
    groups: int
    reason: str


@dataclass(frozen=True)
class Effect:
    """What one intervention does to the log odds of the finding, in units of `spread`, positive where the region speaks for it.

    `name`: "remove token", "insert token"; `fill`: what was put in its place, None of an insertion. `estimate`: over n
    images with the region, or pairs of image and donor; None where there is none, and `undefined` then says why.
    `spread`: the standard deviation of log odds over the audited images, 0 where it is not known. `few`: of an insertion, of
    whom there are fewer patients than a word needs.
    """

    name: str
    fill: str | None
    estimate: Estimate | None
    spread: float
    n: int
    undefined: str | None = None
    few: str = ""

    @property
    def effect(self) -> Span:
        """As `reliance` takes it."""
        if self.estimate is None:
            return Span(None, None, None, 0, self.undefined or "")
        low, high = (None if isnan(end) else end for end in (self.estimate.low, self.estimate.high))
        reason = self.few or self.estimate.dominance("patient")
        return Span(self.estimate.mean, low, high, self.estimate.groups, reason)

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.fill})' if self.fill else ''}: {self.undefined or self.estimate}"


def spread(answers: ArrayLike) -> float:
    """(N,) log odds of the audited images -> their standard deviation; UndefinedError where they do not differ."""
    values = np.asarray(answers, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise InputError(f"answers {values.shape}: expected (N,) finite log odds")
    if len(values) < 2 or values.max() == values.min():
        raise UndefinedError(
            "the model's answers do not differ over the images: there is no unit to measure effects in"
        )
    return float(values.std(ddof=1))


def removal(
    region: str,
    fill: str,
    clean: ArrayLike,
    changed: ArrayLike,
    spread: float,
    groups: Groups = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Effect:
    """(f(x) - f(x without the region)) / spread, mean over the images (N,) that have it, patients drawn whole."""
    effects = np.asarray(clean, np.float64) - np.asarray(changed, np.float64)
    return _effect(
        f"remove {region}",
        fill,
        effects,
        spread,
        lambda values: estimated(values, groups, replicates=replicates, seed=seed),
    )


def insertion(
    region: str,
    clean: ArrayLike,
    changed: ArrayLike,
    spread: float,
    groups: Groups = None,
    *,
    donors: Groups = None,
    others: Groups = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Effect:
    """(f(with a donor's region) - f(without)) / spread, mean over the images (N,) that it was pasted into; groups: theirs.

    Without: the image as it is, or, so that pasting itself is no part of it, with the same pixels of another without the region.
    `donors`, `others` (N,): whose region, and whose pixels without it. One donor's region in a hundred images says what that
    one region does: the interval is of other receivers, donors and others at once, see `multiway`.
    """
    effects = np.asarray(changed, np.float64) - np.asarray(clean, np.float64)
    kinds = [kind for kind in (donors, others) if kind is not None]
    own = range(len(effects)) if groups is None else groups
    roles = {"receivers": own, "donors": donors, "third patients": others}
    counts = {name: len(set(some)) for name, some in roles.items() if some is not None}

    def estimate(values: NDArray[np.float64]) -> Estimate:
        if not kinds:
            return estimated(values, groups, replicates=replicates, seed=seed)
        return replace(multiway(values, own, *kinds), roles=tuple(counts.items()))

    made = _effect(f"insert {region}", None, effects, spread, estimate)
    dominated = made.estimate is not None and made.estimate.is_dominated
    return replace(made, few=_few(counts) or (_dominance(roles) if dominated else ""))


def untested(name: str, fill: str | None, reason: str, spread: float = 0.0) -> Effect:
    """An intervention that could not be made."""
    return Effect(name, fill, None, spread, 0, reason)


def _few(counts: Mapping[str, int]) -> str:
    lacking = [plural(count, name.removesuffix("s")) for name, count in counts.items() if count < FOR_A_WORD]
    return f"{FOR_A_WORD} patients of each kind are needed, and there are {' and '.join(lacking)}" if lacking else ""


def _dominance(roles: Mapping[str, Groups]) -> str:
    """Of which kind of patients one has most of the insertions."""
    sizes = {name: np.bincount(numbered(some, len(some))) for name, some in roles.items() if some is not None}
    worst = min(sizes, key=lambda name: effective_groups(sizes[name]))
    share, effective = sizes[worst].max() / sizes[worst].sum(), effective_groups(sizes[worst])
    return (
        f"one of the {worst} has {100 * share:.0f} % of the insertions: they weigh as {effective:.1f} {worst} of equal size, "
        f"and {MIN_EFFECTIVE:g} are needed for an interval"
    )


def _effect(
    name: str,
    fill: str | None,
    effects: NDArray[np.float64],
    spread: float,
    estimate: Callable[[NDArray[np.float64]], Estimate],
) -> Effect:
    if not (isfinite(spread) and spread > 0):
        raise InputError(f"spread={spread}: expected the standard deviation of log odds, above 0")
    if not len(effects):
        return untested(name, fill, "no image has the region, or lacks it", spread)
    if not np.isfinite(effects).all():
        return untested(name, fill, "an answer is not finite", spread)
    made = estimate(effects / spread)
    if made.groups >= MIN_GROUPS and isnan(made.low) and not made.is_dominated:
        made = replace(made, low=made.mean, high=made.mean)  # the same for all: of how many patients, `reliance` asks
    return Effect(name, fill, made, spread, made.n)
