"""Compute how similar the maps of two methods are, by Spearman's correlation of the displayed maps."""

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch import BatchRun
from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.image_manifest import import_arrow
from camscope.batch.result_rows import FAILED
from camscope.batch.run_store import RunStore
from camscope.batch.sql_query import read_rows
from camscope.errors import UndefinedError
from camscope.evaluation.metric_value_files import RowsByImage, open_value_files, write_missing_value_files
from camscope.explainers.comparison.equal_maps import MAX_HEATMAP_DIFFERENCE
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.metrics.map_similarity import center_and_normalize_rows, rank_values
from camscope.metrics.mean_estimates import Estimate, estimate_mean
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
    """How methods of a run agree: the mean correlation of maps for each pair of methods, and groups of methods with
    equal maps.
    """

    keys: Sequence[MethodKey]  # in the run's order
    estimates: Mapping[tuple[int, int], Estimate]  # of the i-th and the j-th method over images, for i < j
    equivalent_groups: Sequence[Sequence[MethodKey]]  # whose displayed maps are the same for every image

    def get_correlation(self, first: MethodKey, second: MethodKey) -> Estimate | None:
        """Return the mean correlation between the maps of two methods.
        Return None if the correlation is undefined for all images.
        """
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
    """Compute the mean correlation between the maps of each pair of methods. An interrupted run resumes from `output`."""
    require_valid_num_threads(num_threads)
    store, pa = RunStore(output), import_arrow()
    schema = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in AGREEMENT_COLUMNS.items()])
    facts = {
        "run_config": {"run": run.run_info["run_config"], "agreement": "spearman"},
        "versions": run.run_info["versions"],
    }

    def iter_finished_counts_and_rows(images: RowsByImage) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        n_threads = num_threads or os.cpu_count() or 1
        pairs_by_image = map_in_order(lambda image: list(iter_pair_agreements(run, image)), images, n_threads)
        return ((1, pairs) for pairs in pairs_by_image)

    with store.open_run(facts, overwrite=overwrite):
        write_missing_value_files(run, store, schema, iter_finished_counts_and_rows, on_progress=on_progress)
    rows = run.table(columns=list(METHOD_KEY_COLUMNS), filter=import_arrow("dataset").field("status") != FAILED)
    keys = dict.fromkeys(zip(*(rows[name].to_pylist() for name in METHOD_KEY_COLUMNS), strict=True))
    return summarize_agreement(read_rows(open_value_files(output)), list(keys), group_by_row)


def iter_pair_agreements(run: BatchRun, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield one table row for each pair of maps with the same image and target. The row holds their correlation."""
    maps = [row for row in rows if row["attribution"] is not None]
    for _, group in groupby(maps, lambda row: row["target"]):
        target_rows = list(group)
        image_maps = _ImageMaps([run.explanation(row) for row in target_rows])
        for i, j in combinations(range(len(target_rows)), 2):
            first, second = target_rows[i], target_rows[j]
            pair = {name: first[name] for name in ("row", "id", "target", *METHOD_KEY_COLUMNS)}
            pair |= {f"other_{name}": second[name] for name in METHOD_KEY_COLUMNS}
            correlation, reason = image_maps.correlate_maps_or_give_reason(i, j)
            yield pair | {"spearman": correlation, "reason": reason, "same": image_maps.have_same_display(i, j)}


def summarize_agreement(
    pair_table: "pa.Table", keys: Sequence[MethodKey], group_by_row: Mapping[int, Hashable] | None = None
) -> MapAgreement:
    """Average the correlations of each pair of methods over images. Also group methods whose maps are always equal."""
    indices = {key: n for n, key in enumerate(keys)}
    correlations: dict[tuple[int, int], list[tuple[int, float]]] = {}
    same_displays: dict[tuple[int, int], list[bool]] = {}
    columns = (*METHOD_KEY_COLUMNS, *OTHER_METHOD_KEY_COLUMNS, "row", "spearman", "same")
    for *names, row, value, is_same in zip(*(pair_table[name].to_pylist() for name in columns), strict=True):
        i, j = sorted((indices[tuple(names[:3])], indices[tuple(names[3:])]))
        correlations.setdefault((i, j), []).append((row, np.nan if value is None else value))
        same_displays.setdefault((i, j), []).extend([] if is_same is None else [is_same])
    estimates = {}
    for pair, row_values in correlations.items():
        rows, numbers = zip(*row_values, strict=True)
        row_groups = rows if group_by_row is None else [group_by_row[row] for row in rows]
        with contextlib.suppress(UndefinedError):
            estimates[pair] = estimate_mean(numbers, row_groups, bounds=(-1.0, 1.0))
    groups: list[list[int]] = []
    for n in range(len(keys)):
        group = next((g for g in groups if (flags := same_displays.get((g[0], n))) and all(flags)), None)
        groups.append([n]) if group is None else group.append(n)
    return MapAgreement(keys, estimates, [[keys[n] for n in group] for group in groups if len(group) > 1])


class _ImageMaps:
    """The maps of one image. Their ranks and displayed values are computed once."""

    def __init__(self, maps: Sequence[Explanation]) -> None:
        self._maps, self._ranks_by_grid = maps, dict[tuple[int, tuple[int, ...]], Any]()
        self._display_values = [explanation.heatmap("grid") for explanation in maps]
        self._is_empty = [not values.any() for values in self._display_values]

    def have_same_display(self, first_index: int, second_index: int) -> bool | None:
        """Return whether two maps look the same when displayed. Two empty maps do not count, so return None for them."""
        if self._is_empty[first_index] or self._is_empty[second_index]:
            return None if self._is_empty[first_index] == self._is_empty[second_index] else False
        first, second = self._display_values[first_index], self._display_values[second_index]
        return first.shape == second.shape and bool(np.abs(first - second).max() <= MAX_HEATMAP_DIFFERENCE)

    def correlate_maps_or_give_reason(self, first_index: int, second_index: int) -> tuple[float | None, str | None]:
        """Return Spearman's correlation between two maps. If the correlation is undefined, return None and the reason."""
        grids = self._maps[first_index].grid, self._maps[second_index].grid
        if len(grids[0]) != len(grids[1]):
            return None, f"maps with {len(grids[0])} and {plural(len(grids[1]), 'axis')}"
        finer = tuple(map(max, *grids))
        first, second = (self._rank_on_grid(n, finer) for n in (first_index, second_index))
        if first is None or second is None:
            return None, "a map is constant, or contains NaN or infinity"
        return float(np.clip(first @ second, -1, 1)), None

    def _rank_on_grid(self, map_index: int, grid: tuple[int, ...]) -> Any:
        """Resize a map to a grid. Return the normalized ranks (M,) of its values.

        Return None if the map is constant or has NaN.
        """
        if (map_index, grid) not in self._ranks_by_grid:
            values, ranks = self._display_values[map_index].astype(np.float64), None
            if np.isfinite(values).all():
                placed = values if values.shape == grid else Placement.identity(grid).project(values)[0]
                (row,) = center_and_normalize_rows(rank_values(np.rint(DISPLAY_LEVELS * placed))[None])
                ranks = None if np.isnan(row).any() else row
            self._ranks_by_grid[map_index, grid] = ranks
        return self._ranks_by_grid[map_index, grid]
