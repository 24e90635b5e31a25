"""`ReaderStudyEstimates`: the readings of a reader study, with all estimates of measures and agreement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from camscope.evaluation.reader_study.read_reader_forms import StudyReadings
from camscope.evaluation.reader_study.reader_agreement import AnswerChanges
from camscope.metrics.mean_estimates import Estimate
from camscope.metrics.reader_and_patient_intervals import ReaderEstimates


@dataclass(frozen=True)
class MeasureEstimate:
    """A measure under a condition, or its difference between two conditions.

    Attributes:
        measure: The name of the measure, such as "accuracy".
        condition: The condition.
        reference: For a difference, the condition that is subtracted. Otherwise None.
        readers: The numbers of the readers, in the order of `estimates.by_reader`.
        estimates: The estimates of each reader and of all. Of the measure "seconds" they are geometric means, and ratios in
            place of differences.

    >>> from camscope.metrics.reader_and_patient_intervals import estimate_over_readers_and_patients
    >>> estimates = estimate_over_readers_and_patients([0.8, 0.9], [[0.8] * 8, [0.9] * 8])
    >>> round(MeasureEstimate("accuracy", "map", None, (1, 2), estimates).estimates.pooled.mean, 3)
    0.85

    """

    measure: str
    condition: str
    reference: str | None
    readers: tuple[int, ...]
    estimates: ReaderEstimates


@dataclass(frozen=True)
class ReaderStudyEstimates:
    """The readings and the estimates of a reader study. `ReaderStudyResult` adds reports.

    Attributes:
        study: The description of the study, as in `study.json`.
        readings: The readings with an answer, joined with the key.
        measures: The measures under each condition, and their differences.
        agreement_between_readers: Krippendorff's alpha of all readers under each condition.
        agreement_within_readers: Cohen's kappa of each reader with itself, for pairs of conditions, as a mean over readers.
        changes: How answers change between conditions.
        median_seconds: The median seconds of a reading under each condition.

    """

    study: Mapping[str, Any]
    readings: StudyReadings = field(repr=False)
    measures: tuple[MeasureEstimate, ...] = field(repr=False)
    agreement_between_readers: Mapping[str, Estimate] = field(repr=False)
    agreement_within_readers: Mapping[tuple[str, str], Estimate] = field(repr=False)
    changes: tuple[AnswerChanges, ...] = field(repr=False)
    median_seconds: Mapping[str, float] = field(repr=False)

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions of the study."""
        return tuple(self.study["conditions"])

    @property
    def readers(self) -> tuple[int, ...]:
        """The numbers of the readers who have at least one answer."""
        return tuple(int(reader) for reader in np.unique(self.readings.reader))

    def find(self, measure: str, condition: str, reference: str | None = None) -> MeasureEstimate | None:
        """Return the estimate of a measure, or None if the study does not define it.

        Args:
            measure: The name of the measure.
            condition: The condition.
            reference: The condition that is subtracted. Default: the measure itself.

        Returns:
            The estimate.

        >>> study = {"answers": ["no", "yes"], "conditions": ["none", "map"], "n_cases": 1}
        >>> ReaderStudyEstimates(study, None, (), {}, {}, (), {}).find("accuracy", "map")

        """
        key = measure, condition, reference
        return next((line for line in self.measures if (line.measure, line.condition, line.reference) == key), None)
