"""Predictions of the audited model: log odds of each finding and features of each image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from camscope.atomic_writes_and_folder_locks import open_atomic
from camscope.audit.core.stage_result_schema import ResolveResult, StageResult
from camscope.batch.image_manifest import import_arrow
from camscope.metrics.metric_registry import FloatArray
from camscope.read_untrusted_files import read_parquet

PREDICTIONS_FILE = "predictions.parquet"
LOG_ODDS_PREFIX = "log odds "


@dataclass(frozen=True, eq=False)
class Predictions:
    """The log odds (N,F) and features (N,D) of N images, and the errors of images whose prediction failed.

    `errors`: row -> the reason. `outputs_are_probabilities`: the model returns probabilities, which were converted into log
    odds.
    """

    rows: list[int]
    findings: tuple[str, ...]
    log_odds: FloatArray
    features: npt.NDArray[np.float32]
    errors: dict[int, str]
    outputs_are_probabilities: bool = False

    def log_odds_by_row(self, finding: str) -> dict[int, float]:
        """Return a dict from row number to the log odds of a finding."""
        return dict(zip(self.rows, self.log_odds[:, self.findings.index(finding)].tolist(), strict=True))

    def log_odds_std(self, finding: str) -> float:
        """Return the standard deviation of a finding's log odds over all images. Effects are measured in this unit."""
        return float(self.log_odds[:, self.findings.index(finding)].std())

    def write(
        self, folder: Path, ids: dict[int, str], patients: dict[int, int], truths: Sequence[dict[int, bool | None]]
    ) -> None:
        """Write the predictions to `predictions.parquet`.

        Columns: row, id, patient (a number), error, features, and for each finding its truth, log odds and probability.
        """
        pa, rows = import_arrow(), sorted([*self.rows, *self.errors])
        columns: dict[str, Any] = {
            "row": pa.array(rows, pa.int64()),
            "id": pa.array([ids[row] for row in rows], pa.string()),
            "patient": pa.array([patients[row] for row in rows], pa.int64()),
            "error": pa.array([self.errors.get(row) for row in rows], pa.string()),
        }
        for name, truth in zip(self.findings, truths, strict=True):
            by_row = self.log_odds_by_row(name)
            log_odds = [by_row.get(row) for row in rows]
            probabilities = [None if value is None else float(1 / (1 + np.exp(-value))) for value in log_odds]
            columns[f"truth {name}"] = pa.array([truth[row] for row in rows], pa.bool_())
            columns[f"{LOG_ODDS_PREFIX}{name}"] = pa.array(log_odds, pa.float64())
            columns[f"probability {name}"] = pa.array(probabilities, pa.float64())
        features = dict(zip(self.rows, self.features, strict=True))
        features_type = pa.list_(pa.float32(), self.features.shape[1])
        columns["features"] = pa.array([features.get(row) for row in rows], features_type)
        metadata = {"outputs_are_probabilities": str(self.outputs_are_probabilities)}
        with open_atomic(folder / PREDICTIONS_FILE) as file:
            import_arrow("parquet").write_table(pa.table(columns).replace_schema_metadata(metadata), file)

    @classmethod
    def read(cls, folder: Path, *, features: bool = False) -> "Predictions":
        """Read the predictions from `predictions.parquet`. By default, the large features are not read."""
        schema = import_arrow("parquet").read_schema(folder / PREDICTIONS_FILE)
        table = read_parquet(
            folder / PREDICTIONS_FILE, [name for name in schema.names if features or name != "features"]
        )
        columns = [name for name in table.column_names if name.startswith(LOG_ODDS_PREFIX)]
        errors = dict(zip(table["row"].to_pylist(), table["error"].to_pylist(), strict=True))
        predicted = table.filter(import_arrow("compute").is_null(table["error"]))
        log_odds = [predicted[name].to_numpy() for name in columns]
        feature_array = np.empty((predicted.num_rows, 0), np.float32)
        if features:
            values = predicted["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            feature_array = np.asarray(values, np.float32).reshape(predicted.num_rows, -1)
        return cls(
            predicted["row"].to_pylist(),
            tuple(name.removeprefix(LOG_ODDS_PREFIX) for name in columns),
            np.stack(log_odds, 1) if log_odds else np.empty((0, 0)),
            feature_array,
            {row: error for row, error in errors.items() if error is not None},
            (schema.metadata or {}).get(b"outputs_are_probabilities") == b"True",
        )


class StageResults(dict[str, StageResult]):
    """A dict from stage name to result. The predictions are large, so they are read from their file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def resolve(self) -> ResolveResult:
        """The result of the stage "resolve": facts about the model and its explainers."""
        return cast(ResolveResult, self["resolve"])

    @cached_property
    def predictions(self) -> Predictions:
        """The predictions of the stage "predict", without features."""
        return Predictions.read(self._folder)
