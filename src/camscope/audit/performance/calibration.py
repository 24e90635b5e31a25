"""Calibration of probabilities: Brier score, expected calibration error, reliability bins and logistic recalibration."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.performance.auc import MAX_UNDEFINED_SHARE, check_truth, count_draws
from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray, Mask
from camscope.metrics.cluster_variance import count_effective_groups
from camscope.metrics.statistics import (
    N_RESAMPLES,
    Estimate,
    compute_bootstrap_interval,
    estimate_mean,
    index_groups,
    iter_bootstrap_indices,
)
from camscope.plurals import plural

MAX_NEWTON_STEPS = 40  # of Newton's method, which needs 5 to 10
STEP_TOLERANCE = 1e-9  # of a step in standard deviations of the answers: nothing is left to gain


@dataclass(frozen=True)
class Recalibration:
    """Logistic recalibration: log odds of truth = `intercept` + `slope` · answer, and `in_the_large` + 1 · answer."""

    slope: Estimate | None
    intercept: Estimate | None
    in_the_large: Estimate | None
    reason: str = ""


def fit_recalibration(
    y: Mask, z: FloatArray, group: npt.NDArray[np.int64], n_undefined: int, n_resamples: int, seed: int
) -> Recalibration:
    """(N,) bool, (N,) log odds, (N,) numbers of patients -> the lines of greatest likelihood."""
    if not np.isfinite(z).all():
        return _build_undefined_recalibration(
            f"{plural(int(np.isinf(z).sum()), 'probability is', 'probabilities are')} 0 or 1: give their log odds"
        )
    whole = np.ones((1, len(y)))
    if not _has_class_overlap(y, z, whole)[0]:
        return _build_undefined_recalibration(
            "answers part the classes, or there is one class only: any steeper line fits better"
        )
    count = int(group.max()) + 1
    fits = [
        _fit_lines(y, z, count_draws(part, count)[:, group])
        for part in iter_bootstrap_indices(count, n_resamples, seed, len(y))
    ]
    lines = np.concatenate(fits)
    n_undefined_lines = int(np.isnan(lines).any(1).sum())
    if n_undefined_lines > MAX_UNDEFINED_SHARE * n_resamples:
        return _build_undefined_recalibration(
            f"in {n_undefined_lines} of {plural(n_resamples, 'draw')} of patients the answers part the classes"
        )
    point = _fit_lines(y, z, whole)[0]
    if np.isnan(point).any():
        return _build_undefined_recalibration("the answers are too extreme: no line is found")
    valid_lines = lines[~np.isnan(lines).any(1)]
    sizes = np.bincount(group)
    effective, largest = count_effective_groups(sizes), float(sizes.max() / sizes.sum())
    slope, intercept, in_the_large = (
        Estimate(
            float(point[i]),
            *compute_bootstrap_interval(valid_lines[:, i], count, n_effective_groups=effective),
            len(y),
            count,
            n_undefined,
            n_effective_groups=effective,
            largest_group_share=largest,
        )
        for i in range(3)
    )
    return Recalibration(slope, intercept, in_the_large)


def _build_undefined_recalibration(reason: str) -> Recalibration:
    return Recalibration(None, None, None, reason)


def _has_class_overlap(y: Mask, z: FloatArray, weights: FloatArray) -> npt.NDArray[np.bool_]:
    """(r,): whether each class reaches into the other, without which no line has the greatest likelihood."""
    low, high = zip(*(_compute_range(z, (weights > 0) & is_class) for is_class in (y, ~y)), strict=True)
    return np.asarray((low[0] < high[1]) & (low[1] < high[0]))


def _compute_range(z: FloatArray, mask: Mask) -> tuple[FloatArray, FloatArray]:
    """(r,), (r,): the lowest and the highest answer of those there; of none, the highest is below the lowest."""
    return np.where(mask, z, np.inf).min(1), np.where(mask, z, -np.inf).max(1)


def _fit_lines(y: Mask, z: FloatArray, weights: FloatArray) -> FloatArray:
    """(r,N) -> (r,3): slope, intercept, intercept where the slope is 1; NaN where there is none."""
    lines = np.full((len(weights), 3), np.nan)
    can_fit = _has_class_overlap(y, z, weights)
    fit_weights = weights[can_fit]
    center, scale = z.mean(), z.std()
    slope, intercept = _fit_slope_and_intercept(y, (z - center) / scale, fit_weights)
    lines[can_fit] = np.stack([slope / scale, intercept - slope * center / scale, _fit_offset(y, z, fit_weights)], 1)
    return lines


def _fit_slope_and_intercept(y: Mask, x: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(N,) standardized -> (r,), (r,): slope and intercept, by Newton's method; NaN where it does not end."""
    slope, intercept = np.zeros(len(weights)), _logit(weights @ y / weights.sum(1))
    moved = np.full(len(weights), np.inf)
    for _ in range(MAX_NEWTON_STEPS):
        if not (moved > STEP_TOLERANCE).any():
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
    lost = ~(moved <= STEP_TOLERANCE)
    slope[lost] = np.nan
    return slope, intercept


