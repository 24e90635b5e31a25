"""The Ray engine: compute the chunks of a run in worker processes of a Ray cluster."""

import contextlib
import logging
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import MemoryBudget, load_images
from camscope.batch.local_engine import (
    ChunkPlan,
    ChunkProgress,
    ChunkTask,
    ImageFailure,
    compute_and_write_chunk,
)
from camscope.batch.run_store import RunStore
from camscope.errors import InputError, RunError
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.hooks.find_layers import unwrap
from camscope.loaded_model_metadata_and_weight_digest import attach_loaded_model_metadata, get_loaded_model_metadata
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.user_code_and_plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ATTEMPTS_PER_CHUNK = 3  # if its worker dies


def compute_chunks_on_ray(
    worker: BatchWorker,
    store: RunStore,
    plan: ChunkPlan,
    num_threads: int | None,
    address: str | None,
    num_workers: int | None,
    tasks: Sequence[ChunkTask],
) -> ChunkProgress:
    """Compute chunks on a Ray cluster. Raise a RunError if a part file is missing in the end."""
    device = get_device_and_dtype(unwrap(worker.explainers[0].model))[0]
    on_cuda = device.type == "cuda"
    if on_cuda and device.index:
        raise InputError(f"the model is on {device}, but each Ray worker has one GPU, cuda:0; move the model to cuda:0")
    with ray_connection(address) as ray:
        n_actors, num_cpus = plan_actor_pool(ray.nodes(), num_workers, on_cuda)
        payload = _pickle_payload(worker, store, num_threads or num_cpus)
        payload_refs = [ray.put(payload)]  # a list is passed as references
        actor_cls = ray.remote(
            num_cpus=num_cpus, num_gpus=int(on_cuda), max_restarts=-1, max_task_retries=MAX_ATTEMPTS_PER_CHUNK - 1
        )(Actor)
        actors = [actor_cls.remote(num_cpus) for _ in range(min(n_actors, len(tasks)))]
        try:
            yield from _iter_chunk_progress(ray, actors, payload_refs, tasks, plan, worker.manifest.table)
        finally:
            for actor in actors:
                ray.kill(actor)
    n_missing = len({task.chunk for task in tasks} - store.finished_chunks())
    if n_missing:
        raise RunError(
            f"{n_missing} of {plural(len(tasks), 'part file')} are missing in {store.parts_folder}; choose a folder that all "
            "nodes share"
        )


def _iter_chunk_progress(
    ray: Any,
    actors: Sequence[Any],
    payload_refs: Sequence[Any],
    tasks: Sequence[ChunkTask],
    plan: ChunkPlan,
    table: "pa.Table",
) -> ChunkProgress:
    """Yield the progress each time a chunk is finished."""
    open_tasks, n_open = iter(tasks), len(tasks)
    # an actor gets its first chunk when it is ready, since it may wait for free CPUs
    running: dict[Any, tuple[Any, pa.Table | None]] = {
        actor.wait_until_process_started.remote(): (actor, None) for actor in actors
    }
    while n_open:
        (finished,), _ = ray.wait(list(running), num_returns=1)
        actor, rows = running.pop(finished)
        try:
            step = ray.cloudpickle.loads(ray.get(finished))
        except ray.exceptions.RayError as error:
            if rows is not None and isinstance(error, ray.exceptions.RayActorError):
                first, last, path = rows["row"][0], rows["row"][-1], rows["path"][0]
                raise RunError(
                    f"rows {first} to {last} of the manifest, from {path} on: the worker process crashed "
                    f"{plural(MAX_ATTEMPTS_PER_CHUNK, 'time')}. If memory ran out, use fewer workers. If an image file crashes "
                    "its decoder, leave these rows out"
                ) from error
            message = str(error).strip().partition("\n")[0]
            raise RunError(
                f"Ray failed ({type(error).__name__}: {message}); see its logs, and start the run again to resume it"
            ) from error
        if isinstance(step, Exception):
            raise step
        if rows is not None:
            yield step
            n_open -= 1
        if (task := next(open_tasks, None)) is not None:
            rows = task.select_rows(plan, table)
            rows = rows.take(np.arange(len(rows)))  # a slice would be sent with the whole table
            running[actor.compute_chunk.remote(payload_refs, task, rows)] = actor, rows


def _pickle_payload(worker: BatchWorker, store: RunStore, num_threads: int) -> bytes:
    """Pickle the data that Ray actors need: the worker, the run store, the number of threads and the user's plugins."""
    manifest, root = worker.manifest, worker.manifest.root
    is_relative = not root.is_absolute() if root is not None else manifest.has_relative_paths
    working_folder = str(Path.cwd()) if is_relative or not store.folder.is_absolute() else None
    worker = replace(worker, manifest=replace(manifest, table=manifest.table.slice(0, 0)))
    model_metadata, plugins = (
        get_loaded_model_metadata(unwrap(worker.explainers[0].model)),
        find_plugins(map(type, worker.explainers)),
    )
    try:
        payload = cloudpickle_dumps((worker, model_metadata, store, num_threads, working_folder))
        return cloudpickle_dumps((plugins, payload))
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


class ActorPayload(NamedTuple):
    """What an actor needs to compute chunks."""

    worker: BatchWorker
    store: RunStore
    num_threads: int


