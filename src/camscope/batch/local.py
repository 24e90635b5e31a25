"""The local engine: chunk after chunk in this process, images read ahead by threads."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from camscope.batch import rows
from camscope.batch.manifest import Manifest
from camscope.batch.reading import Loaded, loaded
from camscope.batch.store import Store
from camscope.batch.worker import Worker
from camscope.errors import InputError, RunError

Told = Callable[[int, int], None]  # so many images more are done, and so many of them failed


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
    """What became of the images of a run: of how many there are maps now, and why others have none."""

    images: int = 0
    before: int = 0  # of them, found done
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> int:
        """Images without a map."""
        return self.reasons.total()

    def count(self, images: int, reasons: Iterable[str], most: int | None, told: Told | None) -> None:
        """Add what became of some images, and tell it; RunError after more failures than `most`."""
        failed = self.failures
        self.reasons.update(reasons)
        self.images += images
        if told is not None:
            told(images, self.failures - failed)
        if most is not None and self.failures > most:
            why = "; ".join(f"{reason} ({count} x)" for reason, count in self.reasons.most_common(3))
            raise RunError(f"{self.failures} images failed, more than {most}: {why}")


def unfinished(plan: Plan, store: Store) -> tuple[list[int], Outcome]:
    """The chunks whose parts are not there, and what is known before any of them is begun."""
    finished = store.finished()
    before = sum(stop - start for start, stop in map(plan.bounds, plan.chunks) if start // plan.size in finished)
    return [chunk for chunk in plan.chunks if chunk not in finished], Outcome(before=before)


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
    each = (row for chunk in todo for row in manifest.rows(*plan.bounds(chunk)))
    images = loaded(manifest, each, worker.read, threads)
    try:
        for chunk in todo:
            start, stop = plan.bounds(chunk)
            for count, reasons in written(chunk, islice(images, stop - start), worker, store):
                outcome.count(count, reasons, max_failures, told)
    finally:
        images.close()
    return outcome


def written(
    chunk: int, images: Iterator[Loaded], worker: Worker, store: Store
) -> Generator[tuple[int, list[str]], None, None]:
    """Make the part of a chunk of its images; after each pass: how many had it, and why some of them have no map."""
    made: list[dict[str, Any]] = []
    for batch in batches(images, worker):
        new = worker.rows(batch)
        made += new
        yield len(batch), list({row["row"]: row["error"] for row in new if row["status"] == rows.FAILED}.values())
    made.sort(key=lambda row: row["row"])
    store.write(chunk, rows.table_of(made, rows.schema(worker.manifest)))


def batches(images: Iterator[Loaded], worker: Worker) -> Iterator[Sequence[Loaded]]:
    """Neighbours of one group, so many at a time as share a pass."""
    for _, group in groupby(images, worker.group):
        while batch := list(islice(group, worker.batch_size)):
            yield batch
