"""Pictures: overlays that a run writes beside its maps, drawn and encoded while the model goes on."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from camscope import render
from camscope.batch.memory_budget import DECODING_BYTES_PER_PIXEL, DRAWING_BYTES_PER_PIXEL, MemoryBudget
from camscope.batch.result_rows import OutputNames
from camscope.batch.run_store import OVERLAYS_FOLDER
from camscope.errors import InputError
from camscope.explanation import Explanation, PixelArray
from camscope.safe_files import build_output_path, write_bytes

MAX_OVERLAY_PIXELS = 25_000_000  # pixels of an overlay: of a larger image it is drawn at so many
IMAGES_PER_FOLDER = 1000  # images whose overlays lie in one folder: file systems and viewers are slow with more


@dataclass(frozen=True)
class Background:
    """What a map is drawn on: the image, and what the model saw of it; read when it is drawn. `n_pixels`: of the image."""

    read_images: Callable[[], tuple[PixelArray | None, PixelArray | None]]
    n_pixels: int
    in_memory: bool = True  # in memory

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes to draw on it."""
        drawing = DRAWING_BYTES_PER_PIXEL * min(self.n_pixels, MAX_OVERLAY_PIXELS)
        return drawing if self.in_memory else max(drawing, DECODING_BYTES_PER_PIXEL * self.n_pixels)


@dataclass(frozen=True)
class OverlayWriter:
    """`image_format`: jpg, png or webp; `height`: rows of a picture, default the image's own; `output_names`: what tells maps apart."""

    folder: Path
    image_format: str
    output_names: OutputNames
    height: int | None = None

    def __post_init__(self) -> None:
        if f".{self.image_format}" not in render.IMAGE_FORMATS:
            raise InputError(
                f"overlays={self.image_format!r}; expected {', '.join(one[1:] for one in render.IMAGE_FORMATS)}"
            )
        if self.height is not None:
            render.check_image_height("overlay_height", self.height)

    @contextmanager
    def open_queue(self, num_threads: int, memory: MemoryBudget) -> Iterator["OverlayQueue"]:
        """Inside, overlays of rows are drawn by so many threads."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix="camscope-drawing") as pool:
            yield OverlayQueue(self, pool, 8 * num_threads, memory)

    def write(self, path: Path, explanation: Explanation, background: Background, memory: MemoryBudget) -> None:
        """The picture is not synced, as a part is: it can be drawn again from the map."""
        with memory.reserve(background.memory_bytes):
            data = self._render(path.suffix, explanation, background)
        write_bytes(path, data, sync=False)

    def _render(self, suffix: str, explanation: Explanation, background: Background) -> bytes:
        image, seen = background.read_images()
        if image is not None and explanation.attribution.ndim == 2:
            image = limit_pixels(image)
        if image is not None and explanation.placement is not None:
            size = image.shape[: len(explanation.placement.image_size)]
            explanation = replace(explanation, placement=explanation.placement.on_resized_image(size))
        return render.encode_image(
            replace(explanation, image=image, model_input_image=seen).annotated_image(self.height), suffix
        )


def limit_pixels(image: PixelArray) -> PixelArray:
    """(H,W,3): the same picture in at most `MAX_OVERLAY_PIXELS` pixels."""
    height, width = image.shape[:2]
    if height * width <= MAX_OVERLAY_PIXELS:
        return image
    factor = math.sqrt(MAX_OVERLAY_PIXELS / (height * width))
    return render.resize_to_fit(image, max(1, int(height * factor)), max(1, int(width * factor)))


class OverlayQueue:
    """Overlays that are being drawn, no more of them waiting than can soon be drawn."""

    def __init__(self, writer: OverlayWriter, pool: ThreadPoolExecutor, max_waiting: int, memory: MemoryBudget) -> None:
        self._memory = memory
        self._writer, self._pool, self._free_slots = writer, pool, BoundedSemaphore(max_waiting)
        self._pending: dict[str, Future[None]] = {}

    def __call__(self, row: Mapping[str, Any], explanation: Explanation, background: Background) -> str:
        """Draw a row's overlay, soon: its path inside the run's folder."""
        names = (
            OVERLAYS_FOLDER,
            f"{row['row'] // IMAGES_PER_FOLDER:06d}",
            f"{self._writer.output_names.file_stem(row)}.{self._writer.image_format}",
        )
        name, path = "/".join(names), build_output_path(self._writer.folder, *names)
        self._free_slots.acquire()
        drawn = self._pool.submit(self._writer.write, path, explanation, background, self._memory)
        drawn.add_done_callback(lambda _: self._free_slots.release())
        self._pending[name] = drawn
        return name

    def wait_and_report(self, rows: Iterable[dict[str, Any]]) -> None:
        """Wait until all are there; of one that cannot be drawn the row says why. A disk that is full ends the run."""
        why = {name: error for name, drawn in self._pending.items() if (error := drawn.exception()) is not None}
        for row in rows:
            error = why.get(row.get("overlay", ""))
            if isinstance(error, OSError):
                raise error
            if error is not None:
                row |= {"overlay": None, "notes": [*row["notes"], f"no overlay: {error}"]}
