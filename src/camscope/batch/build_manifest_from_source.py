"""Build the manifest of a run from its image source: files, a table of files, or a dataset."""

import glob
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import check_regular_file, describe_file_problem, read_bytes
from camscope.batch.image_manifest import LABEL_COLUMN, Manifest, add_row_and_id_columns, import_arrow
from camscope.errors import CamscopeError, InputError
from camscope.explainers.core.redacted_settings_text import format_without_address
from camscope.images.files.find_and_open_image_files import MAX_FILE_BYTES, is_scan_name, list_image_paths
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
from camscope.images.scans.scan_reader import is_scan
from camscope.optional_packages import require
from camscope.read_untrusted_files import read_errors_converted, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_SUFFIXES = (".csv", ".parquet")
MAX_MANIFEST_BYTES = 2**31  # a table of a million rows has about a tenth of that
PATHS_PER_CHUNK = 65_536  # paths converted to Arrow at once
DATASET_PREFIXES = ("hf:", "torchvision:")
IMAGE_KEYS = ("image", "img", "pixel_values")  # keys under which an item of a dataset holds its image
# the parts of PyArrow's messages that quote no cell, since a cell may name a patient
SAFE_ARROW_MESSAGES = re.compile(
    r"In CSV column #\d+|Row #\d+: Expected \d+ columns, got \d+|invalid UTF-?8|Empty CSV file|Parquet magic bytes"
)


def build_manifest(
    source: Any, root: str | Path | None = None, *, anywhere: bool = False, strict: bool = True
) -> Manifest:
    """Build the manifest for a source of images.

    Args:
        source: A folder, a glob pattern, a list of files, a .csv or .parquet table, a dataset, or the name of a dataset
            (see `load_dataset_by_name`). A table needs a column `path`. Its columns `id` (default: the path) and `target`
            have a meaning, `label` becomes `class`, and all others are copied.
        root: The folder where the relative paths of a table begin and that no path may leave. Default: the folder of the
            table. "": relative paths begin in the working folder, and paths may lead anywhere.
        anywhere: Whether paths may leave the root.
        strict: Whether empty paths, repeated ids and reserved column names are errors. Without it, `label` keeps its name.

    Returns:
        The manifest, one row per image.

    Raises:
        InputError: The source does not exist, holds no image, or is not a valid table.

    >>> import numpy as np
    >>> len(build_manifest([np.zeros((8, 8, 3), np.uint8)] * 2))
    2

    """
    if isinstance(source, Manifest):
        return source
    if isinstance(source, str) and source.startswith(DATASET_PREFIXES):
        return _build_manifest_from_dataset(load_dataset_by_name(source, root), source)
    if isinstance(source, str | Path) or (
        isinstance(source, list | tuple) and all(isinstance(item, str | Path) for item in source)
    ):
        return _build_manifest_from_files(source, root, anywhere=anywhere, strict=strict)
    return _build_manifest_from_dataset(source)


def _build_manifest_from_files(
    source: str | Path | Sequence[str | Path], root: str | Path | None, *, anywhere: bool, strict: bool
) -> Manifest:
    """Build a manifest from a table file, a folder, a pattern or paths."""
    path = Path(source) if isinstance(source, str | Path) else None
    if path is not None and path.suffix.lower() in TABLE_SUFFIXES and not glob.has_magic(str(path)):
        table, root = _read_table_file(path), path.parent if root is None else root
    else:
        table = _list_files_as_table(source)
    rows, folder = (
        add_row_and_id_columns(table, "the manifest", strict=strict),
        Path(root) if root and str(root) else None,
    )
    return Manifest(rows, folder, anywhere=anywhere)


def _read_table_file(path: Path) -> "pa.Table":
    """Read a CSV or Parquet manifest. Raise an InputError without any cell values if it is damaged."""
    csv, kind = import_arrow("csv"), path.suffix[1:].upper()
    if not path.is_file():
        problem = describe_file_problem(path) if path.exists() else f"the {path.suffix} file does not exist"
        raise InputError(f"there is no such manifest: {problem}")
    with read_errors_converted(f"the manifest: this is not a {kind} table", quote_original=False):
        check_regular_file(path, MAX_MANIFEST_BYTES)
        try:
            if kind == "PARQUET":
                return read_parquet(path)
            # these are text even if all values look like numbers
            text_columns = dict.fromkeys(("path", "id", "target"), import_arrow().string())
            options = csv.ConvertOptions(column_types=text_columns, strings_can_be_null=True)
            return csv.read_csv(path, convert_options=options)
        except import_arrow().ArrowInvalid as error:
            safe_parts = "; ".join(match[0] for match in SAFE_ARROW_MESSAGES.finditer(str(error)))
            reason = safe_parts or "it is damaged or has another format"
            raise InputError(f"the manifest: this is not a {kind} table: {reason}") from None


