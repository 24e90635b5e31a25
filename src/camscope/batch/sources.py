"""What a run may be given: files, a table of them, a dataset, or a dataset's name.

Datasets of torchvision, of Hugging Face, or of anybody who wrote `__len__` and `__getitem__`, as the images of a run.
"""

import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from camscope.batch.manifest import Manifest, add_row_columns, build_manifest_from_files, import_arrow
from camscope.errors import InputError
from camscope.explainers.core.maps import format_without_address
from camscope.optional import require
from camscope.safe_files import read_bytes

if TYPE_CHECKING:
    import pyarrow as pa


DATASET_PREFIXES = ("hf:", "torchvision:")


def build_manifest(source: Any, root: str | Path | None = None, *, strict: bool = True) -> Manifest:
    """The manifest that a folder, a pattern, a list of files, a .csv or .parquet file, or a dataset means.

    A table needs a column `path`; `id` (default: the path) and `format_target` are known, all others go along. Relative paths are
    those of the manifest's own folder, or of `root`, and may not leave it; root="" lets them. A dataset is given as such
    (see `build_manifest_from_dataset`), or by its name (see `load_dataset_by_name`). Not `strict`: a table that no run would take, for whoever
    says what is wrong with it.
    """
    if isinstance(source, Manifest):
        return source
    if isinstance(source, str) and source.startswith(DATASET_PREFIXES):
        return build_manifest_from_dataset(load_dataset_by_name(source, root), source)
    if isinstance(source, str | Path) or (isinstance(source, list | tuple) and _are_paths(source)):
        return build_manifest_from_files(source, root, strict=strict)
    return build_manifest_from_dataset(source)


def _are_paths(sources: Sequence[Any]) -> bool:
    return all(isinstance(one, str | Path) for one in sources)


def load_dataset_by_name(spec: str, root: str | Path | None = None) -> Any:
    """`hf:NAME`, `hf:NAME:SPLIT`, `hf:FOLDER` (as `save_to_disk` wrote it), `torchvision:NAME`, `torchvision:NAME:SPLIT`.

    `root`: the folder where torchvision keeps its files; default "data". What is not there is downloaded.
    """
    library, _, rest = spec.partition(":")
    name, _, split = rest.partition(":")
    return _load_hugging_face_dataset(name, split) if library == "hf" else _build_torchvision_dataset(name, split, root)


