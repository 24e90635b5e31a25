"""Reading: images decoded by threads while the model runs, no more of them ahead than it can soon take."""

import errno
import hashlib
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from camscope.batch.manifest import Manifest
from camscope.batch.threads import in_order
from camscope.errors import CamscopeError, GeometryError, ImageError, InputError, MissingExtraError
from camscope.explainers.inputs import Item
from camscope.explanation import Pixels
from camscope.images.photo import remarks

Row = Mapping[str, Any]


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
    """The images of some rows, in their order. `read`: an image -> the model's input; it runs in many threads."""
    return in_order(lambda row: _load(manifest, row, read), rows, threads, ahead=4 * threads)


def _load(manifest: Manifest, row: Row, read: Callable[[Any], Item]) -> Loaded:
    try:
        source = bytes_of(manifest.place(row["path"])) if manifest.images is None else manifest.images[row["row"]]
    except InputError as error:
        return Loaded(row, None, error=str(error))
    except FileNotFoundError:
        return Loaded(row, None, error="there is no such file")
    except CamscopeError:
        raise
    except Exception as error:  # a store, a network and a dataset may raise anything
        return Loaded(row, None, error=f"it cannot be read: {getattr(error, 'strerror', None) or error}")
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
        return Loaded(row, digits, error=str(error).removeprefix("the file: "))
    except CamscopeError:
        raise
    except Exception as error:
        return Loaded(row, digits, error=f"the preprocessing fails: {type(error).__name__}: {error}")


def sha256_of(source: Any) -> str | None:
    """Of a file's bytes; of what a dataset has decoded those of its pixels, row by row."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, Tensor):
        source = source.cpu().numpy()
    data = source.tobytes() if hasattr(source, "tobytes") else None  # NumPy's and Pillow's
    return None if data is None else hashlib.sha256(data).hexdigest()


def bytes_of(place: str) -> bytes:
    """A file's, or those behind a URL, as `s3://bucket/cat.jpg`: fsspec reads that, with the store's own package."""
    if "://" not in place:
        path = Path(place)
        if stat.S_ISFIFO(path.stat().st_mode) or path.is_char_device():  # these may never end
            raise OSError(errno.EINVAL, "it is no file, but a pipe or a device")
        return path.read_bytes()
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError("fsspec", "batch") from error
    with fsspec.open(place, "rb") as file:
        found: bytes = file.read()
    return found
