"""Agreement: what maps of two methods have in common, image by image, and over the images in the mean.

Of each image and target the Spearman correlation of the maps as they are displayed, in the 256 steps that a picture has, on the
finer of their two grids: what nobody can see has no rank. And whether the two are displayed alike, to 1e-4 of the maximum.
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
from camscope.explainers.comparison.equivalence import MAX_HEATMAP_DIFFERENCE
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
DISPLAY_LEVELS = 255  # from nothing to the maximum
OTHER_METHOD_KEY_COLUMNS = tuple(f"other_{name}" for name in METHOD_KEY_COLUMNS)
AGREEMENT_COLUMNS = {
    "row": "int64", "id": "string", "target": "string", **dict.fromkeys((*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS), "string"), "spearman": "float64",
    "reason": "string", "same": "bool_",
}  # fmt: skip


@dataclass(frozen=True)
class MapAgreement:
    """`keys`: methods in the run's order; `estimates`: the mean correlation of the i-th and the j-th over images, i < j.

    `equivalent_groups`: of methods whose displayed maps are the same, of every image.
    """

    keys: Sequence[MethodKey]
    estimates: Mapping[tuple[int, int], Estimate]
    equivalent_groups: Sequence[Sequence[MethodKey]]

    def get_correlation(self, first: MethodKey, second: MethodKey) -> Estimate | None:
        """The mean correlation of two of them; None where no image has one."""
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
    """Agreement of the methods of a run, with its values at `output`; started again, it goes on where it was.

    `group_by_row`: by row, what an interval draws whole; default: the image.
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
    """The parts that are not there yet."""
    pa, todo, there, done = import_arrow(), sorted(run_store.finished_chunks()), store.finished_chunks(), 0
    columns = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in AGREEMENT_COLUMNS.items()])
    rows = {chunk: open_map_parts([str(run_store.part_path(chunk))]) for chunk in todo}
    sources = {
        chunk: run_store.part_digest(chunk) for chunk in todo
    }  # images that failed may have been tried again since
    there = {chunk for chunk in there if store.read_source_digest(chunk) in (None, sources.get(chunk))}
    sizes = {chunk: len(read_rows(rows[chunk], ["row"])["row"].unique()) for chunk in todo}
    for chunk in todo:
        own: list[Row] = []
        work = iter_rows_by_image(rows[chunk], Query().find_positions(rows[chunk])) if chunk not in there else iter(())
        for found in map_in_order(
            lambda image: list(iter_map_pairs(run, image)), work, num_threads or os.cpu_count() or 1
        ):
            own += found
            done += 1
            if on_progress is not None:
                on_progress(done, sum(sizes.values()))
        if chunk not in there:
            store.write_part(chunk, rows_to_table(own, columns), sources[chunk])
        elif on_progress is not None:
            on_progress(done := done + sizes[chunk], sum(sizes.values()))


def read_agreement_table(folder: str | os.PathLike[str]) -> "pa.Table":
    """row, id, target, a method's name, layer and settings, another's, `spearman` or the reason why there is none, `is_same_display`."""
    store = RunStore(folder)
    return read_rows(open_parts([str(store.part_path(chunk)) for chunk in sorted(store.finished_chunks())]))


def list_method_keys(run: BatchRun) -> list[MethodKey]:
    """Every method of a run that has a map, in the order in which they come."""
    rows = run.table(columns=list(METHOD_KEY_COLUMNS), filter=import_arrow("dataset").field("status") != FAILED)
    each = zip(*(rows[name].to_pylist() for name in METHOD_KEY_COLUMNS), strict=True)
    return list(dict.fromkeys(each))


