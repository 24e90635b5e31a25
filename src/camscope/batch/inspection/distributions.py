"""Distributions of targets and of facts in a set of images.

- How often each target is, in each group of a column: a group that gives the target away is a shortcut that waits.
- What a set is made of: of each fact its values, and how many images have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.inspection_table import OWN_GROUPS, Coded, Inspected
from camscope.batch.inspection.issues import Finding
from camscope.batch.manifest import arrow
from camscope.errors import InputError
from camscope.plurals import plural

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


PLAIN = ("format", "codec", "modality", "photometric", "stored", "unit")
MOST = 50  # values that are listed


def mixtures(seen: Inspected) -> dict[str, dict[str, int]]:
    """Fact -> value -> images, the most frequent first; facts that no image has are left out."""
    found: dict[str, Mapping[str, int]] = {name: seen.coded(name).named for name in PLAIN}
    found["colour"] = _words(seen, "colour", ("grey", "colour"))
    found["size"] = _joined(seen, "size", "{:.0f}", " x ", "")
    found["spacing"] = _joined(seen, "spacing", "{:.3g}", " x ", " mm")
    found["orientation"] = seen.coded("orientation").named
    found["window"] = _joined(seen, "window", "{:.6g}", ", ", "")
    found["burned in"] = seen.coded("burned_in").named
    found["lossy"] = _words(seen, "lossy", ("no", "yes"))
    found["mask"] = seen.coded("mask").named
    return {name: _most(values) for name, values in found.items() if values}


def _words(seen: Inspected, name: str, words: tuple[str, str]) -> dict[str, int]:
    values = seen.numbers(name)
    counts = {word: int(np.count_nonzero(values == at)) for at, word in enumerate(words)}
    return dict(sorted(((word, count) for word, count in counts.items() if count), key=lambda one: -one[1]))


def _joined(seen: Inspected, name: str, number: str, between: str, end: str) -> dict[str, int]:
    """Lists of numbers as texts: `512 x 512`, `0.66 x 0.66 x 5 mm`."""
    longest = arrow("compute").max(arrow("compute").list_value_length(seen.facts[name])).as_py() or 0
    found: dict[str, int] = {}
    for length in range(1, longest + 1):
        _, values = seen.lists(name, length)
        kinds, counts = np.unique(values, axis=0, return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            text = between.join(number.format(one) for one in kind) + end
            found[text] = found.get(text, 0) + count
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def _most(values: Mapping[str, int]) -> dict[str, int]:
    named = list(values.items())
    rest = {plural(len(named) - MOST, "other"): sum(count for _, count in named[MOST:])} if len(named) > MOST else {}
    return dict(named[:MOST]) | rest


def ranges(seen: Inspected) -> dict[str, list[Any]]:
    """The least and the largest value of all images, and the least and largest of their sides."""
    low, high = seen.numbers("minimum"), seen.numbers("maximum")
    sides = arrow("compute").min_max(arrow("compute").list_flatten(seen.facts["size"])).as_py()
    found = {"values": [float(np.nanmin(low)), float(np.nanmax(high))] if np.isfinite(low).any() else None}
    found["sides"] = None if sides["min"] is None else [sides["min"], sides["max"]]
    return {name: ends for name, ends in found.items() if ends is not None}
