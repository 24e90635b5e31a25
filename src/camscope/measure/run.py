"""measure: metrics of every map of a run into one Parquet dataset in long form, restartable as the run itself."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch import Run
from camscope.batch.manifest import KNOWN, arrow
from camscope.batch.query import Pieces, Query, by_image
from camscope.batch.rows import table_of
from camscope.batch.store import Store
from camscope.batch.threads import in_order
from camscope.errors import ImageError, InputError, UndefinedError
from camscope.explanation import Explanation
from camscope.measure.evidence import Evidence, Mask, evidence_of
from camscope.measure.maps import floors, shown
from camscope.metrics import METRICS, Metric

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
KEPT = ("row", "id", "method", "layer", "parameters", "target", "label")
OWN = {"control": "bool_", "metric": "string", "value": "float64", "reason": "string"}


@dataclass(frozen=True)
class Measuring:
    """Which metrics of which run, and where the evidence is; None: metrics of the map alone."""

    run: Run
    metrics: Sequence[Metric]
    evidence: Evidence | None

    @cached_property
    def columns(self) -> "pa.Schema":
        """Of the long form; behind our own the manifest's, among them those by which groups are told."""
        pa, run = arrow(), self.run.dataset.schema
        own = [pa.field(name, getattr(pa, kind)()) for name, kind in OWN.items()]
        return pa.schema([*map(run.field, KEPT), *own, *(field for field in run if field.name not in KNOWN)])

    def of_image(self, rows: Sequence[Row]) -> list[Row]:
        """The values of all maps of an image, and of those that know nothing; a reason where there is no value."""
        maps = [row for row in rows if row["heat"] is not None]
        if not maps:
            return [self._row(row, one.name, None, f"no map: {row['error']}") for row in rows for one in self.metrics]
        mask, unknown = self._mask(maps[0])
        found = [value for row in maps for value in self._of_map(row, self.run.explanation(row), mask, unknown)]
        return found if mask is None else found + self._of_floors(maps[0], mask)

    def _mask(self, row: Row) -> tuple[Mask | None, str]:
        if self.evidence is None:
            return None, "no evidence is given"
        if row["image_size"] is None:
            return None, "the size of the image is unknown, for the preprocessing has no known geometry"
        try:
            return self.evidence.mask(row, tuple(row["image_size"])), ""
        except UndefinedError as error:
            return None, str(error)

    def _of_map(self, row: Row, one: Explanation, mask: Mask | None, unknown: str) -> Iterator[Row]:
        try:
            heat, inside, _ = shown(one, np.zeros(row["image_size"] or (1, 1), np.bool_) if mask is None else mask)
        except UndefinedError as error:
            yield from (self._row(row, each.name, None, str(error)) for each in self.metrics)
            return
        for each in self.metrics:
            yield self._row(row, each.name, *value(each, heat, None if mask is None else inside, unknown))

    def _of_floors(self, row: Row, mask: Mask) -> list[Row]:
        """None without the photograph, whose edges one of them shows: a method is held against all of them or none."""
        try:
            one, pixels = self.run.explanation(row), self.run.photo(row)
            _, inside, window = shown(one, mask)
        except (ImageError, UndefinedError):
            return []
        common = {**row, "layer": None, "parameters": None}
        return [
            self._row({**common, "method": name}, each.name, *value(each, heat, inside, ""), control=True)
            for name, heat in floors(one, pixels, window)
            for each in self.metrics
        ]

    def _row(self, row: Row, name: str, number: float | None, reason: str | None, *, control: bool = False) -> Row:
        return {**row, "control": control, "metric": name, "value": number, "reason": reason}


def value(metric: Metric, heat: Any, mask: Mask | None, unknown: str) -> tuple[float | None, str | None]:
    """A metric's number, or the reason why there is none."""
    if metric.needs == "mask" and mask is None:
        return None, unknown
    try:
        return float(metric(heat) if metric.needs == "map" else metric(heat, mask)), None
    except UndefinedError as error:
        return None, str(error)


