"""Inspection: what was found in a set of images, as a table, as findings, as JSON that may be passed on."""

import csv
import html
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.batch.export import CellEscaper
from camscope.batch.inspection.distributions import TargetPrevalence
from camscope.batch.inspection.image_metadata import INTERNAL_COLUMNS, METADATA_COLUMNS
from camscope.batch.inspection.issues import SEVERITIES, DatasetIssue, RowNumbers
from camscope.batch.manifest import import_arrow
from camscope.errors import OutputError
from camscope.plurals import plural
from camscope.safe_files import open_atomic, write_bytes
from camscope.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = "camscope/inspection/1"
MAX_NAMED_ROWS = 1000  # rows that the JSON names of a finding; the table has all
DATASET_LEVEL_CODES = ("columns", "target-follows-group")  # findings that concern no row more than another


@dataclass(frozen=True, eq=False)
class DatasetInspection:
    """What `inspect_images` found. `visible_columns`: row, id, path and the columns that may be shown; `metadata`: of each row, in order.

    `value_counts`: fact -> value -> images. `missing_roles`: which of patient, split, target and mask no column says.
    """

    visible_columns: "pa.Table"
    metadata: "pa.Table"
    issues: tuple[DatasetIssue, ...]
    value_counts: dict[str, dict[str, int]]
    value_ranges: dict[str, list[Any]]
    prevalences: tuple[TargetPrevalence, ...]
    missing_roles: tuple[str, ...]
    profile: str

    def __len__(self) -> int:
        return int(self.metadata.num_rows)

    @property
    def n_readable(self) -> int:
        """How many images could be read."""
        return int(self.metadata["error"].null_count)

    @cached_property
    def severity_counts(self) -> dict[str, int]:
        """How many findings there are of each severity."""
        return {each: sum(one.severity == each for one in self.issues) for each in SEVERITIES}

    def row_ids(self, rows: RowNumbers | Sequence[int], limit: int = MAX_NAMED_ROWS) -> list[str]:
        """The ids of rows, the first of them."""
        found: list[str] = (
            self.visible_columns["id"]
            .take(import_arrow().array(list(rows[:limit]), import_arrow().int64()))
            .to_pylist()
        )
        return found

    def to_table(self) -> "pa.Table":
        """One row an image: row, id, path, the facts, the codes of all findings, the columns that may be shown."""
        pa = import_arrow()
        made = self.visible_columns.select(["row", "id", "path"])
        status = pa.array(["ok" if one is None else "failed" for one in self.metadata["error"].to_pylist()])
        made = made.append_column("status", status)
        for name in METADATA_COLUMNS:
            column = (
                pa.array(self._issue_codes_by_row(), pa.list_(pa.string()))
                if name == "findings"
                else self.metadata[name]
            )
            plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
            made = made.append_column(name, plain)
        for name in self.visible_columns.column_names:
            if name not in made.column_names and name not in INTERNAL_COLUMNS:
                made = made.append_column(name, self.visible_columns[name])
        return made

    def _issue_codes_by_row(self) -> list[list[str]]:
        codes: list[list[str]] = [[] for _ in range(len(self))]
        for one in self.issues:
            for row in one.rows.tolist() if one.code not in DATASET_LEVEL_CODES else ():
                codes[row].append(one.code)
        return codes

    @property
    def summary(self) -> dict[str, Any]:
        """All but the table, as plain numbers and texts."""
        return {
            "schema": SCHEMA_VERSION,
            "camscope": __version__,
            "profile": self.profile,
            "images": len(self),
            "readable": self.n_readable,
            "counts": self.severity_counts,
            "mix": self.value_counts,
            "ranges": self.value_ranges,
            "findings": [self._issue_to_dict(one) for one in self.issues],
            "prevalence": [_prevalence_to_dict(one) for one in self.prevalences],
            "not_checked": list(self.missing_roles),
        }

    def _issue_to_dict(self, issue: DatasetIssue) -> dict[str, Any]:
        ids = [] if issue.code in DATASET_LEVEL_CODES else self.row_ids(issue.rows)
        return {
            "code": issue.code,
            "severity": issue.severity,
            "message": issue.message,
            "count": issue.n_rows,
            "details": dict(issue.row_counts),
            "ids": ids,
            "groups": [self.row_ids(group) for group in issue.row_groups],
        }

    def to_json(self) -> str:
        """`summary` as JSON: keys sorted, the same for the same set."""
        return json.dumps(self.summary, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `summary` (.json), or `to_table` (.parquet, .csv)."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            return write_bytes(path, self.to_json().encode(), overwrite=overwrite)
        if suffix not in (".parquet", ".csv"):
            raise OutputError(f"{path}: expected a file of .json, .parquet or .csv")
        with open_atomic(path, overwrite=overwrite) as file:
            if suffix == ".parquet":
                import_arrow("parquet").write_table(self.to_table(), file)
            else:
                _write_inspection_csv(self.to_table(), file)
        return Path(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {each}s" for each, count in self.severity_counts.items())
        return f"<Inspection of {plural(len(self), 'image', spec=',')}, {self.n_readable:,} readable: {counts}>"

    def _repr_html_(self) -> str:
        """For notebooks: the findings, and what the set is made of."""
        rows = [
            (one.severity, f"{one.n_rows:,}", one.code, one.message, ", ".join(self.row_ids(one.rows, 3)))
            for one in self.issues
        ]
        mix = [
            (name, " · ".join(f"{value} {count:,}" for value, count in list(each.items())[:8]))
            for name, each in self.value_counts.items()
        ]
        head = f"<p>{html.escape(repr(self)[1:-1])}</p>"
        return (
            head
            + _html_table(("", "rows", "finding", "what it is", "the first"), rows)
            + _html_table(("", "images"), mix)
        )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _prevalence_to_dict(prevalence: TargetPrevalence) -> dict[str, Any]:
    shares = prevalence.shares.tolist()
    return {
        "by": prevalence.column,
        "association": prevalence.association,
        "groups": [
            {"group": group, "target": target, "count": int(prevalence.counts[r, c]), "share": shares[r][c]}
            for r, group in enumerate(prevalence.groups)
            for c, target in enumerate(prevalence.targets)
        ],
    }


def _write_inspection_csv(table: "pa.Table", file: Any) -> None:
    text, cells = io.TextIOWrapper(file, "utf-8-sig", newline=""), CellEscaper()
    rows = csv.writer(text)
    rows.writerow(map(cells.escape, table.column_names))
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            rows.writerow(map(cells.escape, row.values()))
    text.detach()
