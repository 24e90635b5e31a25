"""Race: who drops out, and when more images would change nothing any more.

At the end those are out whose quality is worse than the leader's beyond chance: paired by image, Student's t, Holm over
candidates. Before it a candidate drops out as soon as that end can be foreseen: with n of N images seen, the t-value of the
end is spread by √((N - n) / n) about the one that its mean so far would give, with Student's tails for what n images know
(predictive probability: Spiegelhalter et al. 1986, doi:10.1016/0197-2456(86)90003-6; Saville et al. 2014,
doi:10.1177/1740774514531352).
"""

from collections.abc import Sequence
from importlib import import_module
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from camscope.errors import MissingExtraError
from camscope.measure.choosing.standing import Floats, Reference, Standing, quality

LEVEL = 0.05
SURE = 0.925  # of what the end will say


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
    for one, chance in zip(rest, losing(leader, rest, known, images), strict=True):
        if chance >= SURE:
            gap = _gaps(leader, one, known).mean()
            one.out = f"behind {leader.title} by {gap:.2f} of quality after {one.images} images"


def decided(racing: Sequence[Standing], known: Reference, images: int) -> bool:
    """Whether nobody who is left can be expected to drop out: one is left, or all others are as good as sure to stay."""
    if len(racing) < 2:
        return True
    leader, *rest = order(racing, known)
    return all(chance <= 1 - SURE for chance in losing(leader, rest, known, images))


def losing(leader: Standing, rest: Sequence[Standing], known: Reference, images: int) -> list[float]:
    """How sure it is that each of the rest will be worse than the leader once all images are seen; at the end 0 or 1."""
    seen = leader.images
    behind = np.array([_behind(_gaps(leader, one, known)) for one in rest]) * sqrt(images)
    found, still = np.full(len(rest), 0.5), True
    for place, i in enumerate(np.argsort(-behind, kind="stable")):
        level = 1 - LEVEL / 2 / (len(rest) - place)
        if seen >= images:  # Holm: after the first that stays all stay
            still = still and bool(behind[i] > _special().stdtrit(seen - 1, level))
            found[i] = float(still)
        elif seen > 1:
            short = (NormalDist().inv_cdf(level) - behind[i]) / sqrt((images - seen) / seen)
            found[i] = 1 - _special().stdtr(seen - 1, short)
    return [float(chance) for chance in found]


def _gaps(leader: Standing, one: Standing, known: Reference) -> Floats:
    """[image]: by how much the leader is better."""
    both = quality([leader, one], known)
    return np.asarray(both[0] - both[1], np.float64)


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
