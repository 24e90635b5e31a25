"""Write the Parquet files with metric values that a run still lacks, and open all files as one dataset."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from camscope.batch import BatchRun
from camscope.batch.image_manifest import import_arrow
from camscope.batch.result_rows import rows_to_table
from camscope.batch.run_store import RunStore
from camscope.batch.sql_query import group_rows_by_image, open_map_parts, open_parts, read_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

RowsByImage = Sequence[list[dict[str, Any]]]  # the rows of each image


@dataclass(frozen=True)
class MapSelection:
    """Selects the maps of a run to evaluate: some images and methods, for one class.

    Args:
        rows: The row numbers of the images.
        methods: The names of the methods, as in the column `method` of the run.
        target: The target, as in the column `target` of the run.

    >>> MapSelection(rows=(0, 2), methods=("Grad-CAM",), target="1").methods
    ('Grad-CAM',)

    """

    rows: tuple[int, ...]
    methods: tuple[str, ...]
    target: str

    def to_expression(self) -> Any:
        """Convert the selection to a filter expression of PyArrow."""
        field = import_arrow("compute").field
        has_target = (field("target") == self.target) | field("target").is_null()  # a failed image has no target
        return field("row").isin(list(self.rows)) & field("method").isin(list(self.methods)) & has_target


ValueIterator = Callable[[RowsByImage], Iterable[tuple[int, list[dict[str, Any]]]]]


def open_value_files(folder: str | os.PathLike[str]) -> "ds.Dataset":
    """Open all metric value files in a folder as one Arrow dataset."""
    store = RunStore(folder)
    return open_parts([str(store.part_path(chunk)) for chunk in sorted(store.finished_chunks())])


def write_missing_value_files(
    run: BatchRun,
    store: RunStore,
    schema: "pa.Schema",
    iter_finished_counts_and_rows: ValueIterator,
    *,
    selection: MapSelection | None = None,
    max_images: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compute and write the files of metric values that are missing. Finished files stay unchanged.

    `iter_finished_counts_and_rows` yields how many images are finished, and the rows of their values.
    `selection`: only these maps.
    """
    run_store, finished, n_done = RunStore(run.folder), store.finished_chunks(), 0
    chunks = sorted(run_store.finished_chunks())
    total = len(selection.rows) if selection else sum(_count_images_in_chunk(run, chunk) for chunk in chunks)
    for chunk in chunks:
        rows = open_map_parts([str(run_store.part_path(chunk))])
        if selection is not None:
            rows = rows.filter(selection.to_expression())
        parts = list(_split_chunk_into_parts(run, chunk, rows, max_images))
        source = run_store.part_digest(chunk)  # failed images may have been retried since
        valid = {n for n, _, _ in parts if n in finished and store.read_source_digest(n) in (None, source)}
        chunk_table = read_rows(rows) if len(valid) < len(parts) else None
        for number, positions, n_images in parts:
            steps: Iterable[tuple[int, list[dict[str, Any]]]] = [(n_images, [])]
            if number not in valid and chunk_table is not None:
                steps = iter_finished_counts_and_rows(
                    list(group_rows_by_image(chunk_table.slice(positions.start, len(positions))))
                )
            value_rows: list[dict[str, Any]] = []
            for n_images_done, values in steps:
                value_rows += values
                n_done += n_images_done
                if on_progress is not None and n_images_done:
                    on_progress(n_done, total)
            if number not in valid:
                value_rows.sort(key=lambda row: row["row"])  # the rows of one image together
                store.write_part(number, rows_to_table(value_rows, schema), source)


class ChunkPart(NamedTuple):
    """A part of a chunk: its file number, the positions of its rows in the chunk, and its image count."""

    number: int
    row_positions: range
    n_images: int


def _split_chunk_into_parts(run: BatchRun, chunk: int, rows: Any, max_images: int | None) -> Iterator[ChunkPart]:
    """Split a chunk of the run into parts with at most `max_images` images. Each part becomes one file."""
    chunk_size = int(run.run_info["run_config"]["chunk_size"])
    images = np.asarray(read_rows(rows, ["row"])["row"])
    ends = [*np.flatnonzero(np.diff(images, prepend=-1)).tolist(), len(images)]  # of the rows of each image
    n_images = len(ends) - 1
    images_per_part = max_images or max(1, n_images)
    for n, first in enumerate(range(0, n_images, images_per_part)):
        last = min(first + images_per_part, n_images)
        number = chunk * -(-chunk_size // (max_images or chunk_size)) + n
        yield ChunkPart(number, range(ends[first], ends[last]), last - first)


def _count_images_in_chunk(run: BatchRun, chunk: int) -> int:
    manifest, size = run.run_info["run_config"]["manifest"], run.run_info["run_config"]["chunk_size"]
    return int(min(size, manifest["rows"] - chunk * size))
