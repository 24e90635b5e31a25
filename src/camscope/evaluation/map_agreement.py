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

from camscope.batch import Run
from camscope.batch.image_loading import expect_threads, in_order
from camscope.batch.manifest import arrow
from camscope.batch.query import Query, by_image, open_maps, open_parts, read_rows
from camscope.batch.result_rows import FAILED, table_of
from camscope.batch.run_store import Store
from camscope.errors import UndefinedError
from camscope.explainers.comparison.equivalence import SAME
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.metrics.similarity import ranks, unit
from camscope.metrics.statistics import Estimate, estimated
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
Key = tuple[str, str | None, str | None]  # method, layer, and the digest of its settings
KEY = ("method", "layer", "parameters")
STEPS = 255  # from nothing to the maximum
OTHER = tuple(f"other_{name}" for name in KEY)
COLUMNS = {
    "row": "int64", "id": "string", "target": "string", **dict.fromkeys((*KEY, *OTHER), "string"), "spearman": "float64",
    "reason": "string", "same": "bool_",
}  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """`keys`: methods in the run's order; `estimates`: the mean correlation of the i-th and the j-th over images, i < j.

    `groups`: of methods whose displayed maps are the same, of every image.
    """

    keys: Sequence[Key]
    estimates: Mapping[tuple[int, int], Estimate]
    groups: Sequence[Sequence[Key]]

    def of(self, one: Key, other: Key) -> Estimate | None:
        """The mean correlation of two of them; None where no image has one."""
        i, j = sorted((self.keys.index(one), self.keys.index(other)))
        return self.estimates.get((i, j))


def agree(
    run: Run,
    output: str | os.PathLike[str],
    group: Mapping[int, Hashable] | None = None,
    *,
    threads: int | None = None,
    overwrite: bool = False,
    told: Callable[[int, int], None] | None = None,
) -> Agreement:
    """Agreement of the methods of a run, with its values at `output`; started again, it goes on where it was.

    `group`: by row, what an interval draws whole; default: the image.
    """
    expect_threads(threads)
    store, parts = Store(output), Store(run.folder)
    facts = {"made_with": {"run": run.facts["made_with"], "agreement": "spearman"}, "versions": run.facts["versions"]}
    with store.begun(facts, overwrite=overwrite):
        _write(run, store, parts, threads, told)
    return summed_up(table(output), keys_of(run), group)


def _write(run: Run, store: Store, parts: Store, threads: int | None, told: Callable[[int, int], None] | None) -> None:
    """The parts that are not there yet."""
    pa, todo, there, done = arrow(), sorted(parts.finished()), store.finished(), 0
    columns = pa.schema([pa.field(name, getattr(pa, kind)()) for name, kind in COLUMNS.items()])
    rows = {chunk: open_maps([str(parts.path_of(chunk))]) for chunk in todo}
    sources = {chunk: parts.digest_of(chunk) for chunk in todo}  # images that failed may have been tried again since
    there = {chunk for chunk in there if store.source_of(chunk) in (None, sources.get(chunk))}
    sizes = {chunk: len(read_rows(rows[chunk], ["row"])["row"].unique()) for chunk in todo}
    for chunk in todo:
        own: list[Row] = []
        work = by_image(rows[chunk], Query().places(rows[chunk])) if chunk not in there else iter(())
        for found in in_order(lambda image: list(pairs(run, image)), work, threads or os.cpu_count() or 1):
            own += found
            done += 1
            if told is not None:
                told(done, sum(sizes.values()))
        if chunk not in there:
            store.write(chunk, table_of(own, columns), sources[chunk])
        elif told is not None:
            told(done := done + sizes[chunk], sum(sizes.values()))


def table(folder: str | os.PathLike[str]) -> "pa.Table":
    """row, id, target, a method's name, layer and settings, another's, `spearman` or the reason why there is none, `same`."""
    store = Store(folder)
    return read_rows(open_parts([str(store.path_of(chunk)) for chunk in sorted(store.finished())]))


def keys_of(run: Run) -> list[Key]:
    """Every method of a run that has a map, in the order in which they come."""
    rows = run.table(columns=list(KEY), filter=arrow("dataset").field("status") != FAILED)
    each = zip(*(rows[name].to_pylist() for name in KEY), strict=True)
    return list(dict.fromkeys(each))


