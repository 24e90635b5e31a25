"""Columns of an inspected dataset, encoded as integers to count values, groups, and targets by group."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.batch.image_manifest import Manifest, import_arrow, require_columns
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

IntArray = NDArray[np.int64]
NO_ROWS: IntArray = np.empty(0, np.int64)
DEFAULT_COLUMNS = {
    "patient": ("patient", "patient_id"),
    "split": ("split",),
    "target": ("target",),
    "mask": ("mask", "mask_path"),
}
MAX_GROUPS_PER_ISSUE, MAX_LISTED_VALUES = 50, 50  # groups of rows of an issue; values of a kind of metadata
MISSING_NAME = "–"
TEXT_COLUMNS = {  # kind of metadata -> column
    "format": "format",
    "codec": "codec",
    "modality": "modality",
    "photometric": "photometric",
    "stored": "stored_type",
    "unit": "value_unit",
}
GROUP_COLUMNS = (*TEXT_COLUMNS.values(), "orientation", "burned_in", "is_color")  # of the metadata


class GroupedRows(NamedTuple):
    """Row positions sorted by group, and the group code of each row."""

    rows: IntArray
    group_codes: IntArray


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """A column as integers. `codes` (n,) holds the index of each row's value in `values`. The code of an empty cell is -1."""

    codes: IntArray
    values: Sequence[str]

    @classmethod
    def encode(cls, column: Any) -> "EncodedColumn":
        """Convert a column to integer codes, one code per distinct text. Empty text counts as a missing value."""
        pa, compute = import_arrow(), import_arrow("compute")
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.string())
        if pa.types.is_floating(column.type):
            column = compute.if_else(compute.is_nan(column), None, column)
        if not pa.types.is_string(column.type):
            column = pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
        column = compute.utf8_trim_whitespace(column)
        column = compute.if_else(compute.equal(column, ""), None, column)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        encoded = column.dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return cls(codes, encoded.dictionary.to_pylist())

    @cached_property
    def counts(self) -> IntArray:
        """The number of rows that have each value, as an array (values,)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values)).astype(np.int64)

    @cached_property
    def indices_by_frequency(self) -> list[int]:
        """The indices of the values. The most frequent value comes first."""
        return sorted(range(len(self.values)), key=lambda index: (-int(self.counts[index]), self.values[index]))

    @property
    def value_counts(self) -> dict[str, int]:
        """A dict from value to the number of rows with this value. The most frequent value comes first."""
        return {self.values[index]: int(self.counts[index]) for index in self.indices_by_frequency}

    @property
    def minority_rows(self) -> IntArray:
        """The rows with a value that differs from the most frequent value. Empty cells are left out."""
        return np.flatnonzero((self.codes >= 0) & (self.codes != self.counts.argmax())) if self.values else NO_ROWS

    @property
    def rows_without_value(self) -> IntArray:
        """The rows that have no value."""
        return np.flatnonzero(self.codes < 0)

    @property
    def repeated_rows(self) -> GroupedRows:
        """The rows whose value occurs in several rows. They are grouped by value."""
        with_value = np.flatnonzero(self.codes >= 0)
        return self._sort_rows_by_value(with_value[self.counts[self.codes[with_value]] > 1])

    def rows_of_groups_with_several_values(self, values: "EncodedColumn") -> GroupedRows:
        """Group the rows by their value in this column. Return only groups whose rows differ in the column `values`."""
        rows = np.flatnonzero((self.codes >= 0) & (values.codes >= 0))
        n_values = max(1, len(values.values))
        pairs = np.unique(self.codes[rows] * n_values + values.codes[rows])
        is_mixed = np.bincount(pairs // n_values, minlength=len(self.values)) > 1
        return self._sort_rows_by_value(rows[is_mixed[self.codes[rows]]])

    def _sort_rows_by_value(self, rows: IntArray) -> GroupedRows:
        """Sort rows by the code of their value in this column, so that rows with equal values form a group."""
        rows = rows[np.argsort(self.codes[rows], kind="stable")]
        return GroupedRows(rows, self.codes[rows])


class ListsOfRows(NamedTuple):
    """The positions of m rows, and their lists (m,length) of numbers."""

    rows: IntArray
    lists: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class InspectionTable:
    """The metadata of a set of images, and its manifest. Manifest columns have roles: patient, split, target and mask."""

    manifest: Manifest
    metadata: "pa.Table"
    column_names: Mapping[str, str | None]  # role -> column of the manifest

    def encode_metadata_column(self, name: str) -> EncodedColumn:
        """Encode a metadata column."""
        return EncodedColumn.encode(self.metadata[name])

    def encode_manifest_column(self, role: str) -> EncodedColumn | None:
        """Encode the manifest column that has a role, such as "patient". Return None if no manifest column has this role."""
        column = self.column_names[role]
        return None if column is None else EncodedColumn.encode(self.manifest.table[column])

    def read_number_column(self, name: str) -> NDArray[np.float64]:
        """Return a metadata column as floats (n,). Missing values are NaN."""
        cast = self.metadata[name].cast(import_arrow().float64())
        return np.asarray(cast.to_numpy(zero_copy_only=False), np.float64)

    def read_fixed_length_lists(self, name: str, length: int) -> ListsOfRows:
        """Read a metadata column that holds lists. Rows with a list of another length are left out."""
        compute, column = import_arrow("compute"), self.metadata[name].combine_chunks()
        lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(lengths == length)
        values = compute.list_flatten(column.take(import_arrow().array(rows)))
        lists = values.to_numpy(zero_copy_only=False).astype(np.float64).reshape(len(rows), length)
        return ListsOfRows(rows, lists)


def resolve_column_names(manifest: Manifest, requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return a dict from role to column name: the requested column, or else an existing column with a usual name for the role."""
    existing = manifest.table.column_names
    for role, name in requested.items():
        require_columns([name], existing, f"for the {role}")
    return {
        role: requested.get(role) or next((name for name in names if name in existing), None)
        for role, names in DEFAULT_COLUMNS.items()
    }


