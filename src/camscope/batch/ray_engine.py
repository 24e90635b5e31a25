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

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import load_images
from camscope.batch.local_engine import (
    BatchOutcome,
    ChunkPlan,
    ChunkTask,
    OutcomeCallback,
    list_open_tasks,
    write_chunk,
)
from camscope.batch.manifest import Manifest, import_arrow
from camscope.batch.memory_budget import MemoryBudget
from camscope.batch.ray_cluster import plan_actor_pool, ray_connection, start_attempt_counter
from camscope.batch.run_store import RunStore
from camscope.errors import InputError, RunError
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.hooks.base import unwrap
from camscope.model_card import ModelCard, attach_card, get_card
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa


MAX_CHUNKS_AND_IMAGES_IN_FLIGHT = 4096, 2**20  # chunks that are dealt out at a time, and images
MAX_ATTEMPTS_PER_CHUNK = 3  # of a chunk whose worker dies


def run_chunks_on_ray(
    worker: BatchWorker,
    manifest: Manifest,
    store: RunStore,
    plan: ChunkPlan,
    num_threads: int | None,
    max_failures: int | None = None,
    on_progress: OutcomeCallback | None = None,
    address: str | None = None,
    num_workers: int | None = None,
    *,
    retry_failed: bool = False,
) -> BatchOutcome:
    """Work off the chunks whose parts are not there, on a cluster; RunError after more failures than are allowed."""
    todo, outcome = list_open_tasks(plan, store, retry_failed=retry_failed)
    outcome.record(0, {}, max_failures, on_progress)
    if not todo:
        return outcome
    with ray_connection(address) as ray:
        count, cpus = plan_actor_pool(ray.nodes(), num_workers, _check_on_cuda(worker))
        sent, tries = (
            ray.put(_pickle_payload(worker, store, num_threads or cpus)),
            start_attempt_counter(ray, MAX_ATTEMPTS_PER_CHUNK),
        )
        for dealt, rows in _split_into_deals(todo, plan, manifest.table):
            given = {"sent": [sent], "rows": [ray.put(rows)], "tries": tries, "cpus": cpus}
            with contextlib.closing(
                _iter_outcomes(ray, dealt, given, min(count, len(dealt)), _check_on_cuda(worker))
            ) as results:
                for one in results:
                    outcome.record(one.n_processed, one.failure_counts_by_kind, max_failures, on_progress)
    missing = len({task.chunk for task in todo} - store.finished_chunks())
    if missing:
        raise RunError(
            f"missing in {store.parts_folder}: {missing} of {plural(len(todo), 'part')}; it must be a folder that all nodes see"
        )
    return outcome


