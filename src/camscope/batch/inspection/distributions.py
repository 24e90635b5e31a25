"""Distributions of targets and of facts in a set of images.

- How often each target is, in each group of a column: a group that gives the target away is a shortcut that waits.
- What a set is made of: of each fact its values, and how many images have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.inspection_table import METADATA_GROUP_COLUMNS, EncodedColumn, InspectionTable
from camscope.batch.inspection.issues import DatasetIssue
from camscope.batch.manifest import import_arrow
from camscope.errors import InputError
from camscope.plurals import plural

MIN_ASSOCIATION_FOR_ISSUE = 0.5  # Cramér's V
MIN_ROWS_FOR_ISSUE = 30  # rows
MISSING_NAME = "–"


@dataclass(frozen=True, eq=False)
class TargetPrevalence:
    """`counts` (groups,targets) of a column; `association`: Cramér's V, 0 none, 1 the group says the target; None: undefined."""

    column: str
    groups: tuple[str, ...]
    targets: tuple[str, ...]
    counts: NDArray[np.int64]
    association: float | None

    @property
    def shares(self) -> NDArray[np.float64]:
        """(groups,targets): of each group, which part has each target."""
        return np.asarray(self.counts / np.maximum(1, self.counts.sum(axis=1, keepdims=True)))


def compute_prevalences(table: InspectionTable, columns: Sequence[str]) -> list[TargetPrevalence]:
    """Of the manifest's target, or without one of the rows alone, by each of these columns."""
    there = [*table.manifest.table.column_names, *METADATA_GROUP_COLUMNS]
    if unknown := [name for name in columns if name not in there]:
        raise InputError(f"no column {unknown[0]!r} to count by; there are {', '.join(there)}")
    target = table.encode_manifest_column("target")
    wanted = EncodedColumn(np.zeros(len(table.manifest), np.int64), ["images"]) if target is None else target
    return [_count_targets_by_group(name, table.encode_group_column(name), wanted) for name in columns]


def _count_targets_by_group(name: str, groups: EncodedColumn, target: EncodedColumn) -> TargetPrevalence:
    (rows, row_of), (columns, column_of) = _order_by_frequency(groups), _order_by_frequency(target)
    cells = row_of[groups.codes] * len(columns) + column_of[target.codes]
    counts = np.bincount(cells, minlength=len(rows) * len(columns)).reshape(len(rows), len(columns))
    known = counts[: len(groups.values), : len(target.values)]
    return TargetPrevalence(name, tuple(rows), tuple(columns), counts.astype(np.int64), cramers_v(known))


def _order_by_frequency(column: EncodedColumn) -> tuple[list[str], NDArray[np.int64]]:
    """The values by how frequent they are, last that there is none; and of each code, at the end of -1, its place there."""
    names = list(column.value_counts)
    place = {name: at for at, name in enumerate(names)}
    places = np.array([*(place[value] for value in column.values), len(names)], np.int64)
    return [*names, MISSING_NAME] if len(column.missing_rows) else names, places


def cramers_v(counts: NDArray[np.int64]) -> float | None:
    """Cramér's V of a table of counts: sqrt(chi² / (n · (min(rows, columns) - 1))); None where it has one row or column."""
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    total, least = int(counts.sum()), min(counts.shape, default=0)
    if total < 1 or least < 2:
        return None
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / total
    chi = float(((counts - expected) ** 2 / expected).sum())
    return float(np.sqrt(chi / (total * (least - 1))))


def check_group_association(table: InspectionTable, prevalences: Sequence[TargetPrevalence]) -> list[DatasetIssue]:
    """The columns that go along with the target."""
    found = {
        f"{one.column} (Cramér's V {one.association:.2f})": int(one.counts.sum())
        for one in prevalences
        if one.association is not None
        and one.association >= MIN_ASSOCIATION_FOR_ISSUE
        and one.counts.sum() >= MIN_ROWS_FOR_ISSUE
    }
    return [DatasetIssue("target-follows-group", np.arange(len(table.manifest)), found)] if found else []


WORD_COLUMNS = ("format", "codec", "modality", "photometric", "stored", "unit")
MAX_VALUES = 50  # values that are listed


def value_counts(table: InspectionTable) -> dict[str, dict[str, int]]:
    """Fact -> value -> images, the most frequent first; facts that no image has are left out."""
    found: dict[str, Mapping[str, int]] = {name: table.encode_metadata(name).value_counts for name in WORD_COLUMNS}
    found["colour"] = _count_booleans(table, "colour", ("grey", "colour"))
    found["size"] = _count_number_lists(table, "size", "{:.0f}", " x ", "")
    found["spacing"] = _count_number_lists(table, "spacing", "{:.3g}", " x ", " mm")
    found["orientation"] = table.encode_metadata("orientation").value_counts
    found["window"] = _count_number_lists(table, "window", "{:.6g}", ", ", "")
    found["burned in"] = table.encode_metadata("burned_in").value_counts
    found["lossy"] = _count_booleans(table, "lossy", ("no", "yes"))
    found["mask"] = table.encode_metadata("mask").value_counts
    return {name: _limit_values(values) for name, values in found.items() if values}


def _count_booleans(table: InspectionTable, name: str, labels: tuple[str, str]) -> dict[str, int]:
    values = table.read_numbers(name)
    counts = {word: int(np.count_nonzero(values == at)) for at, word in enumerate(labels)}
    return dict(sorted(((word, count) for word, count in counts.items() if count), key=lambda one: -one[1]))


def _count_number_lists(
    table: InspectionTable, name: str, number_format: str, separator: str, suffix: str
) -> dict[str, int]:
    """Lists of numbers as texts: `512 x 512`, `0.66 x 0.66 x 5 mm`."""
    longest = import_arrow("compute").max(import_arrow("compute").list_value_length(table.metadata[name])).as_py() or 0
    found: dict[str, int] = {}
    for length in range(1, longest + 1):
        _, values = table.read_fixed_length_lists(name, length)
        kinds, counts = np.unique(values, axis=0, return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            text = separator.join(number_format.format(one) for one in kind) + suffix
            found[text] = found.get(text, 0) + count
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def _limit_values(values: Mapping[str, int]) -> dict[str, int]:
    named = list(values.items())
    rest = (
        {plural(len(named) - MAX_VALUES, "other"): sum(count for _, count in named[MAX_VALUES:])}
        if len(named) > MAX_VALUES
        else {}
    )
    return dict(named[:MAX_VALUES]) | rest


def value_ranges(table: InspectionTable) -> dict[str, list[Any]]:
    """The least and the largest value of all images, and the least and largest of their sides."""
    low, high = table.read_numbers("minimum"), table.read_numbers("maximum")
    sides = import_arrow("compute").min_max(import_arrow("compute").list_flatten(table.metadata["size"])).as_py()
    found = {"values": [float(np.nanmin(low)), float(np.nanmax(high))] if np.isfinite(low).any() else None}
    found["sides"] = None if sides["min"] is None else [sides["min"], sides["max"]]
    return {name: ends for name, ends in found.items() if ends is not None}
