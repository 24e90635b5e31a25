"""Estimate the mean of a figure of merit over readers who read the same patients: the Obuchowski-Rockette method."""

from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.intervals_and_p_values import compute_t_interval
from camscope.metrics.mean_estimates import Estimate
from camscope.metrics.metric_registry import FloatArray

OBUCHOWSKI_ROCKETTE, JACKKNIFE_OVER_PATIENTS, STUDENT_OVER_READERS = "obuchowski-rockette", "jackknife", "student"


@dataclass(frozen=True)
class ReaderEstimates:
    """The estimates of a figure of merit, such as a difference of accuracies.

    Attributes:
        by_reader: The estimate of each reader. Its interval is by patient: it holds for this reader and other patients.
        pooled: The mean over readers. Its interval is by reader and by patient: it holds for other readers and patients.
        for_these_readers: The same mean. Its interval is by patient: it holds for these readers and other patients.
        for_these_patients: The same mean. Its interval is by reader: it holds for other readers and these patients.

    """

    by_reader: tuple[Estimate, ...]
    pooled: Estimate
    for_these_readers: Estimate
    for_these_patients: Estimate


def estimate_over_readers_and_patients(
    values: npt.ArrayLike,
    values_without_patient: npt.ArrayLike,
    n_readings: int | None = None,
    n_limiting_patients: int | None = None,
) -> ReaderEstimates:
    """Estimate the mean of a figure of merit over readers, and its uncertainty by reader and by patient.

    The values θ_r of R readers have the mean square MS = Σ (θ_r - mean)² / (R - 1). Their error covariance Cov is the mean of
    the jackknife covariances of all pairs of readers. The variance of the mean is (MS + R max(Cov, 0)) / R. It has
    (MS + R max(Cov, 0))² (R - 1) / MS² degrees of freedom (Hillis 2007, doi:10.1002/sim.2532), and at most the number of
    patients minus one. The variance is never less than that for these readers alone.

    Applied to the differences of two conditions, this is the test of Obuchowski and Rockette (1995,
    doi:10.1080/03610919508813243). Any figure of merit is possible, since only its values are used.

    Args:
        values: (R,) the value of each reader.
        values_without_patient: (R,P) the value of each reader without one patient.
        n_readings: The number of readings, for the counts of the result.
        n_limiting_patients: The number of patients that limits the interval, such as that of the rarer class for an AUROC.
            Default: P.

    Returns:
        The estimates. With fewer than `MIN_GROUPS_FOR_INTERVAL` patients, no interval by patient exists. With one reader, no
        interval by reader exists.

    Raises:
        InputError: The shapes differ, or a value is not finite.

    >>> without = 0.5 + np.outer([1, 1, -1], np.linspace(-0.01, 0.01, 10))
    >>> estimates = estimate_over_readers_and_patients([0.5, 0.5, 0.6], without)
    >>> round(estimates.pooled.mean, 3), estimates.pooled.n_groups_by_role
    (0.533, (('readers', 3), ('patients', 10)))

    """
    theta, without = np.asarray(values, np.float64), np.asarray(values_without_patient, np.float64)
    if theta.ndim != 1 or not len(theta) or without.ndim != 2 or len(without) != len(theta) or not without.shape[1]:
        raise InputError(f"values {theta.shape} and values_without_patient {without.shape}: expected (R,) and (R,P)")
    if not (np.isfinite(theta).all() and np.isfinite(without).all()):
        raise InputError("values are not finite: leave out readers and patients without a value")
    n_readers, n_patients = without.shape
    n_limiting = n_patients if n_limiting_patients is None else n_limiting_patients
    n_values = n_readers * n_patients if n_readings is None else n_readings
    counts: dict[str, Any] = {
        "n_values": n_values,
        "n_groups": n_patients,
        "n_groups_by_role": (("readers", n_readers), ("patients", n_patients)),
        "n_limiting_groups": None if n_limiting == n_patients else n_limiting,
    }
    covariance = compute_jackknife_covariance(without)
    by_reader = tuple(
        _build_estimate(
            float(value),
            variance,
            n_limiting - 1,
            n_limiting,
            interval_method=JACKKNIFE_OVER_PATIENTS,
            **counts | {"n_values": n_values // n_readers, "n_groups_by_role": (("patients", n_patients),)},
        )
        for value, variance in zip(theta, np.diag(covariance), strict=True)
    )
    mean = float(theta.mean())
    fixed_readers = _build_estimate(
        mean, covariance.mean(), n_limiting - 1, n_limiting, interval_method=JACKKNIFE_OVER_PATIENTS, **counts
    )
    mean_square = float(theta.var(ddof=1)) if n_readers > 1 else nan
    mean_covariance = max(0.0, compute_mean_covariance(covariance)) if n_readers > 1 else nan
    total = mean_square + n_readers * mean_covariance
    variance = max(total / n_readers, float(covariance.mean()))  # never less than that for these readers
    is_by_reader = total / n_readers >= float(covariance.mean()) and mean_square > 0
    dof = total**2 * (n_readers - 1) / mean_square**2 if is_by_reader else inf
    n_independent = n_limiting if n_readers > 1 else 0  # one reader gives no interval by reader
    pooled = _build_estimate(
        mean,
        variance,
        min(dof, n_limiting - 1),
        n_independent,
        interval_method=OBUCHOWSKI_ROCKETTE,
        **counts,
    )
    fixed_patients = _build_estimate(
        mean, mean_square / n_readers, n_readers - 1, n_independent, interval_method=STUDENT_OVER_READERS, **counts
    )
    return ReaderEstimates(by_reader, pooled, fixed_readers, fixed_patients)


def compute_jackknife_covariance(values_without_patient: FloatArray) -> FloatArray:
    """Compute the jackknife covariance (R,R) of values from those without one patient (R,P)."""
    n_patients = values_without_patient.shape[1]
    deviations = values_without_patient - values_without_patient.mean(1, keepdims=True)
    return np.asarray((n_patients - 1) / n_patients * deviations @ deviations.T, np.float64)


def compute_mean_covariance(covariance: FloatArray) -> float:
    """Return the mean covariance of all pairs of different readers. `covariance` is (R,R)."""
    n_readers = len(covariance)
    return float((covariance.sum() - np.trace(covariance)) / (n_readers * (n_readers - 1)))


def _build_estimate(
    mean: float, variance: float, dof: float, n_independent: int, interval_method: str, **counts: Any
) -> Estimate:
    """Build an estimate with a t interval. Rounding errors count as a variance of 0."""
    error = sqrt(variance) if variance > 1e-24 else 0.0
    low, high, p_value = compute_t_interval(mean, error, n_independent, max(dof, 1.0))
    return Estimate(
        mean,
        low,
        high,
        p_value=p_value,
        interval_method=interval_method,
        dof=dof,
        **counts,
    )
