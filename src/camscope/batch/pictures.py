"""Pictures: overlays that a run writes beside its maps, drawn and encoded while the model goes on."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from camscope import render
from camscope.batch.names import Names
from camscope.batch.store import OVERLAYS
from camscope.errors import InputError
from camscope.explanation import Explanation, Pixels
from camscope.files import path_in, write_bytes

A_FOLDER = 1000  # images whose overlays lie in one folder: file systems and viewers are slow with more


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

    @contextmanager
    def drawing(self, threads: int) -> Iterator["Drawing"]:
        """Inside, overlays of rows are drawn by so many threads."""
        with ThreadPoolExecutor(threads, thread_name_prefix="camscope-drawing") as pool:
            yield Drawing(self, pool, 8 * threads)

    def write(self, path: Path, one: Explanation, image: Pixels | None, seen: Pixels | None) -> None:
        """The picture is not synced, as a part is: it can be drawn again from the map."""
        if image is not None and one.placement is not None:
            size = image.shape[: len(one.placement.image_size)]
            one = replace(one, placement=one.placement.on_image_of(size))
        picture = replace(one, image=image, seen=seen).marked(self.height)
        write_bytes(path, render.encode(picture, path.suffix), sync=False)


class Drawing:
    """Overlays that are being drawn, no more of them waiting than can soon be drawn."""

    def __init__(self, pictures: Pictures, pool: ThreadPoolExecutor, most: int) -> None:
        self._pictures, self._pool, self._room = pictures, pool, BoundedSemaphore(most)
        self._waiting: dict[str, Future[None]] = {}

    def __call__(self, row: Mapping[str, Any], one: Explanation, image: Pixels | None, seen: Pixels | None) -> str:
        """Draw a row's overlay, soon: its path inside the run's folder."""
        names = (OVERLAYS, f"{row['row'] // A_FOLDER:06d}", f"{self._pictures.names.stem(row)}.{self._pictures.kind}")
        name, path = "/".join(names), path_in(self._pictures.folder, *names)
        self._room.acquire()
        drawn = self._pool.submit(self._pictures.write, path, one, image, seen)
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