def _load_hugging_face_dataset(name: str, split: str) -> Any:
    datasets = require("datasets", extra="hub")
    try:
        found = (
            datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, split=split or None)
        )
    except Exception as error:
        raise InputError(f"hf:{name}: it cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        return found
    if split not in found:
        raise InputError(f"hf:{name} has the splits {', '.join(found)}; name one, as hf:{name}:{next(iter(found))}")
    return found[split]


def _build_torchvision_dataset(name: str, split: str, root: str | Path | None) -> Any:
    kinds = import_module("torchvision.datasets")
    if name not in kinds.__all__:
        raise InputError(f"torchvision has no dataset {name!r}; there are {', '.join(kinds.__all__)}")
    kind = getattr(kinds, name)
    settings = signature(kind).parameters
    chosen: dict[str, Any] = {"root": str(root or "data")} if "root" in settings else {}
    if "download" in settings:
        chosen["download"] = True
    if split and "train" in settings:
        chosen["train"] = split == "train"
    elif split:
        chosen["split"] = split
    try:
        return kind(**chosen)
    except Exception as error:
        raise InputError(f"torchvision:{name}: it cannot be made: {type(error).__name__}: {error}") from error


IMAGE_KEYS = ("image", "img", "pixel_values")  # where an item of a dataset has its image
LABEL_COLUMN = "class"  # the column of the dataset's own label


class DatasetImages:
    """The images of a dataset by their numbers, as files' bytes or decoded. One is fetched at a time: few datasets allow more."""

    def __init__(self, dataset: Any, image_key: str | int | None) -> None:
        self.dataset, self.image_key = dataset, image_key
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            item = self.dataset[index]
        image = _extract_image(item) if self.image_key is None else item[self.image_key]
        if isinstance(image, Mapping) and image.keys() >= {
            "bytes",
            "path",
        }:  # as Hugging Face holds what is not decoded
            return read_bytes(image["path"]) if image["bytes"] is None else image["bytes"]
        return image

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetImages, (self.dataset, self.image_key)


def build_manifest_from_dataset(dataset: Any, name: str | None = None) -> Manifest:
    """One row an image, `path` its number as `#12`; its label goes along as the column `class`, all else of a table as it is.

    `dataset`: of Hugging Face with a column of images, of torchvision, or anything with `__len__` and `__getitem__` whose
    items are images, begin with one, or hold one as "image". `name`: words by which `load_dataset_by_name` finds it again.
    """
    if isinstance(getattr(dataset, "samples", None), list) and hasattr(dataset, "classes"):  # ImageFolder and its kin
        return _image_folder_manifest(dataset)
    if hasattr(dataset, "features") and hasattr(dataset, "with_format"):
        table, images = _split_hugging_face_dataset(dataset)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        table, images = _label_table(dataset), DatasetImages(dataset, None)
    else:
        raise InputError(
            f"a {type(dataset).__name__} has no length, or no items by number; pass one that has, or files"
        )
    identity = name or getattr(dataset, "_fingerprint", None) or dataset
    return Manifest(add_row_columns(table, type(dataset).__name__), None, images, format_without_address(identity))


def _image_folder_manifest(dataset: Any) -> Manifest:
    """The files that such a dataset lists: they are read as files, and can be found again."""
    pa = import_arrow()
    paths, classes = zip(*dataset.samples, strict=True)
    columns = {
        "path": pa.array(paths, pa.string()),
        LABEL_COLUMN: _map_labels_to_names(np.array(classes), dataset.classes),
    }
    return Manifest(add_row_columns(pa.table(columns), type(dataset).__name__), None)


def _split_hugging_face_dataset(dataset: Any) -> tuple["pa.Table", DatasetImages]:
    """Its table without the pictures, whose files' bytes are taken undecoded."""
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    if not pictures:
        raise InputError(f"the dataset has no column of images; its columns are {', '.join(kinds)}")
    undecoded = dataset.cast_column(pictures[0], import_module("datasets").Image(decode=False))
    table = dataset.remove_columns(pictures).with_format("arrow")[:] if len(kinds) > len(pictures) else None
    columns = {} if table is None else {name: table[name] for name in table.column_names if name not in ("path", "row")}
    for name in (name for name, kind in kinds.items() if kind == "ClassLabel" and name in columns):
        columns[name] = _map_labels_to_names(columns[name].to_numpy(), dataset.features[name].names)
    free = LABEL_COLUMN not in columns
    renamed = {LABEL_COLUMN if name == "label" and free else name: column for name, column in columns.items()}
    return import_arrow().table({"path": _number_paths(len(dataset)), **renamed}), DatasetImages(undecoded, pictures[0])


def _label_table(dataset: Any) -> "pa.Table":
    """The labels of a dataset of torchvision's kind, which has them beside its images; else its numbers alone."""
    pa, targets, classes = import_arrow(), getattr(dataset, "targets", None), getattr(dataset, "classes", None)
    columns = {"path": _number_paths(len(dataset))}
    values = np.asarray(targets) if isinstance(targets, list | np.ndarray | Tensor) else np.empty(0)
    if len(values) == len(dataset) and values.ndim == 1 and values.dtype.kind in "iuU":
        columns[LABEL_COLUMN] = (
            _map_labels_to_names(values, classes)
            if classes and values.dtype.kind in "iu"
            else pa.array(values.astype(str))
        )
    return pa.table(columns)


def _number_paths(n_images: int) -> "pa.Array":
    digits = import_arrow().array(np.arange(n_images)).cast(import_arrow().string())
    return import_arrow("compute").binary_join_element_wise("#", digits, "")


def _map_labels_to_names(labels: Any, class_names: Sequence[str]) -> "pa.Array":
    """Names for numbers; none for what is no class, as -1."""
    pa = import_arrow()
    known = (labels >= 0) & (labels < len(class_names))
    places = pa.array(np.where(known, np.nan_to_num(labels), 0).astype(np.int64), mask=~known)
    return pa.array([str(name) for name in class_names], pa.string()).take(places)


def _extract_image(item: Any) -> Any:
    """Of what a dataset gives for a number: itself, what it begins with, or what it holds under a usual name."""
    if isinstance(item, np.ndarray | torch.Tensor | bytes) or not hasattr(item, "__getitem__"):
        return item
    if isinstance(item, Mapping):
        for key in IMAGE_KEYS:
            if key in item:
                return item[key]
    elif isinstance(item, list | tuple) and item:
        return item[0]
    raise InputError(
        f"an item is {type(item).__name__}; expected an image, a tuple that begins with one, or one as 'image'"
    )
