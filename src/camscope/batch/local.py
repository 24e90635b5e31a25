"""The local engine: chunk after chunk in this process, images read ahead by threads."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from camscope.batch import rows
from camscope.batch.manifest import Manifest
from camscope.batch.reading import Loaded, loaded
from camscope.batch.store import Store
from camscope.batch.worker import Batch, Worker
from camscope.errors import InputError, RunError

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


@dataclass
class Outcome:
    """What became of the images of a run, or of a shard: of how many there are maps, and why others have none."""

    total: int = 0  # images of this shard
    before: int = 0  # of them, found done
    images: int = 0  # of them, worked off now
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> int:
        """Images without a map."""
        return self.reasons.total()

    def count(self, images: int, reasons: Iterable[str], most: int | None, told: Told | None) -> None:
        """Add what became of some images, and tell it; RunError after more failures than `most`."""
        self.reasons.update(reasons)
        self.images += images
        if told is not None:
            told(self)
        if most is not None and self.failures > most:
            why = "; ".join(f"{reason} ({count} x)" for reason, count in self.reasons.most_common(3))
            raise RunError(f"{self.failures} images failed, more than {most}: {why}")


def unfinished(plan: Plan, store: Store) -> tuple[list[int], Outcome]:
    """The chunks whose parts are not there, and what is known before any of them is begun."""
    there, sizes = store.finished(), {c: stop - start for c in plan.chunks for start, stop in [plan.bounds(c)]}
    done = [chunk for chunk in sizes if chunk in there]
    outcome = Outcome(sum(sizes.values()), sum(sizes[chunk] for chunk in done), reasons=store.reasons(done))
    return [chunk for chunk in sizes if chunk not in there], outcome


def run_chunks(
    worker: Worker,
    manifest: Manifest,
    store: Store,
    plan: Plan,
    threads: int,
    max_failures: int | None = None,
    told: Told | None = None,
) -> Outcome:
    """Work off the chunks whose parts are not there; RunError after more failures than are allowed."""
    todo, outcome = unfinished(plan, store)
    outcome.count(0, (), max_failures, told)
    each = (row for chunk in todo for row in manifest.rows(*plan.bounds(chunk)))
    images = loaded(manifest, each, worker.read, threads)
    try:
        for chunk in todo:
            start, stop = plan.bounds(chunk)
            with closing(written(chunk, islice(images, stop - start), worker, store, threads)) as steps:
                for count, reasons in steps:
                    outcome.count(count, reasons, max_failures, told)
    finally:
        images.close()
    return outcome


def written(
    chunk: int, images: Iterator[Loaded], worker: Worker, store: Store, threads: int
) -> Generator[tuple[int, list[str]], None, None]:
    """Make the part of a chunk of its images; after each pass: how many had it, and why some of them have no map.

    Overlays are drawn meanwhile, by so many threads, and are there before the part is.
    """
    made: list[dict[str, Any]] = []
    with nullcontext() if worker.pictures is None else worker.pictures.drawing(threads) as draw:
        for batch in ahead(batches(images, worker)):
            new = worker.rows(batch, draw)
            made += new
            yield (
                len(batch.images),
                list({row["row"]: row["error"] for row in new if row["status"] == rows.FAILED}.values()),
            )
        if draw is not None:
            draw.finish(made)
    made.sort(key=lambda row: row["row"])
    columns = rows.schema(worker.manifest, overlays=worker.pictures is not None)
    store.write(chunk, rows.table_of(made, columns))


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
