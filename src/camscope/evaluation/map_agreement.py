"""Agreement of the maps of two methods, for each image and as a mean over images.

It is the Spearman correlation of the displayed maps for each image and target, in the 256 levels of a figure, on the finer of
their two grids: differences that are not visible have no rank. It also records whether two maps are displayed alike, up
to 1e-4 of the maximum.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch import BatchRun
from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.manifest import import_arrow
from camscope.batch.query import Query, iter_rows_by_image, open_map_parts, open_parts, read_rows
from camscope.batch.result_rows import FAILED, rows_to_table
from camscope.batch.run_store import RunStore
from camscope.errors import UndefinedError
from camscope.explainers.comparison.equal_maps import MAX_HEATMAP_DIFFERENCE
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.metrics.similarity import center_and_normalize_rows, rank_values
from camscope.metrics.statistics import Estimate, estimate_mean
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
MethodKey = tuple[str, str | None, str | None]  # method, layer, and the digest of its settings
METHOD_KEY_COLUMNS = ("method", "layer", "parameters_digest")
DISPLAY_LEVELS = 255  # levels above zero
OTHER_METHOD_KEY_COLUMNS = tuple(f"other_{name}" for name in METHOD_KEY_COLUMNS)
AGREEMENT_COLUMNS = {
    "row": "int64",
    "id": "string",
    "target": "string",
    **dict.fromkeys((*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS), "string"),
    "spearman": "float64",
    "reason": "string",
    "same": "bool_",
}


@dataclass(frozen=True)
class MapAgreement:
    """The agreement of the methods of a run.

    Attributes:
        keys: The methods in the run's order.
        estimates: The mean correlation of the i-th and the j-th method over images, for i < j.
        equivalent_groups: Groups of methods whose displayed maps are the same for every image.

    """

    keys: Sequence[MethodKey]
    estimates: Mapping[tuple[int, int], Estimate]
    equivalent_groups: Sequence[Sequence[MethodKey]]

    def get_correlation(self, first: MethodKey, second: MethodKey) -> Estimate | None:
        """Return the mean correlation of two methods; None if no image has one."""
        i, j = sorted((self.keys.index(first), self.keys.index(second)))
        return self.estimates.get((i, j))


def compute_agreement(
    run: BatchRun,
    output: str | os.PathLike[str],
    group_by_row: Mapping[int, Hashable] | None = None,
    *,
    num_threads: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MapAgreement:
    """Compute the agreement of the methods of a run, with values at `output`; an interrupted computation resumes.

    `group_by_row` gives the group of each row for the intervals. Default: the image.
    """
    require_valid_num_threads(num_threads)
    store, parts = RunStore(output), RunStore(run.folder)
    facts = {
        "run_config": {"run": run.run_info["run_config"], "agreement": "spearman"},
        "versions": run.run_info["versions"],
    }
    with store.open_run(facts, overwrite=overwrite):
        _write_agreement_parts(run, store, parts, num_threads, on_progress)
    return summarize_agreement(read_agreement_table(output), list_method_keys(run), group_by_row)


def _write_agreement_parts(
    run: BatchRun,
    store: RunStore,
    run_store: RunStore,
    num_threads: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write the missing parts."""
    pa, chunks, n_done = import_arrow(), sorted(run_store.finished_chunks()), 0
    columns = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in AGREEMENT_COLUMNS.items()])
    rows = {chunk: open_map_parts([str(run_store.part_path(chunk))]) for chunk in chunks}
    sources = {chunk: run_store.part_digest(chunk) for chunk in chunks}  # failed images may have been retried since
    finished = {
        chunk for chunk in store.finished_chunks() if store.read_source_digest(chunk) in (None, sources.get(chunk))
    }
    sizes = {chunk: len(read_rows(rows[chunk], ["row"])["row"].unique()) for chunk in chunks}
    for chunk in chunks:
        pair_rows: list[Row] = []
        work = (
            iter_rows_by_image(rows[chunk], Query().find_positions(rows[chunk])) if chunk not in finished else iter(())
        )
        for image_rows in map_in_order(
            lambda image: list(iter_map_pairs(run, image)), work, num_threads or os.cpu_count() or 1
        ):
            pair_rows += image_rows
            n_done += 1
            if on_progress is not None:
                on_progress(n_done, sum(sizes.values()))
        if chunk not in finished:
            store.write_part(chunk, rows_to_table(pair_rows, columns), sources[chunk])
        elif on_progress is not None:
            on_progress(n_done := n_done + sizes[chunk], sum(sizes.values()))


def read_agreement_table(folder: str | os.PathLike[str]) -> "pa.Table":
    """Read one row for each image, target and pair of methods.

    The columns are row, id, target, the keys of both methods, `spearman` or the reason why there is none, and `same`.
    """
    store = RunStore(folder)
    return read_rows(open_parts([str(store.part_path(chunk)) for chunk in sorted(store.finished_chunks())]))


def list_method_keys(run: BatchRun) -> list[MethodKey]:
    """Return every method of a run that has a map, in order of appearance."""
    rows = run.table(columns=list(METHOD_KEY_COLUMNS), filter=import_arrow("dataset").field("status") != FAILED)
    keys = zip(*(rows[name].to_pylist() for name in METHOD_KEY_COLUMNS), strict=True)
    return list(dict.fromkeys(keys))


