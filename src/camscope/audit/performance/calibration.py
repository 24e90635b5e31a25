"""Calibration: of the images that a model gives 70 %, do 70 % show the finding?

The line that truth's log odds follow along a model's: its slope and its intercept, with intervals of patients.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.performance.auc import LOST, expect_truth, times
from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats, Mask
from camscope.metrics.cluster_variance import effective_groups
from camscope.metrics.statistics import REPLICATES, Estimate, draws, estimated, interval_of, numbered
from camscope.plurals import plural

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


PERFECT = 1000  # sets of perfectly calibrated truth that say what error chance alone makes


@dataclass(frozen=True)
class Bin:
    """Images of about one probability, for a plot: their mean `probability`, the `share` with the finding, `low`..`high`.

    The interval is Wilson's, of as many independent answers as there are `groups`.
    """

    probability: float
    share: float
    low: float
    high: float
    n: int
    groups: int


@dataclass(frozen=True)
class Calibration:
    """How far probabilities can be taken at their word.

    `brier`: the mean of (p - y)², 0 the best. `error`: expected calibration error, Σ_b n_b/N |p_b - y_b| over bins of equally
    many images. It is never 0 by chance, and too large where n is small: `by_chance` is what it would be, and
    `by_chance_high` what it would be in 1 of 40 such sets, were every probability right. `slope` (1 is best, less:
    answers too extreme), `intercept` (0 is best) of the truth's log odds on the model's, and `in_the_large`, the intercept
    where the slope is 1; None with a `reason` where no line fits.
    """

    brier: Estimate
    error: Estimate
    by_chance: float
    by_chance_high: float
    slope: Estimate | None
    intercept: Estimate | None
    in_the_large: Estimate | None
    reason: str
    bins: tuple[Bin, ...]


def calibration(
    truth: npt.ArrayLike,
    probability: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    bins: int = 10,
    *,
    log_odds: npt.ArrayLike | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Calibration:
    """(N,) bool, (N,) in 0..1 -> its calibration, intervals of patients drawn whole; NaN answers are left out and counted.

    `log_odds` (N,): the same answers before the sigmoid, which tell probabilities apart that are 1 in a computer's numbers.
    UndefinedError where no row has an answer.
    """
    expect_count(bins=bins, replicates=replicates)
    known, given = expect_truth(truth), np.asarray(probability, np.float64)
    odds = _log_odds(given) if log_odds is None else np.asarray(log_odds, np.float64)
    _expect(known, given, odds)
    names = list(groups) if groups is not None else list(range(len(given)))
    brier = estimated((given - known) ** 2, names, bounds=(0.0, 1.0))
    there = ~np.isnan(given)
    y, p, z = known[there], given[there], odds[there]
    group = numbered([name for name, one in zip(names, there, strict=True) if one], len(y))
    place = _places(p, bins)
    line = recalibrated(y, z, group, brier.undefined, replicates, seed)
    error = _error(y, p, group, place, replicates, seed, brier.undefined)
    return _made(brier, error, _by_chance(p, group, place, seed), line, _bins(y, p, group, place))


def _made(
    brier: Estimate, error: Estimate, chance: tuple[float, float], line: Recalibration, bins: tuple[Bin, ...]
) -> Calibration:
    return Calibration(brier, error, *chance, line.slope, line.intercept, line.in_the_large, line.reason, bins)


def _log_odds(probability: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(probability) - np.log1p(-probability))


def _expect(truth: Mask, probability: Floats, odds: Floats) -> None:
    if not truth.shape == probability.shape == odds.shape:
        raise InputError(f"truth {truth.shape}, answers {probability.shape} and log odds {odds.shape}; expected (N,)")
    wrong = np.flatnonzero((probability < 0) | (probability > 1))
    if len(wrong):
        raise InputError(
            f"answer {int(wrong[0])} is {probability[wrong[0]]}: expected probabilities, 0..1, NaN for none"
        )
    if (np.isnan(odds) != np.isnan(probability)).any():
        raise InputError("log odds and probabilities are of different rows: where one is NaN the other must be")


def _places(p: Floats, bins: int) -> npt.NDArray[np.int64]:
    """(N,): which of the bins of equally many rows; equal answers share one, so that there may be fewer."""
    edges = np.quantile(p, np.arange(1, bins) / bins)
    return np.unique(np.searchsorted(edges, p, side="right"), return_inverse=True)[1]


def _error(
    y: Mask,
    p: Floats,
    group: npt.NDArray[np.int64],
    place: npt.NDArray[np.int64],
    replicates: int,
    seed: int,
    lost: int,
) -> Estimate:
    """The bins are those of all rows in every draw."""
    count = int(group.max()) + 1
    gaps = np.zeros((count, int(place.max()) + 1))
    np.add.at(gaps, (group, place), p - y)
    sizes = np.bincount(group).astype(np.float64)
    drawn = []
    for part in draws(count, replicates, seed):
        weights = times(part, count)
        drawn.append(np.abs(weights @ gaps).sum(1) / (weights @ sizes))
    effective = effective_groups(sizes)
    low, high = interval_of(np.concatenate(drawn), count, effective=effective)
    error, largest = float(np.abs(gaps.sum(0)).sum() / len(y)), float(sizes.max() / sizes.sum())
    return Estimate(error, low, high, len(y), count, lost, effective=effective, largest=largest)


def _by_chance(p: Floats, group: npt.NDArray[np.int64], place: npt.NDArray[np.int64], seed: int) -> tuple[float, float]:
    """What the error would be, were all probabilities right; the images of one patient show the finding together."""
    random = np.random.default_rng(seed)
    count, bins = int(group.max()) + 1, int(place.max()) + 1
    sums = np.bincount(place, weights=p, minlength=bins)
    errors = [
        np.abs(np.bincount(place, weights=random.random(count)[group] < p, minlength=bins) - sums).sum() / len(p)
        for _ in range(PERFECT)
    ]
    return float(np.mean(errors)), float(np.quantile(errors, 0.975))


def _bins(y: Mask, p: Floats, group: npt.NDArray[np.int64], place: npt.NDArray[np.int64]) -> tuple[Bin, ...]:
    return tuple(_bin(y[place == one], p[place == one], group[place == one]) for one in range(int(place.max()) + 1))


def _bin(y: Mask, p: Floats, group: npt.NDArray[np.int64]) -> Bin:
    witnesses, share = len(np.unique(group)), float(y.mean())
    effective = effective_groups(np.unique(group, return_counts=True)[1])
    return Bin(float(p.mean()), share, *wilson(share, effective), len(y), witnesses)


def wilson(share: float, n: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % interval of a share of n independent answers; Wilson 1927, doi:10.1080/01621459.1927.10502953."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))
