"""Loading: images read and decoded by threads while the model runs.

- Reading: images decoded by threads while the model runs, no more of them ahead than it can soon take.
- Work shared out among threads, its results in order, and no more of it begun than is soon wanted.
- Intake: a file's bytes, or an image of a dataset, as the model takes it.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from camscope.batch.manifest import Manifest
from camscope.batch.memory_budget import DECODING, MemoryBudget, give_back
from camscope.errors import (
    CamscopeError,
    GeometryError,
    ImageError,
    InputError,
    PreprocessError,
    is_out_of_memory,
    is_transient,
    memory_reason,
)
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import Item, item_of, known, picture_of, read_item
from camscope.explanation import Pixels
from camscope.hooks.base import unwrap
from camscope.images.files.redaction import unquoted
from camscope.images.files.source_files import selected
from camscope.images.photo import pixel_count, read_photo, read_reduced, remarks
from camscope.images.preprocess import Preprocess
from camscope.images.scans.monai import MonaiTransforms
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.safe_files import open_regular

Row = Mapping[str, Any]
TOGETHER = 4  # images


@dataclass(frozen=True)
class Loaded:
    """A row of the manifest and its image as the model takes it, with the picture to draw on; or why there is none."""

    row: Row
    sha256: str | None
    item: Item | None = None
    error: str | None = None
    transient: bool = False  # the error: another try may succeed
    image: Pixels | None = None
    seen: Pixels | None = None
    notes: tuple[str, ...] = ()
    pixels: int = 0  # of the image
    dropped: bool = False  # the pictures, which would have taken too much memory: they are read again


def loaded(
    manifest: Manifest,
    rows: Iterable[Row],
    read: Callable[[Any], Item],
    threads: int,
    memory: MemoryBudget | None = None,
) -> Generator[Loaded, None, None]:
    """The images of some rows, in their order. `read`: an image -> the model's input; it runs in many threads.

    A thread is given a few at a time: to hand over one costs as much as to open a small file.
    """
    left = iter(rows)
    some = iter(lambda: list(islice(left, TOGETHER)), [])
    with closing(
        in_order(lambda few: [_load(manifest, row, read, memory) for row in few], some, threads, ahead=threads)
    ) as each:
        for few in each:
            yield from few


def _load(manifest: Manifest, row: Row, read: Callable[[Any], Item], memory: MemoryBudget | None) -> Loaded:
    try:
        source = source_of(manifest, row["path"]) if manifest.images is None else manifest.images[row["row"]]
    except InputError as error:
        return Loaded(row, None, error="its path leads elsewhere" if manifest.private else str(error))
    except FileNotFoundError:
        return Loaded(row, None, error="there is no such file", transient=True)
    except CamscopeError:
        raise
    except Exception as error:  # a store, a network and a dataset may raise anything
        unread = "://" in row["path"] or is_transient(error)  # a store and a network may raise anything
        return Loaded(row, None, error=f"it cannot be read: {_words(error, manifest.private)}", transient=unread)
    digits = sha256_of(source)
    try:
        with held_for(source, memory):
            item = read(source)
            keep = memory is None or manifest.images is not None or memory.keeps(item.image, item.seen)
            image, seen = (item.image, item.seen) if keep else (None, None)
            pixels = 0 if item.image is None else item.image.size // 3
            item = replace(item, image=None, seen=None)
        notes: tuple[str, ...] = ()
        if isinstance(source, bytes):
            with suppress(ImageError):  # a later frame is damaged, which nobody asked for
                notes = remarks(source, row["path"])
        return Loaded(row, digits, item, image=image, seen=seen, notes=notes, pixels=pixels, dropped=not keep)
    except (InputError, GeometryError) as error:  # no image, or one that the preprocessing does not take
        said = unquoted(error) if manifest.private else str(error)
        return Loaded(row, digits, error=said.removeprefix("the file: "), transient=is_transient(error))
    except CamscopeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            why = f"{memory_reason(error)} while reading and preprocessing it"
            return Loaded(row, digits, error=why, transient=True)
        kind = type(error).__name__
        why = f"the preprocessing fails: {kind}{'' if manifest.private else f': {error}'}"
        return Loaded(row, digits, error=why, transient=is_transient(error))


def held_for(source: Any, memory: MemoryBudget | None) -> AbstractContextManager[None]:
    """The memory in which a file's bytes are decoded, as far as their header tells."""
    if memory is None or not isinstance(source, bytes):
        return nullcontext()
    return memory.held(DECODING * pixel_count(source))


