"""The Ray engine: actors in worker processes compute chunks with the code of the local engine.

Ray Data distributes the numbers of the chunks that have no part. Their rows of the manifest lie in the object store of Ray,
at most a million images at a time. Each machine gets them once, and actors slice out their chunk without a copy, so the
memory of the driver does not grow with the manifest. (A block of rows per chunk took 12 s instead of 3 s to start, at a
million rows.)
"""

import contextlib
import logging
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import load_images
from camscope.batch.local_engine import ChunkPlan, ChunkTask, Failure, Steps, write_chunk
from camscope.batch.manifest import import_arrow
from camscope.batch.memory_budget import MemoryBudget
from camscope.batch.run_store import RunStore
from camscope.errors import InputError, RunError
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.hooks.base import unwrap
from camscope.model_card import ModelCard, attach_card, get_card
from camscope.optional import require
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CHUNKS_AND_IMAGES_IN_FLIGHT = 4096, 2**20  # chunks and images that are distributed at a time
MAX_ATTEMPTS_PER_CHUNK = 3  # if its worker dies
QUIET_RAY_ENVIRONMENT = {"RAY_BACKEND_LOG_LEVEL": "fatal"}  # else Ray logs every actor that it may restart


def compute_chunks_on_ray(
    worker: BatchWorker,
    store: RunStore,
    plan: ChunkPlan,
    num_threads: int | None,
    address: str | None,
    num_workers: int | None,
    tasks: Sequence[ChunkTask],
) -> Steps:
    """Compute chunks on a Ray cluster; raise a RunError if a part is missing at the end."""
    on_cuda = _check_on_cuda(worker)
    with ray_connection(address) as ray:
        n_actors, num_cpus = plan_actor_pool(ray.nodes(), num_workers, on_cuda)
        payload_ref = ray.put(_pickle_payload(worker, store, num_threads or num_cpus))
        attempt_counter = start_attempt_counter(ray, MAX_ATTEMPTS_PER_CHUNK)
        for jobs, rows in _iter_job_groups(tasks, plan, worker.manifest.table):
            actor_kwargs = {
                "payload_refs": [payload_ref],  # in lists, so that Ray passes references and not the objects
                "row_refs": [ray.put(rows)],
                "attempt_counter": attempt_counter,
                "num_cpus": num_cpus,
            }
            with contextlib.closing(_iter_steps(ray, jobs, actor_kwargs, min(n_actors, len(jobs)), on_cuda)) as steps:
                yield from steps
    n_missing = len({task.chunk for task in tasks} - store.finished_chunks())
    if n_missing:
        raise RunError(
            f"{n_missing} of {plural(len(tasks), 'part')} missing in {store.parts_folder}; choose a folder that all nodes share"
        )


