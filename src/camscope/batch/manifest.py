"""Manifest: the images of a run, as an Arrow table of one row an image, which is never made into Python objects."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from camscope.batch.path_resolver import PathResolver
from camscope.data_readers import read_errors_converted, read_parquet
from camscope.errors import InputError
from camscope.images.files.redaction import pseudonymize_source
from camscope.images.files.source_files import is_scan_name, list_image_paths
from camscope.images.scans.scan_reader import is_scan
from camscope.optional import require
from camscope.plurals import plural
from camscope.safe_files import describe_file_problem

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_SUFFIXES = (".csv", ".parquet")
NAMES_PER_CHUNK = 65_536  # names that become Arrow's at once
# columns of the result, which a manifest cannot carry along
SUMMARY_COLUMNS = (
    "row",
    "sha256",
    "status",
    "error",
    "failure",
    "label",
    "score",
    "probability",
    "method",
    "layer",
    "parameters",
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
# what of PyArrow's words quotes no cell of a table, for a cell may name a patient
SAFE_ARROW_MESSAGES = re.compile(
    r"In CSV column #\d+|Row #\d+: Expected \d+ columns, got \d+|invalid UTF-?8|Empty CSV file|Parquet magic bytes"
)
PSEUDONYMIZED_DATASET = "scans, privately"  # the dataset of a run that does not name its files
RESERVED_COLUMNS = {*RESULT_COLUMNS, "id", "path", "target"}  # all others are carried along


class SupportsImageIndex(Protocol):
    """The images of a dataset."""

    def __getitem__(self, index: int) -> Any:
        """A file's bytes, or an image as `explain_images` takes it."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """`table`: `sample` (its number), `id`, `path`, `format_target` where there is one, and whatever else the manifest holds.

    `root`: what relative paths are relative to, and what none may leave; None: wherever they lead. `images`: of a dataset,
    by row; `dataset`: its name, or what else it can be told from another by.
    """

    table: "pa.Table"
    root: Path | None
    images: "SupportsImageIndex | None" = None
    dataset: str | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_pseudonymized(self) -> bool:
        """Whether nothing that a row says may name a file, or quote one."""
        return self.dataset == PSEUDONYMIZED_DATASET

    @cached_property
    def extra_columns(self) -> list[str]:
        """The columns that go along unchanged."""
        return [name for name in self.table.column_names if name not in RESERVED_COLUMNS]

    @property
    def has_relative_paths(self) -> bool:
        """Whether it matters where its paths begin."""
        if self.images is not None:
            return False
        anchored = import_arrow("compute").match_substring_regex(
            self.table["path"], f"^{re.escape(Path.cwd().anchor)}|://"
        )
        return not import_arrow("compute").all(anchored).as_py()

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Some rows as dicts: those of one chunk, never of all."""
        found: list[dict[str, Any]] = self.table.slice(start, stop - start).to_pylist()
        return found

    def row_by_number(self, number: int) -> dict[str, Any]:
        """The row of that number: in some of a manifest's rows it is not that many rows down."""
        at = self.row_position(number)
        return self.rows(at, at + 1)[0]

    def row_position(self, number: int) -> int:
        """How many rows down the row of that number is; InputError where there is none."""
        at = int(np.searchsorted(self._row_numbers, number))
        if at == len(self._row_numbers) or self._row_numbers[at] != number:
            raise InputError(f"no row {number}: the manifest is not the one that the run was made of")
        return at

    @cached_property
    def _row_numbers(self) -> "npt.NDArray[np.int64]":
        """Of the rows, ascending."""
        return np.asarray(self.table["row"].to_numpy(), np.int64)

    def resolve_path(self, path: str) -> str:
        """Where an image is: a file inside the root, or a URL. InputError for a path that leads out of it."""
        return self.path_resolver.resolve(path)

    @cached_property
    def path_resolver(self) -> PathResolver:
        """Where the paths in its rows lead. A dataset has no folder of its own: its masks are below the current one."""
        return PathResolver(self.root, confined=self.root is not None or self.images is not None)


def build_manifest_from_files(
    source: str | Path | Sequence[str | Path], root: str | Path | None = None, *, strict: bool = True
) -> Manifest:
    """The manifest that a folder, a pattern, a list of files, or a .csv or .parquet file means: see `build_manifest`."""
    if (
        isinstance(source, str | Path)
        and Path(source).suffix.lower() in TABLE_SUFFIXES
        and not glob.has_magic(str(source))
    ):
        table = _read_table_file(Path(source))
        usual: Path | None = Path(source).parent
    else:
        table, usual = _list_files_as_table(source), None
    base = usual if root is None else Path(root) if str(root) else None
    return Manifest(add_row_columns(table, "the manifest", strict=strict), base)


def _read_table_file(path: Path) -> "pa.Table":
    import_arrow("csv")
    if not path.is_file():
        what = describe_file_problem(path) if path.exists() else f"a file of {path.suffix} is named, and is not there"
        raise InputError(f"there is no such manifest: {what}")
    with read_errors_converted(f"the manifest: this is no {path.suffix[1:].upper()} table", quote_original=False):
        return _parse_table_file(path)


def _parse_table_file(path: Path) -> "pa.Table":
    csv = import_arrow("csv")
    try:
        if path.suffix.lower() == ".parquet":
            return read_parquet(path)
        words = dict.fromkeys(("path", "id", "target"), import_arrow().string())  # also where all of them are numbers
        return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=words, strings_can_be_null=True))
    except import_arrow().ArrowInvalid as error:
        why = (
            "; ".join(match[0] for match in SAFE_ARROW_MESSAGES.finditer(str(error)))
            or "it is damaged, or of another kind"
        )
        raise InputError(f"the manifest: this is no {path.suffix[1:].upper()} table: {why}") from None