@dataclass(frozen=True, eq=False)
class TargetPrevalence:
    """How many rows of each group have each target: `counts` (groups,targets). The groups are the values of a column.

    `association` is Cramér's V: 0 if group and target are independent, 1 if the group determines the target, None if
    undefined.
    """

    column: str
    groups: tuple[str, ...]
    targets: tuple[str, ...]
    counts: IntArray
    association: float | None

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of each target within each group, as an array (groups,targets)."""
        return np.asarray(self.counts / np.maximum(1, self.counts.sum(axis=1, keepdims=True)))


def compute_prevalences(table: InspectionTable, columns: Sequence[str]) -> list[TargetPrevalence]:
    """Count the targets in each group of the named columns. If there are no targets, count the rows."""
    require_columns(columns, [*table.manifest.table.column_names, *GROUP_COLUMNS], "to group by")
    target = table.encode_manifest_column("target")
    if target is None:
        target = EncodedColumn(np.zeros(len(table.manifest), np.int64), ["images"])
    return [_count_targets_by_group(table, name, target) for name in columns]


def _count_targets_by_group(table: InspectionTable, name: str, target: EncodedColumn) -> TargetPrevalence:
    """Count each target in each group of a column, the most frequent first, and measure their association."""
    holder = table.manifest.table if name in table.manifest.table.column_names else table.metadata
    encoded = EncodedColumn.encode(holder[name]), target
    counts = np.zeros([len(column.values) + 1 for column in encoded], np.int64)
    # -1, which is no value, means the last row or column
    np.add.at(counts, tuple(column.codes for column in encoded), 1)
    orders = [column.indices_by_frequency + [-1] * bool(len(column.rows_without_value)) for column in encoded]
    counts = counts[np.ix_(*orders)]
    groups, targets = (
        tuple(MISSING_NAME if index < 0 else column.values[index] for index in order)
        for column, order in zip(encoded, orders, strict=True)
    )
    association = compute_cramers_v(counts[: len(encoded[0].values), : len(target.values)])
    return TargetPrevalence(name, groups, targets, counts, association)


def compute_cramers_v(counts: IntArray) -> float | None:
    """Return Cramér's V for a table of counts. Return None if the table has a single row or column."""
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    total, min_side = int(counts.sum()), min(counts.shape, default=0)
    if total < 1 or min_side < 2:
        return None
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / total
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return float(np.sqrt(chi_squared / (total * (min_side - 1))))


def count_metadata_values(table: InspectionTable) -> dict[str, dict[str, int]]:
    """Count, for each kind of metadata, the images with each value. The most frequent value comes first."""
    counts = {name: table.encode_metadata_column(column).value_counts for name, column in TEXT_COLUMNS.items()}
    colors, lossy = (table.encode_metadata_column(name).value_counts for name in ("is_color", "is_lossy"))
    counts["color"] = {"color" if value == "True" else "gray": count for value, count in colors.items()}
    counts["size"] = _count_number_lists(table, "shape", "{:.0f}", " x ", "")
    counts["spacing"] = _count_number_lists(table, "spacing", "{:.3g}", " x ", " mm")
    counts["orientation"] = table.encode_metadata_column("orientation").value_counts
    counts["window"] = _count_number_lists(table, "window", "{:.6g}", ", ", "")
    counts["burned-in text"] = table.encode_metadata_column("burned_in").value_counts
    counts["lossy"] = {"yes" if value == "True" else "no": count for value, count in lossy.items()}
    counts["mask"] = table.encode_metadata_column("mask_status").value_counts
    for values in counts.values():
        other = list(values)[MAX_LISTED_VALUES:]
        n_other = sum(values.pop(name) for name in other)
        if other:
            values[plural(len(other), "other")] = n_other
    return {name: values for name, values in counts.items() if values}


def _count_number_lists(
    table: InspectionTable, name: str, number_format: str, separator: str, suffix: str
) -> dict[str, int]:
    """Count how many images have each list of numbers. The list is written as text, such as `0.66 x 0.66 x 5 mm`."""
    texts = (
        separator.join(number_format.format(number) for number in numbers) + suffix
        for numbers in table.metadata[name].to_pylist()
        if numbers
    )
    return dict(sorted(Counter(texts).items(), key=lambda pair: (-pair[1], pair[0])))


def compute_pixel_value_and_side_length_ranges(table: InspectionTable) -> dict[str, list[Any]]:
    """Return the smallest and the largest pixel value ("values"), and the shortest and longest image side ("sides")."""
    compute, metadata = import_arrow("compute"), table.metadata
    sides = compute.min_max(compute.list_flatten(metadata["shape"])).as_py()
    values = {"min": compute.min(metadata["minimum"]).as_py(), "max": compute.max(metadata["maximum"]).as_py()}
    ranges = {"values": [values["min"], values["max"]], "sides": [sides["min"], sides["max"]]}
    return {name: limits for name, limits in ranges.items() if limits[0] is not None}
