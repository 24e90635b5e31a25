"""Load images in threads while the model runs: read, decode and preprocess them within a memory limit."""

import ctypes
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.batch.image_manifest import Manifest
from camscope.errors import (
    CamscopeError,
    GeometryError,
    ImageError,
    InputError,
    describe_out_of_memory,
    is_out_of_memory,
    is_transient,
)
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import (
    ModelInput,
    prepare_scan,
    read_model_input,
    render_model_input,
    require_preprocess,
)
from camscope.explanation import PixelArray
from camscope.hooks.find_layers import unwrap
from camscope.images.files.find_and_open_image_files import split_path_and_index
from camscope.images.files.redacted_errors_and_file_pseudonyms import format_error_without_causes
from camscope.images.photo_reader import (
    find_suffix_and_frame_warnings,
    read_photo,
    read_pixel_count,
    read_reduced_photo,
)
from camscope.images.preprocess import Preprocess
from camscope.images.scans.monai_preprocess import MonaiPreprocess
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.images.scans.scan_reader import is_scan, read_scan

ManifestRow = Mapping[str, Any]
IMAGES_PER_THREAD_TASK = 4  # images
BYTES_PER_THREAD, MIN_BUDGET_BYTES = 2**28, 2**29  # work in progress: per thread, and at least
MAX_BUDGET_BYTES = 700_000_000  # so that a process with waiting images and libraries needs under 1.5 GB
MAX_WAITING_BYTES = 2**27  # decoded images that wait to be drawn on; further images are read again
DECODING_BYTES_PER_PIXEL = 11  # per pixel of a file: two copies of Pillow, and ours
DRAWING_BYTES_PER_PIXEL = 26  # per pixel of an overlay: values, their copies, colors, and the result
TRIM_THRESHOLD_BYTES = 2**28  # work after which free memory is returned to the system


@cache
def _find_malloc_trim() -> Any:
    """Return the function `malloc_trim` of the C library. Return None if the library lacks this function."""
    with suppress(OSError, TypeError):
        return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_free_memory(n_used_bytes: int) -> None:
    """Return free memory to the operating system if an image used more than `TRIM_THRESHOLD_BYTES`."""
    if n_used_bytes > TRIM_THRESHOLD_BYTES and (trim := _find_malloc_trim()) is not None:
        trim(0)


class MemoryBudget:
    """A memory limit that threads share. A request beyond the limit waits until no other thread uses memory."""

    def __init__(self, num_threads: int) -> None:
        self._free = self._total = min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, BYTES_PER_THREAD * num_threads))
        self._waiting_free = MAX_WAITING_BYTES
        self._changed = Condition()

    @contextmanager
    def reserve(self, n_bytes: int) -> Iterator[None]:
        """Wait for free memory, and reserve it inside the `with` block. A nested reservation could wait forever."""
        n_bytes = min(n_bytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= n_bytes)
            self._free -= n_bytes
        try:
            yield
        finally:
            trim_free_memory(n_bytes)
            with self._changed:
                self._free += n_bytes
                self._changed.notify_all()

    def try_reserve_memory_for_images(self, *images: PixelArray | None) -> bool:
        """Reserve memory for decoded images until their overlays are drawn. Return False if there is too little."""
        arrays = [image for image in images if image is not None]
        n_bytes = sum(array.nbytes for array in arrays)
        with self._changed:
            if n_bytes > self._waiting_free:
                return False
            for array in arrays:
                self._waiting_free -= array.nbytes
                weakref.finalize(array, self._release_memory_of_image, array.nbytes).atexit = False
        return True

    def _release_memory_of_image(self, n_bytes: int) -> None:
        with self._changed:
            self._waiting_free += n_bytes


@dataclass(frozen=True)
class LoadedImage:
    """A row of the manifest with its model input, or with an error. After a transient error, a retry may succeed.

    `sha256` is the digest of the file, or of the pixels of an image in a dataset. Overlays are drawn on `image`, or on
    `model_input_image`, the image as the model received it. Both may be dropped to save memory, and are then read again.
    """

    row: ManifestRow
    sha256: str | None
    item: ModelInput | None = None
    error: str | None = None
    is_transient: bool = False
    image: PixelArray | None = None
    model_input_image: PixelArray | None = None
    notes: tuple[str, ...] = ()
    n_pixels: int = 0
    images_dropped: bool = False


