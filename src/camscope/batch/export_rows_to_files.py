"""`Exporter`: export rows of a run as images, arrays, a CSV table, or a COCO file."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import (
    DISK_ERRNOS,
    build_output_path,
    check_not_existing,
    make_folder,
    write_bytes,
)
from camscope.batch.coco_export import ResultRow, RowExport, build_coco_annotations, open_coco_writer
from camscope.batch.csv_export import write_csv
from camscope.batch.image_loading import map_in_order
from camscope.batch.result_rows import OutputNames
from camscope.batch.run_reader import RunReader, read_original_image, strip_file_name
from camscope.batch.sql_query import Query, iter_rows_by_image
from camscope.errors import InputError, OutputError
from camscope.explanation import AUTO, Explanation, InterpolationOption, require_interpolation_option

IMAGE_FORMATS, MAP_FORMATS = ("png", "jpg", "webp"), ("npz", "json")
TABLE_FILES = {"csv": "rows.csv", "coco": "coco.json"}
FORMATS = (*IMAGE_FORMATS, *MAP_FORMATS, *TABLE_FILES)


@dataclass
class ExportResult:
    """The outcome of an export.

    Attributes:
        n_rows: The number of selected rows.
        n_files: The number of files written.
        n_rows_without_map: Rows without a map.
        n_escaped_cells: Cells of a table that got an apostrophe, so that they are not read as formulas.
        failure_counts: Number of rows without a file, by reason.
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
class Exporter:
    """Export rows of a run in some of `FORMATS` into a folder, or one table to exactly `table_file`.

    `image_height` is that of overlays in pixels, by default the height of the image.
    """

    run: RunReader
    folder: Path
    formats: Sequence[str]
    threshold: float = 0.5
    overwrite: bool = False
    table_file: Path | None = None
    image_height: int | None = None
    interpolation: InterpolationOption = AUTO

    def __post_init__(self) -> None:
        require_interpolation_option(self.interpolation)
        unknown = [name for name in self.formats if name not in FORMATS]
        if unknown or not self.formats:
            raise InputError(f"formats {', '.join(unknown) or 'none'}; expected one or more of {', '.join(FORMATS)}")
        if not 0 < self.threshold <= 1:
            raise InputError(f"threshold={self.threshold}; expected a fraction of the maximum, above 0 and up to 1")

    def table_path(self, table_format: str) -> Path:
        """Return the path of the table file, in CSV or COCO format."""
        return self.table_file or build_output_path(self.folder, TABLE_FILES[table_format])

    def export_rows(self, query: Query, num_threads: int, on_progress: Callable[[int], None]) -> ExportResult:
        """Export the rows that a query selects. Rows that fail are counted in the result."""
        for table_format in set(self.formats) & set(TABLE_FILES):
            check_not_existing(self.table_path(table_format), self.overwrite)
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
            coco_writer = stack.enter_context(self._open_coco_writer(query)) if "coco" in self.formats else None
            for row_exports in map_in_order(
                self._export_rows_of_image, iter_rows_by_image(rows, positions), num_threads
            ):
                for row_export in row_exports:
                    result.n_files += row_export.n_files
                    result.n_rows_without_map += row_export.row["attribution"] is None
                    if row_export.error is not None:
                        result.failure_counts[row_export.error] += 1
                        result.failure_examples.setdefault(row_export.error, row_export.row["id"])
                annotated = [row_export for row_export in row_exports if row_export.annotations is not None]
                if coco_writer is not None and annotated:
                    coco_writer.add_image_with_annotations(annotated)
                on_progress(len(row_exports))
        result.n_files += coco_writer is not None
        return result

    def _export_rows_of_image(self, rows: Sequence[ResultRow]) -> list[RowExport]:
        """Write the files of all rows of one image. The image is read once at most."""
        image = missing_image_reason = None
        if set(self.formats) & set(IMAGE_FORMATS) and any(row["attribution"] is not None for row in rows):
            image, missing_image_reason = read_original_image(self.run, rows[0])
        names = OutputNames.from_run(self.run.run_info["run_config"])
        written_stems, row_exports = set[str](), []
        for row in rows:
            stem = names.file_stem(row)
            if row["attribution"] is None or stem in written_stems:  # two targets of one class have the same map
                row_exports.append(RowExport(row))
            else:
                explanation = self.run.explanation(row, image)
                row_exports.append(self._export_row(row, stem, explanation, missing_image_reason))
            written_stems.add(stem)
        return row_exports

    def _export_row(
        self, row: ResultRow, stem: str, explanation: Explanation, missing_image_reason: str | None
    ) -> RowExport:
        """Write the files of one row. If `missing_image_reason` is given, no image files are written."""
        n_files = 0
        try:
            for file_format in self.formats:
                is_image = file_format in IMAGE_FORMATS
                if file_format in MAP_FORMATS or (is_image and missing_image_reason is None):
                    self._write_file(stem, file_format, explanation if is_image else replace(explanation, image=None))
                    n_files += 1
            annotations = build_coco_annotations(explanation, self.threshold) if "coco" in self.formats else None
            return RowExport(row, n_files, annotations, explanation.target, missing_image_reason)
        except Exception as error:  # a disk and a decoder may raise anything; the other rows are still exported
            if isinstance(error, OutputError) and error.errno in DISK_ERRNOS:  # all further files would fail too
                raise
            return RowExport(row, n_files, error=strip_file_name(error, stem))

    def _write_file(self, stem: str, file_format: str, explanation: Explanation) -> None:
        """Write the map or the drawn image of an explanation. Raise an OutputError if the file exists."""
        path = build_output_path(self.folder, f"{stem}.{file_format}")
        if not self.overwrite and os.path.lexists(path):
            raise OutputError("the file exists; allow overwriting (--overwrite), or choose another folder")
        if file_format in MAP_FORMATS:
            explanation.save(path, overwrite=self.overwrite)
        else:  # not synced to disk: an image can be drawn again
            image = explanation.annotated_image(self.image_height, interpolation=self.interpolation)
            data = render.encode_image(image, path.suffix)
            write_bytes(path, data, overwrite=self.overwrite, sync=False)

    def _open_coco_writer(self, query: Query) -> Any:
        """Open the writer of the COCO file, with a description of the run and the query."""
        run_info = self.run.run_info
        info = {
            "version": f"camscope {run_info['versions']['camscope']}",
            "model": run_info["run_config"]["model"],
            "threshold": self.threshold,
            "query": query.description,
        }
        return open_coco_writer(self.table_path("coco"), run_info["class_names"], info, overwrite=self.overwrite)