def _list_files_as_table(source: str | Path | Sequence[str | Path]) -> "pa.Table":
    """List image files in a table with the column `path`. Each source is a file, a folder or a glob pattern."""
    pa, paths = import_arrow(), _iter_image_paths([source] if isinstance(source, str | Path) else source)
    try:
        chunks = [pa.array(chunk, pa.string()) for chunk in iter(lambda: list(islice(paths, PATHS_PER_CHUNK)), [])]
    except UnicodeEncodeError as error:
        raise InputError(
            f"{redact_scan_path(error.object)!r}: the file name is not valid UTF-8; rename the file, or leave it out"
        ) from None
    return pa.table({"path": pa.chunked_array(chunks, pa.string()).unique()})


def _iter_image_paths(sources: Sequence[str | Path]) -> Iterator[str]:
    """Yield the paths of all images in files, folders and patterns. Raise an InputError for a source without images."""
    for source in map(str, sources):
        is_plain_path = "://" not in source and not glob.has_magic(source)
        if len(sources) == 1 and is_plain_path and not os.path.lexists(source):
            raise InputError(f"{redact_scan_path(source)}: there is no such file or folder")
        paths = sorted(list_image_paths(source, recursive=True))
        if not paths:
            raise InputError(
                f"{redact_scan_path(source)}: there is no image; expected image files, or a folder with images"
            )
        yield from paths


def redact_scan_path(path: str) -> str:
    """Hide the path of a scan behind a keyed hash. Any other path stays unchanged."""
    return pseudonymize_source(path) if is_scan_name(path) or is_scan(path) else path


