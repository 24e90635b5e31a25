"""`Manifest`: an Arrow table with one row per image of a run. File and patient names may be replaced by pseudonyms."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from camscope.batch.path_resolver import PathResolver
from camscope.errors import InputError
from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES, SCAN_SUFFIXES, split_path_and_index
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
from camscope.images.scans.scan_reader import is_scan
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.read_untrusted_files import read_errors_converted

if TYPE_CHECKING:
    import pyarrow as pa

# the columns of every run and the aliases of their Arrow types; a manifest may only add columns with other names
COLUMN_TYPES = {
    "row": "int64",
    "id": "string",
    "path": "string",
    "sha256": "string",
    "status": "string",
    "error": "string",
    "failure_kind": "string",
    "target": "string",
    "label": "string",
    "score": "float64",
    "probability": "float64",
    "method": "string",
    "layer": "string",
    "parameters_digest": "string",
    "grid": "list int32",
    "attribution": "list float32",
    "input_size": "list int32",
    "image_size": "list int32",
    "placement": "list float64",
    "affine": "list float64",
    "scan_steps": "list string",
    "notes": "list string",
    "seconds": "float64",
    "overlay": "string",
}
RESULT_COLUMNS = tuple(name for name in COLUMN_TYPES if name not in ("id", "path", "target"))
LABEL_COLUMN = "class"  # the class of an image, as a dataset or the column `label` of a table states it
PSEUDONYMIZED_DATASET = "pseudonymized scans"  # the dataset of a run that does not name its files
RESERVED_COLUMNS = frozenset(COLUMN_TYPES)  # a run keeps all other columns of its manifest


class SupportsImageIndex(Protocol):
    """The images of a dataset by row number."""

    def __getitem__(self, index: int) -> Any:
        """Return the image at an index: the bytes of a file, or anything else that `Explainer.explain` accepts."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a run, one row per image.

    Attributes:
        table: The columns `row` (its number), `id`, `path`, optionally `target`, and any further columns.
        root: The folder where relative paths begin and that no path may leave. Default: paths may lead anywhere.
        anywhere: Whether paths may leave the root.
        images: The images of a dataset by row number. Default: the images are the files at `path`.
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
    anywhere: bool = False

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_pseudonymized(self) -> bool:
        """Whether pseudonyms replace the file names."""
        return self.dataset == PSEUDONYMIZED_DATASET

    @cached_property
    def extra_columns(self) -> list[str]:
        """The names of the columns that a run copies without changes."""
        return [name for name in self.table.column_names if name not in RESERVED_COLUMNS]

    def find_paths_outside_root(self, column: str = "path") -> list[str]:
        """Return the paths of a column that lead out of the root. Return an empty list if paths are allowed to leave the root."""
        if not self.path_resolver.confined or (self.images is not None and column == "path"):
            return []
        values = self.table[column].to_pylist()
        paths = [value for value in values if isinstance(value, str) and value and not value.lstrip().startswith("[")]
        return [path for path in paths if not self.path_resolver.is_allowed(path)]

    @property
    def has_relative_paths(self) -> bool:
        """Whether at least one path is relative."""
        if self.images is not None:
            return False
        compute = import_arrow("compute")
        absolute = compute.match_substring_regex(self.table["path"], f"^{re.escape(Path.cwd().anchor)}|://")
        return not compute.all(absolute).as_py()

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows at positions `start` to `stop` - 1, as dictionaries."""
        rows: list[dict[str, Any]] = self.table.slice(start, stop - start).to_pylist()
        return rows

    def read_source(self, row: Mapping[str, Any]) -> Any:
        """Return the source of a row's image: an image of a dataset, the bytes of a file, or the path of a scan."""
        return self.path_resolver.read_source(row["path"]) if self.images is None else self.images[row["row"]]

    def row_by_number(self, number: int) -> dict[str, Any]:
        """Return the row with the given number in the column `row`."""
        position = int(np.searchsorted(self._row_numbers, number))
        if position == len(self._row_numbers) or self._row_numbers[position] != number:
            raise InputError(
                f"the manifest has no row {number}, so it is not the manifest of the run; pass the manifest of the run"
            )
        return self.rows(position, position + 1)[0]

    @cached_property
    def _row_numbers(self) -> "npt.NDArray[np.int64]":
        """The values of the column `row`, in ascending order."""
        return np.asarray(self.table["row"].to_numpy(), np.int64)

    @cached_property
    def path_resolver(self) -> PathResolver:
        """The resolver for the paths in the table."""
        # a dataset has no folder: its masks lie below the working folder
        confined = not self.anywhere and (self.root is not None or self.images is not None)
        return PathResolver(self.root, confined=confined)


