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
from camscope.batch.memory_budget import DECODING_BYTES_PER_PIXEL, MemoryBudget, trim_free_memory
from camscope.errors import (
    CamscopeError,
    GeometryError,
    ImageError,
    InputError,
    PreprocessError,
    describe_out_of_memory,
    is_out_of_memory,
    is_transient,
)
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import (
    ModelInput,
    prepare_scan,
    read_model_input,
    render_model_input,
    require_preprocess,
)
from camscope.explanation import PixelArray
from camscope.hooks.base import unwrap
from camscope.images.files.redaction import redact_error_message
from camscope.images.files.source_files import split_selector
from camscope.images.photo import find_file_flags, read_photo, read_pixel_count, read_reduced_photo
from camscope.images.preprocess import Preprocess
from camscope.images.scans.monai import MonaiPreprocess
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.safe_files import open_regular_file

ManifestRow = Mapping[str, Any]
IMAGES_PER_THREAD_TASK = 4  # images


@dataclass(frozen=True)
class LoadedImage:
    """A row of the manifest and its image as the model takes it, with the picture to draw on; or why there is none."""

    row: ManifestRow
    sha256: str | None
    item: ModelInput | None = None
    error: str | None = None
    is_transient: bool = False  # the error: another try may succeed
    image: PixelArray | None = None
    model_input_image: PixelArray | None = None
    notes: tuple[str, ...] = ()
    n_pixels: int = 0  # of the image
    images_dropped: bool = False  # the pictures, which would have taken too much memory: they are read again


def load_images(
    manifest: Manifest,
    rows: Iterable[ManifestRow],
    read_item: Callable[[Any], ModelInput],
    num_threads: int,
    memory: MemoryBudget | None = None,
) -> Generator[LoadedImage, None, None]:
    """The images of some rows, in their order. `read_item`: an image -> the model's input; it runs in many threads.

    A thread is given a few at a time: to hand over one costs as much as to open a small file.
    """
    left = iter(rows)
    some = iter(lambda: list(islice(left, IMAGES_PER_THREAD_TASK)), [])
    with closing(
        map_in_order(
            lambda few: [_load_image(manifest, row, read_item, memory) for row in few],
            some,
            num_threads,
            max_ahead=num_threads,
        )
    ) as each:
        for few in each:
            yield from few


def _load_image(
    manifest: Manifest, row: ManifestRow, read_item: Callable[[Any], ModelInput], memory: MemoryBudget | None
) -> LoadedImage:
    try:
        source = read_row_source(manifest, row["path"]) if manifest.images is None else manifest.images[row["row"]]
    except InputError as error:
        return LoadedImage(row, None, error="its path leads elsewhere" if manifest.is_pseudonymized else str(error))
    except FileNotFoundError:
        return LoadedImage(row, None, error="there is no such file", is_transient=True)
    except CamscopeError:
        raise
    except Exception as error:  # a store, a network and a dataset may raise anything
        unread = "://" in row["path"] or is_transient(error)  # a store and a network may raise anything
        return LoadedImage(
            row,
            None,
            error=f"it cannot be read: {_describe_read_error(error, manifest.is_pseudonymized)}",
            is_transient=unread,
        )
    digits = hash_source(source)
    try:
        with reserve_decoding_memory(source, memory):
            item = read_item(source)
            keep = (
                memory is None
                or manifest.images is not None
                or memory.try_keep_waiting(item.image, item.model_input_image)
            )
            image, seen = (item.image, item.model_input_image) if keep else (None, None)
            pixels = 0 if item.image is None else item.image.size // 3
            item = replace(item, image=None, model_input_image=None)
        notes: tuple[str, ...] = ()
        if isinstance(source, bytes):
            with suppress(ImageError):  # a later frame is damaged, which nobody asked for
                notes = find_file_flags(source, row["path"])
        return LoadedImage(
            row,
            digits,
            item,
            image=image,
            model_input_image=seen,
            notes=notes,
            n_pixels=pixels,
            images_dropped=not keep,
        )
    except (InputError, GeometryError) as error:  # no image, or one that the preprocessing does not take
        said = redact_error_message(error) if manifest.is_pseudonymized else str(error)
        return LoadedImage(row, digits, error=said.removeprefix("the file: "), is_transient=is_transient(error))
    except CamscopeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            why = f"{describe_out_of_memory(error)} while reading and preprocessing it"
            return LoadedImage(row, digits, error=why, is_transient=True)
        kind = type(error).__name__
        why = f"the preprocessing fails: {kind}{'' if manifest.is_pseudonymized else f': {error}'}"
        return LoadedImage(row, digits, error=why, is_transient=is_transient(error))


def reserve_decoding_memory(source: Any, memory: MemoryBudget | None) -> AbstractContextManager[None]:
    """The memory in which a file's bytes are decoded, as far as their header tells."""
    if memory is None or not isinstance(source, bytes):
        return nullcontext()
    return memory.reserve(DECODING_BYTES_PER_PIXEL * read_pixel_count(source))


def _describe_read_error(error: Exception, is_pseudonymized: bool) -> str:
    """What an error says; where files may not be named, its kind."""
    if is_out_of_memory(error):
        return describe_out_of_memory(error)
    return getattr(error, "strerror", None) or (type(error).__name__ if is_pseudonymized else str(error))


