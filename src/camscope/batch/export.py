"""Export: rows of a run as files of other programs: pictures, arrays, a table, or COCO's boxes and outlines.

Spreadsheet: the rows of a run as CSV, for people; programs read the parts.
"""

import csv
import io
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope import render
from camscope.batch.coco_export import CocoWriter, map_annotations, open_coco_writer
from camscope.batch.image_loading import map_in_order
from camscope.batch.map_collection import MapCollection, read_original, strip_file_name
from camscope.batch.query import Query, iter_rows_by_image
from camscope.batch.result_rows import OutputNames
from camscope.errors import InputError, OutputError
from camscope.explanation import Explanation
from camscope.safe_files import DISK_ERRNOS, build_output_path, open_atomic, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa


IMAGE_FORMATS, MAP_FORMATS, TABLE_FILES = (
    ("png", "jpg", "webp"),
    ("npz", "json"),
    {"csv": "rows.csv", "coco": "coco.json"},
)
FORMATS = (*IMAGE_FORMATS, *MAP_FORMATS, *TABLE_FILES)
ResultRow = Mapping[str, Any]


@dataclass
class ExportResult:
    """What became of the rows: how many were meant, how many files there are of them, and why others have none."""

    n_rows: int = 0
    n_files: int = 0
    n_rows_without_map: int = 0  # rows that have no map
    n_escaped_cells: int = 0  # cells of a table that got one, so that they hold no formula
    failure_counts: Counter[str] = field(default_factory=Counter)
    failure_examples: dict[str, str] = field(default_factory=dict)  # of each reason, a row's id


@dataclass(frozen=True)
class _RowExport:
    """A row, how many files were written of it, what COCO says of it and of which class, and what went wrong."""

    row: ResultRow
    n_files: int = 0
    annotations: Sequence[Mapping[str, Any]] | None = None
    target: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Exporter:
    """Where the files go: `formats` of `FORMATS`, into a folder, or one table of a run to exactly `table_file`."""

    run: MapCollection
    folder: Path
    formats: Sequence[str]
    threshold: float = 0.5
    overwrite: bool = False
    table_file: Path | None = None

    def __post_init__(self) -> None:
        unknown = [one for one in self.formats if one not in FORMATS]
        if unknown or not self.formats:
            raise InputError(f"formats {', '.join(unknown) or 'none'}; expected some of {', '.join(FORMATS)}")
        if not 0 < self.threshold <= 1:
            raise InputError(f"threshold={self.threshold}; expected a part of the maximum, above 0 and up to 1")

    def table_path(self, table_format: str) -> Path:
        """The file of a table."""
        return self.table_file or build_output_path(self.folder, TABLE_FILES[table_format])

    def write(self, query: Query, num_threads: int, on_progress: Callable[[int], None]) -> ExportResult:
        """Write the files of the rows that a query means; a row that fails is told of in the end, the others go on."""
        for kind in set(self.formats) & set(TABLE_FILES):
            if not self.overwrite and os.path.lexists(self.table_path(kind)):
                raise OutputError(f"{self.table_path(kind)} exists; allow overwriting, or choose another name")
        done = ExportResult()
        if "csv" in self.formats:
            done.n_rows, done.n_escaped_cells = write_csv(
                self.run, self.table_path("csv"), query, overwrite=self.overwrite
            )
            done.n_files += 1
        if set(self.formats) != {"csv"}:
            self._write_maps(query, num_threads, on_progress, done)
        return done

    def _write_maps(
        self, query: Query, num_threads: int, on_progress: Callable[[int], None], result: ExportResult
    ) -> None:
        rows = self.run.dataset
        places = np.sort(query.find_positions(rows))
        result.n_rows = len(places)
        with ExitStack() as stack:
            table = stack.enter_context(self._open_coco(query)) if "coco" in self.formats else None
            for image in map_in_order(self._export_image, iter_rows_by_image(rows, places), num_threads):
                self._record_image(image, table, result)
                on_progress(len(image))
        result.n_files += table is not None

    def _record_image(
        self, row_exports: Sequence[_RowExport], coco_writer: CocoWriter | None, result: ExportResult
    ) -> None:
        known = False
        for one in row_exports:
            result.n_files += one.n_files
            result.n_rows_without_map += one.row["attribution"] is None
            if one.error is not None:
                result.failure_counts[one.error] += 1
                result.failure_examples.setdefault(one.error, one.row["id"])
            if coco_writer is not None and one.annotations is not None:
                if not known:
                    coco_writer.add_image(one.row, one.row["image_size"])
                known = True
                coco_writer.add_annotations(one.row, one.target, one.annotations)

    def _export_image(self, rows: Sequence[ResultRow]) -> list[_RowExport]:
        """The files of an image's rows: it is read once, and where only maps are wanted not at all."""
        photo = error = None
        if set(self.formats) & set(IMAGE_FORMATS) and any(row["attribution"] is not None for row in rows):
            photo, error = read_original(self.run, rows[0])
        names, taken, made = OutputNames.from_run(self.run.run_info["made_with"]), set[str](), []
        for row in rows:
            stem = names.file_stem(row)
            if row["attribution"] is None or stem in taken:  # asked twice for one class, there are two rows of one map
                made.append(_RowExport(row))
            else:
                made.append(self._export_row(row, stem, self.run.explanation(row, photo), error))
            taken.add(stem)
        return made

    def _export_row(
        self, row: ResultRow, stem: str, explanation: Explanation, missing_image_reason: str | None
    ) -> _RowExport:
        """`missing_image_reason`: why there is no original, without which there are no pictures."""
        files = 0
        try:
            for kind in self.formats:
                if kind in MAP_FORMATS or (kind in IMAGE_FORMATS and missing_image_reason is None):
                    self._write_file(
                        stem, kind, explanation if kind in IMAGE_FORMATS else replace(explanation, image=None)
                    )
                    files += 1
            found = map_annotations(explanation, self.threshold) if "coco" in self.formats else None
            return _RowExport(row, files, found, explanation.target, missing_image_reason)
        except OutputError as error:
            if error.errno in DISK_ERRNOS:  # every other file would fail, too
                raise
            return _RowExport(row, files, error=strip_file_name(error, stem))
        except Exception as error:  # a disk and a decoder may raise anything; the other rows go on
            return _RowExport(row, files, error=strip_file_name(error, stem))

    def _write_file(self, stem: str, file_format: str, explanation: Explanation) -> None:
        path = build_output_path(self.folder, f"{stem}.{file_format}")
        if not self.overwrite and os.path.lexists(path):
            raise OutputError("its file exists; allow overwriting (--overwrite), or choose another folder")
        if file_format in MAP_FORMATS:
            explanation.save(path, overwrite=self.overwrite)
        else:  # not waiting for the disk, file by file: a picture can be drawn again
            write_bytes(
                path,
                render.encode_image(explanation.annotated_image(), path.suffix),
                overwrite=self.overwrite,
                sync=False,
            )

    def _open_coco(self, query: Query) -> Any:
        facts, made = self.run.run_info, self.run.run_info["made_with"]
        info = {
            "version": f"camscope {facts['versions']['camscope']}",
            "model": made["model"],
            "threshold": self.threshold,
            "query": query.description,
        }
        return open_coco_writer(self.table_path("coco"), facts["categories"], info, overwrite=self.overwrite)