def _fit_offset(y: Mask, z: FloatArray, weights: FloatArray) -> FloatArray:
    """(r,): the intercept that makes the probabilities of all rows add up to the positives; NaN where it is not found."""
    total, intercept = weights @ y, np.zeros(len(weights))
    step = np.full(len(weights), np.inf)
    for _ in range(MAX_NEWTON_STEPS):
        if not (np.abs(step) > STEP_TOLERANCE).any():
            break
        share = _sigmoid(z + intercept[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            step = (total - (weights * share).sum(1)) / (weights * share * (1 - share)).sum(1)
        intercept += np.clip(step, -1, 1)
    return np.where(np.abs(step) <= STEP_TOLERANCE, intercept, np.nan)


def _logit(share: FloatArray) -> FloatArray:
    return np.asarray(np.log(share) - np.log1p(-share))


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


N_PERFECT_SIMULATIONS = 1000  # sets of perfectly calibrated truth that say what error chance alone makes


@dataclass(frozen=True)
class CalibrationBin:
    """Images of about one probability, for a plot.

    Their mean `mean_probability`, the `positive_share` with the finding, `low`..`high`.

    The interval is Wilson's, of as many independent answers as there are `n_groups`.
    """

    mean_probability: float
    positive_share: float
    low: float
    high: float
    n_images: int
    n_groups: int


@dataclass(frozen=True)
class Calibration:
    """How far probabilities can be taken at their word.

    `brier`: the mean of (p - y)², 0 the best. `calibration_error`: expected calibration error, Σ_b n_b/N |p_b - y_b|
    over bins of equally
    many images. It is never 0 by chance, and too large where n is small: `chance_error` is what it would be, and
    `chance_error_high` what it would be in 1 of 40 such sets, were every probability right. `slope` (1 is best, less:
    answers too extreme), `intercept` (0 is best) of the truth's log odds on the model's, and `in_the_large`, the intercept
    where the slope is 1; None with a `reason` where no line fits.
    """

    brier: Estimate
    calibration_error: Estimate
    chance_error: float
    chance_error_high: float
    slope: Estimate | None
    intercept: Estimate | None
    in_the_large: Estimate | None
    reason: str
    bins: tuple[CalibrationBin, ...]


def compute_calibration(
    truth: npt.ArrayLike,
    probability: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    n_bins: int = 10,
    *,
    log_odds: npt.ArrayLike | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Calibration:
    """(N,) bool, (N,) in 0..1 -> its calibration, intervals of patients drawn whole; NaN answers are left out and counted.

    `log_odds` (N,): the same answers before the sigmoid, which tell probabilities apart that are 1 in a computer's numbers.
    UndefinedError where no row has an answer.
    """
    check_positive_integer(n_bins=n_bins, n_resamples=n_resamples)
    truths, probabilities = check_truth(truth), np.asarray(probability, np.float64)
    scores = _to_log_odds(probabilities) if log_odds is None else np.asarray(log_odds, np.float64)
    _check_probabilities(truths, probabilities, scores)
    names = list(groups) if groups is not None else list(range(len(probabilities)))
    brier = estimate_mean((probabilities - truths) ** 2, names, bounds=(0.0, 1.0))
    has_value = ~np.isnan(probabilities)
    y, p, z = truths[has_value], probabilities[has_value], scores[has_value]
    group = index_groups([name for name, is_known in zip(names, has_value, strict=True) if is_known], len(y))
    bin_index = _assign_bins(p, n_bins)
    recalibration = fit_recalibration(y, z, group, brier.n_undefined, n_resamples, seed)
    error = _estimate_calibration_error(y, p, group, bin_index, n_resamples, seed, brier.n_undefined)
    return _build_calibration(
        brier,
        error,
        _simulate_chance_errors(p, group, bin_index, seed),
        recalibration,
        _build_bins(y, p, group, bin_index),
    )


def _build_calibration(
    brier: Estimate,
    calibration_error: Estimate,
    chance_errors: tuple[float, float],
    recalibration: Recalibration,
    bins: tuple[CalibrationBin, ...],
) -> Calibration:
    return Calibration(
        brier,
        calibration_error,
        *chance_errors,
        recalibration.slope,
        recalibration.intercept,
        recalibration.in_the_large,
        recalibration.reason,
        bins,
    )


def _to_log_odds(probability: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(probability) - np.log1p(-probability))


def _check_probabilities(truth: Mask, probability: FloatArray, log_odds: FloatArray) -> None:
    if not truth.shape == probability.shape == log_odds.shape:
        raise InputError(
            f"truth {truth.shape}, answers {probability.shape} and log odds {log_odds.shape}; expected (N,)"
        )
    wrong = np.flatnonzero((probability < 0) | (probability > 1))
    if len(wrong):
        raise InputError(
            f"answer {int(wrong[0])} is {probability[wrong[0]]}: expected probabilities, 0..1, NaN for none"
        )
    if (np.isnan(log_odds) != np.isnan(probability)).any():
        raise InputError("log odds and probabilities are of different rows: where one is NaN the other must be")


def _assign_bins(p: FloatArray, n_bins: int) -> npt.NDArray[np.int64]:
    """(N,): which of the bins of equally many rows; equal answers share one, so that there may be fewer."""
    edges = np.quantile(p, np.arange(1, n_bins) / n_bins)
    return np.unique(np.searchsorted(edges, p, side="right"), return_inverse=True)[1]


def _estimate_calibration_error(
    y: Mask,
    p: FloatArray,
    group: npt.NDArray[np.int64],
    bin_index: npt.NDArray[np.int64],
    n_resamples: int,
    seed: int,
    n_undefined: int,
) -> Estimate:
    """The bins are those of all rows in every draw."""
    count = int(group.max()) + 1
    gaps = np.zeros((count, int(bin_index.max()) + 1))
    np.add.at(gaps, (group, bin_index), p - y)
    sizes = np.bincount(group).astype(np.float64)
    drawn = []
    for part in iter_bootstrap_indices(count, n_resamples, seed):
        weights = count_draws(part, count)
        drawn.append(np.abs(weights @ gaps).sum(1) / (weights @ sizes))
    effective = count_effective_groups(sizes)
    low, high = compute_bootstrap_interval(np.concatenate(drawn), count, n_effective_groups=effective)
    error, largest = float(np.abs(gaps.sum(0)).sum() / len(y)), float(sizes.max() / sizes.sum())
    return Estimate(
        error, low, high, len(y), count, n_undefined, n_effective_groups=effective, largest_group_share=largest
    )


def _simulate_chance_errors(
    p: FloatArray, group: npt.NDArray[np.int64], bin_index: npt.NDArray[np.int64], seed: int
) -> tuple[float, float]:
    """What the error would be, were all probabilities right; the images of one patient show the finding together."""
    random = np.random.default_rng(seed)
    count, bins = int(group.max()) + 1, int(bin_index.max()) + 1
    sums = np.bincount(bin_index, weights=p, minlength=bins)
    errors = [
        np.abs(np.bincount(bin_index, weights=random.random(count)[group] < p, minlength=bins) - sums).sum() / len(p)
        for _ in range(N_PERFECT_SIMULATIONS)
    ]
    return float(np.mean(errors)), float(np.quantile(errors, 0.975))


def _build_bins(
    y: Mask, p: FloatArray, group: npt.NDArray[np.int64], bin_index: npt.NDArray[np.int64]
) -> tuple[CalibrationBin, ...]:
    return tuple(
        _build_bin(y[bin_index == index], p[bin_index == index], group[bin_index == index])
        for index in range(int(bin_index.max()) + 1)
    )


def _build_bin(y: Mask, p: FloatArray, group: npt.NDArray[np.int64]) -> CalibrationBin:
    n_groups, share = len(np.unique(group)), float(y.mean())
    effective = count_effective_groups(np.unique(group, return_counts=True)[1])
    return CalibrationBin(float(p.mean()), share, *compute_wilson_interval(share, effective), len(y), n_groups)


def compute_wilson_interval(share: float, n: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % interval of a share of n independent answers; Wilson 1927, doi:10.1080/01621459.1927.10502953."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))