def load_images(
    manifest: Manifest,
    rows: Iterable[ManifestRow],
    prepare_model_input: Callable[[Any], ModelInput],
    num_threads: int,
    memory: MemoryBudget | None = None,
) -> Generator[LoadedImage, None, None]:
    """Load the images of manifest rows in threads. Yield them in the order of the rows."""
    remaining = iter(rows)
    # a few images at a time, since handing over one image costs as much as opening a small file
    row_groups = iter(lambda: list(islice(remaining, IMAGES_PER_THREAD_TASK)), [])

    def load_group(group: list[ManifestRow]) -> list[LoadedImage]:
        return [_load_image(manifest, row, prepare_model_input, memory) for row in group]

    with closing(map_in_order(load_group, row_groups, num_threads, max_ahead=num_threads)) as image_groups:
        for images in image_groups:
            yield from images


def _load_image(
    manifest: Manifest, row: ManifestRow, prepare_model_input: Callable[[Any], ModelInput], memory: MemoryBudget | None
) -> LoadedImage:
    """Read, decode and preprocess the image of a row. An image that fails has the error instead."""
    hides_names = manifest.is_pseudonymized
    try:
        source = manifest.read_source(row)
    except InputError as error:
        return LoadedImage(row, None, error="its path leads out of the root folder" if hides_names else str(error))
    except FileNotFoundError:
        return LoadedImage(row, None, error="there is no such file", is_transient=True)
    except CamscopeError:
        raise
    except Exception as error:  # a store, a network or a dataset may raise anything
        reason = getattr(error, "strerror", None) or (type(error).__name__ if hides_names else str(error))
        reason = describe_out_of_memory(error) if is_out_of_memory(error) else reason
        may_succeed = "://" in row["path"] or is_transient(error)
        return LoadedImage(row, None, error=f"it cannot be read: {reason}", is_transient=may_succeed)
    return _decode_image(manifest, row, source, prepare_model_input, memory)


def _decode_image(
    manifest: Manifest,
    row: ManifestRow,
    source: Any,
    prepare_model_input: Callable[[Any], ModelInput],
    memory: MemoryBudget | None,
) -> LoadedImage:
    """Decode and preprocess an image within the memory budget. An image that fails has the error instead."""
    hides_names, digest = manifest.is_pseudonymized, hash_source(source)
    try:
        n_bytes = DECODING_BYTES_PER_PIXEL * read_pixel_count(source) if memory and isinstance(source, bytes) else 0
        with memory.reserve(n_bytes) if memory else nullcontext():
            item = prepare_model_input(source)
            keeps_images = (
                memory is None
                or manifest.images is not None
                or memory.try_reserve_memory_for_images(item.image, item.model_input_image)
            )
        notes: tuple[str, ...] = ()
        with suppress(ImageError):  # only a later frame is damaged, and it is not used
            notes = find_suffix_and_frame_warnings(source, row["path"]) if isinstance(source, bytes) else ()
        return LoadedImage(
            row,
            digest,
            replace(item, image=None, model_input_image=None),
            image=item.image if keeps_images else None,
            model_input_image=item.model_input_image if keeps_images else None,
            notes=notes,
            n_pixels=0 if item.image is None else item.image.size // 3,
            images_dropped=not keeps_images,
        )
    except (InputError, GeometryError) as error:  # not an image, or not one that the preprocessing accepts
        reason = (format_error_without_causes(error) if hides_names else str(error)).removeprefix("the file: ")
        return LoadedImage(row, digest, error=reason, is_transient=is_transient(error))
    except CamscopeError:
        raise
    except Exception as error:
        reason = f"the preprocessing fails: {type(error).__name__}{'' if hides_names else f': {error}'}"
        if is_out_of_memory(error):
            reason = f"{describe_out_of_memory(error)} while reading and preprocessing it"
        return LoadedImage(row, digest, error=reason, is_transient=is_transient(error))