def read_row_source(manifest: Manifest, path: str) -> bytes | Path:
    """A file's bytes; of a scan, which may be a part of a file or many files, its place."""
    return manifest.path_resolver.read(path)


def hash_source(source: Any) -> str | None:
    """Of a file's bytes; of a folder all of its files', in any order; of what a dataset has decoded its pixels, row by row."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, Path):
        return _hash_files(source)
    if isinstance(source, Tensor):
        source = source.cpu().numpy()
    data = source.tobytes() if hasattr(source, "tobytes") else None  # NumPy's and Pillow's
    return None if data is None else hashlib.sha256(data).hexdigest()


def _hash_files(location: Path) -> str | None:
    """None where there is nothing to read: the reader says why."""
    path, part = split_selector(location)
    try:
        files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
        digits = sorted(map(_hash_file, files))
    except OSError:
        return None
    return digits[0] if part is None and not path.is_dir() else hashlib.sha256(f"{digits} {part}".encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MAX_THREADS = 1024
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def require_valid_num_threads(num_threads: int | None) -> None:
    """InputError unless it is a number of threads that a process can have, or None."""
    if num_threads is not None and not (isinstance(num_threads, int) and 1 <= num_threads <= MAX_THREADS):
        raise InputError(f"num_threads={num_threads}; expected 1 to {MAX_THREADS:,}, or None")


def map_in_order(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT], num_threads: int, *, max_ahead: int | None = None
) -> Generator[ResultT, None, None]:
    """What `function` makes of each, in their order; closed early or failing, it begins nothing more.

    `max_ahead`: how many may be begun beyond the one that is waited for; default: two a thread.
    """
    waiting: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="camscope") as pool:
        try:
            for one in items:
                waiting.append(pool.submit(function, one))
                if len(waiting) > (max_ahead or 2 * num_threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for rest in waiting:
                rest.cancel()


CPU_FLOAT32 = (torch.device("cpu"), torch.float32)  # where inputs wait
MIN_REDUCED_DECODING_FACTOR = 4  # twice leaves the maps' ranks correlated at 0.989, four times at 0.994 and more


@dataclass(frozen=True)
class InputOptions:
    """How it is taken in. `reduced_decoding`: decoded smaller, see `BatchWorker`; `keep_image`: with the picture to draw on.

    `window`, `allow_burned_in_text`: of scans, see `BatchWorker`. `reject_unlabeled_scans`: a medical image is refused where its file's name does not say
    that it is one, for then its row would name it.
    """

    reduced_decoding: bool = False
    keep_image: bool = False
    window: Any = None
    allow_burned_in_text: bool = False
    reject_unlabeled_scans: bool = False


DEFAULT_INPUT_OPTIONS = InputOptions()


def prepare_input(source: Any, explainer: Explainer, options: InputOptions = DEFAULT_INPUT_OPTIONS) -> ModelInput:
    """As the model takes it, in memory."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return explainer.prepare_input(source)
    if isinstance(source, Path) or isinstance(explainer.preprocess, ScanPreprocess) or is_scan(source):
        return _prepare_scan(source, explainer, options)
    pixels, size = _decode_photo(source, explainer, options.reduced_decoding)
    x, place = require_preprocess(explainer.preprocess, "images")(pixels)
    place = place and place.on_resized_image(size)
    seen = render_model_input(x, explainer.preprocess) if options.keep_image and not place else None
    return ModelInput(x, place, "", pixels if options.keep_image else None, seen)


def _prepare_scan(source: Any, explainer: Explainer, options: InputOptions) -> ModelInput:
    """A medical image; without a picture where it is not drawn on, or may not be shown."""
    if (
        options.reject_unlabeled_scans
        and not isinstance(source, Path)
        and not isinstance(explainer.preprocess, ScanPreprocess)
    ):
        raise ImageError("a medical image whose name does not say so: pass profile='research', or 'clinical'")
    if isinstance(explainer.preprocess, MonaiPreprocess) and isinstance(source, Path):
        item = read_model_input(source, explainer.preprocess, unwrap(explainer.model), CPU_FLOAT32)
    else:
        scan = read_scan(source, window=options.window)
        shown = replace(scan, has_burned_in_text=False) if options.allow_burned_in_text else scan
        return prepare_scan(shown, explainer.preprocess, CPU_FLOAT32, with_images=options.keep_image)
    return item if options.keep_image else replace(item, image=None, model_input_image=None)


def require_reducible(explainer: Explainer) -> None:
    """PreprocessError where nobody knows how small an image may be decoded."""
    if not isinstance(explainer.preprocess, Preprocess):
        raise PreprocessError(
            f"reduced decoding needs to know what an image is resized to, and {explainer.preprocess!r} does not say"
        )


def _decode_photo(source: Any, explainer: Explainer, reduced_decoding: bool) -> tuple[PixelArray, tuple[int, ...]]:
    """(h,w,3) and the image's own (H,W)."""
    preprocess = explainer.preprocess
    if not reduced_decoding or not isinstance(source, bytes) or not isinstance(preprocess, Preprocess):
        pixels = read_photo(source).pixels
        trim_free_memory(pixels.nbytes)
        return pixels, pixels.shape[:2]

    def enough(size: tuple[int, int]) -> tuple[int, int]:
        height, width = preprocess.compute_resized_size(size)
        return MIN_REDUCED_DECODING_FACTOR * height, MIN_REDUCED_DECODING_FACTOR * width

    return read_reduced_photo(source, enough)
