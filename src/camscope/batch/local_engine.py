"""The local engine: chunk after chunk in this process, images read ahead by threads."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from camscope.batch import result_rows
from camscope.batch.batch_worker import Batch, Worker
from camscope.batch.image_loading import Loaded, loaded
from camscope.batch.manifest import Manifest, arrow
from camscope.batch.memory_budget import MemoryBudget
from camscope.batch.run_store import Store
from camscope.errors import InputError, RunError
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

Failure = tuple[str, str | None]  # the reason, and its kind: see `rows.failed`
Told = Callable[["Outcome"], None]  # called with what there is so far


@dataclass(frozen=True)
class Plan:
    """Chunks of so many images: of chunk c the rows c size … (c + 1) size - 1; of them every count-th is this shard's."""

    images: int
    size: int
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        which, count = self.shard
        if self.size < 1 or not 0 <= which < count:
            raise InputError(
                f"chunk={self.size}, shard={which}/{count}: expected 1 image or more, and a shard 0/n … n-1/n"
            )

    @property
    def chunks(self) -> range:
        """The numbers of this shard's."""
        return range(self.shard[0], -(-self.images // self.size), self.shard[1])

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The first row, and the one behind the last."""
        return chunk * self.size, min(self.images, (chunk + 1) * self.size)


@dataclass(frozen=True)
class Task:
    """A chunk that is to be worked on: its part is missing, or the images of some `rows` are to be tried again."""

    chunk: int
    rows: tuple[int, ...] | None = None  # numbers of the manifest; None: all of the chunk

    def table(self, plan: Plan, table: "pa.Table") -> "pa.Table":
        """Its rows of the manifest."""
        start, stop = plan.bounds(self.chunk)
        some = table.slice(start, stop - start)
        if self.rows is None:
            return some
        return some.filter(arrow("compute").is_in(some["row"], arrow().array(self.rows, arrow().int64())))


@dataclass
class Outcome:
    """What became of the images of a run, or of a shard: of how many there are maps, and why others have none."""

    total: int = 0  # images of this shard
    before: int = 0  # of them, found done
    images: int = 0  # of them, worked off now
    reasons: Counter[str] = field(default_factory=Counter)
    transient: Counter[str] = field(default_factory=Counter)  # of them, those that another try may remove

    @property
    def failures(self) -> int:
        """Images without a map."""
        return self.reasons.total()

    @property
    def failures_by_kind(self) -> Counter[Failure]:
        """How many images have no map, by reason and kind of failure."""
        kinds: Counter[Failure] = Counter()
        for reason, count in self.reasons.items():
            kinds[reason, result_rows.TRANSIENT] = self.transient[reason]
            kinds[reason, result_rows.PERMANENT] = count - self.transient[reason]
        return +kinds

    def add(self, failures: Mapping[Failure, int]) -> None:
        """Count images without a map, by reason and kind of failure."""
        for (reason, kind), count in failures.items():
            self.reasons[reason] += count
            if kind == result_rows.TRANSIENT:
                self.transient[reason] += count

    def count(self, images: int, failures: Mapping[Failure, int], most: int | None, told: Told | None) -> None:
        """Add what became of some images, and tell it; RunError after more failures than `most`."""
        self.add(failures)
        self.images += images
        if told is not None:
            told(self)
        if most is not None and self.failures > most:
            why = "; ".join(f"{reason} ({count} x)" for reason, count in self.reasons.most_common(3))
            raise RunError(f"{plural(self.failures, 'image')} failed, more than {most}: {why}")


def unfinished(plan: Plan, store: Store, *, retry_failed: bool = False) -> tuple[list[Task], Outcome]:
    """What is to be worked on, and what is known before any of it is begun."""
    sizes = {c: stop - start for c in plan.chunks for start, stop in [plan.bounds(c)]}
    done = store.of_this_run(sorted(sizes.keys() & store.finished()))
    outcome = Outcome(sum(sizes.values()), sum(sizes[chunk] for chunk in done))
    outcome.add(store.reasons(done))
    again: dict[int, tuple[int, ...]] = {}
    if retry_failed and outcome.failures:
        again = {chunk: failed for chunk in done if (failed := tuple(store.failed_rows(chunk)))}
        outcome = Outcome(outcome.total, outcome.before - sum(map(len, again.values())))
    return [Task(chunk, again.get(chunk)) for chunk in sizes if chunk in again or chunk not in set(done)], outcome


def run_chunks(
    worker: Worker,
    manifest: Manifest,
    store: Store,
    plan: Plan,
    threads: int,
    max_failures: int | None = None,
    told: Told | None = None,
    *,
    retry_failed: bool = False,
) -> Outcome:
    """Work off the chunks whose parts are not there; RunError after more failures than are allowed."""
    todo, outcome = unfinished(plan, store, retry_failed=retry_failed)
    outcome.count(0, {}, max_failures, told)
    each = (row for task in todo for row in task.table(plan, manifest.table).to_pylist())
    memory = MemoryBudget(threads)
    images = loaded(manifest, each, worker.read, threads, memory)
    try:
        for task in todo:
            count = task.table(plan, manifest.table).num_rows
            with closing(written(task, islice(images, count), worker, store, threads, memory)) as steps:
                for count, failures in steps:
                    outcome.count(count, failures, max_failures, told)
    finally:
        images.close()
    return outcome


def written(
    task: Task, images: Iterator[Loaded], worker: Worker, store: Store, threads: int, memory: MemoryBudget
) -> Generator[tuple[int, Mapping[Failure, int]], None, None]:
    """Make the part of a chunk of its images; after each pass: how many had it, and why some of them have no map.

    Overlays are drawn meanwhile, by so many threads, and are there before the part is.
    """
    made: list[dict[str, Any]] = []
    with nullcontext() if worker.pictures is None else worker.pictures.drawing(threads, memory) as draw:
        for batch in ahead(batches(images, worker)):
            new = worker.rows(batch, draw)
            made += new
            failed = {row["row"]: (row["error"], row["failure"]) for row in new if row["status"] == result_rows.FAILED}
            yield len(batch.images), Counter(failed.values())
        if draw is not None:
            draw.finish(made)
    made.sort(key=lambda row: row["row"])
    table = result_rows.table_of(made, result_rows.schema(worker.manifest, overlays=worker.pictures is not None))
    if task.rows is not None:
        there = store.read(task.chunk).replace_schema_metadata()
        table = result_rows.merged(there, table)
        if table.equals(there):  # they failed again
            return
    store.write(task.chunk, table)


def batches(images: Iterator[Loaded], worker: Worker) -> Iterator[Batch]:
    """Neighbours of one group, so many at a time as share a pass."""
    for _, group in groupby(images, worker.group):
        left = iter(group)
        for first in left:
            yield worker.collated([first, *islice(left, worker.at_once(first) - 1)])


def ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same, each made by a thread while the one before it is worked on."""
    with ThreadPoolExecutor(1, thread_name_prefix="camscope-collating") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch
