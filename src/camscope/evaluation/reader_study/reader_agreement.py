"""Agreement between readers and within readers: Krippendorff's alpha, Cohen's kappa, and changed answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.evaluation.reader_study.read_reader_forms import StudyReadings
from camscope.metrics.mean_estimates import Estimate
from camscope.metrics.reader_and_patient_intervals import estimate_over_readers_and_patients


@dataclass(frozen=True)
class AnswerChanges:
    """How answers of the same readers to the same cases change from one condition to another.

    Attributes:
        before: The first condition.
        after: The second condition.
        n_pairs: Cases that a reader answered under both conditions, summed over readers.
        n_changed: Pairs with another answer.
        n_to_correct: Pairs from a wrong to the right answer.
        n_to_wrong: Pairs from the right to a wrong answer.
        n_to_wrong_model: Pairs from the right answer to the model's wrong answer.
        n_wrong_model: Pairs of cases where the model's answer is wrong.

    >>> AnswerChanges("none", "map", 100, 9, 6, 3, 2, 10).n_changed
    9

    """

    before: str
    after: str
    n_pairs: int
    n_changed: int
    n_to_correct: int
    n_to_wrong: int
    n_to_wrong_model: int
    n_wrong_model: int


def compute_krippendorff_alpha(answers: npt.NDArray[Any]) -> float:
    """Compute Krippendorff's alpha of nominal answers.

    `answers` has one row per reader and one column per case, with integers from 0, and -1 where an answer is missing. Without
    two different answers, the result is NaN (Krippendorff 2004, doi:10.1111/j.1468-2958.2004.tb00738.x).
    """
    n_categories = int(answers.max(initial=-1)) + 1
    counts = np.stack([(answers == category).sum(0) for category in range(n_categories)], 1) if n_categories else None
    if counts is None:
        return nan
    counts = counts[counts.sum(1) >= 2]  # a case with one answer cannot agree
    sizes, totals = counts.sum(1), counts.sum(0)
    n = int(totals.sum())
    expected = float((totals * (n - totals)).sum())
    if not expected:
        return nan
    observed = float(((counts * (sizes[:, None] - counts)).sum(1) / (sizes - 1)).sum())
    return 1 - (n - 1) * observed / expected


def compute_cohen_kappa(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Compute Cohen's kappa of two lists of answers to the same cases. If both have one and the same answer, it is NaN."""
    if not len(first):
        return nan
    categories = np.unique(np.concatenate([first, second]))
    expected = sum(float((first == category).mean() * (second == category).mean()) for category in categories)
    return nan if expected == 1 else (float((first == second).mean()) - expected) / (1 - expected)


def estimate_agreement_between_readers(
    readings: StudyReadings, readers: Sequence[int], condition: str
) -> Estimate | None:
    """Estimate Krippendorff's alpha of all readers under a condition. Its interval is by patient."""
    table, patients = _tabulate_answers(readings, readers, condition)
    names = np.unique(patients)
    value = compute_krippendorff_alpha(table)
    without = np.array([compute_krippendorff_alpha(table[:, patients != name]) for name in names])
    if len(readers) < 2 or np.isnan(value) or np.isnan(without).any():
        return None
    estimate = estimate_over_readers_and_patients([value], without[None], int((table >= 0).sum())).for_these_readers
    return _without_p_value(estimate)


def estimate_agreement_within_readers(
    readings: StudyReadings, readers: Sequence[int], first: str, second: str
) -> Estimate | None:
    """Estimate Cohen's kappa of a reader with itself under two conditions, as a mean over readers."""
    values, without = [], []
    for reader in readers:
        first_table, patients = _tabulate_answers(readings, [reader], first)
        second_table, _ = _tabulate_answers(readings, [reader], second)
        both = (first_table[0] >= 0) & (second_table[0] >= 0)
        names = np.unique(patients)
        value = compute_cohen_kappa(first_table[0][both], second_table[0][both])
        leave_outs = [
            compute_cohen_kappa(first_table[0][both & (patients != name)], second_table[0][both & (patients != name)])
            for name in names
        ]
        if not np.isnan([value, *leave_outs]).any():
            values.append(value)
            without.append(leave_outs)
    if not values:
        return None
    return _without_p_value(estimate_over_readers_and_patients(values, without).pooled)


def count_answer_changes(readings: StudyReadings, before: str, after: str) -> AnswerChanges | None:
    """Count how answers change from one condition to another. Return None if no reader saw a case under both."""
    places = {
        condition: {
            (int(readings.reader[i]), int(readings.row[i])): int(i)
            for i in np.flatnonzero(readings.condition == condition)
        }
        for condition in (before, after)
    }
    shared = sorted(places[before].keys() & places[after].keys())
    if not shared:
        return None
    old = np.array([places[before][pair] for pair in shared])
    new = np.array([places[after][pair] for pair in shared])
    truth, model = readings.truth[new], readings.model_answer[new]
    was_correct, is_correct = readings.answer[old] == truth, readings.answer[new] == truth
    is_model_wrong = (model != "") & (model != truth)
    return AnswerChanges(
        before,
        after,
        n_pairs=len(shared),
        n_changed=int((readings.answer[old] != readings.answer[new]).sum()),
        n_to_correct=int((~was_correct & is_correct).sum()),
        n_to_wrong=int((was_correct & ~is_correct).sum()),
        n_to_wrong_model=int((was_correct & is_model_wrong & (readings.answer[new] == model)).sum()),
        n_wrong_model=int(is_model_wrong.sum()),
    )


def _tabulate_answers(
    readings: StudyReadings, readers: Sequence[int], condition: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the answers as integers (readers,cases), with -1 where one is missing, and the patient of each case."""
    rows, first_places = np.unique(readings.row, return_index=True)
    codes = np.unique(readings.answer, return_inverse=True)[1].reshape(-1)
    table = np.full((len(readers), len(rows)), -1, np.int64)
    for r, reader in enumerate(readers):
        selected = (readings.reader == reader) & (readings.condition == condition)
        table[r, np.searchsorted(rows, readings.row[selected])] = codes[selected]
    return table, readings.patient[first_places]


def _without_p_value(estimate: Estimate) -> Estimate:
    return replace(estimate, p_value=None)
