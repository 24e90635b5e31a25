"""Reading: images decoded by threads while the model runs, no more of them ahead than it can soon take."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from camscope.batch.manifest import Manifest
from camscope.batch.threads import in_order
from camscope.errors import CamscopeError, GeometryError, ImageError, InputError
from camscope.explainers.inputs import Item
from camscope.explanation import Pixels
from camscope.files import open_regular
from camscope.images.photo import remarks
from camscope.images.private import unquoted
from camscope.images.sources import selected

Row = Mapping[str, Any]
TOGETHER = 4  # images


@dataclass(frozen=True)
class Loaded:
    """A row of the manifest and its image as the model takes it, with the picture to draw on; or why there is none."""

    row: Row
    sha256: str | None
    item: Item | None = None
    error: str | None = None
    image: Pixels | None = None
    seen: Pixels | None = None
    notes: tuple[str, ...] = ()


def loaded(
    manifest: Manifest, rows: Iterable[Row], read: Callable[[Any], Item], threads: int
) -> Generator[Loaded, None, None]:
    """The images of some rows, in their order. `read`: an image -> the model's input; it runs in many threads.

    A thread is given a few at a time: to hand over one costs as much as to open a small file.
    """
    left = iter(rows)
    some = iter(lambda: list(islice(left, TOGETHER)), [])
    with closing(
        in_order(lambda few: [_load(manifest, row, read) for row in few], some, threads, ahead=threads)
    ) as each:
        for few in each:
            yield from few


def _load(manifest: Manifest, row: Row, read: Callable[[Any], Item]) -> Loaded:
    try:
        source = source_of(manifest, row["path"]) if manifest.images is None else manifest.images[row["row"]]
    except InputError as error:
        return Loaded(row, None, error="its path leads elsewhere" if manifest.private else str(error))
    except FileNotFoundError:
        return Loaded(row, None, error="there is no such file")
    except CamscopeError:
        raise
    except Exception as error:  # a store, a network and a dataset may raise anything
        return Loaded(row, None, error=f"it cannot be read: {_words(error, manifest.private)}")
    digits = sha256_of(source)
    try:
        item = read(source)
        notes: tuple[str, ...] = ()
        if isinstance(source, bytes):
            with suppress(ImageError):  # a later frame is damaged, which nobody asked for
                notes = remarks(source, row["path"])
        plain = replace(item, image=None, seen=None)
        return Loaded(row, digits, plain, image=item.image, seen=item.seen, notes=notes)
    except (InputError, GeometryError) as error:  # no image, or one that the preprocessing does not take
        said = unquoted(error) if manifest.private else str(error)
        return Loaded(row, digits, error=said.removeprefix("the file: "))
    except CamscopeError:
        raise
    except Exception as error:
        kind = type(error).__name__
        return Loaded(row, digits, error=f"the preprocessing fails: {kind}{'' if manifest.private else f': {error}'}")


def _words(error: Exception, private: bool) -> str:
    """What an error says; where files may not be named, its kind."""
    return getattr(error, "strerror", None) or (type(error).__name__ if private else str(error))


def source_of(manifest: Manifest, path: str) -> bytes | Path:
    """A file's bytes; of a scan, which may be a part of a file or many files, its place."""
    return manifest.locations.read(path)


def sha256_of(source: Any) -> str | None:
    """Of a file's bytes; of a folder all of its files', in any order; of what a dataset has decoded its pixels, row by row."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, Path):
        return _of_files(source)
    if isinstance(source, Tensor):
        source = source.cpu().numpy()
    data = source.tobytes() if hasattr(source, "tobytes") else None  # NumPy's and Pillow's
    return None if data is None else hashlib.sha256(data).hexdigest()


def _of_files(place: Path) -> str | None:
    """None where there is nothing to read: the reader says why."""
    path, part = selected(place)
    try:
        files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
        digits = sorted(map(_digest, files))
    except OSError:
        return None
    return digits[0] if part is None and not path.is_dir() else hashlib.sha256(f"{digits} {part}".encode()).hexdigest()


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
