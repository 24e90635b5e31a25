"""repeating: how alike the maps of two checkpoints are on the same images: what replicates do not share, none of them shows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from camscope.audit.audited import AuditRun
from camscope.audit.numbers import number
from camscope.audit.schema import Number
from camscope.batch.manifest import arrow
from camscope.batch.query import Pieces, as_dicts
from camscope.errors import UndefinedError
from camscope.metrics import estimated, spearman

MOST = 500  # images, drawn by the seed
COLUMNS = ("id", "method", "target", "grid", "heat")
Key = tuple[str, str]  # method, finding
Maps = dict[tuple[Key, str], Any]  # by the image's id, too


@dataclass(frozen=True)
class Agreement:
    """Spearman's correlation of a method's maps of the same images, by two models: its mean, with the interval by patient."""

    method: str
    finding: str
    correlation: Number


def agreements(one: AuditRun, other: AuditRun, patients: Mapping[str, int], seed: int) -> Iterator[Agreement]:
    """Of every method and finding. Maps without an order, and of other sizes, are undefined rows."""
    ids = list(patients)
    some = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))[:MOST]]
    values: dict[Key, dict[str, float]] = {}
    for first, second in _in_parts(one, other, some):
        for key, name in first:
            if (key, name) in second:
                values.setdefault(key, {})[name] = _correlation(first[key, name], second[key, name])
    for (method, finding), own in values.items():
        if any(np.isfinite(list(own.values()))):
            found = estimated(list(own.values()), [patients[name] for name in own], bounds=(-1.0, 1.0))
            yield Agreement(method, finding, number(found, 0.0, "nothing in common"))


def _in_parts(one: AuditRun, other: AuditRun, ids: Sequence[str]) -> Iterator[tuple[Maps, Maps]]:
    """The maps of the same images in both, those of a part of the first at a time: all of them may be gigabytes."""
    wanted, theirs = (run.maps.table(["id"])["id"] for run in (one, other))
    pieces = Pieces(other.maps.dataset)
    for table in Pieces(one.maps.dataset).in_turn(_places(wanted, arrow().array(ids)), COLUMNS):
        same = pieces.take(_places(theirs, table["id"].combine_chunks()), COLUMNS)
        yield _maps(one, table), _maps(other, same)


def _places(column: Any, ids: Any) -> Any:
    return np.flatnonzero(np.asarray(arrow("compute").is_in(column, value_set=ids)))


def _maps(run: AuditRun, table: Any) -> Maps:
    """Findings are called what they are in the summary, as in all else that is compared."""
    names, found = run.summary.resolve.categories, dict[tuple[Key, str], Any]()
    for row in as_dicts(table):
        if row["heat"] is not None:
            finding = names[int(row["target"])] if names else row["target"]
            found[(row["method"], finding), row["id"]] = row["heat"].reshape(row["grid"])
    return found


def _correlation(one: Any, other: Any) -> float:
    try:
        return float(spearman(one, other)) if one.shape == other.shape else float("nan")
    except UndefinedError:
        return float("nan")