def _list_files_as_table(source: str | Path | Sequence[str | Path]) -> "pa.Table":
    """Files as named, the images under a folder at any depth, those that a pattern matches; sorted, each once."""
    pa, names = import_arrow(), _iter_file_names([source] if isinstance(source, str | Path) else source)
    try:
        pieces = [pa.array(piece, pa.string()) for piece in iter(lambda: list(islice(names, NAMES_PER_CHUNK)), [])]
    except UnicodeEncodeError as error:
        raise InputError(
            f"{_redact_name(error.object)!r}: a file's name that is not UTF-8; rename it, or leave it out"
        ) from None
    return pa.table({"path": pa.chunked_array(pieces, pa.string()).unique()})


def _iter_file_names(sources: Sequence[str | Path]) -> Iterator[str]:
    for one in map(str, sources):
        if len(sources) == 1 and "://" not in one and not glob.has_magic(one) and not os.path.lexists(one):
            raise InputError(f"{_redact_name(one)}: there is no such file or folder")
        meant = sorted(list_image_paths(one, recursive=True))
        if not meant:
            raise InputError(f"{_redact_name(one)}: no image there")
        yield from meant


def _redact_name(name: str) -> str:
    """As it was given; of a medical image, and a folder of some, a keyed hash."""
    return pseudonymize_source(name) if is_scan_name(name) or is_scan(name) else name


def add_row_columns(table: "pa.Table", source_name: str, *, strict: bool = True) -> "pa.Table":
    """With the columns `sample`, `id` and `path` in front; an InputError for what cannot be a manifest.

    Not `strict`: rows without a path ("") and with the id of another stay, and columns that a result would need itself.
    """
    with read_errors_converted(
        f"{source_name}: it cannot be read", quote_original=False
    ):  # a column's name may be no UTF-8
        return _build_manifest_table(table, source_name, strict=strict)


def _build_manifest_table(table: "pa.Table", source_name: str, *, strict: bool) -> "pa.Table":
    pa, compute = import_arrow(), import_arrow("compute")
    _check_column_names(table.column_names, source_name, strict=strict)
    if not table.num_rows:
        raise InputError(f"{source_name}: it has no row")
    paths = _cast_column(table["path"], pa.string(), "path", source_name)
    if not strict:
        paths = compute.coalesce(paths, pa.scalar(""))
    if compute.any(compute.is_null(paths)).as_py():
        raise InputError(f"{source_name}: row {compute.index(compute.is_null(paths), True).as_py()} has no path")
    ids = (
        compute.coalesce(_cast_column(table["id"], pa.string(), "id", source_name), paths)
        if "id" in table.column_names
        else paths
    )
    repeated = len(ids) - compute.count_distinct(ids).as_py()
    if repeated and strict:
        raise InputError(
            f"{source_name}: {plural(repeated, 'row has', 'rows have')} the id of another; every row needs its own"
        )
    rest = [name for name in table.column_names if name not in ("row", "path", "id")]
    columns = {"row": pa.array(np.arange(table.num_rows)), "id": ids, "path": paths}
    columns |= {name: _convert_to_microseconds(table[name]) for name in rest}
    if "target" in rest and pa.types.is_floating(table["target"].type):
        # what pandas makes of numbers some of which are missing
        whole = compute.if_else(compute.is_nan(table["target"]), None, table["target"])
        columns["target"] = _cast_column(whole, pa.int64(), "target", source_name)
    return pa.table(columns)


def _convert_to_microseconds(column: Any) -> Any:
    """A time as Python has it, which knows no nanoseconds; one that needs them as text."""
    pa, kind = import_arrow(), column.type
    if getattr(kind, "unit", None) != "ns":
        return column
    coarse = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("us")
    try:
        return column.cast(pa.time64("us") if pa.types.is_time64(kind) else coarse)
    except pa.ArrowInvalid:
        return column.cast(pa.string()) if not pa.types.is_duration(kind) else column.cast(pa.int64())


def reserved_names(names: Sequence[str]) -> list[str]:
    """Columns that a result has of its own: a query does not tell `Label` from `run_of_cell`."""
    return sorted(name for name in names if name.lower() in RESULT_COLUMNS)


def _check_column_names(names: Sequence[str], source_name: str, *, strict: bool) -> None:
    if "path" not in names:
        raise InputError(f"{source_name}: no column of {len(names)} is called 'path'; is its first row one of names?")
    if strict and (own := reserved_names(names)):
        raise InputError(f"{source_name}: the result has columns named {', '.join(own)} of its own; rename yours")
    twice = sorted(name for name, times in Counter(map(str.lower, names)).items() if times > 1)
    if twice:
        raise InputError(
            f"{source_name}: several columns are named {', '.join(twice)}, in large or small letters; rename them"
        )


def _cast_column(column: Any, arrow_type: Any, name: str, source_name: str) -> Any:
    try:
        return column.cast(arrow_type)
    except (import_arrow().ArrowInvalid, NotImplementedError) as error:
        raise InputError(f"{source_name}: the column {name} cannot be read as {arrow_type}") from error


def import_arrow(submodule: str = "") -> Any:
    """PyArrow, or a part of it; MissingExtraError names the extra that brings it."""
    return require(f"pyarrow.{submodule}" if submodule else "pyarrow", extra="batch")
