"""What a run may be given: files, a table of them, a dataset, or a dataset's name."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from camscope.batch.datasets import manifest_of_dataset
from camscope.batch.manifest import Manifest, manifest_of_files
from camscope.errors import InputError, MissingExtraError

LIBRARIES = ("hf:", "torchvision:")


def manifest_of(source: Any, root: str | Path | None = None, *, strict: bool = True) -> Manifest:
    """The manifest that a folder, a pattern, a list of files, a .csv or .parquet file, or a dataset means.

    A table needs a column `path`; `id` (default: the path) and `target` are known, all others go along. Relative paths are
    those of the manifest's own folder, or of `root`, and may not leave it; root="" lets them. A dataset is given as such
    (see `manifest_of_dataset`), or by its name (see `dataset_of`). Not `strict`: a table that no run would take, for whoever
    says what is wrong with it.
    """
    if isinstance(source, Manifest):
        return source
    if isinstance(source, str) and source.startswith(LIBRARIES):
        return manifest_of_dataset(dataset_of(source, root), source)
    if isinstance(source, str | Path) or (isinstance(source, list | tuple) and _names(source)):
        return manifest_of_files(source, root, strict=strict)
    return manifest_of_dataset(source)


def _names(given: Sequence[Any]) -> bool:
    return all(isinstance(one, str | Path) for one in given)


def dataset_of(words: str, root: str | Path | None = None) -> Any:
    """`hf:NAME`, `hf:NAME:SPLIT`, `hf:FOLDER` (as `save_to_disk` wrote it), `torchvision:NAME`, `torchvision:NAME:SPLIT`.

    `root`: the folder where torchvision keeps its files; default "data". What is not there is downloaded.
    """
    library, _, rest = words.partition(":")
    name, _, split = rest.partition(":")
    return _loaded(name, split) if library == "hf" else _built(name, split, root)


def _loaded(name: str, split: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("datasets", "hub") from error
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


def _built(name: str, split: str, root: str | Path | None) -> Any:
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
