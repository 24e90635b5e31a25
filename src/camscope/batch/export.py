"""Export rows of a run for other programs: images, arrays, a CSV table, or COCO boxes and outlines."""

import csv
import io
import json
import operator
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from camscope import render
from camscope.batch.image_loading import map_in_order
from camscope.batch.map_collection import MapCollection, read_original, strip_file_name
from camscope.batch.query import Query, iter_rows_by_image
from camscope.batch.result_rows import OutputNames
from camscope.errors import GeometryError, InputError, OutputError
from camscope.explanation import Explanation
from camscope.safe_files import DISK_ERRNOS, build_output_path, check_free, make_folder, open_atomic, write_bytes

IMAGE_FORMATS, MAP_FORMATS = ("png", "jpg", "webp"), ("npz", "json")
TABLE_FILES = {"csv": "rows.csv", "coco": "coco.json"}
FORMATS = (*IMAGE_FORMATS, *MAP_FORMATS, *TABLE_FILES)
ResultRow = Mapping[str, Any]


@dataclass
class ExportResult:
    """The outcome of an export.

    Attributes:
        n_rows: The number of selected rows.
        n_files: The number of files written.
        n_rows_without_map: Rows without a map.
        n_escaped_cells: Cells of a table that got an apostrophe, so that they are not read as formulas.
        failure_counts: Rows without a file, by reason.
        failure_examples: For each reason, the id of one row.

    >>> ExportResult(n_rows=2, n_files=2).n_rows_without_map
    0

    """

    n_rows: int = 0
    n_files: int = 0
    n_rows_without_map: int = 0
    n_escaped_cells: int = 0
    failure_counts: Counter[str] = field(default_factory=Counter)
    failure_examples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _RowExport:
    """The files and COCO annotations of one row, the class index of its target, and the error if there was one."""

    row: ResultRow
    n_files: int = 0
    annotations: Sequence[Mapping[str, Any]] | None = None
    target: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Exporter:
    """Export rows of a run in some of `FORMATS` into a folder, or one table to exactly `table_file`.

    `image_height` is that of overlays in pixels, by default the height of the image.
    """

    run: MapCollection
    folder: Path
    formats: Sequence[str]
    threshold: float = 0.5
    overwrite: bool = False
    table_file: Path | None = None
    image_height: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.formats if name not in FORMATS]
        if unknown or not self.formats:
            raise InputError(f"formats {', '.join(unknown) or 'none'}; expected one or more of {', '.join(FORMATS)}")
        if not 0 < self.threshold <= 1:
            raise InputError(f"threshold={self.threshold}; expected a fraction of the maximum, above 0 and up to 1")

    def table_path(self, table_format: str) -> Path:
        """Return the path of the CSV or COCO file."""
        return self.table_file or build_output_path(self.folder, TABLE_FILES[table_format])

    def write(self, query: Query, num_threads: int, on_progress: Callable[[int], None]) -> ExportResult:
        """Export the rows that a query selects. The result counts the rows that fail."""
        for table_format in set(self.formats) & set(TABLE_FILES):
            check_free(self.table_path(table_format), self.overwrite)
        if self.table_file is None:
            make_folder(self.folder)
        result, rows = ExportResult(), self.run.dataset
        if "csv" in self.formats:
            path = self.table_path("csv")
            result.n_rows, result.n_escaped_cells = write_csv(self.run, path, query, overwrite=self.overwrite)
            result.n_files += 1
        if set(self.formats) == {"csv"}:
            return result
        positions = np.sort(query.find_positions(rows))
        result.n_rows = len(positions)
        with ExitStack() as stack:
            coco_writer = stack.enter_context(self._open_coco(query)) if "coco" in self.formats else None
            for row_exports in map_in_order(self._export_image, iter_rows_by_image(rows, positions), num_threads):
                for row_export in row_exports:
                    result.n_files += row_export.n_files
                    result.n_rows_without_map += row_export.row["attribution"] is None
                    if row_export.error is not None:
                        result.failure_counts[row_export.error] += 1
                        result.failure_examples.setdefault(row_export.error, row_export.row["id"])
                annotated = [row_export for row_export in row_exports if row_export.annotations is not None]
                if coco_writer is not None and annotated:
                    coco_writer.add_rows(annotated)
                on_progress(len(row_exports))
        result.n_files += coco_writer is not None
        return result

    def _export_image(self, rows: Sequence[ResultRow]) -> list[_RowExport]:
        """Write the files of all rows of one image. The image is read at most once."""
        image = missing_image_reason = None
        if set(self.formats) & set(IMAGE_FORMATS) and any(row["attribution"] is not None for row in rows):
            image, missing_image_reason = read_original(self.run, rows[0])
        names = OutputNames.from_run(self.run.run_info["run_config"])
        written_stems, row_exports = set[str](), []
        for row in rows:
            stem = names.file_stem(row)
            if row["attribution"] is None or stem in written_stems:  # two targets of one class have the same map
                row_exports.append(_RowExport(row))
            else:
                explanation = self.run.explanation(row, image)
                row_exports.append(self._export_row(row, stem, explanation, missing_image_reason))
            written_stems.add(stem)
        return row_exports

    def _export_row(
        self, row: ResultRow, stem: str, explanation: Explanation, missing_image_reason: str | None
    ) -> _RowExport:
        """Write the files of one row. Image files are left out if there is a `missing_image_reason`."""
        n_files = 0
        try:
            for file_format in self.formats:
                is_image = file_format in IMAGE_FORMATS
                if file_format in MAP_FORMATS or (is_image and missing_image_reason is None):
                    self._write_file(stem, file_format, explanation if is_image else replace(explanation, image=None))
                    n_files += 1
            annotations = build_coco_annotations(explanation, self.threshold) if "coco" in self.formats else None
            return _RowExport(row, n_files, annotations, explanation.target, missing_image_reason)
        except Exception as error:  # a disk and a decoder may raise anything; the other rows are still exported
            if isinstance(error, OutputError) and error.errno in DISK_ERRNOS:  # all further files would fail too
                raise
            return _RowExport(row, n_files, error=strip_file_name(error, stem))

    def _write_file(self, stem: str, file_format: str, explanation: Explanation) -> None:
        path = build_output_path(self.folder, f"{stem}.{file_format}")
        if not self.overwrite and os.path.lexists(path):
            raise OutputError("the file exists; allow overwriting (--overwrite), or choose another folder")
        if file_format in MAP_FORMATS:
            explanation.save(path, overwrite=self.overwrite)
        else:  # not synced to disk: an image can be drawn again
            data = render.encode_image(explanation.annotated_image(self.image_height), path.suffix)
            write_bytes(path, data, overwrite=self.overwrite, sync=False)

    def _open_coco(self, query: Query) -> Any:
        run_info = self.run.run_info
        info = {
            "version": f"camscope {run_info['versions']['camscope']}",
            "model": run_info["run_config"]["model"],
            "threshold": self.threshold,
            "query": query.description,
        }
        return open_coco_writer(self.table_path("coco"), run_info["class_names"], info, overwrite=self.overwrite)


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
    """The numbers of rows in a CSV file, and of cells that got an apostrophe."""

    n_rows: int
    n_escaped_cells: int


