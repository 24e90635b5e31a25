"""The performance of predictions as the summary holds it, for all images and for each subgroup."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Cohort
from camscope.audit.core.schema import EstimateSummary, ReliabilityPoint, SubgroupPerformance
from camscope.audit.core.subgroup_levels import split_by_level
from camscope.audit.core.summary_values import round_significant, summarize_estimate
from camscope.audit.performance.auc import auroc, average_precision
from camscope.audit.performance.calibration import Calibration, compute_calibration
from camscope.errors import UndefinedError
from camscope.metrics import Estimate

BoolArray = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
MIN_PATIENTS_PER_SUBGROUP = 10  # with fewer, an interval does not generalize


def compute_performance(
    truth: BoolArray, log_odds: Floats, patients: Sequence[Any], *, n_resamples: int, seed: int
) -> tuple[dict[str, EstimateSummary], Calibration]:
    """(N,) bool, (N,) log odds -> AUROC, average precision, Brier score, calibration error, slope and intercept."""
    options: Any = {"n_resamples": n_resamples, "seed": seed}
    prevalence = float(truth.mean())
    calibration = compute_calibration(truth, 1 / (1 + np.exp(-log_odds)), patients, log_odds=log_odds, **options)
    estimates = {
        "auroc": _summarize_or_reason(lambda: auroc(truth, log_odds, patients, **options), 0.5, "chance"),
        "average_precision": _summarize_or_reason(
            lambda: average_precision(truth, log_odds, patients, **options), prevalence, "prevalence"
        ),
        "brier": summarize_estimate(calibration.brier, prevalence * (1 - prevalence), "the prevalence for all"),
        "calibration_error": summarize_estimate(
            calibration.calibration_error, calibration.chance_error, "perfect calibration, by chance"
        ),
        "slope": summarize_estimate(calibration.slope, 1.0, "perfect calibration", calibration.reason),
        "intercept": summarize_estimate(calibration.intercept, 0.0, "perfect calibration", calibration.reason),
    }
    return estimates, calibration


def compute_subgroup_performance(
    cohort: Cohort, rows: Sequence[int], truth: BoolArray, log_odds: Floats
) -> Iterator[SubgroupPerformance]:
    """Yield the performance in every subgroup level, or the reason where it has too few patients."""
    for column in cohort.config.data.subgroups:
        levels = cohort.get_subgroup_levels(column)
        for level, is_in_level in split_by_level([levels[row] for row in rows]).items():
            patients = [cohort.patients[row] for row, inside in zip(rows, is_in_level, strict=True) if inside]
            positives, negatives = int(truth[is_in_level].sum()), int((~truth[is_in_level]).sum())
            performance = SubgroupPerformance(
                column=column, level=str(level), n_positives=positives, n_negatives=negatives
            )
            if len(set(patients)) < MIN_PATIENTS_PER_SUBGROUP or not positives or not negatives:
                yield performance.model_copy(update={"reason": "too few patients, or images of one class only"})
            else:
                yield performance.model_copy(
                    update=compute_performance(
                        truth[is_in_level], log_odds[is_in_level], patients, **cohort.config.bootstrap_options
                    )[0]
                )


def summarize_bins(calibration: Calibration) -> Iterator[ReliabilityPoint]:
    """Yield the points of a reliability diagram."""
    for item in calibration.bins:
        yield ReliabilityPoint(
            predicted=round_significant(item.mean_probability) or 0.0,
            observed=round_significant(item.positive_share) or 0.0,
            low=round_significant(item.low) or 0.0,
            high=round_significant(item.high) or 0.0,
            n_images=item.n_images,
        )


def _summarize_or_reason(compute: Callable[[], Estimate], baseline: float, baseline_name: str) -> EstimateSummary:
    try:
        return summarize_estimate(compute(), baseline, baseline_name)
    except UndefinedError as error:
        return summarize_estimate(None, baseline, baseline_name, str(error))
