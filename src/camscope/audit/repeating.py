"""repeating: how alike the maps of two checkpoints are on the same images: what replicates do not share, none of them shows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from camscope.audit.audited import AuditRun
from camscope.audit.numbers import number
from camscope.audit.schema import Number
from camscope.errors import UndefinedError
from camscope.metrics import estimated, spearman

MOST = 500  # images, drawn by the seed
Key = tuple[str, str, str]  # method, label, target


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
    first, second = (_maps(run, some) for run in (one, other))
    for key in first:
        both = [name for name in first[key] if name in second.get(key, {})]
        values = [_correlation(first[key][name], second[key][name]) for name in both]
        if any(np.isfinite(values)):
            found = estimated(values, [patients[name] for name in both], seed=seed)
            yield Agreement(key[0], key[1], number(found, 0.0, "nothing in common"))


def _maps(run: AuditRun, ids: Sequence[str]) -> dict[Key, dict[str, Any]]:
    """[method, label, target][id]: the map."""
    wanted, found = set(ids), dict[Key, dict[str, Any]]()
    rows = [n for n, name in enumerate(run.maps.table(["id"])["id"].to_pylist()) if name in wanted]
    for row in run.maps.dataset.take(rows).to_pylist() if rows else []:
        if row["heat"] is not None:
            key = row["method"], row["label"] or "", row["target"]
            found.setdefault(key, {})[row["id"]] = np.array(row["heat"], np.float32).reshape(row["grid"])
    return found


def _correlation(one: Any, other: Any) -> float:
    try:
        return float(spearman(one, other)) if one.shape == other.shape else float("nan")
    except UndefinedError:
        return float("nan")
