"""Calibration of probabilities: Brier score, expected calibration error, reliability bins and logistic recalibration."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.core.schema import ReliabilityPoint
from camscope.audit.core.summary_values import round_significant
from camscope.audit.performance.auc import MAX_UNDEFINED_SHARE, IntArray, check_truth, count_draws
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

MAX_NEWTON_STEPS = 40  # Newton's method needs 5 to 10
STEP_TOLERANCE = 1e-9  # of a step, in standard deviations of the log odds
N_PERFECT_SIMULATIONS = 1000  # simulated truths of perfect calibration


@dataclass(frozen=True)
class Calibration:
    """The calibration of probabilities.

    `brier` is the mean of (p - y)². `calibration_error` is Σ_b n_b/N |p_b - y_b| over bins of equally many images; it is never
    0, and `chance_error` is its mean for simulated truths for which every probability is right. `slope` and `intercept` are of
    the line from the model's log odds to those of the truth: 1 and 0 are best, and a smaller slope means too extreme. Where no
    line fits they are None, for the `reason`. `bins` has the points of the reliability diagram, with Wilson's intervals.
    """

    brier: Estimate
    calibration_error: Estimate
    chance_error: float
    slope: Estimate | None
    intercept: Estimate | None
    reason: str
    bins: tuple[ReliabilityPoint, ...]


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
    """Return the calibration of probabilities (N,) for a truth (N,), with intervals by patient; NaN rows are left out.

    `log_odds` (N,) are those of the probabilities, and also distinguish probabilities that round to 1. `groups` (N,) are the
    patients; by default each image is its own group. UndefinedError if no row has a probability.
    """
    check_positive_integer(n_bins=n_bins, n_resamples=n_resamples)
    truths, probabilities = check_truth(truth), np.asarray(probability, np.float64)
    scores = _to_log_odds(probabilities) if log_odds is None else np.asarray(log_odds, np.float64)
    _check_probabilities(truths, probabilities, scores)
    names = list(groups) if groups is not None else list(range(len(probabilities)))
    brier = estimate_mean((probabilities - truths) ** 2, names, bounds=(0.0, 1.0))
    has_value = ~np.isnan(probabilities)
    y, p, z = truths[has_value], probabilities[has_value], scores[has_value]
    group = index_groups([names[int(i)] for i in np.flatnonzero(has_value)], len(y))
    bin_index = _assign_bins(p, n_bins)
    lines = _fit_recalibration(y, z, group, brier.n_undefined, n_resamples, seed)
    slope, intercept, reason = (None, None, lines) if isinstance(lines, str) else (*lines, "")
    error = _estimate_calibration_error(y, p, group, bin_index, n_resamples, seed, brier.n_undefined)
    chance_error, bins = _simulate_chance_error(p, group, bin_index, seed), _build_bins(y, p, group, bin_index)
    return Calibration(brier, error, chance_error, slope, intercept, reason, bins)


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


def _fit_recalibration(
    y: Mask, z: FloatArray, group: IntArray, n_undefined: int, n_resamples: int, seed: int
) -> tuple[Estimate, Estimate] | str:
    """Return slope and intercept of the line of maximum likelihood through log odds (N,), or why no line fits."""
    if not np.isfinite(z).all():
        n_infinite = plural(int(np.isinf(z).sum()), "probability is", "probabilities are")
        return f"{n_infinite} 0 or 1: give their log odds"
    whole = np.ones((1, len(y)))
    if not _has_class_overlap(y, z, whole)[0]:
        return "answers part the classes, or there is one class only: any steeper line fits better"
    count = int(group.max()) + 1
    draws = iter_bootstrap_indices(count, n_resamples, seed, len(y))
    lines = np.concatenate([_fit_lines(y, z, count_draws(part, count)[:, group]) for part in draws])
    valid_lines = lines[~np.isnan(lines).any(1)]
    n_undefined_lines = len(lines) - len(valid_lines)
    if n_undefined_lines > MAX_UNDEFINED_SHARE * n_resamples:
        return f"in {n_undefined_lines} of {plural(n_resamples, 'draw')} of patients the answers part the classes"
    point = _fit_lines(y, z, whole)[0]
    if np.isnan(point).any():
        return "the answers are too extreme: no line is found"
    slope, intercept = (
        _build_estimate(float(value), resampled, group, n_undefined)
        for value, resampled in zip(point, valid_lines.T, strict=True)
    )
    return slope, intercept


def _build_estimate(value: float, resampled_values: FloatArray, group: IntArray, n_undefined: int) -> Estimate:
    sizes = np.bincount(group)
    effective = count_effective_groups(sizes)
    low, high = compute_bootstrap_interval(resampled_values, len(sizes), n_effective_groups=effective)
    share = float(sizes.max() / sizes.sum())
    return Estimate(
        value,
        low,
        high,
        len(group),
        len(sizes),
        n_undefined,
        n_effective_groups=effective,
        largest_group_share=share,
    )


def _has_class_overlap(y: Mask, z: FloatArray, weights: FloatArray) -> npt.NDArray[np.bool_]:
    """Return for each resample (r,) whether the classes overlap, without which the slope is infinite."""
    masks = [(weights > 0) & is_class for is_class in (y, ~y)]
    low = [np.where(mask, z, np.inf).min(1) for mask in masks]
    high = [np.where(mask, z, -np.inf).max(1) for mask in masks]
    return np.asarray((low[0] < high[1]) & (low[1] < high[0]))


def _fit_lines(y: Mask, z: FloatArray, weights: FloatArray) -> FloatArray:
    """Return slope and intercept (r,2) for weights (r,N) of the rows; NaN where no line fits."""
    lines = np.full((len(weights), 2), np.nan)
    can_fit = _has_class_overlap(y, z, weights)
    center, scale = z.mean(), z.std()
    slope, intercept = _fit_standardized_lines(y, (z - center) / scale, weights[can_fit])
    lines[can_fit] = np.stack([slope / scale, intercept - slope * center / scale], 1)
    return lines


def _fit_standardized_lines(y: Mask, x: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return slope and intercept (r,) by Newton's method; NaN where it does not converge."""
    slope, intercept = np.zeros(len(weights)), _to_log_odds(weights @ y / weights.sum(1))
    step_size = np.full(len(weights), np.inf)
    for _ in range(MAX_NEWTON_STEPS):
        if not (step_size > STEP_TOLERANCE).any():
            break
        share = 0.5 * (1 + np.tanh(0.5 * (slope[:, None] * x + intercept[:, None])))
        residual, curvature = weights * (y - share), weights * share * (1 - share)
        a, b, c = curvature.sum(1), curvature @ x, curvature @ (x * x)
        u, v = residual.sum(1), residual @ x
        determinant = a * c - b * b
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.stack([(a * v - b * u) / determinant, (c * u - b * v) / determinant])
        step_size = np.abs(steps).max(0)
        steps /= np.maximum(1, step_size)  # larger steps overshoot
        slope, intercept = slope + steps[0], intercept + steps[1]
    slope[~(step_size <= STEP_TOLERANCE)] = np.nan
    return slope, intercept


