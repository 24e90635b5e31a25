"""Answers: the log odds that the model gives each image for each finding, and the features that it drew them from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.batch.manifest import import_arrow
from camscope.data_readers import read_parquet
from camscope.safe_files import open_atomic

Floats = npt.NDArray[np.float64]
PREDICTIONS_FILE = "predictions.parquet"


@dataclass(frozen=True, eq=False)
class Predictions:
    """`rows` (N,): those that were answered; `log_odds` (N,F) for each of `findings`; `features` (N,D); `errors` of the others.

    `outputs_are_probabilities`: the model gives these, and the odds were made of them.
    """

    rows: list[int]
    findings: tuple[str, ...]
    log_odds: Floats
    features: npt.NDArray[np.float32]
    errors: dict[int, str]
    outputs_are_probabilities: bool = False

    def log_odds_by_row(self, finding: str) -> dict[int, float]:
        """Row -> log odds."""
        return dict(zip(self.rows, self.log_odds[:, self.findings.index(finding)].tolist(), strict=True))

    def log_odds_std(self, finding: str) -> float:
        """The standard deviation of a finding's log odds over all images: the unit of effects."""
        return float(self.log_odds[:, self.findings.index(finding)].std())

    def write(
        self, folder: Path, ids: dict[int, str], patients: dict[int, int], truths: Sequence[dict[int, bool | None]]
    ) -> None:
        """As `predictions.parquet`: row, id, patient (a number), error; for each finding truth, log odds, chance; features."""
        pa, every = import_arrow(), sorted([*self.rows, *self.errors])
        place = {row: n for n, row in enumerate(self.rows)}
        columns: dict[str, Any] = {
            "row": pa.array(every, pa.int64()),
            "id": pa.array([ids[row] for row in every], pa.string()),
            "patient": pa.array([patients[row] for row in every], pa.int64()),
            "error": pa.array([self.errors.get(row) for row in every], pa.string()),
        }
        for f, name in enumerate(self.findings):
            odds = [float(self.log_odds[place[row], f]) if row in place else None for row in every]
            chances = [None if one is None else float(1 / (1 + np.exp(-one))) for one in odds]
            columns[f"truth {name}"] = pa.array([truths[f][row] for row in every], pa.bool_())
            columns[f"log odds {name}"] = pa.array(odds, pa.float64())
            columns[f"probability {name}"] = pa.array(chances, pa.float64())
        wide = self.features.shape[1]
        kept = [self.features[place[row]] if row in place else None for row in every]
        columns["features"] = pa.array(kept, pa.list_(pa.float32(), wide))
        table = pa.table(columns).replace_schema_metadata(
            {"outputs_are_probabilities": str(self.outputs_are_probabilities)}
        )
        with open_atomic(folder / PREDICTIONS_FILE) as file:
            import_arrow("parquet").write_table(table, file)

    @classmethod
    def read(cls, folder: Path, *, features: bool = False) -> "Predictions":
        """What `write` wrote; `features` only where they are needed, for they are many."""
        schema = import_arrow("parquet").read_schema(folder / PREDICTIONS_FILE)
        columns = [name for name in schema.names if features or name != "features"]
        table = read_parquet(folder / PREDICTIONS_FILE, columns)
        names = tuple(one.removeprefix("log odds ") for one in table.column_names if one.startswith("log odds "))
        errors = dict(zip(table["row"].to_pylist(), table["error"].to_pylist(), strict=True))
        there = table.filter(import_arrow("compute").is_null(table["error"]))
        odds = [there[f"log odds {name}"].to_numpy() for name in names]
        kept = np.empty((there.num_rows, 0), np.float32)
        if features:
            flat = there["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            kept = np.asarray(flat, np.float32).reshape(there.num_rows, -1)
        return cls(
            there["row"].to_pylist(),
            names,
            np.stack(odds, 1) if odds else np.empty((0, 0)),
            kept,
            {row: why for row, why in errors.items() if why is not None},
            (schema.metadata or {}).get(b"outputs_are_probabilities") == b"True",
        )