def iter_map_pairs(run: BatchRun, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the agreement of each pair of maps of an image, target by target."""
    maps = [row for row in rows if row["attribution"] is not None]
    for _, group in groupby(maps, lambda row: row["target"]):
        target_rows = list(group)
        image_maps = _ImageMaps([run.explanation(row) for row in target_rows])
        for i, j in combinations(range(len(target_rows)), 2):
            common = {name: target_rows[i][name] for name in ("row", "id", "target")}
            names = zip(
                (*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS),
                (target_rows[n][name] for n in (i, j) for name in METHOD_KEY_COLUMNS),
                strict=True,
            )
            correlation, reason = image_maps.correlate(i, j)
            is_same = image_maps.is_same_display(i, j)
            yield common | dict(names) | {"spearman": correlation, "reason": reason, "same": is_same}


def summarize_agreement(
    pair_table: "pa.Table", keys: Sequence[MethodKey], group_by_row: Mapping[int, Hashable] | None = None
) -> MapAgreement:
    """Return mean correlations over images, and groups of methods whose maps are always the same."""
    indices = {key: n for n, key in enumerate(keys)}
    correlations: dict[tuple[int, int], list[tuple[int, float]]] = {}
    same_displays: dict[tuple[int, int], list[bool]] = {}
    names = zip(
        *(pair_table[name].to_pylist() for name in (*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS)), strict=True
    )
    values = (pair_table[name].to_pylist() for name in ("row", "spearman", "same"))
    for name, row, value, is_same in zip(names, *values, strict=True):
        i, j = sorted((indices[name[:3]], indices[name[3:]]))
        correlations.setdefault((i, j), []).append((row, np.nan if value is None else value))
        same_displays.setdefault((i, j), []).extend([] if is_same is None else [is_same])
    estimates = {
        pair: estimate
        for pair, row_values in correlations.items()
        if (estimate := _estimate_correlation(row_values, group_by_row)) is not None
    }
    groups: list[list[int]] = []
    for n in range(len(keys)):
        group = next((g for g in groups if (flags := same_displays.get((g[0], n))) and all(flags)), None)
        groups.append([n]) if group is None else group.append(n)
    return MapAgreement(keys, estimates, [[keys[n] for n in group] for group in groups if len(group) > 1])


def _estimate_correlation(
    row_values: Sequence[tuple[int, float]], group_by_row: Mapping[int, Hashable] | None
) -> Estimate | None:
    rows, values = zip(*row_values, strict=True)
    try:
        return estimate_mean(
            values, [row if group_by_row is None else group_by_row[row] for row in rows], bounds=(-1.0, 1.0)
        )
    except UndefinedError:
        return None


class _ImageMaps:
    """The maps of an image, with cached ranks on each grid and cached displayed values."""

    def __init__(self, maps: Sequence[Explanation]) -> None:
        self._maps, self._ranks_by_grid = maps, dict[tuple[int, tuple[int, ...]], Any]()
        self._display_values = [explanation.heatmap("grid") for explanation in maps]
        self._is_empty = [not values.any() for values in self._display_values]

    def is_same_display(self, i: int, j: int) -> bool | None:
        """Return whether two maps are displayed alike; None if both are empty."""
        if self._is_empty[i] or self._is_empty[j]:
            return None if self._is_empty[i] == self._is_empty[j] else False
        first, second = self._display_values[i], self._display_values[j]
        return first.shape == second.shape and bool(np.abs(first - second).max() <= MAX_HEATMAP_DIFFERENCE)

    def correlate(self, i: int, j: int) -> tuple[float | None, str | None]:
        """Return Spearman's correlation of two maps, or the reason why there is none."""
        grids = self._maps[i].grid, self._maps[j].grid
        if len(grids[0]) != len(grids[1]):
            return None, f"maps with {len(grids[0])} and {plural(len(grids[1]), 'axis')}"
        finer = tuple(map(max, *grids))
        first, second = (self._rank_on_grid(n, finer) for n in (i, j))
        if first is None or second is None:
            return None, "a map is constant, or contains NaN or infinity"
        return float(np.clip(first @ second, -1, 1)), None

    def _rank_on_grid(self, index: int, grid: tuple[int, ...]) -> Any:
        """Return the centered, normalized ranks (M,) of a map; None for a constant map."""
        if (index, grid) not in self._ranks_by_grid:
            values, ranks = self._display_values[index].astype(np.float64), None
            if np.isfinite(values).all():
                placed = values if values.shape == grid else Placement.identity(grid).project(values)[0]
                (row,) = center_and_normalize_rows(rank_values(np.rint(DISPLAY_LEVELS * placed))[None])
                ranks = None if np.isnan(row).any() else row
            self._ranks_by_grid[index, grid] = ranks
        return self._ranks_by_grid[index, grid]


def get_agreement_folder(output: str | os.PathLike[str]) -> Path:
    """Return the folder of the agreement values inside the folder of an evaluation."""
    return Path(output) / "agreement"