def iter_map_pairs(run: BatchRun, rows: Sequence[Row]) -> Iterator[Row]:
    """What each two maps of an image have in common, target by target."""
    maps = [row for row in rows if row["attribution"] is not None]
    for _, own in groupby(maps, lambda row: row["target"]):
        some = list(own)
        known = _ImageMaps([run.explanation(row) for row in some])
        for i, j in combinations(range(len(some)), 2):
            common = {name: some[i][name] for name in ("row", "id", "target")}
            names = zip(
                (*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS),
                (some[n][name] for n in (i, j) for name in METHOD_KEY_COLUMNS),
                strict=True,
            )
            number, reason = known.correlate(i, j)
            yield common | dict(names) | {"spearman": number, "reason": reason, "same": known.is_same_display(i, j)}


def summarize_agreement(
    pair_table: "pa.Table", keys: Sequence[MethodKey], group_by_row: Mapping[int, Hashable] | None = None
) -> MapAgreement:
    """Means over images, and who is the same throughout."""
    numbers = {key: n for n, key in enumerate(keys)}
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    alike: dict[tuple[int, int], list[bool]] = {}
    names = zip(
        *(pair_table[name].to_pylist() for name in (*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS)), strict=True
    )
    values = (pair_table[name].to_pylist() for name in ("row", "spearman", "same"))
    for name, row, value, is_same in zip(names, *values, strict=True):
        i, j = sorted((numbers[name[:3]], numbers[name[3:]]))
        found.setdefault((i, j), []).append((row, np.nan if value is None else value))
        alike.setdefault((i, j), []).extend([] if is_same is None else [is_same])
    estimates = {
        pair: one for pair, own in found.items() if (one := _estimate_correlation(own, group_by_row)) is not None
    }
    groups: list[list[int]] = []
    for n in range(len(keys)):
        home = next((each for each in groups if (own := alike.get((each[0], n))) and all(own)), None)
        groups.append([n]) if home is None else home.append(n)
    return MapAgreement(keys, estimates, [[keys[n] for n in each] for each in groups if len(each) > 1])


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
    """Maps of an image, with what is asked of each several times worked out once: its ranks on a grid, how it is displayed."""

    def __init__(self, maps: Sequence[Explanation]) -> None:
        self._maps, self._ranks_by_grid = maps, dict[tuple[int, tuple[int, ...]], Any]()
        self._display_values = [one.heatmap("grid") for one in maps]
        self._is_empty = [not one.any() for one in self._display_values]

    def is_same_display(self, i: int, j: int) -> bool | None:
        """Whether two maps are displayed alike; None where nothing is displayed of either."""
        if self._is_empty[i] or self._is_empty[j]:
            return None if self._is_empty[i] == self._is_empty[j] else False
        one, other = self._display_values[i], self._display_values[j]
        return one.shape == other.shape and bool(np.abs(one - other).max() <= MAX_HEATMAP_DIFFERENCE)

    def correlate(self, i: int, j: int) -> tuple[float | None, str | None]:
        """Spearman's, or why there is none."""
        grids = self._maps[i].grid, self._maps[j].grid
        if len(grids[0]) != len(grids[1]):
            return None, f"maps of {len(grids[0])} and of {plural(len(grids[1]), 'axis')}"
        finer = tuple(map(max, *grids))
        one, other = (self._rank_on_grid(n, finer) for n in (i, j))
        if one is None or other is None:
            return None, "a map has one value everywhere, NaN or infinity"
        return float(np.clip(one @ other, -1, 1)), None

    def _rank_on_grid(self, index: int, grid: tuple[int, ...]) -> Any:
        """(M,) ranks less their mean, of length 1; None of a map without an order."""
        if (index, grid) not in self._ranks_by_grid:
            shown, made = self._display_values[index].astype(np.float64), None
            if np.isfinite(shown).all():
                placed = shown if shown.shape == grid else Placement.identity(grid).project(shown)[0]
                (row,) = center_and_normalize_rows(rank_values(np.rint(DISPLAY_LEVELS * placed))[None])
                made = None if np.isnan(row).any() else row
            self._ranks_by_grid[index, grid] = made
        return self._ranks_by_grid[index, grid]


def get_agreement_folder(output: str | os.PathLike[str]) -> Path:
    """Where the values lie, beside those of the metrics."""
    return Path(output) / "agreement"
