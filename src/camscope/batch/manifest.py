"""Manifest: the images of a run, as an Arrow table of one row an image, which is never made into Python objects."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
TABLES = (".csv", ".parquet")
# columns of the result, which a manifest cannot carry along
OURS = ("row", "sha256", "status", "error", "label", "score", "probability", "method", "layer", "parameters")
TAKEN = (*OURS, "grid", "heat", "input_size", "image_size", "placement", "seconds", "notes")


@dataclass(frozen=True, eq=False)
class Manifest:
    """`table`: `row` (its number), `id`, `path`, `target` where there is one, and whatever else the manifest holds.

    `root`: what relative paths are relative to, and what none may leave; None: wherever they lead.
    """

    table: "pa.Table"
    root: Path | None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def carried(self) -> list[str]:
        """The columns that go along unchanged."""
        return [name for name in self.table.column_names if name not in ("row", "id", "path", "target")]

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Some rows as dicts: those of one chunk, never of all."""
        found: list[dict[str, Any]] = self.table.slice(start, stop - start).to_pylist()
        return found

    def place(self, path: str) -> str:
        """Where an image is: a file inside the root, or a URL. InputError for a path that leads out of it."""
        if "://" in path:
            return path
        where = Path(path) if self.root is None else self.root / path
        if self.root is not None and not where.resolve().is_relative_to(self.root.resolve()):
            raise InputError(f"{path}: it leads out of {self.root}; move it there, or pass --anywhere")
        return str(where)


def manifest_of(source: str | Path | Sequence[str | Path], root: str | Path | None = None) -> Manifest:
    """The manifest that a folder, a pattern, a list of files, or a .csv or .parquet file means.

    A table needs a column `path`; `id` (default: the path) and `target` are known, all others go along. Relative paths are
    those of the manifest's own folder, or of `root`, and may not leave it; root="" lets them.
    """
    if isinstance(source, str | Path) and Path(source).suffix.lower() in TABLES and not glob.has_magic(str(source)):
        table = _read(Path(source))
        usual: Path | None = Path(source).parent
    else:
        table, usual = _table(_files(source)), None
    base = usual if root is None else Path(root) if str(root) else None
    return Manifest(_numbered(table, str(source)), base)


def _read(path: Path) -> "pa.Table":
    csv, parquet = arrow("csv"), arrow("parquet")
    if not path.is_file():
        raise InputError(f"{path}: there is no such manifest")
    try:
        if path.suffix.lower() == ".parquet":
            return parquet.read_table(path)
        return csv.read_csv(
            path, convert_options=csv.ConvertOptions(column_types={"id": arrow().string()}, strings_can_be_null=True)
        )
    except arrow().ArrowInvalid as error:
        raise InputError(f"{path}: this is no {path.suffix[1:].upper()} table: {error}") from error


def _files(source: str | Path | Sequence[str | Path]) -> list[str]:
    """Files as named, the images under a folder at any depth, those that a pattern matches; sorted, each once."""
    given = [source] if isinstance(source, str | Path) else list(source)
    found: dict[str, None] = {}
    for one in map(str, given):
        if Path(one).is_dir():
            meant = sorted(str(path) for path in Path(one).rglob("*") if _is_image(path))
        elif glob.has_magic(one) and not Path(one).exists():
            matches = glob.glob(one, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
            meant = sorted(path for path in matches if _is_image(Path(path)))
        else:
            meant = [one]
        if not meant:
            raise InputError(f"{one}: no image there")
        found.update(dict.fromkeys(meant))
    return list(found)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGES and not path.name.startswith(".") and path.is_file()


def _table(files: Sequence[str]) -> "pa.Table":
    return arrow().table({"path": arrow().array(files, arrow().string())})


def _numbered(table: "pa.Table", source: str) -> "pa.Table":
    """With the columns `row`, `id` and `path` in front; an InputError for what cannot be a manifest."""
    pa, compute = arrow(), arrow("compute")
    if "path" not in table.column_names:
        raise InputError(f"{source}: no column 'path' among {', '.join(table.column_names)}")
    taken = sorted(set(table.column_names) & set(TAKEN))
    if taken:
        raise InputError(f"{source}: the result has columns named {', '.join(taken)} of its own; rename yours")
    if not table.num_rows:
        raise InputError(f"{source}: it has no row")
    paths = table["path"].cast(pa.string())
    if compute.any(compute.is_null(paths)).as_py():
        raise InputError(f"{source}: row {compute.index(compute.is_null(paths), True).as_py()} has no path")
    ids = compute.coalesce(table["id"].cast(pa.string()), paths) if "id" in table.column_names else paths
    repeated = len(ids) - compute.count_distinct(ids).as_py()
    if repeated:
        raise InputError(f"{source}: {repeated} rows have the id of another; every row needs its own")
    rest = [name for name in table.column_names if name not in ("path", "id")]
    columns = {"row": pa.array(range(table.num_rows), pa.int64()), "id": ids, "path": paths}
    return pa.table({**columns, **{name: table[name] for name in rest}})


def arrow(part: str = "") -> Any:
    """PyArrow, or a part of it; MissingExtraError names the extra that brings it."""
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise MissingExtraError("pyarrow", "batch") from error
