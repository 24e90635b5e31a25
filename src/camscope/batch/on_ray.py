"""The Ray engine: actors hold the explainers, and make of each chunk what the local engine makes of it, by the same code.

Ray Data deals out the numbers of the chunks whose parts are not there. Their rows of the manifest lie in Ray's object store,
of at most a million images at a time: each machine gets them once, actors cut their chunk out of them without a copy, and what
the driver holds does not grow with the manifest. (A block of rows for each chunk, at a million rows: 12 s to begin, not 3.)
"""

import contextlib
import os
import re
import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camscope.batch.cluster import connected, pool, tries_of
from camscope.batch.local import Outcome, Plan, Told, unfinished, written
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.reading import loaded
from camscope.batch.store import Store
from camscope.batch.worker import Worker
from camscope.cards import ModelCard, attach_card, card_of
from camscope.errors import InputError, RunError
from camscope.explainers.scope import home
from camscope.hooks.base import unwrap

if TYPE_CHECKING:
    import pyarrow as pa

AHEAD = 4096, 2**20  # chunks that are dealt out at a time, and images
TRIES = 3  # of a chunk whose worker dies


@dataclass(frozen=True)
class Sent:
    """What an actor needs but the manifest's rows: explainers, what is known of their model, and where things are."""

    worker: Worker
    card: ModelCard | None
    store: Store
    threads: int
    folder: str | None  # where relative paths begin, if there are any

    def part(self, chunk: int, table: "pa.Table") -> Outcome:
        """Make the part of a chunk of its rows of the manifest; one that is there is only read."""
        found = Outcome()
        if self.store.path_of(chunk).exists():  # whoever made it died before it could tell
            found.count(table.num_rows, self.store.reasons([chunk]).elements(), None, None)
            return found
        manifest = replace(self.worker.manifest, table=table)
        images = loaded(manifest, manifest.rows(0, table.num_rows), self.worker.read, self.threads)
        with contextlib.closing(images):
            for count, reasons in written(chunk, images, self.worker, self.store, self.threads):
                found.count(count, reasons, None, None)
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
            told = [_pickled(self._made(**dealt)) for dealt in block.to_pylist()]
        except Exception as error:
            told = [_packed(error)]
        return pa.table({"told": pa.array(told, pa.binary())})

    def _made(self, chunk: int, at: int, images: int) -> Outcome:
        import ray

        deaths = ray.get(self._tries.begin.remote(chunk))
        if deaths:
            raise RunError(
                f"images {at} to {at + images - 1} of those not done: their worker died {deaths} times (was it killed for want "
                "of memory, or is a file among them that kills its decoder?); take fewer workers, or leave them out"
            )
        if self._ready is None:  # not in the constructor: of an error there nothing would arrive
            self._ready = self._unpacked()
        sent, rows = self._ready
        return sent.part(chunk, rows.slice(at, images))

    def _unpacked(self) -> "tuple[Sent, pa.Table]":
        import ray
        import ray.cloudpickle as pickle

        told = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(told) if told.isdecimal() else self._cpus)
        packed, rows = ray.get([*self._sent, *self._rows])
        try:
            sent: Sent = pickle.loads(packed)
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
) -> Outcome:
    """Work off the chunks whose parts are not there, on a cluster; RunError after more failures than are allowed."""
    todo, outcome = unfinished(plan, store)
    outcome.count(0, (), max_failures, told)
    if not todo:
        return outcome
    with connected(address) as ray:
        count, cpus = pool(ray.nodes(), workers, _on_cuda(worker))
        sent, tries = ray.put(_sent(worker, store, threads or cpus)), tries_of(ray, TRIES)
        for dealt, rows in _pieces(todo, plan, manifest.table):
            given = {"sent": [sent], "rows": [ray.put(rows)], "tries": tries, "cpus": cpus}
            with contextlib.closing(_results(ray, dealt, given, min(count, len(dealt)), _on_cuda(worker))) as results:
                for one in results:
                    outcome.count(one.images, one.reasons.elements(), max_failures, told)
    missing = len(set(todo) - store.finished())
    if missing:
        raise RunError(
            f"{missing} of {len(todo)} parts are not in {store.parts}: it must be a folder that all nodes see"
        )
    return outcome


def _pieces(todo: Sequence[int], plan: Plan, table: "pa.Table") -> "Iterator[tuple[list[dict[str, int]], pa.Table]]":
    """Chunks that are dealt out at a time, and their rows: of each chunk its number, and which of these rows are its."""
    chunks, images = AHEAD
    step = max(1, min(chunks, images // plan.size))
    for first in range(0, len(todo), step):
        bounds = [(chunk, *plan.bounds(chunk)) for chunk in todo[first : first + step]]
        sizes = [stop - start for _, start, stop in bounds]
        places = accumulate(sizes, initial=0)
        rows = arrow().concat_tables([table.slice(start, stop - start) for _, start, stop in bounds]).combine_chunks()
        yield (
            [{"chunk": bound[0], "at": at, "images": n} for bound, at, n in zip(bounds, places, sizes, strict=False)],
            rows,
        )


def _results(
    ray: Any, dealt: list[dict[str, int]], given: dict[str, Any], count: int, cuda: bool
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
        return _pickled(Sent(replace(worker, manifest=empty), card, store, threads, folder))
    except Exception as error:
        raise RunError(
            f"the explainers cannot be sent to workers ({type(error).__name__}: {error}); use the local engine"
        ) from error


def _relative(manifest: Manifest, store: Store) -> bool:
    """Whether anything is looked for from the folder that the driver is in."""
    if not store.folder.is_absolute() or (manifest.root is not None and not manifest.root.is_absolute()):
        return True
    compute, anchored = arrow("compute"), f"^{re.escape(Path.cwd().anchor)}|://"
    paths = manifest.table["path"]
    return (
        manifest.root is None
        and manifest.images is None
        and not compute.all(compute.match_substring_regex(paths, anchored)).as_py()
    )


def expect_folder(folder: str | Path, what: str) -> None:
    """RunError where a worker does not see a folder of the driver's."""
    if not Path(folder).is_dir():
        raise RunError(f"{socket.gethostname()} sees no folder {folder}, {what}: it must be one that all nodes see")


def _packed(error: Exception) -> bytes:
    """An error as the driver will raise it; one that cannot travel, by its name."""
    import pickle

    try:
        packed = _pickled(error)
        pickle.loads(packed)  # noqa: S301 - our own bytes
    except Exception:
        packed = _pickled(RunError(f"{type(error).__name__}: {error}"))
    return packed


def _pickled(value: object) -> bytes:
    import ray.cloudpickle

    packed: bytes = ray.cloudpickle.dumps(value)
    return packed


def _on_cuda(worker: Worker) -> bool:
    """Whether the model is on a GPU: the first, which is what an actor calls the one it is given."""
    device = home(unwrap(worker.tools[0].model))[0]
    if device.type == "cuda" and device.index:
        raise InputError(f"the model is on {device}; Ray gives each worker one GPU as cuda:0: put the model there")
    return device.type == "cuda"
