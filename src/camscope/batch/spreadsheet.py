"""Spreadsheet: the rows of a run as CSV, for people; programs read the parts."""

import csv
import io
import json
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.batch.collection import Collection
from camscope.batch.query import Query
from camscope.files import writing

if TYPE_CHECKING:
    import pyarrow as pa

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
