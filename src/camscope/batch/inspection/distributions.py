"""Distributions of targets and metadata in a set of images.

- `compute_prevalences`: target counts per group. A group that predicts the target is a possible shortcut.
- `value_counts` and `value_ranges`: the values of the metadata.
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
    """How often each target occurs in each group of a column.

    Attributes:
        column: The column of the groups.
        groups: The groups, the most frequent first.
        targets: The targets, the most frequent first.
        counts: Rows per group and target (groups,targets).
        association: Cramér's V, from 0 (independent) to 1 (the group determines the target). None: undefined.

    """

    column: str
    groups: tuple[str, ...]
    targets: tuple[str, ...]
    counts: NDArray[np.int64]
    association: float | None

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of each target within each group (groups,targets)."""
        return np.asarray(self.counts / np.maximum(1, self.counts.sum(axis=1, keepdims=True)))


def compute_prevalences(table: InspectionTable, columns: Sequence[str]) -> list[TargetPrevalence]:
    """Count targets, or rows if there is no target, by the groups of each of these columns."""
    existing = [*table.manifest.table.column_names, *METADATA_GROUP_COLUMNS]
    if unknown := [name for name in columns if name not in existing]:
        raise InputError(f"no column {unknown[0]!r} to group by; the columns are {', '.join(existing)}")
    target = table.encode_manifest_column("target")
    if target is None:
        target = EncodedColumn(np.zeros(len(table.manifest), np.int64), ["images"])
    return [_count_targets_by_group(name, table.encode_group_column(name), target) for name in columns]


def _count_targets_by_group(name: str, groups: EncodedColumn, target: EncodedColumn) -> TargetPrevalence:
    (group_names, group_positions), (target_names, target_positions) = map(_order_by_frequency, (groups, target))
    shape = len(group_names), len(target_names)
    cells = group_positions[groups.codes] * shape[1] + target_positions[target.codes]
    counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    known_counts = counts[: len(groups.values), : len(target.values)]
    association = cramers_v(known_counts)
    return TargetPrevalence(name, tuple(group_names), tuple(target_names), counts.astype(np.int64), association)


def _order_by_frequency(column: EncodedColumn) -> tuple[list[str], NDArray[np.int64]]:
    """Return the values, the most frequent first, and the position of each code among them (the last entry: no value)."""
    names = list(column.value_counts)
    position_by_name = {name: position for position, name in enumerate(names)}
    positions = np.array([*(position_by_name[value] for value in column.values), len(names)], np.int64)
    return [*names, MISSING_NAME] if len(column.missing_rows) else names, positions


def cramers_v(counts: NDArray[np.int64]) -> float | None:
    """Return Cramér's V of a table of counts, sqrt(chi² / (n · (min(rows, columns) - 1))), or None for one row or column."""
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    total, min_side = int(counts.sum()), min(counts.shape, default=0)
    if total < 1 or min_side < 2:
        return None
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / total
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return float(np.sqrt(chi_squared / (total * (min_side - 1))))


def check_group_association(table: InspectionTable, prevalences: Sequence[TargetPrevalence]) -> list[DatasetIssue]:
    """Report the columns that predict the target."""
    row_counts = {
        f"{prevalence.column} (Cramér's V {prevalence.association:.2f})": int(prevalence.counts.sum())
        for prevalence in prevalences
        if prevalence.association is not None
        and prevalence.association >= MIN_ASSOCIATION_FOR_ISSUE
        and prevalence.counts.sum() >= MIN_ROWS_FOR_ISSUE
    }
    if not row_counts:
        return []
    return [DatasetIssue("target-associated-with-group", np.arange(len(table.manifest)), row_counts)]


TEXT_COLUMNS = {  # name of a distribution -> column of the metadata
    "format": "format",
    "codec": "codec",
    "modality": "modality",
    "photometric": "photometric",
    "stored": "stored_type",
    "unit": "value_unit",
}
MAX_VALUES = 50  # values that are listed


def value_counts(table: InspectionTable) -> dict[str, dict[str, int]]:
    """Count images by value for each kind of metadata, the most frequent value first. Kinds without values are left out."""
    counts: dict[str, Mapping[str, int]] = {
        name: table.encode_metadata(column).value_counts for name, column in TEXT_COLUMNS.items()
    }
    counts["color"] = _count_booleans(table, "is_color", ("gray", "color"))
    counts["size"] = _count_number_lists(table, "shape", "{:.0f}", " x ", "")
    counts["spacing"] = _count_number_lists(table, "spacing", "{:.3g}", " x ", " mm")
    counts["orientation"] = table.encode_metadata("orientation").value_counts
    counts["window"] = _count_number_lists(table, "window", "{:.6g}", ", ", "")
    counts["burned-in text"] = table.encode_metadata("burned_in").value_counts
    counts["lossy"] = _count_booleans(table, "is_lossy", ("no", "yes"))
    counts["mask"] = table.encode_metadata("mask_status").value_counts
    return {name: _limit_values(values) for name, values in counts.items() if values}


def _count_booleans(table: InspectionTable, name: str, labels: tuple[str, str]) -> dict[str, int]:
    values = table.read_numbers(name)
    counts = {label: int(np.count_nonzero(values == value)) for value, label in enumerate(labels)}
    return dict(sorted(((label, count) for label, count in counts.items() if count), key=lambda pair: -pair[1]))


def _count_number_lists(
    table: InspectionTable, name: str, number_format: str, separator: str, suffix: str
) -> dict[str, int]:
    """Count lists of numbers as texts such as `512 x 512` or `0.66 x 0.66 x 5 mm`."""
    compute = import_arrow("compute")
    max_length = compute.max(compute.list_value_length(table.metadata[name])).as_py() or 0
    counts: dict[str, int] = {}
    for length in range(1, max_length + 1):
        _, lists = table.read_fixed_length_lists(name, length)
        unique_lists, unique_counts = np.unique(lists, axis=0, return_counts=True)
        for numbers, count in zip(unique_lists.tolist(), unique_counts.tolist(), strict=True):
            text = separator.join(number_format.format(number) for number in numbers) + suffix
            counts[text] = counts.get(text, 0) + count
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _limit_values(values: Mapping[str, int]) -> dict[str, int]:
    pairs = list(values.items())
    limited = dict(pairs[:MAX_VALUES])
    if len(pairs) > MAX_VALUES:
        limited[plural(len(pairs) - MAX_VALUES, "other")] = sum(count for _, count in pairs[MAX_VALUES:])
    return limited


def value_ranges(table: InspectionTable) -> dict[str, list[Any]]:
    """Return the minimum and maximum of all pixel values ("values") and of all side lengths ("sides")."""
    minimum, maximum = table.read_numbers("minimum"), table.read_numbers("maximum")
    compute = import_arrow("compute")
    sides = compute.min_max(compute.list_flatten(table.metadata["shape"])).as_py()
    ranges: dict[str, list[Any]] = {}
    if np.isfinite(minimum).any():
        ranges["values"] = [float(np.nanmin(minimum)), float(np.nanmax(maximum))]
    if sides["min"] is not None:
        ranges["sides"] = [sides["min"], sides["max"]]
    return ranges