def _iter_job_groups(
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


def _iter_steps(
    ray: Any, jobs: list[dict[str, Any]], actor_kwargs: dict[str, Any], n_actors: int, on_cuda: bool
) -> Steps:
    """Yield what became of each chunk as soon as it is known. Closing the generator early stops the actors."""
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
            for pickled in block["step"].to_pylist():
                step = ray.cloudpickle.loads(pickled)
                if isinstance(step, Exception):
                    raise step
                yield step
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
    root = manifest.root
    is_relative = not root.is_absolute() if root is not None else manifest.has_relative_paths
    payload = ActorPayload(
        replace(worker, manifest=replace(manifest, table=manifest.table.slice(0, 0))),
        get_card(unwrap(worker.explainers[0].model)),
        store,
        num_threads,
        str(Path.cwd()) if is_relative or not store.folder.is_absolute() else None,
    )
    try:
        return cloudpickle_dumps(payload)
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


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

    def complete_chunk(self, chunk: int, table: "pa.Table", *, retry: bool) -> tuple[int, Mapping[Failure, int]]:
        """Compute the part of a chunk from its rows of the manifest. A part that exists is only read.

        With `retry`, the rows are those of failed images, and they replace rows of the existing part.
        """
        if not retry and self.store.select_parts_of_run(self.store.finished_chunks() & {chunk}):
            # the worker that wrote it died before it could report
            return table.num_rows, self.store.count_failures([chunk])
        task = ChunkTask(chunk, tuple(table["row"].to_pylist()) if retry else None)
        manifest, memory = replace(self.worker.manifest, table=table), MemoryBudget(self.num_threads)
        rows, failures = manifest.rows(0, table.num_rows), Counter[Failure]()
        with contextlib.closing(load_images(manifest, rows, self.worker.read_item, self.num_threads, memory)) as images:
            for _, batch_failures in write_chunk(task, images, self.worker, self.store, self.num_threads, memory):
                failures.update(batch_failures)
        return table.num_rows, failures


class Actor:
    """A callable that Ray Data keeps in a worker process: it takes jobs and returns pickled steps."""

    def __init__(
        self, payload_refs: Sequence[Any], row_refs: Sequence[Any], attempt_counter: Any, num_cpus: int
    ) -> None:
        self._payload_refs, self._row_refs = payload_refs, row_refs
        self._attempt_counter, self._num_cpus = attempt_counter, num_cpus
        self._loaded_payload: tuple[ActorPayload, pa.Table] | None = None

    def __call__(self, block: "pa.Table") -> "pa.Table":
        """Process jobs. An error is returned as a step, because Ray would wrap a raised one in its own traceback."""
        pa = import_arrow()
        try:
            steps = [cloudpickle_dumps(self._process(**job)) for job in block.to_pylist()]
        except Exception as error:
            steps = [pickle_error(error)]
        return pa.table({"step": pa.array(steps, pa.binary())})

    def _process(self, chunk: int, offset: int, n_images: int, retry: bool) -> tuple[int, Mapping[Failure, int]]:
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


@contextlib.contextmanager
def ray_connection(address: str | None = None) -> Iterator[Any]:
    """Connect to Ray for a `with` block, or keep an existing connection; raise a RunError if the address does not answer.

    Without an address, the first of these is used: the address in `RAY_ADDRESS`, the instance that `ray start` started on
    this machine, a new instance.
    """
    require("ray.data", extra="ray")
    ray = require("ray", extra="ray")
    with _suppress_ray_data_output():
        if ray.is_initialized():
            yield ray
            return
        try:
            host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).removeprefix("ray://").rpartition(":")
            if host and port.isdecimal():  # where no process listens, Ray itself would wait for many minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            with _default_environment(QUIET_RAY_ENVIRONMENT), _suppress_stderr():
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            where = address or os.environ.get("RAY_ADDRESS", "this machine")
            message = str(error).strip().partition("\n")[0]
            raise RunError(f"no Ray at {where} ({message}); leave the address out to start one here") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def plan_actor_pool(nodes: list[dict[str, Any]], num_workers: int | None, on_cuda: bool) -> tuple[int, int]:
    """Return how many actors to start and how many CPUs each gets.

    Without `num_workers` there is one actor per GPU (model on CUDA) or per CPU. The CPUs are divided among the actors.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus_and_gpus = [(int(resource.get("CPU", 0)), int(resource.get("GPU", 0))) for resource in resources]
    if on_cuda and not any(gpus for _, gpus in cpus_and_gpus):
        raise InputError("the model is on CUDA, but the cluster has no GPU: move the model to the CPU, or add a GPU")
    n_actors = num_workers or sum(gpus if on_cuda else cpus for cpus, gpus in cpus_and_gpus) or 1
    max_cpus = max((cpus for cpus, gpus in cpus_and_gpus if gpus or not on_cuda), default=1)
    for share in range(max_cpus, 1, -1):
        if sum(min(cpus // share, gpus) if on_cuda else cpus // share for cpus, gpus in cpus_and_gpus) >= n_actors:
            return n_actors, share
    return n_actors, 1


def start_attempt_counter(ray: Any, max_attempts: int) -> Any:
    """Start an actor that counts the attempts at each chunk, since Ray restarts a chunk whose worker died without limit.

    Its method `record_attempt` returns 0, or the number of attempts that failed if the chunk must not be tried again.
    """

    class AttemptCounter:  # defined here, so that its process need not import camscope and PyTorch
        def __init__(self) -> None:
            self.n_attempts: dict[int, int] = {}

        def record_attempt(self, chunk: int) -> int:
            self.n_attempts[chunk] = self.n_attempts.get(chunk, 0) + 1
            return max_attempts if self.n_attempts[chunk] > max_attempts else 0

    return ray.remote(num_cpus=0)(AttemptCounter).remote()


@contextlib.contextmanager
def _suppress_ray_data_output() -> Iterator[None]:
    """Let Ray Data print only errors: no plans and no progress bars."""
    from ray.data import DataContext

    logger, context = logging.getLogger("ray.data"), DataContext.get_current()
    level, shows_bars = logger.level, context.enable_progress_bars
    logger.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = shows_bars


@contextlib.contextmanager
def _default_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for a `with` block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Discard what the process writes to stderr, where Ray reports the log level that silences it."""
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            stderr_copy = os.dup(2)
        except OSError:  # there is no stderr
            yield
            return
        stack.callback(os.close, stderr_copy)
        stack.callback(os.dup2, stderr_copy, 2)
        with open(os.devnull, "wb") as null_device:  # noqa: PTH123 - a device
            os.dup2(null_device.fileno(), 2)
        yield
