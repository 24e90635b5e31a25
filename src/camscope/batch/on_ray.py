"""The Ray engine: actors hold the explainers, and make of each chunk what the local engine makes of it, by the same code.

Ray Data deals out the numbers of the chunks whose parts are not there. Their rows of the manifest lie in Ray's object store,
of at most a million images at a time: each machine gets them once, actors cut their chunk out of them without a copy, and what
the driver holds does not grow with the manifest. (A block of rows for each chunk, at a million rows: 12 s to begin, not 3.)
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.batch.actor import Actor, Sent, pickled
from camscope.batch.cluster import connected, pool, tries_of
from camscope.batch.local import Outcome, Plan, Task, Told, unfinished
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.store import Store
from camscope.batch.worker import Worker
from camscope.cards import card_of
from camscope.errors import InputError, RunError
from camscope.explainers.scope import home
from camscope.hooks.base import unwrap
from camscope.wording import plural

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
