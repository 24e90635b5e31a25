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
from camscope.batch.memory_budget import DECODING, DRAWING, MemoryBudget
from camscope.batch.result_rows import Names
from camscope.batch.run_store import OVERLAYS
from camscope.errors import InputError
from camscope.explanation import Explanation, Pixels
from camscope.safe_files import path_in, write_bytes

LARGEST = 25_000_000  # pixels of an overlay: of a larger image it is drawn at so many
A_FOLDER = 1000  # images whose overlays lie in one folder: file systems and viewers are slow with more


@dataclass(frozen=True)
class Background:
    """What a map is drawn on: the image, and what the model saw of it; read when it is drawn. `pixels`: of the image."""

    read: Callable[[], tuple[Pixels | None, Pixels | None]]
    pixels: int
    waiting: bool = True  # in memory

    @property
    def cost(self) -> int:
        """Bytes that it takes to draw on it."""
        drawing = DRAWING * min(self.pixels, LARGEST)
        return drawing if self.waiting else max(drawing, DECODING * self.pixels)


@dataclass(frozen=True)
class Pictures:
    """`kind`: jpg, png or webp; `height`: rows of a picture, default the image's own; `names`: what tells maps apart."""

    folder: Path
    kind: str
    names: Names
    height: int | None = None

    def __post_init__(self) -> None:
        if f".{self.kind}" not in render.FORMATS:
            raise InputError(f"overlays={self.kind!r}; expected {', '.join(one[1:] for one in render.FORMATS)}")
        if self.height is not None:
            render.expect_height("overlay_height", self.height)

    @contextmanager
    def drawing(self, threads: int, memory: MemoryBudget) -> Iterator["Drawing"]:
        """Inside, overlays of rows are drawn by so many threads."""
        with ThreadPoolExecutor(threads, thread_name_prefix="camscope-drawing") as pool:
            yield Drawing(self, pool, 8 * threads, memory)

    def write(self, path: Path, one: Explanation, background: Background, memory: MemoryBudget) -> None:
        """The picture is not synced, as a part is: it can be drawn again from the map."""
        with memory.held(background.cost):
            data = self._drawn(path.suffix, one, background)
        write_bytes(path, data, sync=False)

    def _drawn(self, suffix: str, one: Explanation, background: Background) -> bytes:
        image, seen = background.read()
        if image is not None and one.heat.ndim == 2:
            image = bounded(image)
        if image is not None and one.placement is not None:
            size = image.shape[: len(one.placement.image_size)]
            one = replace(one, placement=one.placement.on_image_of(size))
        return render.encode(replace(one, image=image, seen=seen).marked(self.height), suffix)


def bounded(image: Pixels) -> Pixels:
    """(H,W,3): the same picture in at most `LARGEST` pixels."""
    height, width = image.shape[:2]
    if height * width <= LARGEST:
        return image
    factor = math.sqrt(LARGEST / (height * width))
    return render.fitted(image, max(1, int(height * factor)), max(1, int(width * factor)))


class Drawing:
    """Overlays that are being drawn, no more of them waiting than can soon be drawn."""

    def __init__(self, pictures: Pictures, pool: ThreadPoolExecutor, most: int, memory: MemoryBudget) -> None:
        self._memory = memory
        self._pictures, self._pool, self._room = pictures, pool, BoundedSemaphore(most)
        self._waiting: dict[str, Future[None]] = {}

    def __call__(self, row: Mapping[str, Any], one: Explanation, background: Background) -> str:
        """Draw a row's overlay, soon: its path inside the run's folder."""
        names = (OVERLAYS, f"{row['row'] // A_FOLDER:06d}", f"{self._pictures.names.stem(row)}.{self._pictures.kind}")
        name, path = "/".join(names), path_in(self._pictures.folder, *names)
        self._room.acquire()
        drawn = self._pool.submit(self._pictures.write, path, one, background, self._memory)
        drawn.add_done_callback(lambda _: self._room.release())
        self._waiting[name] = drawn
        return name

    def finish(self, rows: Iterable[dict[str, Any]]) -> None:
        """Wait until all are there; of one that cannot be drawn the row says why. A disk that is full ends the run."""
        why = {name: error for name, drawn in self._waiting.items() if (error := drawn.exception()) is not None}
        for row in rows:
            error = why.get(row.get("overlay", ""))
            if isinstance(error, OSError):
                raise error
            if error is not None:
                row |= {"overlay": None, "notes": [*row["notes"], f"no overlay: {error}"]}
