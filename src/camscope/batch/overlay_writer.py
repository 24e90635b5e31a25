"""`OverlayWriter`, `OverlayQueue`: draw and write the overlays of a run in threads, while the model runs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, NamedTuple

from camscope import render
from camscope.atomic_writes_and_folder_locks import build_output_path, write_bytes
from camscope.batch.image_loading import (
    DECODING_BYTES_PER_PIXEL,
    DRAWING_BYTES_PER_PIXEL,
    LoadedImage,
    MemoryBudget,
)
from camscope.batch.result_rows import OutputNames
from camscope.batch.run_store import OVERLAYS_FOLDER
from camscope.errors import InputError
from camscope.explanation import AUTO, Explanation, InterpolationOption, PixelArray, require_interpolation_option

MAX_OVERLAY_PIXELS = 25_000_000  # a larger overlay is drawn at a reduced size
IMAGES_PER_FOLDER = 1000  # more files per folder make file systems and viewers slow


class OverlayImages(NamedTuple):
    """The original image, and the image as the model received it. Each may be None."""

    image: PixelArray | None
    model_input_image: PixelArray | None


ImageReader = Callable[[], OverlayImages]


@dataclass(frozen=True)
class OverlayWriter:
    """Writes overlays into the folder of a run, in one image format and height. Without a height, images keep their own."""

    folder: Path
    image_format: str
    output_names: OutputNames
    height: int | None = None
    interpolation: InterpolationOption = AUTO

    def __post_init__(self) -> None:
        require_interpolation_option(self.interpolation)
        if f".{self.image_format}" not in render.IMAGE_FORMATS:
            formats = ", ".join(suffix[1:] for suffix in render.IMAGE_FORMATS)
            raise InputError(f"overlays={self.image_format!r}; expected {formats}")
        if self.height is not None:
            render.check_image_height("overlay_height", self.height)

    @contextmanager
    def open_queue(self, num_threads: int, memory: MemoryBudget) -> Iterator["OverlayQueue"]:
        """Start `num_threads` threads that draw overlays. The `with` block ends when all overlays are drawn."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix="camscope-drawing") as pool:
            yield OverlayQueue(self, pool, 8 * num_threads, memory)

    def write_overlay(
        self, path: Path, explanation: Explanation, loaded: LoadedImage, read_images: ImageReader, memory: MemoryBudget
    ) -> None:
        """Draw the overlay of an explanation, and write it to a file."""
        n_bytes = DRAWING_BYTES_PER_PIXEL * min(loaded.n_pixels, MAX_OVERLAY_PIXELS)
        if loaded.images_dropped:
            n_bytes = max(n_bytes, DECODING_BYTES_PER_PIXEL * loaded.n_pixels)
        with memory.reserve(n_bytes):
            image, model_input_image = read_images()
            if image is not None and explanation.attribution.ndim == 2:
                image = reduce_large_image(image)
            if image is not None and explanation.placement is not None:
                size = image.shape[: len(explanation.placement.image_size)]
                explanation = replace(explanation, placement=explanation.placement.on_resized_image(size))
            explanation = replace(explanation, image=image, model_input_image=model_input_image)
            data = render.encode_image(
                explanation.annotated_image(self.height, interpolation=self.interpolation), path.suffix
            )
        write_bytes(path, data, sync=False)  # an overlay can be drawn again from the map


def reduce_large_image(image: PixelArray) -> PixelArray:
    """Shrink an image (H,W,3) to at most `MAX_OVERLAY_PIXELS` pixels. Smaller images stay unchanged."""
    height, width = image.shape[:2]
    if height * width <= MAX_OVERLAY_PIXELS:
        return image
    factor = math.sqrt(MAX_OVERLAY_PIXELS / (height * width))
    return render.resize_to_fit(image, max(1, int(height * factor)), max(1, int(width * factor)))


class OverlayQueue:
    """A queue of overlays that threads draw. If too many overlays wait, the caller waits too."""

    def __init__(self, writer: OverlayWriter, pool: ThreadPoolExecutor, max_waiting: int, memory: MemoryBudget) -> None:
        self._memory = memory
        self._writer, self._pool, self._free_slots = writer, pool, BoundedSemaphore(max_waiting)
        self._pending: dict[str, Future[None]] = {}

    def __call__(
        self, row: Mapping[str, Any], explanation: Explanation, loaded: LoadedImage, read_images: ImageReader
    ) -> str:
        """Put the overlay of a row into the queue. Return its future path inside the run folder."""
        file_name = f"{self._writer.output_names.file_stem(row)}.{self._writer.image_format}"
        names = (OVERLAYS_FOLDER, f"{row['row'] // IMAGES_PER_FOLDER:06d}", file_name)
        name, path = "/".join(names), build_output_path(self._writer.folder, *names)
        self._free_slots.acquire()
        future = self._pool.submit(self._writer.write_overlay, path, explanation, loaded, read_images, self._memory)
        future.add_done_callback(lambda _: self._free_slots.release())
        self._pending[name] = future
        return name

    def wait_and_record_failures(self, rows: Iterable[dict[str, Any]]) -> None:
        """Wait for all overlays. Add a note to each row whose overlay failed. If a file cannot be written, raise the OSError."""
        errors = {name: error for name, future in self._pending.items() if (error := future.exception()) is not None}
        for row in rows:
            error = errors.get(row.get("overlay", ""))
            if isinstance(error, OSError):
                raise error
            if error is not None:
                row |= {"overlay": None, "notes": [*row["notes"], f"no overlay: {error}"]}
