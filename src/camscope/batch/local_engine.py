"""The local engine: chunk after chunk in this process, images read ahead by threads."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from camscope.batch import result_rows
from camscope.batch.batch_worker import BatchWorker, ImageBatch
from camscope.batch.image_loading import LoadedImage, load_images
from camscope.batch.manifest import Manifest, import_arrow
from camscope.batch.memory_budget import MemoryBudget
from camscope.batch.run_store import RunStore
from camscope.errors import InputError, RunError
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

Failure = tuple[str, str | None]  # the reason, and its kind: see `rows.failed`
OutcomeCallback = Callable[["BatchOutcome"], None]  # called with what there is so far


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of so many images: of chunk c the rows c size … (c + 1) size - 1; of them every count-th is this shard's."""

    n_images: int
    chunk_size: int
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        which, count = self.shard
        if self.chunk_size < 1 or not 0 <= which < count:
            raise InputError(
                f"chunk_size={self.chunk_size}, shard={which}/{count}: expected 1 image or more, and a shard 0/n … n-1/n"
            )

    @property
    def shard_chunks(self) -> range:
        """The numbers of this shard's."""
        return range(self.shard[0], -(-self.n_images // self.chunk_size), self.shard[1])

    def row_range(self, chunk: int) -> tuple[int, int]:
        """The first row, and the one behind the last."""
        return chunk * self.chunk_size, min(self.n_images, (chunk + 1) * self.chunk_size)


@dataclass(frozen=True)
class ChunkTask:
    """A chunk that is to be worked on: its part is missing, or the images of some `row_numbers` are to be tried again."""

    chunk: int
    row_numbers: tuple[int, ...] | None = None  # numbers of the manifest; None: all of the chunk

    def select_rows(self, plan: ChunkPlan, table: "pa.Table") -> "pa.Table":
        """Its rows of the manifest."""
        start, stop = plan.row_range(self.chunk)
        some = table.slice(start, stop - start)
        if self.row_numbers is None:
            return some
        return some.filter(
            import_arrow("compute").is_in(some["row"], import_arrow().array(self.row_numbers, import_arrow().int64()))
        )


@dataclass
class BatchOutcome:
    """What became of the images of a run, or of a shard: of how many there are maps, and why others have none."""

    n_images: int = 0  # images of this shard
    n_done_before: int = 0  # of them, found done
    n_processed: int = 0  # of them, worked off now
    failure_counts: Counter[str] = field(default_factory=Counter)
    transient_failure_counts: Counter[str] = field(
        default_factory=Counter
    )  # of them, those that another try may remove

    @property
    def n_failures(self) -> int:
        """Images without a map."""
        return self.failure_counts.total()

    @property
    def failure_counts_by_kind(self) -> Counter[Failure]:
        """How many images have no map, by reason and kind of failure."""
        kinds: Counter[Failure] = Counter()
        for reason, count in self.failure_counts.items():
            kinds[reason, result_rows.TRANSIENT] = self.transient_failure_counts[reason]
            kinds[reason, result_rows.PERMANENT] = count - self.transient_failure_counts[reason]
        return +kinds

    def add_failures(self, failures: Mapping[Failure, int]) -> None:
        """Count images without a map, by reason and kind of failure."""
        for (reason, kind), count in failures.items():
            self.failure_counts[reason] += count
            if kind == result_rows.TRANSIENT:
                self.transient_failure_counts[reason] += count

    def record(
        self,
        n_images: int,
        failures: Mapping[Failure, int],
        max_failures: int | None,
        on_progress: OutcomeCallback | None,
    ) -> None:
        """Add what became of some images, and tell it; RunError after more failures than `max_failures`."""
        self.add_failures(failures)
        self.n_processed += n_images
        if on_progress is not None:
            on_progress(self)
        if max_failures is not None and self.n_failures > max_failures:
            why = "; ".join(f"{reason} ({count} x)" for reason, count in self.failure_counts.most_common(3))
            raise RunError(f"{plural(self.n_failures, 'image')} failed, more than {max_failures}: {why}")


def list_open_tasks(
    plan: ChunkPlan, store: RunStore, *, retry_failed: bool = False
) -> tuple[list[ChunkTask], BatchOutcome]:
    """What is to be worked on, and what is known before any of it is begun."""
    sizes = {c: stop - start for c in plan.shard_chunks for start, stop in [plan.row_range(c)]}
    done = store.select_own_parts(sorted(sizes.keys() & store.finished_chunks()))
    outcome = BatchOutcome(sum(sizes.values()), sum(sizes[chunk] for chunk in done))
    outcome.add_failures(store.count_failures(done))
    again: dict[int, tuple[int, ...]] = {}
    if retry_failed and outcome.n_failures:
        again = {chunk: failed for chunk in done if (failed := tuple(store.list_failed_rows(chunk)))}
        outcome = BatchOutcome(outcome.n_images, outcome.n_done_before - sum(map(len, again.values())))
    return [ChunkTask(chunk, again.get(chunk)) for chunk in sizes if chunk in again or chunk not in set(done)], outcome


def run_chunks(
    worker: BatchWorker,
    manifest: Manifest,
    store: RunStore,
    plan: ChunkPlan,
    num_threads: int,
    max_failures: int | None = None,
    on_progress: OutcomeCallback | None = None,
    *,
    retry_failed: bool = False,
) -> BatchOutcome:
    """Work off the chunks whose parts are not there; RunError after more failures than are allowed."""
    todo, outcome = list_open_tasks(plan, store, retry_failed=retry_failed)
    outcome.record(0, {}, max_failures, on_progress)
    each = (row for task in todo for row in task.select_rows(plan, manifest.table).to_pylist())
    memory = MemoryBudget(num_threads)
    images = load_images(manifest, each, worker.read_item, num_threads, memory)
    try:
        for task in todo:
            count = task.select_rows(plan, manifest.table).num_rows
            with closing(write_chunk(task, islice(images, count), worker, store, num_threads, memory)) as steps:
                for count, failures in steps:
                    outcome.record(count, failures, max_failures, on_progress)
    finally:
        images.close()
    return outcome


def write_chunk(
    task: ChunkTask,
    images: Iterator[LoadedImage],
    worker: BatchWorker,
    store: RunStore,
    num_threads: int,
    memory: MemoryBudget,
) -> Generator[tuple[int, Mapping[Failure, int]], None, None]:
    """Make the part of a chunk of its images; after each pass: how many had it, and why some of them have no map.

    Overlays are drawn meanwhile, by so many threads, and are there before the part is.
    """
    made: list[dict[str, Any]] = []
    with (
        nullcontext()
        if worker.overlay_writer is None
        else worker.overlay_writer.open_queue(num_threads, memory) as draw
    ):
        for batch in prefetch_batches(group_into_batches(images, worker)):
            new = worker.compute_rows(batch, draw)
            made += new
            failed = {row["row"]: (row["error"], row["failure"]) for row in new if row["status"] == result_rows.FAILED}
            yield len(batch.images), Counter(failed.values())
        if draw is not None:
            draw.wait_and_report(made)
    made.sort(key=lambda row: row["row"])
    table = result_rows.rows_to_table(
        made, result_rows.part_schema(worker.manifest, with_overlays=worker.overlay_writer is not None)
    )
    if task.row_numbers is not None:
        there = store.read_part(task.chunk).replace_schema_metadata()
        table = result_rows.replace_rows(there, table)
        if table.equals(there):  # they failed again
            return
    store.write_part(task.chunk, table)


def group_into_batches(images: Iterator[LoadedImage], worker: BatchWorker) -> Iterator[ImageBatch]:
    """Neighbours of one group, so many at a time as share a pass."""
    for _, group in groupby(images, worker.batch_key):
        left = iter(group)
        for first in left:
            yield worker.collate([first, *islice(left, worker.batch_size_for(first) - 1)])


def prefetch_batches(batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
    """The same, each made by a thread while the one before it is worked on."""
    with ThreadPoolExecutor(1, thread_name_prefix="camscope-collating") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch
