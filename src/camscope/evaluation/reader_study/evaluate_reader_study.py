"""`evaluate_reader_study`: read the forms of a reader study, and estimate what maps change for readers."""

import html
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from camscope.atomic_writes_and_folder_locks import check_not_existing, make_folder, write_bytes
from camscope.batch.reader_study import study_files
from camscope.batch.reader_study.study_design import CONTROL_MAP, WITH_MAP, WITHOUT_MAP
from camscope.evaluation.reader_study.read_reader_forms import StudyReadings, read_readings, read_study
from camscope.evaluation.reader_study.reader_agreement import (
    count_answer_changes,
    estimate_agreement_between_readers,
    estimate_agreement_within_readers,
)
from camscope.evaluation.reader_study.reader_measures import (
    MEASURES,
    ReaderMeasure,
    as_columns,
    compute_median_seconds,
    compute_reader_values,
)
from camscope.evaluation.reader_study.reader_study_estimates import MeasureEstimate, ReaderStudyEstimates
from camscope.evaluation.reader_study.reader_study_figure import draw_reader_study
from camscope.evaluation.reader_study.reader_study_report import build_statements, format_report
from camscope.json_values import to_json_value
from camscope.metrics.mean_estimates import Estimate
from camscope.metrics.reader_and_patient_intervals import ReaderEstimates, estimate_over_readers_and_patients

COMPARISONS = ((WITH_MAP, WITHOUT_MAP), (WITH_MAP, CONTROL_MAP), (CONTROL_MAP, WITHOUT_MAP))
MEASURES_BY_NAME = {measure.name: measure for measure in MEASURES}
RESULT_FILE, REPORT_FILE, READINGS_FILE, FIGURE_FILE = "results.json", "report.md", "readings.csv", "figure.svg"


@dataclass(frozen=True)
class ReaderStudyResult(ReaderStudyEstimates):
    """The result of a reader study.

    Attributes:
        study: The description of the study, as in `study.json`.
        readings: The readings with an answer, joined with the key.
        measures: The measures under each condition, and their differences.
        agreement_between_readers: Krippendorff's alpha of all readers under each condition.
        agreement_within_readers: Cohen's kappa of each reader with itself, for pairs of conditions, as a mean over readers.
        changes: How answers change between conditions.
        median_seconds: The median seconds of a reading under each condition.

    >>> study, readings = {"answers": ["no", "yes"], "conditions": ["none", "map"], "n_cases": 1}, None
    >>> ReaderStudyResult(study, readings, (), {}, {}, (), {}).conditions
    ('none', 'map')

    """

    def statements(self) -> list[str]:
        """Describe the result in plain sentences.

        Returns:
            The sentences.

        >>> study = {"answers": ["no", "yes"], "conditions": ["none", "map"], "n_cases": 1}
        >>> ReaderStudyResult(study, None, (), {}, {}, (), {}).statements()
        []

        """
        return build_statements(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as numbers and text, for JSON.

        Returns:
            The fields `study`, `measures`, `agreement`, `changes`, `median_seconds` and `statements`. Missing numbers
            become None.

        >>> study = {"answers": ["no", "yes"], "conditions": ["none", "map"], "n_cases": 1}
        >>> ReaderStudyResult(study, None, (), {}, {}, (), {}).to_dict()["measures"]
        []

        """
        agreement = [
            {
                "kind": "between readers",
                "statistic": "krippendorff-alpha",
                "conditions": [condition],
                **_to_fields(estimate),
            }
            for condition, estimate in self.agreement_between_readers.items()
        ] + [
            {"kind": "within readers", "statistic": "cohen-kappa", "conditions": list(pair), **_to_fields(estimate)}
            for pair, estimate in self.agreement_within_readers.items()
        ]
        return {
            "study": dict(self.study),
            "n_readings": 0 if self.readings is None else len(self.readings),
            "n_missing": 0 if self.readings is None else self.readings.n_missing,
            "measures": [
                {
                    "measure": line.measure,
                    "condition": line.condition,
                    "reference": line.reference,
                    **{
                        name: _to_fields(getattr(line.estimates, name))
                        for name in ("pooled", "for_these_readers", "for_these_patients")
                    },
                    "by_reader": [
                        {"reader": reader, **_to_fields(estimate)}
                        for reader, estimate in zip(line.readers, line.estimates.by_reader, strict=True)
                    ],
                }
                for line in self.measures
            ],
            "agreement": agreement,
            "changes": [vars(change) for change in self.changes],
            "median_seconds": {name: to_json_value(value) for name, value in self.median_seconds.items()},
            "statements": self.statements(),
        }

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `report.md`, `results.json`, `readings.csv` and `figure.svg`.

        Args:
            folder: The folder of the files.
            overwrite: Replace existing files.

        Returns:
            The folder.

        Raises:
            OutputError: A file exists, or cannot be written.
            MissingExtraError: matplotlib is not installed.

        >>> from camscope.errors import InputError
        >>> study = {"answers": ["no", "yes"], "conditions": ["none", "map"], "n_cases": 1}
        >>> try:
        ...     ReaderStudyResult(study, None, (), {}, {}, (), {}).save("results")
        ... except InputError as error:
        ...     print(error)
        there is nothing to draw: no measure is defined

        """
        path = Path(folder)
        figure = draw_reader_study(self, Path(FIGURE_FILE).suffix)
        columns = as_columns(self.readings)
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        files = {
            FIGURE_FILE: figure,
            REPORT_FILE: format_report(self).encode(),
            RESULT_FILE: (json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n").encode(),
            READINGS_FILE: study_files.format_csv(list(columns), rows),
        }
        make_folder(path)
        for name in files:
            check_not_existing(path / name, overwrite)
        for name, data in files.items():
            write_bytes(path / name, data, overwrite=overwrite)
        return path

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.statements())
        return f"<ul>{items}</ul>"


def evaluate_reader_study(
    folder: str | os.PathLike[str], key: str | os.PathLike[str] | None = None, *, allow_missing: bool = False
) -> ReaderStudyResult:
    """Evaluate the filled forms of a reader study that `BatchRun.export_reader_study` wrote.

    Args:
        folder: The folder of the study, with the filled forms `reader-1/session-1/form.csv` and so on.
        key: The folder of the key. Default: `key` in the folder of the study.
        allow_missing: Evaluate the answers that exist. Default: a missing answer is an error.

    Returns:
        The result.

    Raises:
        FormError: Forms have faults: missing or double lines, answers that are not allowed, or lines of another form. The
            message lists all of them with file and line.
        InputError: The key is missing or damaged.

    >>> import tempfile
    >>> from camscope.errors import InputError
    >>> try:
    ...     evaluate_reader_study(tempfile.mkdtemp())
    ... except InputError as error:
    ...     print("study.json" in str(error))
    True

    """
    path = Path(folder)
    key_folder = path / study_files.KEY_FOLDER if key is None else Path(key)
    study = read_study(path, key_folder)
    return summarize_readings(study, read_readings(path, key_folder, study, allow_missing=allow_missing))


def summarize_readings(study: Mapping[str, Any], readings: StudyReadings) -> ReaderStudyResult:
    """Estimate all measures, differences and agreements of readings."""
    conditions, readers = tuple(study["conditions"]), [int(reader) for reader in np.unique(readings.reader)]
    pairs = [pair for pair in COMPARISONS if set(pair) <= set(conditions)]
    measures = tuple(
        line for measure in MEASURES for line in _estimate_measure(readings, measure, readers, conditions, study)
    )
    between = {name: estimate_agreement_between_readers(readings, readers, name) for name in conditions}
    within = {pair[::-1]: estimate_agreement_within_readers(readings, readers, *pair[::-1]) for pair in pairs}
    changes = [count_answer_changes(readings, before, after) for after, before in pairs]
    return ReaderStudyResult(
        study,
        readings,
        measures,
        {name: estimate for name, estimate in between.items() if estimate is not None},
        {pair: estimate for pair, estimate in within.items() if estimate is not None},
        tuple(change for change in changes if change is not None),
        {name: compute_median_seconds(readings, name) for name in conditions},
    )


def _estimate_measure(
    readings: StudyReadings,
    measure: ReaderMeasure,
    readers: list[int],
    conditions: tuple[str, ...],
    study: Mapping[str, Any],
) -> Iterator[MeasureEstimate]:
    """Yield the estimates of a measure under each condition and of its differences, if it is defined."""
    positive = study.get("positive_answer")
    if measure.needs_positive and positive is None:
        return
    values = compute_reader_values(readings, measure, readers, conditions, positive)
    if values is None:
        return
    for c, condition in enumerate(conditions):
        estimates = estimate_over_readers_and_patients(
            values.values[:, c],
            values.without_patient[:, c],
            int(values.n_readings[:, c].sum()),
            values.n_limiting_patients,
        )
        yield MeasureEstimate(
            measure.name, condition, None, values.readers, _finish_estimates(estimates, measure, is_difference=False)
        )
    for condition, reference in COMPARISONS:
        if condition in conditions and reference in conditions:
            c, k = conditions.index(condition), conditions.index(reference)
            estimates = estimate_over_readers_and_patients(
                values.values[:, c] - values.values[:, k],
                values.without_patient[:, c] - values.without_patient[:, k],
                int(values.n_readings[:, [c, k]].sum()),
                values.n_limiting_patients,
            )
            yield MeasureEstimate(
                measure.name,
                condition,
                reference,
                values.readers,
                _finish_estimates(estimates, measure, is_difference=True),
            )


def _finish_estimates(estimates: ReaderEstimates, measure: ReaderMeasure, *, is_difference: bool) -> ReaderEstimates:
    """Limit shares to their range, and convert logarithms of times to seconds or ratios. Only differences have a p-value."""

    def finish(estimate: Estimate) -> Estimate:
        mean, low, high = estimate.mean, estimate.low, estimate.high
        if measure.is_time:
            mean, low, high = exp(mean), exp(low), exp(high)
        else:
            smallest = -1.0 if is_difference else 0.0
            low, high = np.clip([low, high], smallest, 1.0).tolist()
        return replace(estimate, mean=mean, low=low, high=high, p_value=estimate.p_value if is_difference else None)

    return ReaderEstimates(
        tuple(map(finish, estimates.by_reader)),
        finish(estimates.pooled),
        finish(estimates.for_these_readers),
        finish(estimates.for_these_patients),
    )


def _to_fields(estimate: Estimate) -> dict[str, Any]:
    """Return the numbers of an estimate. Missing ones become None."""
    counts = dict(estimate.n_groups_by_role)
    return {
        **{name: to_json_value(getattr(estimate, name)) for name in ("mean", "low", "high", "p_value", "dof")},
        "n_readings": estimate.n_values,
        "n_readers": counts.get("readers", 1),
        "n_patients": counts["patients"],
    }
