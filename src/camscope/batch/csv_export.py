"""Write the CSV table of a run for spreadsheets. Text that looks like a formula gets an apostrophe."""

import csv
import io
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from camscope.atomic_writes_and_folder_locks import open_atomic
from camscope.batch.run_reader import RunReader
from camscope.batch.sql_query import Query
from camscope.explanation import STATUS_MEANINGS

OMITTED_COLUMNS = ("grid", "attribution", "input_size", "image_size", "placement")
PEAK_CELL_SQL = (
    "CASE WHEN list_max(attribution) > 0 AND isfinite(list_max(attribution)) "
    "THEN list_position(attribution, list_max(attribution)) - 1 END"
)
NUMBER_PATTERN = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
# where a spreadsheet may split or end a line: at semicolons too where the comma is the decimal mark
CELL_BREAKS = r";,|\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029"
# Invisible characters that some spreadsheets remove: control and format characters, selectors and fillers of Unicode.
INVISIBLE_CHARACTERS = (
    r"\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# the first character of a formula, in each width of Unicode
FORMULA_SIGNS = r"=+\-@＝＋－＠﹦﹢﹣﹫−"
# the start of a text or a break, then invisible characters, white space and quotation marks, then a formula
FORMULA_PATTERN = re.compile(
    rf"^(?=[\t\r\n])|((?:^|[{CELL_BREAKS}])[\s\"“”„‟{INVISIBLE_CHARACTERS}]*)(?=[{FORMULA_SIGNS}])"
)


class CsvCounts(NamedTuple):
    """The number of rows in a CSV file, and the number of cells that got an apostrophe."""

    n_rows: int
    n_escaped_cells: int


def write_csv(run: RunReader, path: Path, query: Query, *, overwrite: bool) -> CsvCounts:
    """Write the rows that a query selects to a CSV file. Add the peak of each map, and the meaning of its flag."""
    schema = [field for field in run.dataset.schema if field.name not in OMITTED_COLUMNS]
    quoted = ['"{}"'.format(field.name.replace('"', '""')) for field in schema]
    # times with a zone are cast to text, since DuckDB would need another package for them
    columns = [
        f"CAST({name} AS VARCHAR)" if getattr(field.type, "tz", None) else name
        for name, field in zip(quoted, schema, strict=True)
    ]
    rows = query.iter_rows(run.dataset, [*columns, PEAK_CELL_SQL, "grid", "input_size", "placement"])
    status_position = [field.name for field in schema].index("status")
    cells = (
        (
            *row[: len(columns)],
            STATUS_MEANINGS.get(row[status_position]),
            *_locate_peak_row_and_column(*row[len(columns) :]),
        )
        for row in rows
    )
    names = [*(field.name for field in schema), "status_meaning", "peak_row", "peak_column"]
    with open_atomic(path, overwrite=overwrite) as file:
        return write_escaped_csv(file, names, cells)


def write_escaped_csv(file: BinaryIO, names: Sequence[str], rows: Iterable[Iterable[Any]]) -> CsvCounts:
    """Write a CSV table. Text that a spreadsheet would execute as a formula gets a leading apostrophe."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # the byte order mark tells Excel that it is UTF-8
    writer, escaper, n_rows = csv.writer(text), CellEscaper(), 0
    writer.writerow(map(escaper.to_csv_cell, names))
    for row in rows:
        writer.writerow(map(escaper.to_csv_cell, row))
        n_rows += 1
    text.detach()
    return CsvCounts(n_rows, escaper.n_escaped)


class CellEscaper:
    """Converts values to cells of a CSV file, and counts the cells that get an apostrophe."""

    def __init__(self) -> None:
        self.n_escaped = 0

    def to_csv_cell(self, value: Any) -> Any:
        """Convert a value to a CSV cell. Lists become JSON. Text that is a formula gets a leading apostrophe."""
        if isinstance(value, Mapping | list | tuple):
            text = json.dumps(value, default=str, ensure_ascii=False) if value else ""
            if '"' not in text:  # only numbers
                return text
            value = text
        if value is None or isinstance(value, int | float) or NUMBER_PATTERN.fullmatch(str(value)):
            return value
        text, count = FORMULA_PATTERN.subn(r"\1'", str(value))
        self.n_escaped += count > 0
        return text


def _locate_peak_row_and_column(
    cell_index: int | None,
    grid: Sequence[int] | None,
    input_size: Sequence[int] | None,
    placement: Sequence[float] | None,
) -> tuple[float | None, float | None]:
    """Convert a peak's cell index to row and column in image pixels. Return (None, None) if the position is unknown."""
    if cell_index is None or placement is None or grid is None or input_size is None or len(grid) != 2:
        return None, None
    grid_row, grid_column = divmod(cell_index, grid[1])
    point = ((grid_row + 0.5) * input_size[0] / grid[0], (grid_column + 0.5) * input_size[1] / grid[1], 1.0)
    row, column = (sum(map(operator.mul, placement[start : start + 3], point)) for start in (0, 3))
    return round(row, 1), round(column, 1)