class Actor:
    """A Ray actor. It computes chunks in a worker process, and returns pickled results."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._payload: ActorPayload | None = None

    def wait_until_process_started(self) -> bytes:
        """Return as soon as the worker process has started. The result is a pickled None."""
        return cloudpickle_dumps(None)

    def compute_chunk(self, payload_refs: Sequence[Any], task: ChunkTask, table: "pa.Table") -> bytes:
        """Compute a chunk. Return its pickled result. If an error occurs, return the pickled error."""
        try:
            if self._payload is None:  # an error of the constructor would not be reported
                self._payload = self._load_payload(payload_refs)
            return cloudpickle_dumps(_compute_chunk_unless_finished(*self._payload, task, table))
        except Exception as error:  # Ray would wrap a raised error in its own traceback
            return pickle_error(error)

    def _load_payload(self, payload_refs: Sequence[Any]) -> ActorPayload:
        """Unpickle the worker and its plugins on this node. Raise a RunError if a package or a shared folder is missing."""
        import ray

        n_omp_threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(n_omp_threads) if n_omp_threads.isdecimal() else self._num_cpus)
        pickled = ray.get(payload_refs[0])
        try:
            plugins, payload = pickle.loads(pickled)  # noqa: S301 - the driver's bytes
            for plugin in plugins:  # first, since the explainers are objects of their classes
                load_plugin(plugin)
            worker, model_metadata, store, num_threads, working_folder = pickle.loads(payload)  # noqa: S301 - the same
        except Exception as error:
            raise RunError(
                f"the node {socket.gethostname()} cannot load the explainers ({type(error).__name__}: {error}). Install the "
                "packages of the model and its preprocessing on this node, or start from a folder that all nodes share"
            ) from error
        if working_folder is not None:
            require_shared_folder(working_folder, "where relative paths begin")
            os.chdir(working_folder)
        require_shared_folder(store.parts_folder.absolute(), "where parts are written")
        if model_metadata is not None:
            attach_loaded_model_metadata(unwrap(worker.explainers[0].model), model_metadata)
        return ActorPayload(worker, store, num_threads)


def _compute_chunk_unless_finished(
    worker: BatchWorker, store: RunStore, num_threads: int, task: ChunkTask, table: "pa.Table"
) -> tuple[int, list[ImageFailure]]:
    """Compute a chunk if its part file does not exist. Return the number of its images, and those that failed."""
    if task.row_numbers is None and store.select_parts_of_run(store.finished_chunks() & {task.chunk}):
        # the worker that wrote it died before it could report
        return table.num_rows, [ImageFailure(*failure) for failure in store.list_failures(task.chunk)]
    manifest, memory = replace(worker.manifest, table=table), MemoryBudget(num_threads)
    rows, failures = manifest.rows(0, table.num_rows), list[ImageFailure]()
    with contextlib.closing(load_images(manifest, rows, worker.prepare_model_input, num_threads, memory)) as images:
        for _, batch_failures in compute_and_write_chunk(task, images, worker, store, num_threads, memory):
            failures += batch_failures
    return table.num_rows, failures


def require_shared_folder(folder: str | Path, purpose: str) -> None:
    """Raise a RunError if a folder does not exist on this cluster node."""
    if not Path(folder).is_dir():
        raise RunError(
            f"the node {socket.gethostname()} has no folder {folder}, {purpose}; choose a folder that all nodes share"
        )


def pickle_error(error: Exception) -> bytes:
    """Pickle an error. If this is not possible, pickle a RunError with the same message."""
    try:
        pickled = cloudpickle_dumps(error)
        pickle.loads(pickled)  # noqa: S301 - our own bytes
    except Exception:
        return cloudpickle_dumps(RunError(f"{type(error).__name__}: {error}"))
    return pickled


def cloudpickle_dumps(value: object) -> bytes:
    """Pickle a value with cloudpickle. It also supports classes that are defined in a script."""
    import ray.cloudpickle

    pickled: bytes = ray.cloudpickle.dumps(value)
    return pickled


@contextlib.contextmanager
def ray_connection(address: str | None = None) -> Iterator[Any]:
    """Connect to Ray inside the `with` block. Raise a RunError if the address does not answer."""
    ray = require("ray", extra="ray")
    if ray.is_initialized():
        yield ray
        return
    try:
        host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():  # where no process listens, Ray itself would wait for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS", "this machine")
        message = str(error).strip().partition("\n")[0]
        raise RunError(
            f"there is no Ray cluster at {where} ({message}); leave the address out to start Ray on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


class ActorPool(NamedTuple):
    """The number of Ray actors, and the number of CPUs of each actor."""

    n_actors: int
    cpus_per_actor: int


def plan_actor_pool(nodes: list[dict[str, Any]], num_workers: int | None, on_cuda: bool) -> ActorPool:
    """Choose the number of actors: `num_workers`.
    By default, choose one actor per GPU for a model on CUDA, or else one per CPU.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus_and_gpus = [(int(resource.get("CPU", 0)), int(resource.get("GPU", 0))) for resource in resources]
    if on_cuda and not any(gpus for _, gpus in cpus_and_gpus):
        raise InputError("the model is on CUDA, but the cluster has no GPU: move the model to the CPU, or add a GPU")
    n_actors = num_workers or sum(gpus if on_cuda else cpus for cpus, gpus in cpus_and_gpus) or 1
    max_cpus = max((cpus for cpus, gpus in cpus_and_gpus if gpus or not on_cuda), default=1)
    for share in range(max_cpus, 1, -1):
        if sum(min(cpus // share, gpus) if on_cuda else cpus // share for cpus, gpus in cpus_and_gpus) >= n_actors:
            return ActorPool(n_actors, share)
    return ActorPool(n_actors, 1)
