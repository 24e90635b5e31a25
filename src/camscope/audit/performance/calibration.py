"""Calibration of probabilities: Brier score, expected calibration error, reliability diagram and recalibration."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from camscope.audit.core.convert_to_summary_entries import round_significant, summarize_estimate
from camscope.audit.core.stage_result_schema import EstimateSummary, ReliabilityPoint
from camscope.audit.performance.auc import MAX_UNDEFINED_SHARE, IntArray, count_group_draws
from camscope.metrics.intervals_and_p_values import compute_bootstrap_interval, index_groups, iter_bootstrap_indices
from camscope.metrics.jackknife_variance import count_effective_groups
from camscope.metrics.mean_estimates import N_RESAMPLES, Estimate, estimate_mean
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import plural

MAX_NEWTON_STEPS = 40  # Newton's method needs 5 to 10
STEP_TOLERANCE = 1e-9  # of a step, in standard deviations of the log odds
N_PERFECT_SIMULATIONS = 1000  # simulated truths of perfect calibration


def compute_calibration_and_reliability_points(
    truth: Mask,
    log_odds: FloatArray,
    groups: Sequence[Hashable] | None = None,
    n_bins: int = 10,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> tuple[dict[str, EstimateSummary], tuple[ReliabilityPoint, ...]]:
    """Return the calibration estimates by name, and the points of the reliability diagram.

    `groups` (N,) are the patients. By default each image is its own group.

    - brier: the mean of (p - y)².
    - calibration_error: Σ_b n_b/N |p_b - y_b| over bins of equally many images. It is never 0. Its baseline is the mean for
      simulated truths for which every probability is right.
    - slope, intercept: the line from the model's log odds to those of the truth. A slope below 1 means too extreme.
    """
    probability, group, prevalence = 1 / (1 + np.exp(-log_odds)), index_groups(groups, len(truth)), float(truth.mean())
    brier = estimate_mean((probability - truth) ** 2, groups, bounds=(0.0, 1.0))
    bin_index = _assign_bins(probability, n_bins)
    error = _estimate_calibration_error(truth, probability, group, bin_index, n_resamples, seed)
    chance_error = _simulate_perfect_calibration_error(probability, group, bin_index, seed)
    lines = _estimate_recalibration_slope_and_intercept(truth, log_odds, group, n_resamples, seed)
    slope, intercept, reason = (None, None, lines) if isinstance(lines, str) else (*lines, "")
    estimates = {
        "brier": summarize_estimate(brier, prevalence * (1 - prevalence), "the prevalence for all"),
        "calibration_error": summarize_estimate(error, chance_error, "perfect calibration, by chance"),
        "slope": summarize_estimate(slope, 1.0, "perfect calibration", reason),
        "intercept": summarize_estimate(intercept, 0.0, "perfect calibration", reason),
    }
    return estimates, _build_reliability_points(truth, probability, group, bin_index)


def _estimate_recalibration_slope_and_intercept(
    truth: Mask, log_odds: FloatArray, group: IntArray, n_resamples: int, seed: int
) -> tuple[Estimate, Estimate] | str:
    """Fit a logistic recalibration. Return its slope and intercept, or the reason why no line can be fitted."""
    whole = np.ones((1, len(truth)))
    if not _find_resamples_with_class_overlap(truth, log_odds, whole)[0]:
        if truth.all() or not truth.any():
            return "all images are of one class: no line fits"
        return "the log odds separate both classes completely: no slope is the best"
    count = int(group.max()) + 1
    draws = iter_bootstrap_indices(count, n_resamples, seed, len(truth))
    lines = np.concatenate(
        [_fit_slopes_and_intercepts(truth, log_odds, count_group_draws(part, count)[:, group]) for part in draws]
    )
    valid_lines = lines[~np.isnan(lines).any(1)]
    n_undefined_lines = len(lines) - len(valid_lines)
    if n_undefined_lines > MAX_UNDEFINED_SHARE * n_resamples:
        return (
            f"in {n_undefined_lines} of {plural(n_resamples, 'resample')} the log odds separate both classes completely"
        )
    point = _fit_slopes_and_intercepts(truth, log_odds, whole)[0]
    if np.isnan(point).any():
        return "the log odds are too extreme: no line fits"
    slope, intercept = (
        _build_estimate(float(value), resampled, group) for value, resampled in zip(point, valid_lines.T, strict=True)
    )
    return slope, intercept


def _build_estimate(value: float, resampled_values: FloatArray, group: IntArray) -> Estimate:
    sizes = np.bincount(group)
    effective, share = count_effective_groups(sizes), float(sizes.max() / sizes.sum())
    interval = compute_bootstrap_interval(resampled_values, len(sizes), n_effective_groups=effective)
    counts = len(group), len(sizes)
    return Estimate(value, *interval, *counts, n_effective_groups=effective, largest_group_share=share)


def _find_resamples_with_class_overlap(truth: Mask, log_odds: FloatArray, weights: FloatArray) -> npt.NDArray[np.bool_]:
    """Return for each resample whether the scores of the two classes overlap. Without overlap, the slope would be infinite."""
    masks = [(weights > 0) & is_class for is_class in (truth, ~truth)]
    low = [np.where(mask, log_odds, np.inf).min(1) for mask in masks]
    high = [np.where(mask, log_odds, -np.inf).max(1) for mask in masks]
    return np.asarray((low[0] < high[1]) & (low[1] < high[0]))


def _fit_slopes_and_intercepts(truth: Mask, log_odds: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the recalibration slope and intercept of each resample (r,2). A resample without a fitted line gets NaN."""
    lines = np.full((len(weights), 2), np.nan)
    can_fit = _find_resamples_with_class_overlap(truth, log_odds, weights)
    center, scale = log_odds.mean(), log_odds.std()
    slope, intercept = _fit_standardized_slopes_and_intercepts(truth, (log_odds - center) / scale, weights[can_fit])
    lines[can_fit] = np.stack([slope / scale, intercept - slope * center / scale], 1)
    return lines


