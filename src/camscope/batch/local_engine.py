"""The local engine: divide a run into chunks, and compute them in this process with progress."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from camscope.batch import result_rows
from camscope.batch.batch_worker import BatchWorker, ImageBatch
from camscope.batch.image_loading import LoadedImage, MemoryBudget, load_images
from camscope.batch.image_manifest import import_arrow
from camscope.batch.run_store import RunStore
from camscope.errors import RunError
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

Failure = tuple[str, str | None]  # reason, and kind: "transient" or "permanent"
OutcomeCallback = Callable[["BatchOutcome"], None]  # called with the outcome so far
ChunkProgress = Generator[
    tuple[int, "Sequence[ImageFailure]"], None, None
]  # number of processed images, and those of them that failed


class ImageFailure(NamedTuple):
    """An image without a map.

    Attributes:
        id: The id of the image, as the run has it.
        reason: The reason.
        kind: "transient" or "permanent".

    >>> ImageFailure("a.png", "there is no such file", "transient").kind
    'transient'

    """

    id: str
    reason: str
    kind: str | None


@dataclass(frozen=True)
class ChunkPlan:
    """The division of a manifest into chunks of `chunk_size` rows. Shard (i, n) has every n-th chunk, starting with chunk i."""

    n_images: int
    chunk_size: int
    shard: tuple[int, int] = (0, 1)

    @property
    def shard_chunks(self) -> range:
        """The numbers of the chunks that belong to this shard."""
        return range(self.shard[0], -(-self.n_images // self.chunk_size), self.shard[1])

    def start_and_stop_row(self, chunk: int) -> tuple[int, int]:
        """Return the positions in the manifest where a chunk starts and stops. The stop position is exclusive."""
        return chunk * self.chunk_size, min(self.n_images, (chunk + 1) * self.chunk_size)


@dataclass(frozen=True)
class ChunkTask:
    """A chunk to compute. `row_numbers` are the rows to compute again. By default, all rows of the chunk are computed."""

    chunk: int
    row_numbers: tuple[int, ...] | None = None

    def select_rows(self, plan: ChunkPlan, table: "pa.Table") -> "pa.Table":
        """Return the manifest rows that this task has to compute."""
        start, stop = plan.start_and_stop_row(self.chunk)
        rows = table.slice(start, stop - start)
        if self.row_numbers is None:
            return rows
        numbers = import_arrow().array(self.row_numbers, import_arrow().int64())
        return rows.filter(import_arrow("compute").is_in(rows["row"], numbers))


@dataclass
class BatchOutcome:
    """How many images of a run or shard were explained, and why other images have no map.

    Attributes:
        n_images: Images of the run, or of this shard.
        n_done_before: Images that were processed before the run was resumed.
        n_processed: Images that were processed since.
        failure_counts: Images without a map, by reason.
        transient_failure_counts: Images without a map by reason, where a retry may succeed.
        flag_counts: Number of maps with each flag, in the whole run or shard. It is filled at the end.
        new_failures: The images that failed since the last call of `on_progress`.

    >>> BatchOutcome(n_images=3, n_processed=3).n_failures
    0

    """

    n_images: int = 0
    n_done_before: int = 0
    n_processed: int = 0
    failure_counts: Counter[str] = field(default_factory=Counter)
    transient_failure_counts: Counter[str] = field(default_factory=Counter)
    flag_counts: Counter[str] = field(default_factory=Counter)
    new_failures: Sequence[ImageFailure] = ()

    @property
    def n_flagged(self) -> int:
        """The number of maps that have a flag."""
        return self.flag_counts.total()

    @property
    def n_failures(self) -> int:
        """The number of images that have no map."""
        return self.failure_counts.total()

    @property
    def failure_counts_by_kind(self) -> Counter[Failure]:
        """A dict from (reason, kind) to the number of images without a map. The kind of failure is "transient" or "permanent"."""
        counts: Counter[Failure] = Counter()
        for reason, count in self.failure_counts.items():
            counts[reason, result_rows.TRANSIENT] = self.transient_failure_counts[reason]
            counts[reason, result_rows.PERMANENT] = count - self.transient_failure_counts[reason]
        return +counts

    def add_failures(self, failures: Mapping[Failure, int]) -> None:
        """Add to the counts of images without a map. The keys are the reason and the kind of failure."""
        for (reason, kind), count in failures.items():
            self.failure_counts[reason] += count
            if kind == result_rows.TRANSIENT:
                self.transient_failure_counts[reason] += count


class OpenTasks(NamedTuple):
    """The chunks that remain to compute, and the outcome of the finished chunks."""

    tasks: list[ChunkTask]
    outcome: BatchOutcome


def list_open_tasks(plan: ChunkPlan, store: RunStore, retry_failed: bool) -> OpenTasks:
    """Find the chunks that still have to be computed. Also count the images in finished chunks."""
    sizes = {chunk: stop - start for chunk in plan.shard_chunks for start, stop in [plan.start_and_stop_row(chunk)]}
    done = store.select_parts_of_run(sorted(sizes.keys() & store.finished_chunks()))
    outcome = BatchOutcome(sum(sizes.values()), sum(sizes[chunk] for chunk in done))
    outcome.add_failures(store.count_failures(done))
    retries: dict[int, tuple[int, ...]] = {}
    if retry_failed and outcome.n_failures:
        retries = {chunk: failed for chunk in done if (failed := tuple(store.list_failed_rows(chunk)))}
        outcome = BatchOutcome(outcome.n_images, outcome.n_done_before - sum(map(len, retries.values())))
    open_chunks = [chunk for chunk in sizes if chunk in retries or chunk not in set(done)]
    return OpenTasks([ChunkTask(chunk, retries.get(chunk)) for chunk in open_chunks], outcome)


def run_chunks(
    compute: Callable[[Sequence[ChunkTask]], ChunkProgress],
    store: RunStore,
    plan: ChunkPlan,
    max_failures: int | None = None,
    on_progress: OutcomeCallback | None = None,
    *,
    retry_failed: bool = False,
) -> BatchOutcome:
    """Compute all missing chunks. Raise a RunError if more than `max_failures` images fail."""
    tasks, outcome = list_open_tasks(plan, store, retry_failed)
    with closing(compute(tasks)) as steps:
        for n_images, failures in chain([(0, ())], steps if tasks else ()):
            outcome.add_failures(Counter((failure.reason, failure.kind) for failure in failures))
            outcome.new_failures = failures
            outcome.n_processed += n_images
            if on_progress is not None:
                on_progress(outcome)
            if max_failures is not None and outcome.n_failures > max_failures:
                reasons = "; ".join(f"{reason} ({count} x)" for reason, count in outcome.failure_counts.most_common(3))
                raise RunError(
                    f"{plural(outcome.n_failures, 'image')} failed, more than the limit of {max_failures}: {reasons}"
                )
    outcome.new_failures = ()
    outcome.flag_counts = store.count_flags(sorted({*plan.shard_chunks} & store.finished_chunks()))
    return outcome


def compute_chunks(
    worker: BatchWorker, store: RunStore, plan: ChunkPlan, num_threads: int, tasks: Sequence[ChunkTask]
) -> ChunkProgress:
    """Compute chunks one after another in this process. At the same time, threads read the next images."""
    table, memory = worker.manifest.table, MemoryBudget(num_threads)
    rows = (row for task in tasks for row in task.select_rows(plan, table).to_pylist())
    with closing(load_images(worker.manifest, rows, worker.prepare_model_input, num_threads, memory)) as images:
        for task in tasks:
            chunk_images = islice(images, task.select_rows(plan, table).num_rows)
            with closing(compute_and_write_chunk(task, chunk_images, worker, store, num_threads, memory)) as steps:
                yield from steps


def compute_and_write_chunk(
    task: ChunkTask,
    images: Iterator[LoadedImage],
    worker: BatchWorker,
    store: RunStore,
    num_threads: int,
    memory: MemoryBudget,
) -> ChunkProgress:
    """Compute the rows of a chunk, and write its part file. At the same time, threads draw the overlays."""
    rows: list[dict[str, Any]] = []
    writer = worker.overlay_writer
    with nullcontext() if writer is None else writer.open_queue(num_threads, memory) as overlay_queue:
        for batch in prefetch_batches(group_into_batches(images, worker)):
            batch_rows = worker.compute_rows(batch, overlay_queue)
            rows += batch_rows
            failed_rows = (row for row in batch_rows if row["status"] == result_rows.FAILED)
            failures = {row["row"]: ImageFailure(row["id"], row["error"], row["failure_kind"]) for row in failed_rows}
            yield len(batch.images), list(failures.values())
        if overlay_queue is not None:
            overlay_queue.wait_and_record_failures(rows)
    rows.sort(key=lambda row: row["row"])
    schema = result_rows.build_part_schema(worker.manifest, with_overlays=writer is not None)
    table = result_rows.rows_to_table(rows, schema)
    if task.row_numbers is not None:
        existing = store.read_part(task.chunk).replace_schema_metadata()
        table = result_rows.replace_rows_of_images(existing, table)
        if table.equals(existing):  # they failed again
            return
    store.write_part(task.chunk, table)


def group_into_batches(images: Iterator[LoadedImage], worker: BatchWorker) -> Iterator[ImageBatch]:
    """Group consecutive images into batches. The images of a batch can share a forward pass."""
    for _, group in groupby(images, worker.forward_pass_key):
        remaining = iter(group)
        for first in remaining:
            yield worker.stack_model_inputs([first, *islice(remaining, worker.choose_batch_size(first) - 1)])


def prefetch_batches(batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
    """Yield batches. While a batch is in use, a thread builds the next one."""
    with ThreadPoolExecutor(1, thread_name_prefix="camscope-collating") as pool:
        future = pool.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = pool.submit(next, batches, None)
            yield batch
