"""Verdict: whether maps of a model without training are as little alike the trained one's as maps of different images are."""

from typing import NamedTuple

import numpy as np

from camscope.metrics.base import Floats

UNCHANGED = 0.95  # a map that stays this alike is the same map, whatever maps of different images have in common
REPLICATES = 2000


class Verdict(NamedTuple):
    """What one similarity says of the last step: `last`, the mean there, beside the null's interval `low`..`high`.

    `passes` None: there is nothing to compare, and so neither a pass nor a failure.
    """

    passes: bool | None
    last: float
    low: float
    high: float
    reason: str


def verdict_of(end: Floats, null: tuple[float, float, float]) -> Verdict:
    """Similarities of the last step's maps, NaN where there is none; a word needs a number of half of them at least."""
    low, _, high = null
    last = mean_of(end)
    if np.isnan(end).mean() > 0.5 or np.isnan(high):
        return Verdict(None, last, low, high, "most maps have no number: nothing to compare")
    if last >= UNCHANGED:
        return Verdict(False, last, low, high, "the map is still the same")
    words = "less alike than" if last < low else "as alike as" if last <= high else "more alike than"
    return Verdict(bool(last <= high), last, low, high, f"{words} maps of different images")


def interval_of(pairs: Floats) -> tuple[float, float, float]:
    """(N,N), NaN for none -> each image beside another one at random, the mean over images: 95 % of such means lie between
    the first and the last number; the middle one is the mean of all pairs.
    """
    known = [row[~np.isnan(row)] for row in pairs]
    known = [row for row in known if row.size]
    if not known:
        return float("nan"), float("nan"), float("nan")
    random = np.random.default_rng(0)
    drawn = np.mean([random.choice(row, REPLICATES) for row in known], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(np.mean(np.concatenate(known))), float(high)


def mean_of(values: Floats) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
