"""How much a region says, in standard deviations of the model's log odds, and whether that is reliance on it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import InputError, UndefinedError
from camscope.metrics.statistics import REPLICATES, Estimate, estimated, numbered

Word = Literal["supported", "not supported", "not testable"]
Groups = Sequence[Hashable] | None

MARGIN: Final = 0.1  # SD of log odds
PATIENTS: Final = 10  # below, an interval of a bootstrap says more of its few patients than of the model
FILLS: Final = 2  # that a removal is seen under: one fill's effect may be its own


class Interval(Protocol):
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
    def groups(self) -> int:
        """Patients."""

    @property
    def reason(self) -> str:
        """Why there is none."""


class Shown(Protocol):
    """What `reliance` looks at."""

    @property
    def fill(self) -> str | None:
        """What was put in the region's place."""

    @property
    def effect(self) -> Interval:
        """What it did."""


S = TypeVar("S", bound=Shown)


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
    `spread`: the standard deviation of log odds over the audited images, 0 where it is not known.
    """

    name: str
    fill: str | None
    estimate: Estimate | None
    spread: float
    n: int
    undefined: str | None = None

    @property
    def effect(self) -> Span:
        """As `reliance` takes it."""
        if self.estimate is None:
            return Span(None, None, None, 0, self.undefined or "")
        return Span(self.estimate.mean, self.estimate.low, self.estimate.high, self.estimate.groups, "")

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
    return _effect(f"remove {region}", fill, effects, spread, groups, replicates, seed)


def insertion(
    region: str,
    clean: ArrayLike,
    changed: ArrayLike,
    spread: float,
    groups: Groups = None,
    *,
    donors: Groups = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Effect:
    """(f(with a donor's region) - f(without)) / spread, mean over the images (N,) that it was pasted into; groups: theirs.

    Without: the image as it is, or, so that pasting itself is no part of it, with the same pixels of another without the region.
    `donors` (N,): the patients of the donors. One donor's region in a hundred images says what that one region does: the
    estimate's groups are the patients who were given it, or the donors' where those are fewer.
    """
    effects = np.asarray(changed, np.float64) - np.asarray(clean, np.float64)
    made = _effect(f"insert {region}", None, effects, spread, groups, replicates, seed)
    if donors is None or made.estimate is None:
        return made
    givers = len(np.unique(numbered(donors, len(effects))))
    return replace(made, estimate=replace(made.estimate, groups=min(made.estimate.groups, givers)))


def untested(name: str, fill: str | None, reason: str, spread: float = 0.0) -> Effect:
    """An intervention that could not be made."""
    return Effect(name, fill, None, spread, 0, reason)


def reliance(insert: Sequence[Shown], remove: Sequence[Shown], margin: float = MARGIN) -> tuple[Word, str]:
    """Whether the model relies on a region, and why that is said, without numbers: the effects have them.

    "supported": every insertion, or every removal under two fills at least, has its interval beyond the margin on one
    side: for the finding (above) or against it (below). One direction is enough: a marker may speak only where it is
    added, or only where it meets something else. "not supported": every interval that there is lies inside the margins.
    "not testable": anything else: no effect of ten patients or more, fills that disagree, intervals across a margin.
    """
    ways = _ways(insert, remove)
    if speaking := _speaking(ways, margin):
        way, side = next(iter(speaking.items()))
        return "supported", f"{way} speaks {side} the finding; {_other(ways, way, margin)}"
    known = [e for effects in ways.values() for e in effects]
    if not known:
        return "not testable", _why_nothing([*insert, *remove])
    if all(_inside(e, margin) for e in known):
        lacking = [way for way, effects in ways.items() if not effects]
        return (
            "not supported",
            f"every effect lies within the margin{f'; {lacking[0]} was not tested' if lacking else ''}",
        )
    return "not testable", _why_undecided(ways["removal"], margin)


def evidence(insert: Sequence[Shown], remove: Sequence[Shown], margin: float = MARGIN) -> tuple[Word, str]:
    """Whether a region speaks for the finding, as its own pixels should: `reliance` of which only one side is "supported".

    "not supported": also where the region speaks against the finding. "not testable": also where insertion and removal speak
    for different sides.
    """
    sides = set(_speaking(_ways(insert, remove), margin).values())
    word, reason = reliance(insert, remove, margin)
    if len(sides) == 2:
        return "not testable", f"insertion and removal contradict one another: {reason}"
    if sides == {"against"}:
        return "not supported", f"these pixels speak against it: {reason}"
    return word, reason


def deciding(insert: Sequence[S], remove: Sequence[S], margin: float = MARGIN) -> S | None:
    """Of the effects that gave the word the largest: of those that speak, else of those that leave it open, else of all.

    Effects of ten patients or more come first, of these insertions; None where there is no effect.
    """
    ways = _ways(insert, remove)
    every = [*ways["insertion"], *ways["removal"]]
    spoken = next(iter(_speaking(ways, margin)), "")
    choices = (
        ways.get(spoken, []),
        [one for one in every if not _inside(one, margin)],
        *ways.values(),
        *([one for one in some if one.effect.value is not None] for some in (insert, remove)),
    )
    some = next((one for one in choices if one), [])
    return max(some, key=lambda one: abs(one.effect.value or 0.0), default=None)


def _ways(insert: Sequence[S], remove: Sequence[S]) -> dict[str, list[S]]:
    """What enough patients vouch for."""
    return {"insertion": [e for e in insert if _told(e)], "removal": [e for e in remove if _told(e)]}


def _speaking(ways: Mapping[str, Sequence[Shown]], margin: float) -> dict[str, str]:
    """Which ways have all their intervals beyond the margin, and for which side they speak; insertion before removal."""
    if not 0 < margin < float("inf"):
        raise InputError(f"margin={margin}: expected a positive number of standard deviations")
    sides = {way: _side(effects, margin) for way, effects in ways.items()}
    if len({one.fill for one in ways["removal"]}) < FILLS:
        del sides["removal"]
    return {way: side for way, side in sides.items() if side}


def _effect(
    name: str, fill: str | None, effects: NDArray[np.float64], spread: float, groups: Groups, replicates: int, seed: int
) -> Effect:
    if not (isfinite(spread) and spread > 0):
        raise InputError(f"spread={spread}: expected the standard deviation of log odds, above 0")
    if not len(effects):
        return untested(name, fill, "no image has the region, or lacks it", spread)
    if not np.isfinite(effects).all():
        return untested(name, fill, "an answer is not finite", spread)
    made = estimated(effects / spread, groups, replicates=replicates, seed=seed)
    if not (isfinite(made.low) and isfinite(made.high)):
        return Effect(name, fill, None, spread, made.n, "one patient only: there is no interval")
    return Effect(name, fill, made, spread, made.n)


def _told(shown: Shown) -> bool:
    return shown.effect.low is not None and shown.effect.high is not None and shown.effect.groups >= PATIENTS


def _beyond(shown: Shown, margin: float) -> int:
    """1, -1: the whole interval is above the margin, or below it; 0: neither."""
    low, high = shown.effect.low, shown.effect.high
    return 0 if low is None or high is None else int(low > margin) - int(high < -margin)


def _inside(shown: Shown, margin: float) -> bool:
    low, high = shown.effect.low, shown.effect.high
    return low is not None and high is not None and -margin < low and high < margin


def _side(effects: Sequence[Shown], margin: float) -> str:
    """For or against the finding, where all of them say so; else nothing."""
    sides = {_beyond(effect, margin) for effect in effects}
    return {1: "for", -1: "against"}.get(sides.pop(), "") if len(sides) == 1 else ""


def _other(ways: Mapping[str, Sequence[Shown]], decided: str, margin: float) -> str:
    """What the other direction says."""
    other = next(way for way in ways if way != decided)
    effects = ways[other]
    if not effects:
        return f"{other} was not tested"
    if side := _side(effects, margin):
        return f"{other} speaks {side} it"
    return f"{other} does not show it" if all(_inside(e, margin) for e in effects) else f"{other} leaves it open"


def _why_nothing(effects: Sequence[Shown]) -> str:
    known = [one.effect.groups for one in effects if one.effect.value is not None]
    if known:
        return f"there are fewer than ten patients with the region, or without it: {max(known)}"
    reasons = dict.fromkeys(one.effect.reason for one in effects if one.effect.reason)
    return "; ".join(reasons) or "no intervention was made"


def _why_undecided(removals: Sequence[Shown], margin: float) -> str:
    sides = {_beyond(effect, margin) for effect in removals}
    if len(sides) > 1:
        return "the fills disagree"
    if sides - {0} and len({effect.fill for effect in removals}) < FILLS:
        return "removal was seen under one fill, whose own doing it may be; two are needed"
    return "an interval reaches over the margin: more images would tell"
