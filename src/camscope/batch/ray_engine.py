"""The Ray engine: actors in worker processes compute chunks with the code of the local engine.

Ray Data distributes the numbers of the chunks that have no part. Their rows of the manifest lie in the object store of Ray,
at most a million images at a time. Each machine gets them once, and actors slice out their chunk without a copy, so the
memory of the driver does not grow with the manifest. (A block of rows per chunk took 12 s instead of 3 s to start, at a
million rows.)
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


MAX_CHUNKS_AND_IMAGES_IN_FLIGHT = 4096, 2**20  # chunks and images that are distributed at a time
MAX_ATTEMPTS_PER_CHUNK = 3  # if its worker dies


def run_chunks_on_ray(
    worker: BatchWorker,
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
    """Compute the chunks without a part on a Ray cluster; raise a RunError for more failures than `max_failures`."""
    tasks, outcome = list_open_tasks(plan, store, retry_failed=retry_failed)
    outcome.record(0, {}, max_failures, on_progress)
    if not tasks:
        return outcome
    on_cuda = _check_on_cuda(worker)
    with ray_connection(address) as ray:
        n_actors, num_cpus = plan_actor_pool(ray.nodes(), num_workers, on_cuda)
        payload_ref = ray.put(_pickle_payload(worker, store, num_threads or num_cpus))
        attempt_counter = start_attempt_counter(ray, MAX_ATTEMPTS_PER_CHUNK)
        for jobs, rows in _split_into_deals(tasks, plan, worker.manifest.table):
            actor_kwargs = {
                "payload_refs": [payload_ref],  # in lists, so that Ray passes references and not the objects
                "row_refs": [ray.put(rows)],
                "attempt_counter": attempt_counter,
                "num_cpus": num_cpus,
            }
            outcomes = _iter_outcomes(ray, jobs, actor_kwargs, min(n_actors, len(jobs)), on_cuda)
            with contextlib.closing(outcomes):
                for chunk_outcome in outcomes:
                    failures = chunk_outcome.failure_counts_by_kind
                    outcome.record(chunk_outcome.n_processed, failures, max_failures, on_progress)
    n_missing = len({task.chunk for task in tasks} - store.finished_chunks())
    if n_missing:
        raise RunError(
            f"{n_missing} of {plural(len(tasks), 'part')} missing in {store.parts_folder}; choose a folder that all nodes share"
        )
    return outcome


def _split_into_deals(
    open_tasks: Sequence[ChunkTask], plan: ChunkPlan, table: "pa.Table"
) -> "Iterator[tuple[list[dict[str, Any]], pa.Table]]":
    """Yield the chunks that are distributed at a time as jobs, with their rows of the manifest.

    The keys of a job are the parameters of `Actor._process`: the chunk, and where its rows lie in the table.
    """
    max_chunks, max_images = MAX_CHUNKS_AND_IMAGES_IN_FLIGHT
    step = max(1, min(max_chunks, max_images // plan.chunk_size))
    for first in range(0, len(open_tasks), step):
        tasks = open_tasks[first : first + step]
        tables = [task.select_rows(plan, table) for task in tasks]
        offsets = accumulate((len(rows) for rows in tables), initial=0)
        jobs = [
            {"chunk": task.chunk, "offset": offset, "n_images": len(rows), "retry": task.row_numbers is not None}
            for task, offset, rows in zip(tasks, offsets, tables, strict=False)
        ]
        yield jobs, import_arrow().concat_tables(tables).combine_chunks()


def _iter_outcomes(
    ray: Any, jobs: list[dict[str, Any]], actor_kwargs: dict[str, Any], n_actors: int, on_cuda: bool
) -> Generator[BatchOutcome, None, None]:
    """Yield the outcome of each chunk as soon as it is known. Closing the generator early stops the actors."""
    dataset = ray.data.from_items(jobs, override_num_blocks=len(jobs)).map_batches(
        Actor,
        fn_constructor_kwargs=actor_kwargs,
        compute=ray.data.ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=2),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=actor_kwargs["num_cpus"],
        num_gpus=1 if on_cuda else None,
    )
    blocks = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    try:
        for block in blocks:
            for pickled in block["outcome"].to_pylist():
                outcome = ray.cloudpickle.loads(pickled)
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
    except ray.exceptions.RayError as error:
        message = str(error).strip().partition("\n")[0]
        raise RunError(
            f"Ray failed ({type(error).__name__}: {message}); see its logs, and start the run again to resume it"
        ) from error
    finally:
        blocks.close()


def _pickle_payload(worker: BatchWorker, store: RunStore, num_threads: int) -> bytes:
    """Pickle what actors need. Classes of a script or of `--model FILE.py:FUNCTION` are included; others are imported."""
    manifest = worker.manifest
    empty_manifest = replace(manifest, table=manifest.table.slice(0, 0))
    card = get_card(unwrap(worker.explainers[0].model))
    folder = str(Path.cwd()) if _needs_working_folder(manifest, store) else None
    payload = ActorPayload(replace(worker, manifest=empty_manifest), card, store, num_threads, folder)
    try:
        return cloudpickle_dumps(payload)
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


def _needs_working_folder(manifest: Manifest, store: RunStore) -> bool:
    """Return whether any path is relative to the working folder of the driver."""
    if not store.folder.is_absolute() or (manifest.root is not None and not manifest.root.is_absolute()):
        return True
    return manifest.root is None and manifest.has_relative_paths


def _check_on_cuda(worker: BatchWorker) -> bool:
    """Return whether the model is on a GPU; raise an InputError unless it is cuda:0, the name of the GPU of each actor."""
    device = device_and_dtype(unwrap(worker.explainers[0].model))[0]
    if device.type == "cuda" and device.index:
        raise InputError(f"the model is on {device}; Ray gives each worker one GPU as cuda:0: put the model there")
    return device.type == "cuda"


@dataclass(frozen=True)
class ActorPayload:
    """What an actor needs besides the rows of the manifest: explainers, the card of their model, and folders."""

    worker: BatchWorker
    card: ModelCard | None
    store: RunStore
    num_threads: int
    working_folder: str | None  # where relative paths begin; None: all paths are absolute

    def complete_chunk(self, chunk: int, table: "pa.Table", *, retry: bool = False) -> BatchOutcome:
        """Compute the part of a chunk from its rows of the manifest. A part that exists is only read.

        With `retry`, the rows are those of failed images, and they replace rows of the existing part.
        """
        outcome = BatchOutcome()
        if not retry and self.store.select_own_parts(self.store.finished_chunks() & {chunk}):
            # the worker that wrote it died before it could report
            outcome.record(table.num_rows, self.store.count_failures([chunk]), None, None)
            return outcome
        task = ChunkTask(chunk, tuple(table["row"].to_pylist()) if retry else None)
        manifest = replace(self.worker.manifest, table=table)
        memory = MemoryBudget(self.num_threads)
        rows = manifest.rows(0, table.num_rows)
        with contextlib.closing(load_images(manifest, rows, self.worker.read_item, self.num_threads, memory)) as images:
            for n_images, failures in write_chunk(task, images, self.worker, self.store, self.num_threads, memory):
                outcome.record(n_images, failures, None, None)
        return outcome


class Actor:
    """A callable that Ray Data keeps in a worker process: it takes jobs and returns pickled outcomes."""

    def __init__(
        self, payload_refs: Sequence[Any], row_refs: Sequence[Any], attempt_counter: Any, num_cpus: int
    ) -> None:
        self._payload_refs, self._row_refs = payload_refs, row_refs
        self._attempt_counter, self._num_cpus = attempt_counter, num_cpus
        self._loaded_payload: tuple[ActorPayload, pa.Table] | None = None

    def __call__(self, block: "pa.Table") -> "pa.Table":
        """Process jobs. An error is returned as an outcome, because Ray would wrap a raised one in its own traceback."""
        pa = import_arrow()
        try:
            outcomes = [cloudpickle_dumps(self._process(**job)) for job in block.to_pylist()]
        except Exception as error:
            outcomes = [pickle_error(error)]
        return pa.table({"outcome": pa.array(outcomes, pa.binary())})

    def _process(self, chunk: int, offset: int, n_images: int, retry: bool) -> BatchOutcome:
        import ray

        n_deaths = ray.get(self._attempt_counter.record_attempt.remote(chunk))
        if n_deaths:
            rows = ray.get(self._row_refs[0]).slice(offset, n_images)
            first, last, path = rows["row"][0].as_py(), rows["row"][-1].as_py(), rows["path"][0].as_py()
            raise RunError(
                f"rows {first} to {last} of the manifest, from {path} on: their worker died {plural(n_deaths, 'time')}. Either "
                "memory ran out (use fewer workers), or a file crashes its decoder (leave these rows out)"
            )
        if self._loaded_payload is None:  # an error of the constructor would not be reported
            self._loaded_payload = self._load_payload()
        payload, rows = self._loaded_payload
        return payload.complete_chunk(chunk, rows.slice(offset, n_images), retry=retry)

    def _load_payload(self) -> "tuple[ActorPayload, pa.Table]":
        import ray

        n_omp_threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(n_omp_threads) if n_omp_threads.isdecimal() else self._num_cpus)
        pickled, rows = ray.get([*self._payload_refs, *self._row_refs])
        try:
            payload: ActorPayload = pickle.loads(pickled)  # noqa: S301 - the driver's bytes
        except Exception as error:
            raise RunError(
                f"{socket.gethostname()} cannot load the explainers ({type(error).__name__}: {error}); install the packages of "
                "the model and its preprocessing there, or start from a folder that all nodes share"
            ) from error
        if payload.working_folder is not None:
            require_shared_folder(payload.working_folder, "where relative paths begin")
            os.chdir(payload.working_folder)
        require_shared_folder(payload.store.parts_folder.absolute(), "where parts are written")
        if payload.card is not None:
            attach_card(unwrap(payload.worker.explainers[0].model), payload.card)
        return payload, rows


def require_shared_folder(folder: str | Path, purpose: str) -> None:
    """Raise a RunError if a folder of the driver does not exist on this node."""
    if not Path(folder).is_dir():
        raise RunError(
            f"{socket.gethostname()} has no folder {folder}, {purpose}; choose a folder that all nodes share"
        )


def pickle_error(error: Exception) -> bytes:
    """Pickle an error for the driver; replace one that cannot be pickled by a RunError with its message."""
    try:
        pickled = cloudpickle_dumps(error)
        pickle.loads(pickled)  # noqa: S301 - our own bytes
    except Exception:
        return cloudpickle_dumps(RunError(f"{type(error).__name__}: {error}"))
    return pickled


def cloudpickle_dumps(value: object) -> bytes:
    """Pickle a value with the pickler of Ray, which includes classes of scripts and of files loaded by path."""
    import ray.cloudpickle

    pickled: bytes = ray.cloudpickle.dumps(value)
    return pickled
