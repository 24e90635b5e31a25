"""The performance of predictions as the summary holds it, for all images and for each subgroup."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from camscope.audit.core.cohort import Cohort
from camscope.audit.core.schema import EstimateSummary, ReliabilityPoint, SubgroupPerformance
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT, split_by_level
from camscope.audit.core.summary_values import summarize_estimate
from camscope.audit.performance.auc import auroc, average_precision
from camscope.audit.performance.calibration import compute_calibration
from camscope.errors import UndefinedError
from camscope.metrics import Estimate
from camscope.metrics.base import FloatArray, Mask


def summarize_or_reason(compute: Callable[[], Estimate], baseline: float, baseline_name: str) -> EstimateSummary:
    """Return an estimate with its baseline, or the reason why it is undefined."""
    try:
        return summarize_estimate(compute(), baseline, baseline_name)
    except UndefinedError as error:
        return summarize_estimate(None, baseline, baseline_name, str(error))


def compute_performance(
    truth: Mask, log_odds: FloatArray, patients: Sequence[Any], *, n_resamples: int, seed: int
) -> tuple[dict[str, EstimateSummary], tuple[ReliabilityPoint, ...]]:
    """Return AUROC, average precision, Brier score, calibration error, slope and intercept, and the reliability diagram."""
    options: Any = {"n_resamples": n_resamples, "seed": seed}
    calibration, bins = compute_calibration(truth, log_odds, patients, **options)
    discrimination = {
        "auroc": summarize_or_reason(lambda: auroc(truth, log_odds, patients, **options), 0.5, "chance"),
        "average_precision": summarize_or_reason(
            lambda: average_precision(truth, log_odds, patients, **options), float(truth.mean()), "prevalence"
        ),
    }
    return discrimination | calibration, bins


def compute_subgroup_performance(
    cohort: Cohort, rows: Sequence[int], truth: Mask, log_odds: FloatArray
) -> Iterator[SubgroupPerformance]:
    """Yield the performance in every subgroup level, or the reason where it has too few patients."""
    for column in cohort.config.data.subgroups:
        levels = cohort.get_subgroup_levels(column)
        for level, mask in split_by_level([levels[row] for row in rows]).items():
            patients = [cohort.patients[rows[int(i)]] for i in np.flatnonzero(mask)]
            positives, negatives = int(truth[mask].sum()), int((~truth[mask]).sum())
            estimates: dict[str, Any] = {"reason": "too few patients, or images of one class only"}
            if len(set(patients)) >= MIN_PATIENTS_FOR_VERDICT and positives and negatives:
                options = cohort.config.bootstrap_options
                estimates = compute_performance(truth[mask], log_odds[mask], patients, **options)[0]
            yield SubgroupPerformance(
                column=column, level=str(level), n_positives=positives, n_negatives=negatives, **estimates
            )