def hash_source(source: Any) -> str | None:
    """Return the SHA-256 digest of a file, a folder or pixels. Return None if the digest cannot be computed."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, Path):
        return _hash_files(source)
    if isinstance(source, Tensor):
        source = source.cpu().numpy()
    data = source.tobytes() if hasattr(source, "tobytes") else None  # NumPy and Pillow
    return None if data is None else hashlib.sha256(data).hexdigest()


def _hash_files(location: Path) -> str | None:
    """Return the digest of a file or folder. Return None if the file or folder cannot be read."""
    path, selector = split_path_and_index(location)
    digests = []
    try:
        for file in (entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]:
            with open_regular_file(file) as opened:
                digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
    except OSError:  # the reader reports the reason
        return None
    if selector is None and not path.is_dir():
        return digests[0]
    return hashlib.sha256(f"{sorted(digests)} {selector}".encode()).hexdigest()


MAX_THREADS = 1024
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def require_valid_num_threads(num_threads: int | None) -> None:
    """Check that `num_threads` is `None` or an integer from 1 to `MAX_THREADS`. Otherwise raise an InputError."""
    if num_threads is not None and not (isinstance(num_threads, int) and 1 <= num_threads <= MAX_THREADS):
        raise InputError(f"num_threads={num_threads}; expected 1 to {MAX_THREADS:,}, or None")


def map_in_order(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT], num_threads: int, *, max_ahead: int | None = None
) -> Generator[ResultT, None, None]:
    """Apply a function to items in parallel threads. Yield the results in the order of the items.

    At most `max_ahead` results are computed in advance. The default is two per thread.
    """
    futures: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="camscope") as pool:
        try:
            for item in items:
                futures.append(pool.submit(function, item))
                if len(futures) > (max_ahead or 2 * num_threads):
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()


CPU_FLOAT32 = (torch.device("cpu"), torch.float32)  # of inputs that wait for the model
MIN_REDUCED_DECODING_FACTOR = 4  # rank correlation of maps: 0.989 with a factor of 2, 0.994 or more with 4


def prepare_input(
    source: Any,
    explainer: Explainer,
    *,
    reduced_decoding: bool = False,
    window: Any = None,
    keep_image: bool = False,
    allow_burned_in_text: bool = False,
    reject_scans_named_as_photos: bool = False,
) -> ModelInput:
    """Convert an image to a model input on the CPU. With `keep_image`, the result also contains the image.

    With `reject_scans_named_as_photos`, raise an error for a scan with the file name of a photo, such as `a.png`.
    """
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return explainer.prepare_input(source)
    preprocess, is_path = explainer.preprocess, isinstance(source, Path)
    if is_path or isinstance(preprocess, ScanPreprocess) or is_scan(source):
        if reject_scans_named_as_photos and not is_path and not isinstance(preprocess, ScanPreprocess):
            raise ImageError(
                "the file is a scan, but its name does not show this; choose profile='research' or 'clinical'"
            )
        if is_path and isinstance(preprocess, MonaiPreprocess):
            item = read_model_input(source, preprocess, unwrap(explainer.model), CPU_FLOAT32)
            return item if keep_image else replace(item, image=None, model_input_image=None)
        scan = read_scan(source, window=window)
        if allow_burned_in_text:
            scan = replace(scan, has_burned_in_text=False)
        return prepare_scan(scan, preprocess, CPU_FLOAT32, with_images=keep_image)
    pixels, size = _decode_photo(source, explainer, reduced_decoding)
    x, placement = require_preprocess(preprocess, "images")(pixels)
    placement = placement and placement.on_resized_image(size)
    input_image = render_model_input(x, preprocess) if keep_image and not placement else None
    return ModelInput(x, placement, "", pixels if keep_image else None, input_image)


class DecodedPhoto(NamedTuple):
    """The pixels (h,w,3) of a photo, which may be reduced, and its full size (H,W)."""

    pixels: PixelArray
    full_size: tuple[int, ...]


def _decode_photo(source: Any, explainer: Explainer, reduced_decoding: bool) -> DecodedPhoto:
    """Decode a photo. With `reduced_decoding`, it may be decoded at a smaller size."""
    preprocess = explainer.preprocess
    if not reduced_decoding or not isinstance(source, bytes) or not isinstance(preprocess, Preprocess):
        pixels = read_photo(source).pixels
        trim_free_memory(pixels.nbytes)
        return DecodedPhoto(pixels, pixels.shape[:2])

    def compute_min_decoded_size(full_size: tuple[int, int]) -> tuple[int, int]:
        height, width = preprocess.compute_resized_size(full_size)
        return MIN_REDUCED_DECODING_FACTOR * height, MIN_REDUCED_DECODING_FACTOR * width

    return DecodedPhoto(*read_reduced_photo(source, compute_min_decoded_size))
