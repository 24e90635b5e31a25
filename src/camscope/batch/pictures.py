"""Pictures: overlays that a run writes beside its maps, drawn and encoded while the model goes on."""

from collections.abc import Callable, Iterator, Mapping
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
from camscope.files import write_bytes

A_FOLDER = 1000  # images whose overlays lie in one folder: file systems and viewers are slow with more
Draw = Callable[[Mapping[str, Any], Explanation, Pixels | None, Pixels | None], str]


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
    def drawing(self, threads: int) -> Iterator[Draw]:
        """Inside, overlays of rows are drawn by threads, no more of them waiting than can soon be drawn; at the end all are.

        What is called gives the overlay's path inside the run's folder. An error of a disk that is full ends the run.
        """
        room, waiting = BoundedSemaphore(8 * threads), list[Future[None]]()
        with ThreadPoolExecutor(threads, thread_name_prefix="camscope-drawing") as pool:

            def draw(row: Mapping[str, Any], one: Explanation, image: Pixels | None, seen: Pixels | None) -> str:
                name = f"{OVERLAYS}/{row['row'] // A_FOLDER:06d}/{self.names.stem(row)}.{self.kind}"
                room.acquire()
                waiting.append(pool.submit(self._write, self.folder / name, one, image, seen))
                waiting[-1].add_done_callback(lambda _: room.release())
                return name

            yield draw
        for one in waiting:
            one.result()

    def _write(self, path: Path, one: Explanation, image: Pixels | None, seen: Pixels | None) -> None:
        """The picture is not synced, as a part is: it can be drawn again from the map."""
        if image is not None and one.placement is not None:
            one = replace(one, placement=one.placement.on_image_of(image.shape[:2]))
        picture = replace(one, image=image, seen=seen).marked(self.height)
        write_bytes(path, render.encode(picture, path.suffix), sync=False)
