"""The line that truth's log odds follow along a model's: its slope and its intercept, with intervals of patients."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.answers.ranking import LOST, times
from camscope.metrics.base import Floats, Mask
from camscope.metrics.clusters import effective_groups
from camscope.metrics.statistics import Estimate, draws, interval_of
from camscope.wording import plural

STEPS = 40  # of Newton's method, which needs 5 to 10
CLOSE = 1e-9  # of a step in standard deviations of the answers: nothing is left to gain


@dataclass(frozen=True)
class Recalibration:
    """Logistic recalibration: log odds of truth = `intercept` + `slope` · answer, and `in_the_large` + 1 · answer."""

    slope: Estimate | None
    intercept: Estimate | None
    in_the_large: Estimate | None
    reason: str = ""


def recalibrated(
    y: Mask, z: Floats, group: npt.NDArray[np.int64], undefined: int, replicates: int, seed: int
) -> Recalibration:
    """(N,) bool, (N,) log odds, (N,) numbers of patients -> the lines of greatest likelihood."""
    if not np.isfinite(z).all():
        return _none(
            f"{plural(int(np.isinf(z).sum()), 'probability is', 'probabilities are')} 0 or 1: give their log odds"
        )
    whole = np.ones((1, len(y)))
    if not _overlapping(y, z, whole)[0]:
        return _none("answers part the classes, or there is one class only: any steeper line fits better")
    count = int(group.max()) + 1
    drawn = [_lines(y, z, times(part, count)[:, group]) for part in draws(count, replicates, seed, len(y))]
    lines = np.concatenate(drawn)
    lost = int(np.isnan(lines).any(1).sum())
    if lost > LOST * replicates:
        return _none(f"in {lost} of {plural(replicates, 'draw')} of patients the answers part the classes")
    point = _lines(y, z, whole)[0]
    if np.isnan(point).any():
        return _none("the answers are too extreme: no line is found")
    known = lines[~np.isnan(lines).any(1)]
    sizes = np.bincount(group)
    effective, largest = effective_groups(sizes), float(sizes.max() / sizes.sum())
    slope, intercept, in_the_large = (
        Estimate(
            float(point[i]),
            *interval_of(known[:, i], count, effective=effective),
            len(y),
            count,
            undefined,
            effective=effective,
            largest=largest,
        )
        for i in range(3)
    )
    return Recalibration(slope, intercept, in_the_large)


def _none(reason: str) -> Recalibration:
    return Recalibration(None, None, None, reason)


def _overlapping(y: Mask, z: Floats, weights: Floats) -> npt.NDArray[np.bool_]:
    """(r,): whether each class reaches into the other, without which no line has the greatest likelihood."""
    low, high = zip(*(_ends(z, (weights > 0) & one) for one in (y, ~y)), strict=True)
    return np.asarray((low[0] < high[1]) & (low[1] < high[0]))


def _ends(z: Floats, there: Mask) -> tuple[Floats, Floats]:
    """(r,), (r,): the lowest and the highest answer of those there; of none, the highest is below the lowest."""
    return np.where(there, z, np.inf).min(1), np.where(there, z, -np.inf).max(1)


def _lines(y: Mask, z: Floats, weights: Floats) -> Floats:
    """(r,N) -> (r,3): slope, intercept, intercept where the slope is 1; NaN where there is none."""
    made = np.full((len(weights), 3), np.nan)
    fits = _overlapping(y, z, weights)
    used = weights[fits]
    centre, spread = z.mean(), z.std()
    slope, intercept = _newton(y, (z - centre) / spread, used)
    made[fits] = np.stack([slope / spread, intercept - slope * centre / spread, _offset(y, z, used)], 1)
    return made


def _newton(y: Mask, x: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """(N,) standardised -> (r,), (r,): slope and intercept, by Newton's method; NaN where it does not end."""
    slope, intercept = np.zeros(len(weights)), _logit(weights @ y / weights.sum(1))
    moved = np.full(len(weights), np.inf)
    for _ in range(STEPS):
        if not (moved > CLOSE).any():
            break
        share = _sigmoid(slope[:, None] * x + intercept[:, None])
        left, bend = weights * (y - share), weights * share * (1 - share)
        a, b, c = bend.sum(1), bend @ x, bend @ (x * x)
        u, v = left.sum(1), left @ x
        size = a * c - b * b
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.stack([(a * v - b * u) / size, (c * u - b * v) / size])
        moved = np.abs(steps).max(0)
        steps /= np.maximum(1, moved)  # no step of more than one standard deviation: from far off Newton's overshoots
        slope, intercept = slope + steps[0], intercept + steps[1]
    lost = ~(moved <= CLOSE)
    slope[lost] = np.nan
    return slope, intercept


def _offset(y: Mask, z: Floats, weights: Floats) -> Floats:
    """(r,): the intercept that makes the probabilities of all rows add up to the positives; NaN where it is not found."""
    total, intercept = weights @ y, np.zeros(len(weights))
    step = np.full(len(weights), np.inf)
    for _ in range(STEPS):
        if not (np.abs(step) > CLOSE).any():
            break
        share = _sigmoid(z + intercept[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            step = (total - (weights * share).sum(1)) / (weights * share * (1 - share)).sum(1)
        intercept += np.clip(step, -1, 1)
    return np.where(np.abs(step) <= CLOSE, intercept, np.nan)


def _logit(share: Floats) -> Floats:
    return np.asarray(np.log(share) - np.log1p(-share))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))
