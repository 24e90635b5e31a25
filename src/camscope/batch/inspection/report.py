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

from camscope.batch.export import Cells
from camscope.batch.inspection.distributions import Prevalence
from camscope.batch.inspection.image_metadata import COLUMNS, UNSHOWN
from camscope.batch.inspection.issues import SEVERITIES, Finding, Rows
from camscope.batch.manifest import arrow
from camscope.errors import OutputError
from camscope.plurals import plural
from camscope.safe_files import write_bytes, writing
from camscope.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "camscope/inspection/1"
NAMED = 1000  # rows that the JSON names of a finding; the table has all
OF_THE_SET = ("columns", "target-follows-group")  # findings that concern no row more than another


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `inspect_images` found. `shown`: row, id, path and the columns that may be shown; `facts`: of each row, in order.

    `mix`: fact -> value -> images. `not_checked`: which of patient, split, target and mask no column says.
    """

    shown: "pa.Table"
    facts: "pa.Table"
    findings: tuple[Finding, ...]
    mix: dict[str, dict[str, int]]
    ranges: dict[str, list[Any]]
    prevalences: tuple[Prevalence, ...]
    not_checked: tuple[str, ...]
    profile: str

    def __len__(self) -> int:
        return int(self.facts.num_rows)

    @property
    def readable(self) -> int:
        """How many images could be read."""
        return int(self.facts["error"].null_count)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each severity."""
        return {each: sum(one.severity == each for one in self.findings) for each in SEVERITIES}

    def names(self, rows: Rows | Sequence[int], most: int = NAMED) -> list[str]:
        """The ids of rows, the first of them."""
        found: list[str] = self.shown["id"].take(arrow().array(list(rows[:most]), arrow().int64())).to_pylist()
        return found

    def table(self) -> "pa.Table":
        """One row an image: row, id, path, the facts, the codes of all findings, the columns that may be shown."""
        pa = arrow()
        made = self.shown.select(["row", "id", "path"])
        status = pa.array(["ok" if one is None else "failed" for one in self.facts["error"].to_pylist()])
        made = made.append_column("status", status)
        for name in COLUMNS:
            column = pa.array(self._codes(), pa.list_(pa.string())) if name == "findings" else self.facts[name]
            plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
            made = made.append_column(name, plain)
        for name in self.shown.column_names:
            if name not in made.column_names and name not in UNSHOWN:
                made = made.append_column(name, self.shown[name])
        return made

    def _codes(self) -> list[list[str]]:
        codes: list[list[str]] = [[] for _ in range(len(self))]
        for one in self.findings:
            for row in one.rows.tolist() if one.code not in OF_THE_SET else ():
                codes[row].append(one.code)
        return codes

    @property
    def summary(self) -> dict[str, Any]:
        """All but the table, as plain numbers and texts."""
        return {
            "schema": SCHEMA,
            "camscope": __version__,
            "profile": self.profile,
            "images": len(self),
            "readable": self.readable,
            "counts": self.counts,
            "mix": self.mix,
            "ranges": self.ranges,
            "findings": [self._told(one) for one in self.findings],
            "prevalence": [_counted(one) for one in self.prevalences],
            "not_checked": list(self.not_checked),
        }

    def _told(self, one: Finding) -> dict[str, Any]:
        ids = [] if one.code in OF_THE_SET else self.names(one.rows)
        return {
            "code": one.code,
            "severity": one.severity,
            "message": one.message,
            "count": one.count,
            "details": dict(one.details),
            "ids": ids,
            "groups": [self.names(group) for group in one.groups],
        }

    def json(self) -> str:
        """`summary` as JSON: keys sorted, the same for the same set."""
        return json.dumps(self.summary, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `summary` (.json), or `table` (.parquet, .csv)."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            return write_bytes(path, self.json().encode(), overwrite=overwrite)
        if suffix not in (".parquet", ".csv"):
            raise OutputError(f"{path}: expected a file of .json, .parquet or .csv")
        with writing(path, overwrite=overwrite) as file:
            if suffix == ".parquet":
                arrow("parquet").write_table(self.table(), file)
            else:
                _as_csv(self.table(), file)
        return Path(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {each}s" for each, count in self.counts.items())
        return f"<Inspection of {plural(len(self), 'image', spec=',')}, {self.readable:,} readable: {counts}>"

    def _repr_html_(self) -> str:
        """For notebooks: the findings, and what the set is made of."""
        rows = [
            (one.severity, f"{one.count:,}", one.code, one.message, ", ".join(self.names(one.rows, 3)))
            for one in self.findings
        ]
        mix = [
            (name, " · ".join(f"{value} {count:,}" for value, count in list(each.items())[:8]))
            for name, each in self.mix.items()
        ]
        head = f"<p>{html.escape(repr(self)[1:-1])}</p>"
        return head + _html(("", "rows", "finding", "what it is", "the first"), rows) + _html(("", "images"), mix)


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _counted(one: Prevalence) -> dict[str, Any]:
    shares = one.shares.tolist()
    return {
        "by": one.by,
        "association": one.association,
        "groups": [
            {"group": group, "target": target, "count": int(one.counts[r, c]), "share": shares[r][c]}
            for r, group in enumerate(one.groups)
            for c, target in enumerate(one.targets)
        ],
    }


def _as_csv(table: "pa.Table", file: Any) -> None:
    text, cells = io.TextIOWrapper(file, "utf-8-sig", newline=""), Cells()
    rows = csv.writer(text)
    rows.writerow(map(cells.text, table.column_names))
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            rows.writerow(map(cells.text, row.values()))
    text.detach()