OMITTED_COLUMNS = ("grid", "attribution", "input_size", "image_size", "placement")
PEAK_CELL_SQL = "CASE WHEN list_max(attribution) > 0 AND isfinite(list_max(attribution)) THEN list_position(attribution, list_max(attribution)) - 1 END"
NUMBER_PATTERN = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
CELL_BREAKS = r";,|\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029"  # where a spreadsheet may split a line, or end it
# What nobody sees, and some spreadsheets take away: control and format characters, selectors and fillers of Unicode.
INVISIBLE_CHARACTERS = (
    r"\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# what a formula begins with, in every width that Unicode has of it
FORMULA_SIGNS = r"=+\-@＝＋－＠﹦﹢﹣﹫−"
# the beginning of a text, or a break; what is not seen, white space and quotation marks; then a formula
FORMULA_PATTERN = re.compile(
    rf"^(?=[\t\r\n])|((?:^|[{CELL_BREAKS}])[\s\"“”„‟{INVISIBLE_CHARACTERS}]*)(?=[{FORMULA_SIGNS}])"
)


def write_csv(run: MapCollection, path: Path, query: Query, *, overwrite: bool) -> tuple[int, int]:
    """Write the rows, and where on the image each map is hottest; how many rows, and how many cells a `'` was put before.

    What a spreadsheet would take for a formula gets a `'` in front, so that it stays a text. Rows come in the order of the
    query; of all of them only a few are in memory.
    """
    fields = [field for field in run.dataset.schema if field.name not in OMITTED_COLUMNS]
    names, own = [field.name for field in fields], [_column_sql(field) for field in fields]
    rows = query.iter_rows(run.dataset, [*own, PEAK_CELL_SQL, "grid", "input_size", "placement"])
    written, cells = 0, CellEscaper()
    with open_atomic(path, overwrite=overwrite) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # by its first bytes Excel knows that it is UTF-8
        table = csv.writer(text)
        table.writerow([*map(cells.escape, names), "peak_row", "peak_column"])
        for row in rows:
            table.writerow([*map(cells.escape, row[: len(names)]), *_peak_position(*row[len(names) :])])
            written += 1
        text.detach()
    return written, cells.n_escaped


def _column_sql(field: "pa.Field") -> str:
    """A column in SQL; times with a zone as words, for which DuckDB would want one more package."""
    quoted = '"{}"'.format(field.name.replace('"', '""'))
    return f"CAST({quoted} AS VARCHAR)" if getattr(field.type, "tz", None) else quoted


class CellEscaper:
    """Values as cells of a CSV file, counting those that had to be changed."""

    def __init__(self) -> None:
        self.n_escaped = 0

    def escape(self, value: Any) -> Any:
        """Numbers unchanged, lists as JSON, and no formula at the beginning of a text or after `;`, `,`, `|`, a tab, a new line.

        Where the comma is the decimal mark, spreadsheets split lines at semicolons.
        """
        if isinstance(value, Mapping | list | tuple):
            text = json.dumps(value, default=str, ensure_ascii=False) if value else ""
            if '"' not in text:  # numbers alone
                return text
            value = text
        if value is None or isinstance(value, int | float) or NUMBER_PATTERN.fullmatch(str(value)):
            return value
        text, count = FORMULA_PATTERN.subn(r"\1'", str(value))
        self.n_escaped += count > 0
        return text


def _peak_position(
    cell: int | None,
    grid: Sequence[int] | None,
    input_size: Sequence[int] | None,
    placement: Sequence[float] | None,
) -> tuple[float | None, float | None]:
    """The middle of the hottest cell, on the original's pixels; nothing where a map is nowhere positive, or its place unknown."""
    if cell is None or placement is None or grid is None or input_size is None or len(grid) != 2:
        return None, None
    down, across = divmod(cell, grid[1])
    point = ((down + 0.5) * input_size[0] / grid[0], (across + 0.5) * input_size[1] / grid[1], 1.0)
    row, column = (sum(map(operator.mul, placement[start : start + 3], point)) for start in (0, 3))
    return round(row, 1), round(column, 1)