def measure(
    run: Run | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: Evidence | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    categories: Sequence[str] = (),
    threads: int | None = None,
    overwrite: bool = False,
    told: Callable[[int, int], None] | None = None,
) -> "Measures":
    """Metrics of every map of `run`, into a Parquet dataset at `output`, a row for each map and metric.

    `masks`: a COCO file (`categories`: only annotations of these), a folder of mask pictures named as the images, or a column
    that the run carries, with a mask's path, boxes [[x, y, width, height]] or points [[x, y]]. `metrics`: names in METRICS;
    default: all that need nothing else. Beside the methods stand maps that know nothing: `uniform`, `centre`, `edges`,
    `random`. Started again, it goes on where it was. `told`: called with how many parts are done, of how many.
    """
    made = run if isinstance(run, Run) else Run(run)
    plan = Measuring(made, chosen(metrics, masks is not None), evidence_for(masks, made, categories))
    store, parts = Store(output), Store(made.folder)
    store.begin(_facts(plan, masks, categories), overwrite=overwrite)
    todo, there = sorted(parts.finished()), store.finished()
    for done, chunk in enumerate(todo, start=1):
        if chunk not in there:
            rows = arrow("dataset").dataset([str(parts.path_of(chunk))], format="parquet")
            images = by_image(rows, Query().places(rows))
            found = in_order(plan.of_image, images, threads or os.cpu_count() or 1)
            store.write(chunk, table_of([row for own in found for row in own], plan.columns))
        if told is not None:
            told(done, len(todo))
    return Measures(output)


def chosen(names: Sequence[str] | None, masked: bool) -> list[Metric]:
    """Metrics by name, or all that can be had without a model; InputError for a name that is none."""
    if names is None:
        return [one for one in METRICS.values() if one.needs == "map" or (one.needs == "mask" and masked)]
    if unknown := [name for name in names if name not in METRICS]:
        raise InputError(f"no metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    found = [METRICS[name] for name in names]
    if others := [one for one in found if one.needs not in ("map", "mask")]:
        raise InputError(
            f"{others[0].name} needs more than the maps that a run holds: camscope.metrics has it for Python"
        )
    if wanting := [one.name for one in found if one.needs == "mask" and not masked]:
        raise InputError(f"{wanting[0]} needs to know where the evidence is: pass masks")
    return found


class Measures:
    """What `measure` wrote, in long form."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = Store(folder).facts
        if facts is None or "metrics" not in facts.get("made_with", {}):
            raise InputError(f"{folder}: no metrics of a run are here")
        self.facts: dict[str, Any] = facts

    def table(self, where: str | None = None) -> "pa.Table":
        """row, id, method, layer, parameters, target, label, control, metric, value, reason, and the manifest's columns.

        `where`: DuckDB's SQL over them, as in `Run.query`.
        """
        store = Store(self.folder)
        parts = [str(store.path_of(chunk)) for chunk in sorted(store.finished())]
        rows = arrow("dataset").dataset(parts, format="parquet")
        return rows.to_table() if where is None else Pieces(rows).take(Query(where).places(rows))


def evidence_for(
    masks: Evidence | str | os.PathLike[str] | None, run: Run, categories: Sequence[str]
) -> Evidence | None:
    """What `masks` means for a run."""
    if masks is None or isinstance(masks, Evidence):
        return masks
    columns = run.dataset.schema.names
    return evidence_of(os.fspath(masks), columns, Path(run.facts["root"]["folder"]), categories)


def _facts(plan: Measuring, masks: Any, categories: Sequence[str]) -> Mapping[str, Any]:
    source = str(masks) if isinstance(masks, str | os.PathLike) else type(masks).__name__
    made = {
        "run": plan.run.facts["made_with"],
        "metrics": [one.name for one in plan.metrics],
        "masks": None if plan.evidence is None else f"{source} {plan.evidence.digest}",
        "categories": list(categories),
    }
    return {"made_with": made, "versions": plan.run.facts["versions"]}
