"""The manifest: the images of a run as an Arrow table with one row per image.

The table is never converted to Python objects as a whole, so a manifest may have millions of rows.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from camscope.batch.path_resolver import PathResolver
from camscope.errors import InputError
from camscope.optional import require
from camscope.plurals import plural
from camscope.untrusted_files import read_errors_converted

if TYPE_CHECKING:
    import pyarrow as pa

# columns of a run that a manifest cannot add; the first group is read for a summary
SUMMARY_COLUMNS = (
    "row",
    "sha256",
    "status",
    "error",
    "failure_kind",
    "label",
    "score",
    "probability",
    "method",
    "layer",
    "parameters_digest",
)
RESULT_COLUMNS = (
    *SUMMARY_COLUMNS,
    "grid",
    "attribution",
    "input_size",
    "image_size",
    "placement",
    "affine",
    "scan_steps",
    "seconds",
    "notes",
    "overlay",
)
PSEUDONYMIZED_DATASET = "pseudonymized scans"  # the dataset of a run that does not name its files
RESERVED_COLUMNS = {*RESULT_COLUMNS, "id", "path", "target"}  # a run keeps all other columns of its manifest


class SupportsImageIndex(Protocol):
    """The images of a dataset by row number."""

    def __getitem__(self, index: int) -> Any:
        """Return the bytes of a file, or an image as `Explainer.explain` takes it."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a run, one row per image.

    Attributes:
        table: The columns `row` (its number), `id`, `path`, optionally `target`, and any further columns.
        root: The folder where relative paths begin and that no path may leave. None: paths may lead anywhere.
        images: The images of a dataset by row number. None: the images are the files at `path`.
        dataset: The name of the dataset, or other text that identifies it.

    >>> import numpy as np
    >>> from camscope.batch import build_manifest
    >>> build_manifest([np.zeros((8, 8, 3), np.uint8)]).rows(0, 1)
    [{'row': 0, 'id': '#0', 'path': '#0'}]

    """

    table: "pa.Table"
    root: Path | None
    images: "SupportsImageIndex | None" = None
    dataset: str | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_pseudonymized(self) -> bool:
        """Whether no row may name or quote a file."""
        return self.dataset == PSEUDONYMIZED_DATASET

    @cached_property
    def extra_columns(self) -> list[str]:
        """The columns that a run copies unchanged."""
        return [name for name in self.table.column_names if name not in RESERVED_COLUMNS]

    @property
    def has_relative_paths(self) -> bool:
        """Whether any path depends on the folder where relative paths begin."""
        if self.images is not None:
            return False
        compute = import_arrow("compute")
        absolute = compute.match_substring_regex(self.table["path"], f"^{re.escape(Path.cwd().anchor)}|://")
        return not compute.all(absolute).as_py()

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows from position `start` up to `stop` as dictionaries."""
        rows: list[dict[str, Any]] = self.table.slice(start, stop - start).to_pylist()
        return rows

    def row_by_number(self, number: int) -> dict[str, Any]:
        """Return the row with this number, which is not its position if the manifest holds only some rows."""
        position = self.row_position(number)
        return self.rows(position, position + 1)[0]

    def row_position(self, number: int) -> int:
        """Return the position of the row with this number; raise an InputError if there is none."""
        position = int(np.searchsorted(self._row_numbers, number))
        if position == len(self._row_numbers) or self._row_numbers[position] != number:
            raise InputError(
                f"no row {number}: this is not the manifest of the run; pass the one that the run was made from"
            )
        return position

    @cached_property
    def _row_numbers(self) -> "npt.NDArray[np.int64]":
        """The numbers of the rows, ascending."""
        return np.asarray(self.table["row"].to_numpy(), np.int64)

    def resolve_path(self, path: str) -> str:
        """Return the file or URL of a path; raise an InputError if it leads out of the root."""
        return self.path_resolver.resolve(path)

    @cached_property
    def path_resolver(self) -> PathResolver:
        """The rule for paths in the table. A dataset has no folder, so its masks lie below the working folder."""
        return PathResolver(self.root, confined=self.root is not None or self.images is not None)


def hash_manifest(manifest: Manifest) -> str:
    """Return 16 hex digits that change with any cell of a manifest."""
    sha = hashlib.sha256()
    stream = import_arrow().PythonFile(_HashingFile(sha), mode="w")
    with import_arrow("ipc").new_stream(stream, manifest.table.schema.remove_metadata()) as writer:
        writer.write_table(manifest.table.combine_chunks().replace_schema_metadata())
    return sha.hexdigest()[:16]