def _assign_bins(p: FloatArray, n_bins: int) -> IntArray:
    """Return the bin (N,) of each row; equal probabilities share a bin, so that there may be fewer."""
    edges = np.quantile(p, np.arange(1, n_bins) / n_bins)
    return np.unique(np.searchsorted(edges, p, side="right"), return_inverse=True)[1]


def _estimate_calibration_error(
    y: Mask, p: FloatArray, group: IntArray, bin_index: IntArray, n_resamples: int, seed: int, n_undefined: int
) -> Estimate:
    """Return the expected calibration error; resamples use the bins of all rows."""
    count = int(group.max()) + 1
    gaps = np.zeros((count, int(bin_index.max()) + 1))
    np.add.at(gaps, (group, bin_index), p - y)
    sizes = np.bincount(group).astype(np.float64)
    resampled = []
    for part in iter_bootstrap_indices(count, n_resamples, seed):
        weights = count_draws(part, count)
        resampled.append(np.abs(weights @ gaps).sum(1) / (weights @ sizes))
    error = float(np.abs(gaps.sum(0)).sum() / len(y))
    return _build_estimate(error, np.concatenate(resampled), group, n_undefined)


def _simulate_chance_error(p: FloatArray, group: IntArray, bin_index: IntArray, seed: int) -> float:
    """Return the mean error if all probabilities were right; images of one patient have the finding together."""
    random = np.random.default_rng(seed)
    count, bins = int(group.max()) + 1, int(bin_index.max()) + 1
    sums = np.bincount(bin_index, weights=p, minlength=bins)
    errors = [
        np.abs(np.bincount(bin_index, weights=random.random(count)[group] < p, minlength=bins) - sums).sum() / len(p)
        for _ in range(N_PERFECT_SIMULATIONS)
    ]
    return float(np.mean(errors))


def _build_bins(y: Mask, p: FloatArray, group: IntArray, bin_index: IntArray) -> tuple[ReliabilityPoint, ...]:
    points = []
    for index in range(int(bin_index.max()) + 1):
        is_inside = bin_index == index
        share = float(y[is_inside].mean())
        effective = count_effective_groups(np.unique(group[is_inside], return_counts=True)[1])
        values = (float(p[is_inside].mean()), share, *compute_wilson_interval(share, effective))
        predicted, observed, low, high = (round_significant(value) or 0.0 for value in values)
        points.append(
            ReliabilityPoint(predicted=predicted, observed=observed, low=low, high=high, n_images=int(is_inside.sum()))
        )
    return tuple(points)


def compute_wilson_interval(share: float, n: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the 95 % interval of a share of n independent images; Wilson 1927, doi:10.1080/01621459.1927.10502953."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))
