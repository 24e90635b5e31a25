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
from camscope.batch.coco_export import Coco, annotations, coco
from camscope.batch.image_loading import in_order
from camscope.batch.map_collection import Collection, original, why
from camscope.batch.query import Query, by_image
from camscope.batch.result_rows import Names
from camscope.errors import InputError, OutputError
from camscope.explanation import Explanation
from camscope.safe_files import DISK_ERRORS, path_in, write_bytes, writing

if TYPE_CHECKING:
    import pyarrow as pa


PICTURES, MAPS, TABLES = ("png", "jpg", "webp"), ("npz", "json"), {"csv": "rows.csv", "coco": "coco.json"}
FORMATS = (*PICTURES, *MAPS, *TABLES)
Row = Mapping[str, Any]


@dataclass
class Exported:
    """What became of the rows: how many were meant, how many files there are of them, and why others have none."""

    rows: int = 0
    files: int = 0
    without: int = 0  # rows that have no map
    apostrophes: int = 0  # cells of a table that got one, so that they hold no formula
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of each reason, a row's id


@dataclass(frozen=True)
class _Row:
    """A row, how many files were written of it, what COCO says of it and of which class, and what went wrong."""

    row: Row
    files: int = 0
    found: Sequence[Mapping[str, Any]] | None = None
    target: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Export:
    """Where the files go: `formats` of `FORMATS`, into a folder, or one table of a run to exactly `file`."""

    run: Collection
    folder: Path
    formats: Sequence[str]
    threshold: float = 0.5
    overwrite: bool = False
    file: Path | None = None

    def __post_init__(self) -> None:
        unknown = [one for one in self.formats if one not in FORMATS]
        if unknown or not self.formats:
            raise InputError(f"formats {', '.join(unknown) or 'none'}; expected some of {', '.join(FORMATS)}")
        if not 0 < self.threshold <= 1:
            raise InputError(f"threshold={self.threshold}; expected a part of the maximum, above 0 and up to 1")

    def place(self, kind: str) -> Path:
        """The file of a table."""
        return self.file or path_in(self.folder, TABLES[kind])

    def write(self, query: Query, threads: int, told: Callable[[int], None]) -> Exported:
        """Write the files of the rows that a query means; a row that fails is told of in the end, the others go on."""
        for kind in set(self.formats) & set(TABLES):
            if not self.overwrite and os.path.lexists(self.place(kind)):
                raise OutputError(f"{self.place(kind)} exists; allow overwriting, or choose another name")
        done = Exported()
        if "csv" in self.formats:
            done.rows, done.apostrophes = write_csv(self.run, self.place("csv"), query, overwrite=self.overwrite)
            done.files += 1
        if set(self.formats) != {"csv"}:
            self._write_maps(query, threads, told, done)
        return done

    def _write_maps(self, query: Query, threads: int, told: Callable[[int], None], done: Exported) -> None:
        rows = self.run.dataset
        places = np.sort(query.places(rows))
        done.rows = len(places)
        with ExitStack() as stack:
            table = stack.enter_context(self._coco(query)) if "coco" in self.formats else None
            for image in in_order(self._image, by_image(rows, places), threads):
                self._note(image, table, done)
                told(len(image))
        done.files += table is not None

    def _note(self, image: Sequence[_Row], table: Coco | None, done: Exported) -> None:
        known = False
        for one in image:
            done.files += one.files
            done.without += one.row["heat"] is None
            if one.error is not None:
                done.reasons[one.error] += 1
                done.examples.setdefault(one.error, one.row["id"])
            if table is not None and one.found is not None:
                if not known:
                    table.image(one.row, one.row["image_size"])
                known = True
                table.map(one.row, one.target, one.found)

    def _image(self, rows: Sequence[Row]) -> list[_Row]:
        """The files of an image's rows: it is read once, and where only maps are wanted not at all."""
        photo = error = None
        if set(self.formats) & set(PICTURES) and any(row["heat"] is not None for row in rows):
            photo, error = original(self.run, rows[0])
        names, taken, made = Names.of(self.run.facts["made_with"]), set[str](), []
        for row in rows:
            stem = names.stem(row)
            if row["heat"] is None or stem in taken:  # asked twice for one class, there are two rows of one map
                made.append(_Row(row))
            else:
                made.append(self._row(row, stem, self.run.explanation(row, photo), error))
            taken.add(stem)
        return made

    def _row(self, row: Row, stem: str, one: Explanation, unseen: str | None) -> _Row:
        """`unseen`: why there is no original, without which there are no pictures."""
        files = 0
        try:
            for kind in self.formats:
                if kind in MAPS or (kind in PICTURES and unseen is None):
                    self._file(stem, kind, one if kind in PICTURES else replace(one, image=None))
                    files += 1
            found = annotations(one, self.threshold) if "coco" in self.formats else None
            return _Row(row, files, found, one.target, unseen)
        except OutputError as error:
            if error.errno in DISK_ERRORS:  # every other file would fail, too
                raise
            return _Row(row, files, error=why(error, stem))
        except Exception as error:  # a disk and a decoder may raise anything; the other rows go on
            return _Row(row, files, error=why(error, stem))

    def _file(self, stem: str, kind: str, one: Explanation) -> None:
        path = path_in(self.folder, f"{stem}.{kind}")
        if not self.overwrite and os.path.lexists(path):
            raise OutputError("its file exists; allow overwriting (--overwrite), or choose another folder")
        if kind in MAPS:
            one.save(path, overwrite=self.overwrite)
        else:  # not waiting for the disk, file by file: a picture can be drawn again
            write_bytes(path, render.encode(one.marked(), path.suffix), overwrite=self.overwrite, sync=False)

    def _coco(self, query: Query) -> Any:
        facts, made = self.run.facts, self.run.facts["made_with"]
        info = {
            "version": f"camscope {facts['versions']['camscope']}",
            "model": made["model"],
            "threshold": self.threshold,
            "query": query.words,
        }
        return coco(self.place("coco"), facts["categories"], info, overwrite=self.overwrite)