def _fit_standardized_slopes_and_intercepts(
    truth: Mask, x: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Fit the slope and intercept of each resample by Newton's method. A resample whose fit does not converge gets NaN."""
    share = weights @ truth / weights.sum(1)
    slope, intercept = np.zeros(len(weights)), np.log(share) - np.log1p(-share)
    step_size = np.full(len(weights), np.inf)
    for _ in range(MAX_NEWTON_STEPS):
        if not (step_size > STEP_TOLERANCE).any():
            break
        p = 0.5 * (1 + np.tanh(0.5 * (slope[:, None] * x + intercept[:, None])))
        residual, curvature = weights * (truth - p), weights * p * (1 - p)
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


def _assign_bins(probability: FloatArray, n_bins: int) -> IntArray:
    """Assign probabilities (N,) to bins of similar size. Equal probabilities fall into the same bin."""
    edges = np.quantile(probability, np.arange(1, n_bins) / n_bins)
    return np.unique(np.searchsorted(edges, probability, side="right"), return_inverse=True)[1]


def _estimate_calibration_error(
    truth: Mask, probability: FloatArray, group: IntArray, bin_index: IntArray, n_resamples: int, seed: int
) -> Estimate:
    """Return the expected calibration error. The bins stay fixed in all bootstrap resamples."""
    count = int(group.max()) + 1
    gaps = np.zeros((count, int(bin_index.max()) + 1))
    np.add.at(gaps, (group, bin_index), probability - truth)
    sizes = np.bincount(group).astype(np.float64)
    resampled = []
    for part in iter_bootstrap_indices(count, n_resamples, seed):
        weights = count_group_draws(part, count)
        resampled.append(np.abs(weights @ gaps).sum(1) / (weights @ sizes))
    error = float(np.abs(gaps.sum(0)).sum() / len(truth))
    return _build_estimate(error, np.concatenate(resampled), group)


def _simulate_perfect_calibration_error(
    probability: FloatArray, group: IntArray, bin_index: IntArray, seed: int
) -> float:
    """Simulate labels that follow the predicted probabilities exactly. Return the mean calibration error that remains.

    All images of a patient get the same label.
    """
    random = np.random.default_rng(seed)
    count, bins = int(group.max()) + 1, int(bin_index.max()) + 1
    sums = np.bincount(bin_index, weights=probability, minlength=bins)
    errors = [
        np.abs(np.bincount(bin_index, weights=random.random(count)[group] < probability, minlength=bins) - sums).sum()
        / len(probability)
        for _ in range(N_PERFECT_SIMULATIONS)
    ]
    return float(np.mean(errors))


def _build_reliability_points(
    truth: Mask, probability: FloatArray, group: IntArray, bin_index: IntArray
) -> tuple[ReliabilityPoint, ...]:
    """Return the points of the reliability diagram: the mean prediction, the observed share and its interval in each bin."""
    points = []
    for index in range(int(bin_index.max()) + 1):
        is_inside = bin_index == index
        share = float(truth[is_inside].mean())
        effective = count_effective_groups(np.unique(group[is_inside], return_counts=True)[1])
        values = (float(probability[is_inside].mean()), share, *compute_wilson_interval(share, effective))
        predicted, observed, low, high = (round_significant(value) or 0.0 for value in values)
        points.append(
            ReliabilityPoint(predicted=predicted, observed=observed, low=low, high=high, n_images=int(is_inside.sum()))
        )
    return tuple(points)


def compute_wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share that was observed in n independent images.

    Wilson 1927, doi:10.1080/01621459.1927.10502953.
    """
    z = 1.959963984540054
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))