def write_csv(run: MapCollection, path: Path, query: Query, *, overwrite: bool) -> CsvCounts:
    """Write the rows and the peaks of their maps to a CSV file."""
    schema = [field for field in run.dataset.schema if field.name not in OMITTED_COLUMNS]
    quoted = ['"{}"'.format(field.name.replace('"', '""')) for field in schema]
    # times with a zone are cast to text, since DuckDB would need another package for them
    columns = [
        f"CAST({name} AS VARCHAR)" if getattr(field.type, "tz", None) else name
        for name, field in zip(quoted, schema, strict=True)
    ]
    rows = query.iter_rows(run.dataset, [*columns, PEAK_CELL_SQL, "grid", "input_size", "placement"])
    cells = ((*row[: len(columns)], *_locate_peak(*row[len(columns) :])) for row in rows)
    with open_atomic(path, overwrite=overwrite) as file:
        return write_escaped_csv(file, [*(field.name for field in schema), "peak_row", "peak_column"], cells)


def write_escaped_csv(file: BinaryIO, names: Sequence[str], rows: Iterable[Iterable[Any]]) -> CsvCounts:
    """Write a CSV table. An apostrophe is put before text that a spreadsheet would read as a formula."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # the byte order mark tells Excel that it is UTF-8
    writer, escaper, n_rows = csv.writer(text), CellEscaper(), 0
    writer.writerow(map(escaper.escape, names))
    for row in rows:
        writer.writerow(map(escaper.escape, row))
        n_rows += 1
    text.detach()
    return CsvCounts(n_rows, escaper.n_escaped)


class CellEscaper:
    """Converts values to cells of a CSV file, and counts the cells that get an apostrophe."""

    def __init__(self) -> None:
        self.n_escaped = 0

    def escape(self, value: Any) -> Any:
        """Convert a value to a CSV cell. Lists become JSON, and formulas get a leading apostrophe."""
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


def _locate_peak(
    cell_index: int | None,
    grid: Sequence[int] | None,
    input_size: Sequence[int] | None,
    placement: Sequence[float] | None,
) -> tuple[float | None, float | None]:
    """Convert the cell index of a peak to row and column in pixels of the image, or None if they are unknown."""
    if cell_index is None or placement is None or grid is None or input_size is None or len(grid) != 2:
        return None, None
    grid_row, grid_column = divmod(cell_index, grid[1])
    point = ((grid_row + 0.5) * input_size[0] / grid[0], (grid_column + 0.5) * input_size[1] / grid[1], 1.0)
    row, column = (sum(map(operator.mul, placement[start : start + 3], point)) for start in (0, 3))
    return round(row, 1), round(column, 1)


SCORE_DESCRIPTION = (
    "score: the model's probability of the category; peak: largest value in the box, divided by the maximum of the map"
)


def build_coco_annotations(explanation: Explanation, threshold: float) -> list[dict[str, Any]]:
    """Return a COCO box, outline and area in image pixels for each region above `threshold` x maximum."""
    if explanation.placement is None:
        raise GeometryError("the position of the map on the image is unknown")
    explanation._check_two_axes()
    values = explanation.heatmap("image")
    outlines = {}
    for points in render.find_contours(values, threshold):
        (top, left), (bottom, right) = points.min(0).tolist(), points.max(0).tolist()
        outlines[left, top, right - left, bottom - top] = points  # the box identifies an outline of a map
    annotations = []
    for box in render.find_boxes(values, threshold):
        rows, columns = outlines[box.left, box.top, box.width, box.height].T
        annotations.append(
            {
                "bbox": [box.left, box.top, box.width, box.height],
                "segmentation": [np.stack([columns, rows], axis=1).ravel().tolist()],
                "area": float(abs(rows @ np.roll(columns, -1) - columns @ np.roll(rows, -1)) / 2),
                "iscrowd": 0,
                "score": explanation.probability,
                "peak": round(box.peak, 6),
            }
        )
    return annotations


class CocoWriter:
    """Writes a COCO file incrementally, without keeping images and annotations in memory."""

    def __init__(self, file: BinaryIO, image_buffer: BinaryIO, class_names: Sequence[str]) -> None:
        self._file, self._image_buffer = file, image_buffer
        self._n_classes = len(class_names)
        self.extra_category_ids: dict[str, int] = {}  # labels that are not classes of the model
        self._n_annotations = self._n_images = 0

    def add_rows(self, row_exports: Sequence[_RowExport]) -> None:
        """Add an image and the annotations of its rows."""
        row = row_exports[0].row
        height, width = row["image_size"]
        entry = {"id": row["row"], "file_name": row["path"], "height": height, "width": width, "name": row["id"]}
        self._image_buffer.write(_encode_json_list_item(entry, first=not self._n_images))
        self._n_images += 1
        for row_export in row_exports:
            self.add_annotations(row_export.row, row_export.target, row_export.annotations or ())

    def add_annotations(
        self, row: Mapping[str, Any], target: int | None, annotations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add the annotations of one row. `target` is a class index, or None if the target is not a class."""
        for annotation in annotations:
            category_id = (target or 0) + 1
            if target is None or target >= self._n_classes:
                new_id = self._n_classes + len(self.extra_category_ids) + 1
                category_id = self.extra_category_ids.setdefault(row["label"], new_id)
            entry = {"id": self._n_annotations + 1, "image_id": row["row"], "category_id": category_id, **annotation}
            entry |= {"method": row["method"], "layer": row["layer"]}
            self._file.write(_encode_json_list_item(entry, first=not self._n_annotations))
            self._n_annotations += 1


@contextmanager
def open_coco_writer(
    path: Path, class_names: Sequence[str], info: Mapping[str, Any], *, overwrite: bool
) -> Iterator[CocoWriter]:
    """Open a COCO file for writing. The file appears only if the `with` block succeeds."""
    with open_atomic(path, overwrite=overwrite) as file, tempfile.TemporaryFile() as image_buffer:
        file.write(b'{\n"annotations": [')
        writer = CocoWriter(file, image_buffer, class_names)
        yield writer
        file.write(b'\n],\n"images": [')
        image_buffer.seek(0)
        shutil.copyfileobj(image_buffer, file)
        names = enumerate([*class_names, *writer.extra_category_ids], start=1)
        categories = json.dumps([{"id": number, "name": name} for number, name in names])
        description = json.dumps({"description": SCORE_DESCRIPTION, **info})
        file.write(f'\n],\n"categories": {categories},\n"info": {description}\n}}\n'.encode())


def _encode_json_list_item(value: Mapping[str, Any], *, first: bool) -> bytes:
    return (b"\n" if first else b",\n") + json.dumps(value).encode()