def _words(error: Exception, private: bool) -> str:
    """What an error says; where files may not be named, its kind."""
    if is_out_of_memory(error):
        return memory_reason(error)
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


MAX_THREADS = 1024
Given = TypeVar("Given")
Made = TypeVar("Made")


def expect_threads(threads: int | None) -> None:
    """InputError unless it is a number of threads that a process can have, or None."""
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MAX_THREADS):
        raise InputError(f"threads={threads}; expected 1 to {MAX_THREADS:,}, or None")


def in_order(
    work: Callable[[Given], Made], given: Iterable[Given], threads: int, *, ahead: int | None = None
) -> Generator[Made, None, None]:
    """What `work` makes of each, in their order; closed early or failing, it begins nothing more.

    `ahead`: how many may be begun beyond the one that is waited for; default: two a thread.
    """
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="camscope") as pool:
        try:
            for one in given:
                waiting.append(pool.submit(work, one))
                if len(waiting) > (ahead or 2 * threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for rest in waiting:
                rest.cancel()


HERE = (torch.device("cpu"), torch.float32)  # where inputs wait
MARGIN = 4  # twice leaves the maps' ranks correlated at 0.989, four times at 0.994 and more


@dataclass(frozen=True)
class Way:
    """How it is taken in. `reduced`: decoded smaller, see `Worker`; `drawn`: with the picture to draw on.

    `window`, `allow_pixels`: of scans, see `Worker`. `nameless`: a medical image is refused where its file's name does not say
    that it is one, for then its row would name it.
    """

    reduced: bool = False
    drawn: bool = False
    window: Any = None
    allow_pixels: bool = False
    nameless: bool = False


PLAIN = Way()


def taken_in(source: Any, tool: Explainer, way: Way = PLAIN) -> Item:
    """As the model takes it, in memory."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return tool.read(source)
    if isinstance(source, Path) or isinstance(tool.preprocess, ScanPreprocess) or is_scan(source):
        return _scan(source, tool, way)
    pixels, size = _pixels(source, tool, way.reduced)
    x, place = known(tool.preprocess, "images")(pixels)
    place = place and place.on_image_of(size)
    seen = picture_of(x, tool.preprocess) if way.drawn and not place else None
    return Item(x, place, "", pixels if way.drawn else None, seen)


def _scan(source: Any, tool: Explainer, way: Way) -> Item:
    """A medical image; without a picture where it is not drawn on, or may not be shown."""
    if way.nameless and not isinstance(source, Path) and not isinstance(tool.preprocess, ScanPreprocess):
        raise ImageError("a medical image whose name does not say so: pass profile='research', or 'clinical'")
    if isinstance(tool.preprocess, MonaiTransforms) and isinstance(source, Path):
        item = read_item(source, tool.preprocess, unwrap(tool.model), HERE)
    else:
        scan = read_scan(source, window=way.window)
        shown = replace(scan, burned_in=False) if way.allow_pixels else scan
        return item_of(shown, tool.preprocess, HERE, drawn=way.drawn)
    return item if way.drawn else replace(item, image=None, seen=None)


def expect_reducible(tool: Explainer) -> None:
    """PreprocessError where nobody knows how small an image may be decoded."""
    if not isinstance(tool.preprocess, Preprocess):
        raise PreprocessError(
            f"reduced decoding needs to know what an image is resized to, and {tool.preprocess!r} does not say"
        )


def _pixels(source: Any, tool: Explainer, reduced: bool) -> tuple[Pixels, tuple[int, ...]]:
    """(h,w,3) and the image's own (H,W)."""
    preprocess = tool.preprocess
    if not reduced or not isinstance(source, bytes) or not isinstance(preprocess, Preprocess):
        pixels = read_photo(source).pixels
        give_back(pixels.nbytes)
        return pixels, pixels.shape[:2]

    def enough(size: tuple[int, int]) -> tuple[int, int]:
        height, width = preprocess.resized(size)
        return MARGIN * height, MARGIN * width

    return read_reduced(source, enough)
