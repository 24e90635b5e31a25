"""How often each target is, in each group of a column: a group that gives the target away is a shortcut that waits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.codes import Finding
from camscope.batch.inspection.columns import OWN_GROUPS, Coded, Inspected
from camscope.errors import InputError

GIVEN_AWAY = 0.5  # Cramér's V
ENOUGH = 30  # rows
NONE = "–"


@dataclass(frozen=True, eq=False)
class Prevalence:
    """`counts` (groups,targets) of a column; `association`: Cramér's V, 0 none, 1 the group says the target; None: undefined."""

    by: str
    groups: tuple[str, ...]
    targets: tuple[str, ...]
    counts: NDArray[np.int64]
    association: float | None

    @property
    def shares(self) -> NDArray[np.float64]:
        """(groups,targets): of each group, which part has each target."""
        return np.asarray(self.counts / np.maximum(1, self.counts.sum(axis=1, keepdims=True)))


def prevalences(seen: Inspected, by: Sequence[str]) -> list[Prevalence]:
    """Of the manifest's target, or without one of the rows alone, by each of these columns."""
    there = [*seen.manifest.table.column_names, *OWN_GROUPS]
    if unknown := [name for name in by if name not in there]:
        raise InputError(f"no column {unknown[0]!r} to count by; there are {', '.join(there)}")
    target = seen.given("target")
    wanted = Coded(np.zeros(len(seen.manifest), np.int64), ["images"]) if target is None else target
    return [_prevalence(name, seen.group(name), wanted) for name in by]


def _prevalence(name: str, groups: Coded, target: Coded) -> Prevalence:
    (rows, row_of), (columns, column_of) = _ordered(groups), _ordered(target)
    cells = row_of[groups.codes] * len(columns) + column_of[target.codes]
    counts = np.bincount(cells, minlength=len(rows) * len(columns)).reshape(len(rows), len(columns))
    known = counts[: len(groups.values), : len(target.values)]
    return Prevalence(name, tuple(rows), tuple(columns), counts.astype(np.int64), association(known))


def _ordered(coded: Coded) -> tuple[list[str], NDArray[np.int64]]:
    """The values by how frequent they are, last that there is none; and of each code, at the end of -1, its place there."""
    names = list(coded.named)
    place = {name: at for at, name in enumerate(names)}
    places = np.array([*(place[value] for value in coded.values), len(names)], np.int64)
    return [*names, NONE] if len(coded.missing) else names, places


def association(counts: NDArray[np.int64]) -> float | None:
    """Cramér's V of a table of counts: sqrt(chi² / (n · (min(rows, columns) - 1))); None where it has one row or column."""
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    total, least = int(counts.sum()), min(counts.shape, default=0)
    if total < 1 or least < 2:
        return None
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / total
    chi = float(((counts - expected) ** 2 / expected).sum())
    return float(np.sqrt(chi / (total * (least - 1))))


def given_away(seen: Inspected, made: Sequence[Prevalence]) -> list[Finding]:
    """The columns that go along with the target."""
    found = {
        f"{one.by} (Cramér's V {one.association:.2f})": int(one.counts.sum())
        for one in made
        if one.association is not None and one.association >= GIVEN_AWAY and one.counts.sum() >= ENOUGH
    }
    return [Finding("target-follows-group", np.arange(len(seen.manifest)), found)] if found else []