def load_dataset_by_name(spec: str, root: str | Path | None = None) -> Any:
    """Load a dataset that is named as `hf:NAME`, `hf:NAME:SPLIT` or `torchvision:NAME:SPLIT`.

    `hf:FOLDER:SPLIT` loads a dataset from disk. Missing files are downloaded. `root` is the folder of torchvision datasets,
    by default "data".
    """
    library, _, name_and_split = spec.partition(":")
    name, _, split = name_and_split.partition(":")
    try:
        if library == "hf":
            return _load_hugging_face_dataset(name, split)
        return _build_torchvision_dataset(name, split, root)
    except CamscopeError:
        raise
    except Exception as error:
        raise InputError(f"the dataset {library}:{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _load_hugging_face_dataset(name: str, split: str) -> Any:
    """Load a split of a Hugging Face dataset, from a folder or by its name."""
    datasets = require("datasets", extra="hub")
    on_disk = Path(name).is_dir()
    dataset = datasets.load_from_disk(name) if on_disk else datasets.load_dataset(name, split=split or None)
    if not isinstance(dataset, Mapping):
        return dataset
    if split not in dataset:
        raise InputError(
            f"hf:{name} has the splits {', '.join(dataset)}; choose one, such as hf:{name}:{next(iter(dataset))}"
        )
    return dataset[split]


def _build_torchvision_dataset(name: str, split: str, root: str | Path | None) -> Any:
    """Build a dataset of torchvision. The split becomes the argument that the dataset's class has for it."""
    module = import_module("torchvision.datasets")
    if name not in module.__all__:
        raise InputError(f"torchvision has no dataset {name!r}; its datasets are {', '.join(module.__all__)}")
    dataset_cls = getattr(module, name)
    parameters = signature(dataset_cls).parameters
    arguments: dict[str, Any] = {"root": str(root or "data")} if "root" in parameters else {}
    if "download" in parameters:
        arguments["download"] = True
    if split and "train" in parameters:
        arguments["train"] = split == "train"
    elif split:
        arguments["split"] = split
    return dataset_cls(**arguments)


class DatasetImages:
    """The images of a dataset by number. Several threads can read them."""

    def __init__(self, dataset: Any, image_key: str | int | None) -> None:
        self.dataset, self.image_key = dataset, image_key
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            item = self.dataset[index]  # few datasets are thread-safe
        image = _extract_image(item) if self.image_key is None else item[self.image_key]
        if isinstance(image, Mapping) and image.keys() >= {"bytes", "path"}:  # an undecoded image of Hugging Face
            return read_bytes(image["path"], MAX_FILE_BYTES) if image["bytes"] is None else image["bytes"]
        return image

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetImages, (self.dataset, self.image_key)


def _build_manifest_from_dataset(dataset: Any, name: str | None = None) -> Manifest:
    """Build the manifest of a dataset. Its images get numbers such as `#12` as names.

    Labels become the column `class`, and other columns are copied.
    """
    pa, kind = import_arrow(), type(dataset).__name__
    if isinstance(getattr(dataset, "samples", None), list) and hasattr(dataset, "classes"):
        # ImageFolder and subclasses: the files are read as files, so that they can be found again
        paths, labels = zip(*dataset.samples, strict=True)
        names = _map_labels_to_names(np.array(labels), dataset.classes)
        table = pa.table({"path": pa.array(paths, pa.string()), LABEL_COLUMN: names})
        return Manifest(add_row_and_id_columns(table, kind), None)
    if hasattr(dataset, "features") and hasattr(dataset, "with_format"):
        table, images = _split_into_table_and_images(dataset)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        table, images = _build_path_and_label_table(dataset), DatasetImages(dataset, None)
    else:
        raise InputError(f"a {kind} has no __len__ or no __getitem__; pass a dataset with both methods, or files")
    identity = name or getattr(dataset, "_fingerprint", None) or dataset
    return Manifest(add_row_and_id_columns(table, kind), None, images, format_without_address(identity))


def _split_into_table_and_images(dataset: Any) -> tuple["pa.Table", DatasetImages]:
    """Split a dataset in two: the images as undecoded files, and a table of all other columns."""
    feature_types = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    image_columns = [name for name, feature_type in feature_types.items() if feature_type == "Image"]
    if not image_columns:
        raise InputError(f"the dataset has no column of images; its columns are {', '.join(feature_types)}")
    undecoded = dataset.cast_column(image_columns[0], import_module("datasets").Image(decode=False))
    columns: dict[str, Any] = {}
    if len(feature_types) > len(image_columns):
        table = dataset.remove_columns(image_columns).with_format("arrow")[:]
        columns = {name: table[name] for name in table.column_names if name not in ("path", "row")}
    for name, feature_type in feature_types.items():
        if feature_type == "ClassLabel" and name in columns:
            columns[name] = _map_labels_to_names(columns[name].to_numpy(), dataset.features[name].names)
    if "label" in columns and LABEL_COLUMN not in columns:
        columns = {LABEL_COLUMN if name == "label" else name: column for name, column in columns.items()}
    table = import_arrow().table({"path": _build_numbered_paths(len(dataset)), **columns})
    return table, DatasetImages(undecoded, image_columns[0])


def _build_path_and_label_table(dataset: Any) -> "pa.Table":
    """Build a table of numbered paths for a torchvision dataset. For a dataset with labels, the table has a column `class`."""
    targets, class_names = getattr(dataset, "targets", None), getattr(dataset, "classes", None)
    columns = {"path": _build_numbered_paths(len(dataset))}
    labels = np.asarray(targets) if isinstance(targets, list | np.ndarray | Tensor) else np.empty(0)
    if len(labels) == len(dataset) and labels.ndim == 1 and labels.dtype.kind in "iuU":
        if class_names and labels.dtype.kind in "iu":
            columns[LABEL_COLUMN] = _map_labels_to_names(labels, class_names)
        else:
            columns[LABEL_COLUMN] = import_arrow().array(labels.astype(str))
    return import_arrow().table(columns)


def _build_numbered_paths(n_images: int) -> "pa.Array":
    digits = import_arrow().array(np.arange(n_images)).cast(import_arrow().string())
    return import_arrow("compute").binary_join_element_wise("#", digits, "")


def _map_labels_to_names(labels: Any, class_names: Sequence[str]) -> "pa.Array":
    """Return the class name of each label index. An index without a class, such as -1, becomes null."""
    pa = import_arrow()
    is_class = (labels >= 0) & (labels < len(class_names))
    indices = pa.array(np.where(is_class, np.nan_to_num(labels), 0).astype(np.int64), mask=~is_class)
    return pa.array([str(name) for name in class_names], pa.string()).take(indices)


def _extract_image(dataset_item: Any) -> Any:
    """Extract the image from a dataset item. It is the item itself, its first element, or the value at an image key."""
    if isinstance(dataset_item, np.ndarray | torch.Tensor | bytes) or not hasattr(dataset_item, "__getitem__"):
        return dataset_item
    if isinstance(dataset_item, Mapping):
        for key in IMAGE_KEYS:
            if key in dataset_item:
                return dataset_item[key]
    elif isinstance(dataset_item, list | tuple) and dataset_item:
        return dataset_item[0]
    raise InputError(
        f"a dataset item is a {type(dataset_item).__name__}; expected an image, a tuple whose first element is an image, or a "
        "mapping with the key 'image'"
    )