def hash_manifest(manifest: Manifest) -> str:
    """Return a hash of all manifest cells as 16 hex digits."""
    file = _HashingFile()
    stream = import_arrow().PythonFile(file, mode="w")
    with import_arrow("ipc").new_stream(stream, manifest.table.schema.remove_metadata()) as writer:
        writer.write_table(manifest.table.combine_chunks().replace_schema_metadata())
    return file.sha256.hexdigest()[:16]


class _HashingFile(io.BytesIO):
    """A file-like object that hashes the written bytes and does not store them."""

    def __init__(self) -> None:
        super().__init__()
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Add bytes to the hash, as a file would write them, and return their number. Nothing is stored."""
        self.sha256.update(data)
        return len(data)


def add_row_and_id_columns(table: "pa.Table", source_name: str, *, strict: bool = True) -> "pa.Table":
    """Add the columns `row` and `id` to a table that has the column `path`. Also check the table.

    Without `strict`, empty paths, repeated ids and reserved names are accepted.
    """
    with read_errors_converted(f"{source_name}: it cannot be read", quote_original=False):  # names may be invalid UTF-8
        return _build_manifest_table(table, source_name, strict=strict)


def _build_manifest_table(table: "pa.Table", source_name: str, *, strict: bool) -> "pa.Table":
    """Return the table with columns `row`, `id` and `path`. Raise an InputError for missing paths and repeated ids."""
    pa, compute = import_arrow(), import_arrow("compute")
    # the index that pandas writes has no name; this is what pandas calls such a column
    table = table.rename_columns([name or f"Unnamed: {index}" for index, name in enumerate(table.column_names)])
    if strict:
        table = table.rename_columns(_rename_label_column(table.column_names))
    _check_column_names(table.column_names, source_name, strict=strict)
    if not table.num_rows:
        raise InputError(f"{source_name} has no rows; expected one row per image")
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
    """Convert times from nanoseconds to microseconds. Times that would lose digits become text."""
    pa, arrow_type = import_arrow(), column.type
    if getattr(arrow_type, "unit", None) != "ns":
        return column
    microseconds = pa.timestamp("us", arrow_type.tz) if pa.types.is_timestamp(arrow_type) else pa.duration("us")
    try:
        return column.cast(pa.time64("us") if pa.types.is_time64(arrow_type) else microseconds)
    except pa.ArrowInvalid:
        return column.cast(pa.string()) if not pa.types.is_duration(arrow_type) else column.cast(pa.int64())


def find_reserved_names(names: Sequence[str]) -> list[str]:
    """Return the names that are reserved for result columns of a run. Case is ignored."""
    return sorted(name for name in names if name.lower() in RESULT_COLUMNS)


def _rename_label_column(names: Sequence[str]) -> list[str]:
    """Rename the column `label` to `class`. In the rows of a run, `label` is the label of a map."""
    is_free = LABEL_COLUMN not in [name.lower() for name in names]
    return [LABEL_COLUMN if name == "label" and is_free else name for name in names]


def _check_column_names(names: Sequence[str], source_name: str, *, strict: bool) -> None:
    """Raise an InputError if the column `path` is missing, or if names are reserved or repeated."""
    if "path" not in names:
        raise InputError(
            f"{source_name} has {plural(len(names), 'column')}, but none is called 'path'; check that the first row holds the "
            "column names"
        )
    if strict and (reserved := find_reserved_names(names)):
        raise InputError(
            f"{source_name}: the column names {', '.join(reserved)} are reserved for results; rename your columns"
        )
    repeated = sorted(name for name, count in Counter(map(str.lower, names)).items() if count > 1)
    if repeated:
        raise InputError(
            f"{source_name}: several columns are called {', '.join(repeated)} (case is ignored); rename them"
        )


def require_columns(names: Iterable[str | None], existing: Sequence[str], purpose: str) -> None:
    """Raise an InputError if a named column does not exist. `purpose` is part of the message, such as `for the patient`."""
    for name in names:
        if name is not None and name not in existing:
            raise InputError(f"there is no column {name!r} {purpose}; the columns are {', '.join(existing) or 'none'}")


def _cast_column(column: Any, arrow_type: Any, name: str, source_name: str) -> Any:
    try:
        return column.cast(arrow_type)
    except (import_arrow().ArrowInvalid, NotImplementedError) as error:
        raise InputError(f"{source_name}: the column {name} cannot be read as {arrow_type}") from error


@dataclass(frozen=True, eq=False)
class ImageAccessor:
    """The images of a manifest by row number. File names are hidden."""

    manifest: Manifest

    def __getitem__(self, index: int) -> Any:
        images = self.manifest.images
        return self.manifest.read_source(self.manifest.row_by_number(index)) if images is None else images[index]


def contains_scans(manifest: Manifest) -> bool:
    """Return whether at least one path leads to a scan file or to a folder of slices."""
    if manifest.images is not None:
        return False
    compute, paths = import_arrow("compute"), manifest.table["path"]
    scan_suffixes, photo_suffixes = ("|".join(map(re.escape, suffixes)) for suffixes in (SCAN_SUFFIXES, PHOTO_SUFFIXES))
    if compute.any(compute.match_substring_regex(paths, rf"(?i)({scan_suffixes})(#\d+)?$")).as_py():
        return True
    is_photo_or_url = compute.match_substring_regex(paths, rf"(?i)({photo_suffixes})$|://")
    return any(_is_scan_path(manifest, path.as_py()) for path in paths.filter(compute.invert(is_photo_or_url)))


def _is_scan_path(manifest: Manifest, path: str) -> bool:
    """Return whether a path leads to a folder or a scan. Files outside the root are not read."""
    try:
        location = manifest.path_resolver.resolve(path)
    except InputError:
        return False
    return split_path_and_index(location)[0].is_dir() or is_scan(location)


def pseudonymize_manifest(manifest: Manifest, keep_columns: Sequence[str] = ()) -> Manifest:
    """Replace the paths of a manifest by keyed hashes. Ids that equal their path are replaced, too.

    All other columns but `row`, `target` and `keep_columns` are dropped.
    """
    require_columns(keep_columns, manifest.extra_columns, "to keep")
    pa, compute, table = import_arrow(), import_arrow("compute"), manifest.table
    if manifest.images is not None:  # the number of an image in a named dataset
        identifiers: list[Any] = [f"{manifest.dataset}{path}".encode() for path in table["path"].to_pylist()]
    else:  # an absolute path or a URL
        root = manifest.root or Path.cwd()
        identifiers = [path if "://" in path else str(root / path) for path in table["path"].to_pylist()]
    names = pa.array([pseudonymize_source(identifier) for identifier in identifiers], pa.string())
    has_own_id = compute.not_equal(table["id"], table["path"])
    columns = {"row": table["row"], "id": compute.if_else(has_own_id, table["id"], names), "path": names}
    columns |= {name: table[name] for name in table.column_names if name in ("target", *keep_columns)}
    return Manifest(pa.table(columns), None, ImageAccessor(manifest), PSEUDONYMIZED_DATASET)


def import_arrow(submodule: str = "") -> Any:
    """Import PyArrow or one of its modules. Raise a MissingExtraError if PyArrow is not installed."""
    return require(f"pyarrow.{submodule}" if submodule else "pyarrow", extra="batch")