def _split_into_deals(
    open_tasks: Sequence[ChunkTask], plan: ChunkPlan, table: "pa.Table"
) -> "Iterator[tuple[list[dict[str, Any]], pa.Table]]":
    """Chunks that are dealt out at a time, and their rows: of each chunk its number, and which of these rows are its."""
    chunks, images = MAX_CHUNKS_AND_IMAGES_IN_FLIGHT
    step = max(1, min(chunks, images // plan.chunk_size))
    for first in range(0, len(open_tasks), step):
        tasks = open_tasks[first : first + step]
        rows = [task.select_rows(plan, table) for task in tasks]
        places = accumulate((len(own) for own in rows), initial=0)
        dealt = [
            {"chunk": task.chunk, "at": at, "images": len(own), "again": task.row_numbers is not None}
            for task, at, own in zip(tasks, places, rows, strict=False)
        ]
        yield dealt, import_arrow().concat_tables(rows).combine_chunks()


def _iter_outcomes(
    ray: Any, jobs: list[dict[str, Any]], actor_kwargs: dict[str, Any], n_actors: int, on_cuda: bool
) -> Generator[BatchOutcome, None, None]:
    """What becomes of each chunk, as it becomes known; closed before its end, it stops the actors."""
    work = ray.data.from_items(jobs, override_num_blocks=len(jobs)).map_batches(
        Actor,
        fn_constructor_kwargs=actor_kwargs,
        compute=ray.data.ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=2),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=actor_kwargs["cpus"],
        num_gpus=1 if on_cuda else None,
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


def _pickle_payload(worker: BatchWorker, store: RunStore, num_threads: int) -> bytes:
    """What actors get. Classes of a file (`--model FILE.py:FUNCTION`) and of a script go along; others they import."""
    manifest = worker.manifest
    empty, card = replace(manifest, table=manifest.table.slice(0, 0)), get_card(unwrap(worker.explainers[0].model))
    folder = str(Path.cwd()) if _needs_working_folder(manifest, store) else None
    try:
        return cloudpickle_dumps(ActorPayload(replace(worker, manifest=empty), card, store, num_threads, folder))
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


def _needs_working_folder(manifest: Manifest, store: RunStore) -> bool:
    """Whether anything is looked for from the folder that the driver is in."""
    if not store.folder.is_absolute() or (manifest.root is not None and not manifest.root.is_absolute()):
        return True
    return manifest.root is None and manifest.has_relative_paths


def _check_on_cuda(worker: BatchWorker) -> bool:
    """Whether the model is on a GPU: the first, which is what an actor calls the one it is given."""
    device = device_and_dtype(unwrap(worker.explainers[0].model))[0]
    if device.type == "cuda" and device.index:
        raise InputError(f"the model is on {device}; Ray gives each worker one GPU as cuda:0: put the model there")
    return device.type == "cuda"


@dataclass(frozen=True)
class ActorPayload:
    """What an actor needs but the manifest's rows: explainers, what is known of their model, and where things are."""

    worker: BatchWorker
    card: ModelCard | None
    store: RunStore
    num_threads: int
    working_folder: str | None  # where relative paths begin, if there are any

    def complete_chunk(self, chunk: int, table: "pa.Table", *, retry: bool = False) -> BatchOutcome:
        """Make the part of a chunk of its rows of the manifest; one that is there is only read.

        `retry`: the rows are those that failed, and replace the ones that are there.
        """
        found = BatchOutcome()
        if not retry and self.store.select_own_parts(
            self.store.finished_chunks() & {chunk}
        ):  # its maker died before it could tell
            found.record(table.num_rows, self.store.count_failures([chunk]), None, None)
            return found
        task = ChunkTask(chunk, tuple(table["row"].to_pylist()) if retry else None)
        manifest = replace(self.worker.manifest, table=table)
        memory = MemoryBudget(self.num_threads)
        images = load_images(
            manifest, manifest.rows(0, table.num_rows), self.worker.read_item, self.num_threads, memory
        )
        with contextlib.closing(images):
            for count, failures in write_chunk(task, images, self.worker, self.store, self.num_threads, memory):
                found.record(count, failures, None, None)
        return found


class Actor:
    """What Ray Data calls in a worker process: the number of a chunk in, what became of its images out."""

    def __init__(
        self, payload_refs: Sequence[Any], row_refs: Sequence[Any], attempt_counter: Any, num_cpus: int
    ) -> None:
        self._payload_refs, self._row_refs, self._attempt_counter, self._num_cpus = (
            payload_refs,
            row_refs,
            attempt_counter,
            num_cpus,
        )
        self._loaded_payload: tuple[ActorPayload, pa.Table] | None = None

    def __call__(self, block: "pa.Table") -> "pa.Table":
        """An error is handed over like a result: raised here, it would come out of Ray as a traceback of Ray's."""
        pa = import_arrow()
        try:
            told = [cloudpickle_dumps(self._process(**dealt)) for dealt in block.to_pylist()]
        except Exception as error:
            told = [pickle_error(error)]
        return pa.table({"told": pa.array(told, pa.binary())})

    def _process(self, chunk: int, offset: int, n_images: int, retry: bool) -> BatchOutcome:
        import ray

        deaths = ray.get(self._attempt_counter.begin.remote(chunk))
        if deaths:
            rows = ray.get(self._row_refs[0]).slice(offset, n_images)
            first, last, path = rows["row"][0].as_py(), rows["row"][-1].as_py(), rows["path"][0].as_py()
            raise RunError(
                f"rows {first} to {last} of the manifest, from {path} on: their worker died {plural(deaths, 'time')} (was "
                "it killed for want of memory, or is there a file that kills its decoder?); take fewer workers, or leave them out"
            )
        if self._loaded_payload is None:  # not in the constructor: of an error there nothing would arrive
            self._loaded_payload = self._load_payload()
        sent, rows = self._loaded_payload
        return sent.complete_chunk(chunk, rows.slice(offset, n_images), retry=retry)

    def _load_payload(self) -> "tuple[ActorPayload, pa.Table]":
        import ray

        told = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(told) if told.isdecimal() else self._num_cpus)
        packed, rows = ray.get([*self._payload_refs, *self._row_refs])
        try:
            sent: ActorPayload = pickle.loads(packed)  # noqa: S301 - the driver's bytes
        except Exception as error:
            raise RunError(
                f"{socket.gethostname()} cannot load what it is sent ({type(error).__name__}: {error}); install there what "
                "the model and its preprocessing are made with, or start from a folder that all nodes see"
            ) from error
        if sent.working_folder is not None:
            require_shared_folder(sent.working_folder, "where relative paths begin")
            os.chdir(sent.working_folder)
        require_shared_folder(sent.store.parts_folder.absolute(), "where the parts go")
        if sent.card is not None:
            attach_card(unwrap(sent.worker.explainers[0].model), sent.card)
        return sent, rows


def require_shared_folder(folder: str | Path, purpose: str) -> None:
    """RunError where a worker does not see a folder of the driver's."""
    if not Path(folder).is_dir():
        raise RunError(f"{socket.gethostname()} sees no folder {folder}, {purpose}: it must be one that all nodes see")


def pickle_error(error: Exception) -> bytes:
    """An error as the driver will raise it; one that cannot travel, by its name."""
    try:
        as_it_is = cloudpickle_dumps(error)
        pickle.loads(as_it_is)  # noqa: S301 - our own bytes
    except Exception:
        return cloudpickle_dumps(RunError(f"{type(error).__name__}: {error}"))
    return as_it_is


def cloudpickle_dumps(value: object) -> bytes:
    """By Ray's pickle: classes of a file that was loaded by its path, and of a script, go along."""
    import ray.cloudpickle

    packed: bytes = ray.cloudpickle.dumps(value)
    return packed
