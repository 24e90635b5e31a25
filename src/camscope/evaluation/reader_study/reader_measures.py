"""The measures of a reader study: accuracy, sensitivity, specificity, AUROC, time, and answers that follow the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.evaluation.reader_study.read_reader_forms import StudyReadings
from camscope.metrics.metric_registry import FloatArray

Flags = npt.NDArray[np.bool_]
GetValues = Callable[[StudyReadings, "str | None"], FloatArray]


@dataclass(frozen=True)
class ReaderMeasure:
    """A measure of a reader under a condition.

    Attributes:
        name: The name, such as "accuracy".
        title: The name for display.
        description: What is measured, as one line.
        get_values: The value of each reading (N,). Readings that do not count have NaN. The measure is the mean of the values,
            or for an AUROC the rank statistic of the values.
        needs_positive: Whether the measure needs a positive and a negative answer.
        is_auroc: Whether the measure is the area under the ROC curve of the values.
        is_time: Whether the values are logarithms of seconds. Means become geometric means, and differences ratios.
        higher_is_better: Whether higher values are better. None if neither is.

    """

    name: str
    title: str
    description: str
    get_values: GetValues
    needs_positive: bool = False
    is_auroc: bool = False
    is_time: bool = False
    higher_is_better: bool | None = True


def _select_values(values: npt.ArrayLike, counts: Flags) -> FloatArray:
    """Return values (N,) as numbers. Where `counts` is False, they are NaN."""
    return np.where(counts, np.asarray(values, np.float64), np.nan)


def _get_correct(readings: StudyReadings, _: str | None) -> FloatArray:
    return np.asarray(readings.answer == readings.truth, np.float64)


def _get_sensitivity(readings: StudyReadings, positive: str | None) -> FloatArray:
    return _select_values(readings.answer == positive, readings.truth == positive)


def _get_specificity(readings: StudyReadings, positive: str | None) -> FloatArray:
    return _select_values(readings.answer != positive, readings.truth != positive)


def _get_ratings(readings: StudyReadings, positive: str | None) -> FloatArray:
    return np.where(readings.answer == positive, readings.confidence, -readings.confidence)


def _get_log_seconds(readings: StudyReadings, _: str | None) -> FloatArray:
    return np.asarray(np.log(readings.seconds), np.float64)


def _get_follows_wrong_model(readings: StudyReadings, _: str | None) -> FloatArray:
    is_wrong = (readings.model_answer != "") & (readings.model_answer != readings.truth)
    return _select_values(readings.answer == readings.model_answer, is_wrong)


def _get_follows_correct_model(readings: StudyReadings, _: str | None) -> FloatArray:
    return _select_values(readings.answer == readings.model_answer, readings.model_answer == readings.truth)


MEASURES = (
    ReaderMeasure("accuracy", "Accuracy", "share of correct answers", _get_correct),
    ReaderMeasure(
        "sensitivity",
        "Sensitivity",
        "share of positive answers for positive cases",
        _get_sensitivity,
        needs_positive=True,
    ),
    ReaderMeasure(
        "specificity",
        "Specificity",
        "share of negative answers for negative cases",
        _get_specificity,
        needs_positive=True,
    ),
    ReaderMeasure(
        "auroc",
        "AUROC",
        "area under the ROC curve of the confidence, with its sign by the answer",
        _get_ratings,
        needs_positive=True,
        is_auroc=True,
    ),
    ReaderMeasure(
        "seconds",
        "Time",
        "geometric mean of the seconds of a reading",
        _get_log_seconds,
        is_time=True,
        higher_is_better=False,
    ),
    ReaderMeasure(
        "follows-wrong-model",
        "Follows wrong model",
        "share of answers that equal the model's answer where the model is wrong",
        _get_follows_wrong_model,
        higher_is_better=False,
    ),
    ReaderMeasure(
        "follows-correct-model",
        "Follows correct model",
        "share of answers that equal the model's answer where the model is right",
        _get_follows_correct_model,
    ),
)


@dataclass(frozen=True)
class ReaderValues:
    """The values of a measure for R readers and C conditions, and the same without one of P patients.

    Attributes:
        readers: The readers for whom the measure is defined under all conditions.
        values: (R,C) the values.
        without_patient: (R,C,P) the values without each patient.
        n_readings: (R,C) the number of readings that count.
        n_limiting_patients: The number of patients that limits an interval: for an AUROC, that of the rarer class.

    """

    readers: tuple[int, ...]
    values: FloatArray
    without_patient: FloatArray
    n_readings: npt.NDArray[np.int64]
    n_limiting_patients: int


def compute_reader_values(
    readings: StudyReadings,
    measure: ReaderMeasure,
    readers: Sequence[int],
    conditions: Sequence[str],
    positive: str | None,
) -> ReaderValues | None:
    """Compute a measure for each reader and condition, and without each patient. Return None if no reader has all values."""
    values = measure.get_values(readings, positive)
    counts, is_positive = np.isfinite(values), readings.truth == positive
    patients = np.unique(readings.patient[counts])
    if not len(patients):
        return None
    shape = len(readers), len(conditions)
    result, without = np.full(shape, np.nan), np.full((*shape, len(patients)), np.nan)
    n_readings = np.zeros(shape, np.int64)
    for r, reader in enumerate(readers):
        for c, condition in enumerate(conditions):
            selected = counts & (readings.reader == reader) & (readings.condition == condition)
            n_readings[r, c] = selected.sum()
            patient_indices = np.searchsorted(patients, readings.patient[selected])
            if measure.is_auroc:
                result[r, c], without[r, c] = _compute_auroc_without_patients(
                    values[selected], is_positive[selected], patient_indices, len(patients)
                )
            else:
                result[r, c], without[r, c] = _compute_mean_without_patients(
                    values[selected], patient_indices, len(patients)
                )
    defined = np.isfinite(result).all(1) & np.isfinite(without).all((1, 2))
    if not defined.any():
        return None
    n_limiting = len(patients)
    if measure.is_auroc:
        n_limiting = min(len(np.unique(readings.patient[counts & (is_positive == flag)])) for flag in (True, False))
    retained = tuple(reader for reader, flag in zip(readers, defined, strict=True) if flag)
    return ReaderValues(retained, result[defined], without[defined], n_readings[defined], n_limiting)


def _compute_mean_without_patients(
    values: FloatArray, patients: npt.NDArray[np.int64], n_patients: int
) -> tuple[float, FloatArray]:
    """Compute the mean of values (n,), and the mean without each of P patients (P,)."""
    sums = np.bincount(patients, weights=values, minlength=n_patients)
    sizes = np.bincount(patients, minlength=n_patients)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.divide(values.sum(), len(values))), np.asarray((sums.sum() - sums) / (sizes.sum() - sizes))


def _compute_auroc_without_patients(
    ratings: FloatArray, is_positive: Flags, patients: npt.NDArray[np.int64], n_patients: int
) -> tuple[float, FloatArray]:
    """Compute the AUROC of ratings (n,), and the AUROC without each of P patients (P,). Ties count one half."""
    higher = ratings[is_positive][:, None] - ratings[~is_positive][None, :]
    wins = (higher > 0) + 0.5 * (higher == 0)  # (positive readings, negative readings)
    n_positive, n_negative = wins.shape
    if not wins.size:
        return np.nan, np.full(n_patients, np.nan)
    owner_of_positive, owner_of_negative = patients[is_positive], patients[~is_positive]
    without = np.empty(n_patients)
    for patient in range(n_patients):
        rows, columns = owner_of_positive != patient, owner_of_negative != patient
        if rows.all() and columns.all():
            without[patient] = wins.mean()
        elif not rows.any() or not columns.any():
            without[patient] = np.nan
        else:
            without[patient] = wins[rows][:, columns].mean()
    return float(wins.sum() / (n_positive * n_negative)), without


def compute_median_seconds(readings: StudyReadings, condition: str, reader: int | None = None) -> float:
    """Return the median seconds of a reading under a condition, of one reader or of all. Without times, return NaN."""
    selected = (readings.condition == condition) & np.isfinite(readings.seconds)
    if reader is not None:
        selected &= readings.reader == reader
    return float(np.median(readings.seconds[selected])) if selected.any() else float("nan")


def as_columns(readings: StudyReadings) -> Mapping[str, Any]:
    """Return the readings as columns for a table."""
    names = (
        "reader", "session", "row", "patient", "condition", "truth", "answer", "model_answer", "confidence", "seconds",
    )  # fmt: skip
    return {name: getattr(readings, name).tolist() for name in names}