def pairs(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    """What each two maps of an image have in common, target by target."""
    maps = [row for row in rows if row["heat"] is not None]
    for _, own in groupby(maps, lambda row: row["target"]):
        some = list(own)
        known = _Maps([run.explanation(row) for row in some])
        for i, j in combinations(range(len(some)), 2):
            common = {name: some[i][name] for name in ("row", "id", "target")}
            names = zip((*KEY, *OTHER), (some[n][name] for n in (i, j) for name in KEY), strict=True)
            number, reason = known.correlation(i, j)
            yield common | dict(names) | {"spearman": number, "reason": reason, "same": known.same(i, j)}


def summed_up(pairs: "pa.Table", keys: Sequence[Key], group: Mapping[int, Hashable] | None = None) -> Agreement:
    """Means over images, and who is the same throughout."""
    numbers = {key: n for n, key in enumerate(keys)}
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    alike: dict[tuple[int, int], list[bool]] = {}
    names = zip(*(pairs[name].to_pylist() for name in (*KEY, *OTHER)), strict=True)
    values = (pairs[name].to_pylist() for name in ("row", "spearman", "same"))
    for name, row, value, is_same in zip(names, *values, strict=True):
        i, j = sorted((numbers[name[:3]], numbers[name[3:]]))
        found.setdefault((i, j), []).append((row, np.nan if value is None else value))
        alike.setdefault((i, j), []).extend([] if is_same is None else [is_same])
    estimates = {pair: one for pair, own in found.items() if (one := _estimate(own, group)) is not None}
    groups: list[list[int]] = []
    for n in range(len(keys)):
        home = next((each for each in groups if (own := alike.get((each[0], n))) and all(own)), None)
        groups.append([n]) if home is None else home.append(n)
    return Agreement(keys, estimates, [[keys[n] for n in each] for each in groups if len(each) > 1])


def _estimate(own: Sequence[tuple[int, float]], group: Mapping[int, Hashable] | None) -> Estimate | None:
    rows, values = zip(*own, strict=True)
    try:
        return estimated(values, [row if group is None else group[row] for row in rows], bounds=(-1.0, 1.0))
    except UndefinedError:
        return None


class _Maps:
    """Maps of an image, with what is asked of each several times worked out once: its ranks on a grid, how it is displayed."""

    def __init__(self, maps: Sequence[Explanation]) -> None:
        self._maps, self._known = maps, dict[tuple[int, tuple[int, ...]], Any]()
        self._shown = [one.heatmap("grid") for one in maps]
        self._empty = [not one.any() for one in self._shown]

    def same(self, i: int, j: int) -> bool | None:
        """Whether two maps are displayed alike; None where nothing is displayed of either."""
        if self._empty[i] or self._empty[j]:
            return None if self._empty[i] == self._empty[j] else False
        one, other = self._shown[i], self._shown[j]
        return one.shape == other.shape and bool(np.abs(one - other).max() <= SAME)

    def correlation(self, i: int, j: int) -> tuple[float | None, str | None]:
        """Spearman's, or why there is none."""
        grids = self._maps[i].grid, self._maps[j].grid
        if len(grids[0]) != len(grids[1]):
            return None, f"maps of {len(grids[0])} and of {plural(len(grids[1]), 'axis')}"
        finer = tuple(map(max, *grids))
        one, other = (self._on(n, finer) for n in (i, j))
        if one is None or other is None:
            return None, "a map has one value everywhere, NaN or infinity"
        return float(np.clip(one @ other, -1, 1)), None

    def _on(self, n: int, grid: tuple[int, ...]) -> Any:
        """(M,) ranks less their mean, of length 1; None of a map without an order."""
        if (n, grid) not in self._known:
            shown, made = self._shown[n].astype(np.float64), None
            if np.isfinite(shown).all():
                placed = shown if shown.shape == grid else Placement.identity(grid).project(shown)[0]
                (row,) = unit(ranks(np.rint(STEPS * placed))[None])
                made = None if np.isnan(row).any() else row
            self._known[n, grid] = made
        return self._known[n, grid]


def folder_of(output: str | os.PathLike[str]) -> Path:
    """Where the values lie, beside those of the metrics."""
    return Path(output) / "agreement"
