"""measuring: the numbers of answers as the summary holds them, of all images and of each subgroup."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.core.context import Subject
from camscope.audit.core.schema import Bin, Group, Number
from camscope.audit.core.subgroup_levels import levels_of
from camscope.audit.core.summary_values import number, rounded
from camscope.audit.performance.auc import auroc, average_precision
from camscope.audit.performance.calibration import Calibration, calibration
from camscope.errors import UndefinedError
from camscope.metrics import Estimate

Truth = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
LEAST = 10  # patients of a subgroup: of fewer an interval says nothing of others


def measures(
    truth: Truth, odds: Floats, patients: Sequence[Any], *, replicates: int, seed: int
) -> tuple[dict[str, Number], Calibration]:
    """(N,) bool, (N,) log odds -> AUROC, average precision, Brier score, calibration error, slope and intercept."""
    how: Any = {"replicates": replicates, "seed": seed}
    share = float(truth.mean())
    judged = calibration(truth, 1 / (1 + np.exp(-odds)), patients, log_odds=odds, **how)
    made = {
        "auroc": _number(lambda: auroc(truth, odds, patients, **how), 0.5, "chance"),
        "average_precision": _number(lambda: average_precision(truth, odds, patients, **how), share, "prevalence"),
        "brier": number(judged.brier, share * (1 - share), "the prevalence for all"),
        "calibration_error": number(judged.error, judged.by_chance, "perfect calibration, by chance"),
        "slope": number(judged.slope, 1.0, "perfect calibration", judged.reason),
        "intercept": number(judged.intercept, 0.0, "perfect calibration", judged.reason),
    }
    return made, judged


def by_group(subject: Subject, rows: Sequence[int], truth: Truth, odds: Floats) -> Iterator[Group]:
    """The same of every level of every subgroup with enough patients; of the others it is said that they are too few."""
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        for level, own in levels_of([said[row] for row in rows]).items():
            patients = [subject.patients[row] for row, inside in zip(rows, own, strict=True) if inside]
            positives, negatives = int(truth[own].sum()), int((~truth[own]).sum())
            made = Group(column=column, level=str(level), positives=positives, negatives=negatives)
            if len(set(patients)) < LEAST or not positives or not negatives:
                yield made.model_copy(update={"reason": "too few patients, or images of one class only"})
            else:
                yield made.model_copy(update=measures(truth[own], odds[own], patients, **subject.how)[0])


def bins(judged: Calibration) -> Iterator[Bin]:
    """Of a reliability plot."""
    for one in judged.bins:
        yield Bin(
            predicted=rounded(one.probability) or 0.0,
            observed=rounded(one.share) or 0.0,
            low=rounded(one.low) or 0.0,
            high=rounded(one.high) or 0.0,
            n=one.n,
        )


def _number(estimate: Callable[[], Estimate], baseline: float, name: str) -> Number:
    try:
        return number(estimate(), baseline, name)
    except UndefinedError as error:
        return number(None, baseline, name, str(error))
