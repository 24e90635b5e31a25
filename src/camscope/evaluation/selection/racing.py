"""Race: who drops out, and when more images would change nothing any more.

At the end those are out whose quality is worse than the leader's beyond chance: paired by image, or by the mean of a group of
images (a patient), of eight at least, Student's t, and no surer than so many images can be (`least_p`). Who leads is told by
the same values, and so is one of all pairs that are
left: step by step (Holm) there are as many comparisons as pairs. Before it a candidate drops out as soon as that end can be
foreseen: a gap so far is luck in part, and the more the less those who are as good or better differ beyond chance (empirical
Bayes: Efron and Morris 1973, doi:10.1080/01621459.1973.10481350); what is left of it goes on, with Student's tails for what the
images so far know (predictive probability: Spiegelhalter et al. 1986, doi:10.1016/0197-2456(86)90003-6; Saville et al. 2014,
doi:10.1177/1740774514531352).

Standing: a candidate in a race, and what is known of it so far; Sample: an image that it is judged by.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import MissingExtraError, UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import Item
from camscope.metrics import METRICS
from camscope.metrics.statistics import Estimate, estimated, least_p
from camscope.plurals import plural
from camscope.targets import Question

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
FAITHFULNESS, LOCALISATION, ROBUSTNESS = "lerf-morf-gap", "enrichment", "stability"
RACED = (FAITHFULNESS, LOCALISATION)  # what ranks candidates; the maps of what is not robust are out


@dataclass(frozen=True)
class Sample:
    """An image as the model takes it, what is asked of it, and on the input's plane where the evidence is, if that is known."""

    item: Item
    target: Question = None
    mask: Mask | None = None
    group: Hashable = None  # a patient, a scene; None: nobody else's


@dataclass
class Standing:
    """A candidate's evidence so far. `values`: [criterion] of each image, NaN where there is no number.

    `groups`: of all images of the race, in its order; images of one are no independent witnesses. None: each is its own.
    `first`: its maps (N,*S) of the first images, by which those that are the same are told.
    """

    tool: Explainer
    values: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    images: int = 0
    out: str = ""  # why it is out of the race
    groups: Sequence[Hashable] | None = None
    first: list[Floats] = field(default_factory=list, repr=False)

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        layer = getattr(self.tool, "layer", None)
        return " · ".join(filter(None, (self.tool.title, layer if isinstance(layer, str) else None)))

    @property
    def price(self) -> float:
        """Seconds an image."""
        return self.seconds / max(1, self.images)

    def estimate(self, criterion: str) -> Estimate | None:
        """The mean of a criterion over the images that it saw."""
        try:
            values = self.values[criterion]
            groups = None if self.groups is None else self.groups[: len(values)]
            return estimated(values, groups, bounds=METRICS[criterion].bounds)
        except UndefinedError:
            return None


# of each criterion that ranks, the values of all candidates on the first images where it has any, in order
Reference = dict[str, Floats]


def reference(standings: Sequence[Standing]) -> Reference:
    """What all candidates made of the images that all of them saw: by it a value is called high or low from then on."""
    names = [name for name in RACED if name in standings[0].values]
    every = {name: np.concatenate([np.asarray(one.values[name], np.float64) for one in standings]) for name in names}
    return {name: np.sort(values[~np.isnan(values)]) for name, values in every.items()}


def quality(racing: Sequence[Standing], known: Reference) -> Floats:
    """[candidate, image]: the share of the reference's values that its own exceeds (equal ones count half), 0..1.

    Values that differ by no more than the criterion's precision are equal. The mean over criteria; 0 where it has no number
    and another candidate has one. It does not depend on who else is left.
    """
    shares = []
    for name, values in known.items():
        own = np.array([one.values[name] for one in racing], np.float64)
        rounding = METRICS[name].precision
        below = np.searchsorted(values, own - rounding, "left") + np.searchsorted(values, own + rounding, "right")
        found = np.where(np.isnan(own), 0.0, below / (2 * max(1, len(values))))
        found[:, np.isnan(own).all(0)] = np.nan
        shares.append(found)
    counts = (~np.isnan(shares)).sum(0)
    return np.asarray(np.nansum(shares, 0) / np.maximum(counts, 1), np.float64)


LEVEL = 0.05
SURE, UNLIKELY = (
    0.93,
    0.2,
)  # of what the end will say: so sure that somebody is out, so unlikely that anybody else will be
FEWEST = 8  # images, or groups: fewer tell nobody from anybody, and foresee nothing
FORESEEN = 16  # and before so many the race is not over


def left_over(standings: Sequence[Standing]) -> list[Standing]:
    """Those that are still in the race."""
    return [one for one in standings if not one.out]


def order(racing: Sequence[Standing], known: Reference) -> list[Standing]:
    """The best first."""
    if not racing:
        return []
    return [racing[i] for i in np.argsort(-quality(racing, known).mean(1), kind="stable")]