class _HashingFile:
    """A file object that only hashes what is written to it."""

    closed = False

    def __init__(self, sha: Any) -> None:
        self._sha, self._size = sha, 0

    def write(self, data: Any) -> int:
        """Hash some bytes."""
        self._sha.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: no bytes are buffered."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def add_row_columns(table: "pa.Table", source_name: str, *, strict: bool = True) -> "pa.Table":
    """Put the columns `row`, `id` and `path` in front; raise an InputError for a table that is not a manifest.

    Without `strict`, empty paths, repeated ids and reserved column names are kept.
    """
    # the name of a column may be invalid UTF-8
    with read_errors_converted(f"{source_name}: it cannot be read", quote_original=False):
        return _build_manifest_table(table, source_name, strict=strict)


def _build_manifest_table(table: "pa.Table", source_name: str, *, strict: bool) -> "pa.Table":
    pa, compute = import_arrow(), import_arrow("compute")
    _check_column_names(table.column_names, source_name, strict=strict)
    if not table.num_rows:
        raise InputError(f"{source_name}: it has no rows; expected one row per image")
    paths = _cast_column(table["path"], pa.string(), "path", source_name)
    if not strict:
        paths = compute.coalesce(paths, pa.scalar(""))
    if compute.any(compute.is_null(paths)).as_py():
        raise InputError(f"{source_name}: row {compute.index(compute.is_null(paths), True).as_py()} has no path")
    ids = paths
    if "id" in table.column_names:
        ids = compute.coalesce(_cast_column(table["id"], pa.string(), "id", source_name), paths)
    n_repeated = len(ids) - compute.count_distinct(ids).as_py()
    if n_repeated and strict:
        raise InputError(f"{source_name}: {plural(n_repeated, 'row repeats', 'rows repeat')} an id; ids must be unique")
    other_names = [name for name in table.column_names if name not in ("row", "path", "id")]
    columns = {"row": pa.array(np.arange(table.num_rows)), "id": ids, "path": paths}
    columns |= {name: _convert_to_microseconds(table[name]) for name in other_names}
    if "target" in other_names and pa.types.is_floating(table["target"].type):
        # pandas turns integers into floats where some are missing
        integers = compute.if_else(compute.is_nan(table["target"]), None, table["target"])
        columns["target"] = _cast_column(integers, pa.int64(), "target", source_name)
    return pa.table(columns)


def _convert_to_microseconds(column: Any) -> Any:
    """Convert nanoseconds to microseconds, the resolution of Python, or to text if that would lose digits."""
    pa, arrow_type = import_arrow(), column.type
    if getattr(arrow_type, "unit", None) != "ns":
        return column
    microseconds = pa.timestamp("us", arrow_type.tz) if pa.types.is_timestamp(arrow_type) else pa.duration("us")
    try:
        return column.cast(pa.time64("us") if pa.types.is_time64(arrow_type) else microseconds)
    except pa.ArrowInvalid:
        return column.cast(pa.string()) if not pa.types.is_duration(arrow_type) else column.cast(pa.int64())


def reserved_names(names: Sequence[str]) -> list[str]:
    """Return the names that a run uses itself, in any case: SQL does not distinguish `Label` from `label`."""
    return sorted(name for name in names if name.lower() in RESULT_COLUMNS)


def _check_column_names(names: Sequence[str], source_name: str, *, strict: bool) -> None:
    if "path" not in names:
        raise InputError(f"{source_name}: no column of {len(names)} is called 'path'; does the first row hold names?")
    if strict and (reserved := reserved_names(names)):
        raise InputError(
            f"{source_name}: the names {', '.join(reserved)} are reserved for columns of the result; rename your columns"
        )
    repeated = sorted(name for name, count in Counter(map(str.lower, names)).items() if count > 1)
    if repeated:
        raise InputError(
            f"{source_name}: several columns are called {', '.join(repeated)} (case is ignored); rename them"
        )


def _cast_column(column: Any, arrow_type: Any, name: str, source_name: str) -> Any:
    try:
        return column.cast(arrow_type)
    except (import_arrow().ArrowInvalid, NotImplementedError) as error:
        raise InputError(f"{source_name}: the column {name} cannot be read as {arrow_type}") from error


def import_arrow(submodule: str = "") -> Any:
    """Import PyArrow or one of its modules; raise a MissingExtraError if it is not installed."""
    return require(f"pyarrow.{submodule}" if submodule else "pyarrow", extra="batch")