LEFT_OUT = ("grid", "heat", "input_size", "image_size", "placement")
HOTTEST = "CASE WHEN list_max(heat) > 0 AND isfinite(list_max(heat)) THEN list_position(heat, list_max(heat)) - 1 END"
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
BREAKS = r";,|\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029"  # where a spreadsheet may split a line, or end it
# What nobody sees, and some spreadsheets take away: control and format characters, selectors and fillers of Unicode.
UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# what a formula begins with, in every width that Unicode has of it
SIGNS = r"=+\-@＝＋－＠﹦﹢﹣﹫−"
# the beginning of a text, or a break; what is not seen, white space and quotation marks; then a formula
FORMULA = re.compile(rf"^(?=[\t\r\n])|((?:^|[{BREAKS}])[\s\"“”„‟{UNSEEN}]*)(?=[{SIGNS}])")


def write_csv(run: Collection, path: Path, query: Query, *, overwrite: bool) -> tuple[int, int]:
    """Write the rows, and where on the image each map is hottest; how many rows, and how many cells a `'` was put before.

    What a spreadsheet would take for a formula gets a `'` in front, so that it stays a text. Rows come in the order of the
    query; of all of them only a few are in memory.
    """
    fields = [field for field in run.dataset.schema if field.name not in LEFT_OUT]
    names, own = [field.name for field in fields], [_column(field) for field in fields]
    rows = query.stream(run.dataset, [*own, HOTTEST, "grid", "input_size", "placement"])
    written, cells = 0, Cells()
    with writing(path, overwrite=overwrite) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # by its first bytes Excel knows that it is UTF-8
        table = csv.writer(text)
        table.writerow([*map(cells.text, names), "peak_row", "peak_column"])
        for row in rows:
            table.writerow([*map(cells.text, row[: len(names)]), *_peak(*row[len(names) :])])
            written += 1
        text.detach()
    return written, cells.changed


def _column(field: "pa.Field") -> str:
    """A column in SQL; times with a zone as words, for which DuckDB would want one more package."""
    quoted = '"{}"'.format(field.name.replace('"', '""'))
    return f"CAST({quoted} AS VARCHAR)" if getattr(field.type, "tz", None) else quoted


class Cells:
    """Values as cells of a CSV file, counting those that had to be changed."""

    def __init__(self) -> None:
        self.changed = 0

    def text(self, value: Any) -> Any:
        """Numbers unchanged, lists as JSON, and no formula at the beginning of a text or after `;`, `,`, `|`, a tab, a new line.

        Where the comma is the decimal mark, spreadsheets split lines at semicolons.
        """
        if isinstance(value, Mapping | list | tuple):
            text = json.dumps(value, default=str, ensure_ascii=False) if value else ""
            if '"' not in text:  # numbers alone
                return text
            value = text
        if value is None or isinstance(value, int | float) or NUMBER.fullmatch(str(value)):
            return value
        text, count = FORMULA.subn(r"\1'", str(value))
        self.changed += count > 0
        return text


def _peak(
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
