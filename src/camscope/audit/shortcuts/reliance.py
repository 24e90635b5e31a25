"""Whether what a region says is reliance on it: the rule, and which effect it went by."""

from collections.abc import Mapping, Sequence
from math import ceil, log, log1p
from typing import Final, Literal, Protocol, TypeVar

from camscope.audit.core.subgroup_levels import FOR_A_WORD
from camscope.errors import InputError
from camscope.metrics.statistics import smallest_prevalence
from camscope.plurals import plural

Word = Literal["supported", "not supported", "not testable"]

MARGIN: Final = 0.1  # SD of log odds
PREVALENCE: Final = 0.05  # of patients: a reliance of fewer of them need not be found
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


def reliance(
    insert: Sequence[Shown],
    remove: Sequence[Shown],
    margin: float = MARGIN,
    prevalence: float = PREVALENCE,
    *,
    set_aside: Sequence[Shown] = (),
) -> tuple[Word, str]:
    """Whether the model relies on a region, and why that is said, without numbers: the effects have them.

    "supported": every insertion, or every removal under two fills at least, has its interval beyond the margin on one
    side: for the finding (above) or against it (below). One direction is enough: a marker may speak only where it is
    added, or only where it meets something else. "not supported": every interval that there is lies inside the margins, and
    the insertion or the removal was tried in so many patients that a reliance of a share `prevalence` of them would have been
    met with 95 % certainty. An interval cannot show what is rare and large: where 5 % of patients have an effect of 3 SD, 6
    of 10 samples of ten patients hold none of them. "not testable": anything else: no effect of ten patients or more, fills
    that disagree, intervals across a margin, too few patients for an absence.

    `set_aside`: removals that were measured and do not count, for every image has the region; the reason says so.
    """
    if not 0 < prevalence < 1:
        raise InputError(f"prevalence={prevalence}: expected a share of patients, between 0 and 1")
    ways, absent = _ways(insert, remove), _not_counted(insert, remove, set_aside)
    if speaking := _speaking(ways, margin):
        way, side = next(iter(speaking.items()))
        return "supported", f"{way} speaks {side} the finding; {_other(ways, way, margin, absent)}"
    known = [e for effects in ways.values() for e in effects]
    if not known:
        aside = f"; {absent['removal']}" if _measured(set_aside) else ""
        return "not testable", f"{_why_nothing(insert, remove)}{aside}"
    if all(_inside(e, margin) for e in known):
        return _absence(ways, prevalence, absent)
    return "not testable", _why_undecided(ways["removal"], margin)


def _absence(
    ways: Mapping[str, Sequence[Shown]], prevalence: float, not_counted: Mapping[str, str]
) -> tuple[Word, str]:
    """Whether so many patients would have shown a reliance, were it there."""
    patients = {way: min(one.effect.groups for one in effects) for way, effects in ways.items() if effects}
    lacking = "".join(f"; {not_counted[way]}" for way, effects in ways.items() if not effects)
    if reason := too_few_for_absence(max(patients.values()), prevalence):
        return "not testable", f"every effect that counts lies within the margin, but {reason}{lacking}"
    missed = smallest_prevalence(max(patients.values()))
    return "not supported", f"every effect that counts lies within the margin{lacking}; {_unseen(missed)}"


def too_few_for_absence(patients: int, prevalence: float) -> str:
    """Why so many patients cannot show that nothing occurs in a share `prevalence` of them; "" where they can."""
    if smallest_prevalence(patients) <= prevalence:
        return ""
    are_needed = plural(patients_for(prevalence), "patient is", "patients are")
    return f"{_unseen(smallest_prevalence(patients))}: {are_needed} needed for {100 * prevalence:g} %"


def patients_for(prevalence: float) -> int:
    """How many patients it takes to meet, with 95 % certainty, what a share `prevalence` of them has: 59 for 0.05."""
    return ceil(log(0.05) / log1p(-prevalence))


def _unseen(share: float) -> str:
    return f"a reliance in fewer than {100 * share:.1f} % of patients could have been missed"


def evidence(
    insert: Sequence[Shown],
    remove: Sequence[Shown],
    margin: float = MARGIN,
    prevalence: float = PREVALENCE,
    *,
    set_aside: Sequence[Shown] = (),
) -> tuple[Word, str]:
    """Whether a region speaks for the finding, as its own pixels should: `reliance` of which only one side is "supported".

    "not supported": also where the region speaks against the finding. "not testable": also where insertion and removal speak
    for different sides.
    """
    sides = set(_speaking(_ways(insert, remove), margin).values())
    word, reason = reliance(insert, remove, margin, prevalence, set_aside=set_aside)
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


def _told(shown: Shown) -> bool:
    return shown.effect.low is not None and shown.effect.high is not None and shown.effect.groups >= FOR_A_WORD


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


def _measured(some: Sequence[Shown]) -> list[Shown]:
    return [one for one in some if one.effect.value is not None]


def _not_counted(insert: Sequence[Shown], remove: Sequence[Shown], set_aside: Sequence[Shown]) -> dict[str, str]:
    """What is said of a way that gives no word: it was not tested, or was measured and does not count."""
    found = {
        way: f"{way} was measured in too few patients to count" if _measured(some) else f"{way} was not tested"
        for way, some in (("insertion", insert), ("removal", remove))
    }
    if _measured(set_aside):
        found["removal"] = "removal was measured but does not count, because every image has this region"
    return found


def _other(ways: Mapping[str, Sequence[Shown]], decided: str, margin: float, absent: Mapping[str, str]) -> str:
    """What the other direction says."""
    other = next(way for way in ways if way != decided)
    effects = ways[other]
    if not effects:
        return absent[other]
    if side := _side(effects, margin):
        return f"{other} speaks {side} it"
    return f"{other} does not show it" if all(_inside(e, margin) for e in effects) else f"{other} leaves it open"


def _why_nothing(insert: Sequence[Shown], remove: Sequence[Shown]) -> str:
    pasted, taken = ([one.effect for one in some if one.effect.value is not None] for some in (insert, remove))
    if pasted:
        best = max(pasted, key=lambda one: one.groups)
        return (
            best.reason or f"fewer than {FOR_A_WORD} patients are given the region, have it, or lack it: {best.groups}"
        )
    if taken:
        return f"there are fewer than {FOR_A_WORD} patients with the region: {max(one.groups for one in taken)}"
    reasons = dict.fromkeys(one.effect.reason for one in (*insert, *remove) if one.effect.reason)
    return "; ".join(reasons) or "there is no insertion or removal that counts"


def _why_undecided(removals: Sequence[Shown], margin: float) -> str:
    sides = {_beyond(effect, margin) for effect in removals}
    if len(sides) > 1:
        return "the fills disagree"
    if sides - {0} and len({effect.fill for effect in removals}) < FILLS:
        return f"removal was seen under one fill, whose own doing it may be; {FILLS} are needed"
    return "an interval reaches over the margin: more images would tell"
