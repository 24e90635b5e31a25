"""The Ray engine: actors hold the explainers, and make of each chunk what the local engine makes of it, by the same code.

Ray Data deals out the numbers of the chunks whose parts are not there. Their rows of the manifest lie in Ray's object store,
of at most a million images at a time: each machine gets them once, actors cut their chunk out of them without a copy, and what
the driver holds does not grow with the manifest. (A block of rows for each chunk, at a million rows: 12 s to begin, not 3.)

Actor: what works in a process of Ray's: it holds the explainers, and makes of a chunk what the local engine makes of
it.
"""

import contextlib
import os
import pickle
import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camscope.batch.batch_worker import Worker
from camscope.batch.image_loading import loaded
from camscope.batch.local_engine import Outcome, Plan, Task, Told, unfinished, written
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.memory_budget import MemoryBudget
from camscope.batch.ray_cluster import connected, pool, tries_of
from camscope.batch.run_store import Store
from camscope.errors import InputError, RunError
from camscope.explainers.core.evaluation_context import home
from camscope.hooks.base import unwrap
from camscope.model_card import ModelCard, attach_card, card_of
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa


AHEAD = 4096, 2**20  # chunks that are dealt out at a time, and images
TRIES = 3  # of a chunk whose worker dies


def run_chunks(
    worker: Worker,
    manifest: Manifest,
    store: Store,
    plan: Plan,
    threads: int | None,
    max_failures: int | None = None,
    told: Told | None = None,
    address: str | None = None,
    workers: int | None = None,
    *,
    retry_failed: bool = False,
) -> Outcome:
    """Work off the chunks whose parts are not there, on a cluster; RunError after more failures than are allowed."""
    todo, outcome = unfinished(plan, store, retry_failed=retry_failed)
    outcome.count(0, {}, max_failures, told)
    if not todo:
        return outcome
    with connected(address) as ray:
        count, cpus = pool(ray.nodes(), workers, _on_cuda(worker))
        sent, tries = ray.put(_sent(worker, store, threads or cpus)), tries_of(ray, TRIES)
        for dealt, rows in _pieces(todo, plan, manifest.table):
            given = {"sent": [sent], "rows": [ray.put(rows)], "tries": tries, "cpus": cpus}
            with contextlib.closing(_results(ray, dealt, given, min(count, len(dealt)), _on_cuda(worker))) as results:
                for one in results:
                    outcome.count(one.images, one.failures_by_kind, max_failures, told)
    missing = len({task.chunk for task in todo} - store.finished())
    if missing:
        raise RunError(
            f"missing in {store.parts}: {missing} of {plural(len(todo), 'part')}; it must be a folder that all nodes see"
        )
    return outcome


def _pieces(todo: Sequence[Task], plan: Plan, table: "pa.Table") -> "Iterator[tuple[list[dict[str, Any]], pa.Table]]":
    """Chunks that are dealt out at a time, and their rows: of each chunk its number, and which of these rows are its."""
    chunks, images = AHEAD
    step = max(1, min(chunks, images // plan.size))
    for first in range(0, len(todo), step):
        tasks = todo[first : first + step]
        rows = [task.table(plan, table) for task in tasks]
        places = accumulate((len(own) for own in rows), initial=0)
        dealt = [
            {"chunk": task.chunk, "at": at, "images": len(own), "again": task.rows is not None}
            for task, at, own in zip(tasks, places, rows, strict=False)
        ]
        yield dealt, arrow().concat_tables(rows).combine_chunks()


def _results(
    ray: Any, dealt: list[dict[str, Any]], given: dict[str, Any], count: int, cuda: bool
) -> Generator[Outcome, None, None]:
    """What becomes of each chunk, as it becomes known; closed before its end, it stops the actors."""
    work = ray.data.from_items(dealt, override_num_blocks=len(dealt)).map_batches(
        Actor,
        fn_constructor_kwargs=given,
        compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=2),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=given["cpus"],
        num_gpus=1 if cuda else None,
    )
    blocks = iter(work.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    try:
        for block in blocks:
            for packed in block["told"].to_pylist():
                one = ray.cloudpickle.loads(packed)
                if isinstance(one, Exception):
                    raise one
                yield one
    except ray.exceptions.RayError as error:
        said = str(error).strip().partition("\n")[0]
        raise RunError(
            f"Ray gave up ({type(error).__name__}: {said}); its logs say more; started again, the run goes on where it was"
        ) from error
    finally:
        blocks.close()


def _sent(worker: Worker, store: Store, threads: int) -> bytes:
    """What actors get. Classes of a file (`--model FILE.py:FUNCTION`) and of a script go along; others they import."""
    manifest = worker.manifest
    empty, card = replace(manifest, table=manifest.table.slice(0, 0)), card_of(unwrap(worker.tools[0].model))
    folder = str(Path.cwd()) if _relative(manifest, store) else None
    try:
        return pickled(Sent(replace(worker, manifest=empty), card, store, threads, folder))
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


def _relative(manifest: Manifest, store: Store) -> bool:
    """Whether anything is looked for from the folder that the driver is in."""
    if not store.folder.is_absolute() or (manifest.root is not None and not manifest.root.is_absolute()):
        return True
    return manifest.root is None and manifest.relative


def _on_cuda(worker: Worker) -> bool:
    """Whether the model is on a GPU: the first, which is what an actor calls the one it is given."""
    device = home(unwrap(worker.tools[0].model))[0]
    if device.type == "cuda" and device.index:
        raise InputError(f"the model is on {device}; Ray gives each worker one GPU as cuda:0: put the model there")
    return device.type == "cuda"


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
