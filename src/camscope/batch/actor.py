"""Actor: what works in a process of Ray's: it holds the explainers, and makes of a chunk what the local engine makes of it."""

import contextlib
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camscope.batch.local import Outcome, Task, written
from camscope.batch.manifest import arrow
from camscope.batch.memory import MemoryBudget
from camscope.batch.reading import loaded
from camscope.batch.store import Store
from camscope.batch.worker import Worker
from camscope.cards import ModelCard, attach_card
from camscope.errors import RunError
from camscope.hooks.base import unwrap
from camscope.wording import plural

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Sent:
    """What an actor needs but the manifest's rows: explainers, what is known of their model, and where things are."""

    worker: Worker
    card: ModelCard | None
    store: Store
    threads: int
    folder: str | None  # where relative paths begin, if there are any

    def part(self, chunk: int, table: "pa.Table", *, again: bool = False) -> Outcome:
        """Make the part of a chunk of its rows of the manifest; one that is there is only read.

        `again`: the rows are those that failed, and replace the ones that are there.
        """
        found = Outcome()
        if not again and self.store.of_this_run(self.store.finished() & {chunk}):  # its maker died before it could tell
            found.count(table.num_rows, self.store.reasons([chunk]), None, None)
            return found
        task = Task(chunk, tuple(table["row"].to_pylist()) if again else None)
        manifest = replace(self.worker.manifest, table=table)
        memory = MemoryBudget(self.threads)
        images = loaded(manifest, manifest.rows(0, table.num_rows), self.worker.read, self.threads, memory)
        with contextlib.closing(images):
            for count, failures in written(task, images, self.worker, self.store, self.threads, memory):
                found.count(count, failures, None, None)
        return found


class Actor:
    """What Ray Data calls in a worker process: the number of a chunk in, what became of its images out."""

    def __init__(self, sent: Sequence[Any], rows: Sequence[Any], tries: Any, cpus: int) -> None:
        self._sent, self._rows, self._tries, self._cpus = sent, rows, tries, cpus
        self._ready: tuple[Sent, pa.Table] | None = None

    def __call__(self, block: "pa.Table") -> "pa.Table":
        """An error is handed over like a result: raised here, it would come out of Ray as a traceback of Ray's."""
        pa = arrow()
        try:
            told = [pickled(self._made(**dealt)) for dealt in block.to_pylist()]
        except Exception as error:
            told = [packed(error)]
        return pa.table({"told": pa.array(told, pa.binary())})

    def _made(self, chunk: int, at: int, images: int, again: bool) -> Outcome:
        import ray

        deaths = ray.get(self._tries.begin.remote(chunk))
        if deaths:
            rows = ray.get(self._rows[0]).slice(at, images)
            first, last, path = rows["row"][0].as_py(), rows["row"][-1].as_py(), rows["path"][0].as_py()
            raise RunError(
                f"rows {first} to {last} of the manifest, from {path} on: their worker died {plural(deaths, 'time')} (was "
                "it killed for want of memory, or is there a file that kills its decoder?); take fewer workers, or leave them out"
            )
        if self._ready is None:  # not in the constructor: of an error there nothing would arrive
            self._ready = self._unpacked()
        sent, rows = self._ready
        return sent.part(chunk, rows.slice(at, images), again=again)

    def _unpacked(self) -> "tuple[Sent, pa.Table]":
        import ray

        told = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(told) if told.isdecimal() else self._cpus)
        packed, rows = ray.get([*self._sent, *self._rows])
        try:
            sent: Sent = pickle.loads(packed)  # noqa: S301 - the driver's bytes
        except Exception as error:
            raise RunError(
                f"{socket.gethostname()} cannot load what it is sent ({type(error).__name__}: {error}); install there what "
                "the model and its preprocessing are made with, or start from a folder that all nodes see"
            ) from error
        if sent.folder is not None:
            expect_folder(sent.folder, "where relative paths begin")
            os.chdir(sent.folder)
        expect_folder(sent.store.parts.absolute(), "where the parts go")
        if sent.card is not None:
            attach_card(unwrap(sent.worker.tools[0].model), sent.card)
        return sent, rows


def expect_folder(folder: str | Path, what: str) -> None:
    """RunError where a worker does not see a folder of the driver's."""
    if not Path(folder).is_dir():
        raise RunError(f"{socket.gethostname()} sees no folder {folder}, {what}: it must be one that all nodes see")


def packed(error: Exception) -> bytes:
    """An error as the driver will raise it; one that cannot travel, by its name."""
    try:
        as_it_is = pickled(error)
        pickle.loads(as_it_is)  # noqa: S301 - our own bytes
    except Exception:
        return pickled(RunError(f"{type(error).__name__}: {error}"))
    return as_it_is


def pickled(value: object) -> bytes:
    """By Ray's pickle: classes of a file that was loaded by its path, and of a script, go along."""
    import ray.cloudpickle

    packed: bytes = ray.cloudpickle.dumps(value)
    return packed