def without_losers(racing: Sequence[Standing], known: Reference, images: int) -> None:
    """Put out whoever is worse than the leader; before the end, whoever is as good as sure to be."""
    if len(racing) < 2:
        return
    leader, *rest = order(racing, known)
    lost = [one for one, chance in zip(rest, losing(leader, rest, known, images), strict=True) if chance >= SURE]
    if len(racing) - len(lost) <= 2 and not late(leader, images):
        return
    for one in lost:
        gap = _gaps(leader, one, known).mean()
        one.out = f"behind {leader.title} by {gap:.2f} of quality after {plural(one.images, 'image')}"


def decided(racing: Sequence[Standing], known: Reference, images: int) -> bool:
    """Whether nobody who is left can be expected to drop out: one is left, or all others are likely to stay."""
    if len(racing) < 2:
        return True
    leader, *rest = order(racing, known)
    if not late(leader, images) or not all(map(len, known.values())):  # of a criterion no image had a value yet
        return False
    return all(chance <= UNLIKELY for chance in losing(leader, rest, known, images))


def losing(leader: Standing, rest: Sequence[Standing], known: Reference, images: int) -> list[float]:
    """How sure it is that each of the rest, the best first, will be worse than the leader once all images are seen.

    At the end 0 or 1.
    """
    if not enough(leader, images):
        return [0.0] * len(rest)
    seen, images = witnesses(leader, images)
    gaps = np.array([_gaps(leader, one, known) for one in rest])
    behind, found = np.array([_behind(each) for each in gaps]) * sqrt(images), [0.5] * len(rest)
    if seen < FEWEST:
        return found
    to_come, real, still = images - seen, _real(gaps), True
    for place, i in enumerate(np.argsort(-behind, kind="stable")):
        level = 1 - LEVEL / 2 / comb(1 + len(rest) - place, 2)
        if not to_come:  # Holm: after the first that stays all stay
            still = still and bool(behind[i] > _special().stdtrit(seen - 1, level)) and least_p(seen) < 2 * (1 - level)
            found[i] = float(still)
        else:
            expected = behind[i] * (seen + to_come * real[i]) / images
            spread = to_come * sqrt((real[i] / seen + 1 / to_come) / images)
            short = (NormalDist().inv_cdf(level) - expected) / spread
            found[i] = float(1 - _special().stdtr(seen - 1, short))
    return found


def _real(gaps: Floats) -> Floats:
    """(rest, images), the best first -> (rest,): the share of each mean gap that is not luck.

    Estimated from how far apart the means of those who are as good or better are, beside how far luck alone would bring them.
    """
    shares = []
    for n, own in enumerate(gaps, start=1):
        better = np.vstack([np.zeros_like(own), gaps[:n]])  # the leader's gap to itself
        means = better.mean(1)
        noise = better - better.mean(0) - means[:, None] + means.mean()
        luck = (noise**2).sum() / (n * (len(own) - 1) * len(own))
        apart = max(0.0, means.var(ddof=1) - luck)
        shares.append(2 * apart / (2 * apart + own.var(ddof=1) / len(own)) if apart else 0.0)
    return np.array(shares, np.float64)


def enough(one: Standing, images: int) -> bool:
    """Whether so many images, or the groups that they are of, can tell anybody from anybody."""
    return witnesses(one, images)[1] >= FEWEST


def late(leader: Standing, images: int) -> bool:
    """Whether so many were seen that one may foresee how the race ends."""
    seen, there = witnesses(leader, images)
    return seen >= min(FORESEEN, there)


def _gaps(leader: Standing, one: Standing, known: Reference) -> Floats:
    """[image], or [group]: by how much the leader is better."""
    both = quality([leader, one], known)
    gaps = np.asarray(both[0] - both[1], np.float64)
    if leader.groups is None:
        return gaps
    numbers = {group: n for n, group in enumerate(dict.fromkeys(leader.groups[: len(gaps)]))}
    places = [numbers[group] for group in leader.groups[: len(gaps)]]
    return np.asarray(np.bincount(places, weights=gaps) / np.bincount(places), np.float64)


def witnesses(leader: Standing, images: int) -> tuple[int, int]:
    """How many independent ones were seen, and how many there are."""
    if leader.groups is None:
        return leader.images, images
    return len(set(leader.groups[: leader.images])), len(set(leader.groups))


def _behind(gaps: Floats) -> float:
    """Their mean in standard deviations; infinite where all are the same and none is 0."""
    spread = gaps.std(ddof=1) if len(gaps) > 1 else 0.0
    if spread > 0:
        return float(gaps.mean() / spread)
    return float(np.inf) if gaps.mean() > 0 and len(gaps) > 1 else 0.0


def _special() -> Any:
    try:
        return import_module("scipy.special")
    except ImportError as error:
        raise MissingExtraError("scipy", "metrics") from error
