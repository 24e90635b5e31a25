"""The columns of an inspected set, encoded as integers, and groups of rows that share a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.batch.manifest import Manifest, import_arrow
from camscope.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

Codes = NDArray[np.int64]
DEFAULT_COLUMNS = {
    "patient": ("patient", "patient_id"),
    "split": ("split",),
    "target": ("target",),
    "mask": ("mask", "mask_path"),
}
MAX_GROUPS_PER_ISSUE = 50  # groups of rows that an issue lists
METADATA_GROUP_COLUMNS = (
    "format",
    "codec",
    "modality",
    "photometric",
    "stored_type",
    "value_unit",
    "orientation",
    "burned_in",
    "is_color",
)


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """A column as integers: `codes` (n,) holds for each row the index of its value in `values`, or -1 for no value."""

    codes: Codes
    values: Sequence[str]

    @classmethod
    def encode(cls, column: Any) -> "EncodedColumn":
        """Encode the text of each value. Empty text counts as no value."""
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
    def counts(self) -> Codes:
        """The number of rows of each value (values,)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values)).astype(np.int64)

    @cached_property
    def value_counts(self) -> dict[str, int]:
        """The number of rows of each value, the most frequent value first."""
        order = sorted(range(len(self.values)), key=lambda index: (-int(self.counts[index]), self.values[index]))
        return {self.values[index]: int(self.counts[index]) for index in order}

    @property
    def minority_rows(self) -> Codes:
        """The rows whose value is not the most frequent one. Rows without a value are not included."""
        if not len(self.values):
            return np.empty(0, np.int64)
        return np.flatnonzero((self.codes >= 0) & (self.codes != self.counts.argmax()))

    @property
    def missing_rows(self) -> Codes:
        """The rows without a value."""
        return np.flatnonzero(self.codes < 0)


@dataclass(frozen=True, eq=False)
class InspectionTable:
    """The metadata of a set of images, and the columns of its manifest by role (patient, split, target, mask)."""

    manifest: Manifest
    metadata: "pa.Table"
    column_names: Mapping[str, str | None]  # role -> column of the manifest

    def encode_metadata(self, name: str) -> EncodedColumn:
        """Encode a column of the metadata."""
        return EncodedColumn.encode(self.metadata[name])

    def encode_manifest_column(self, role: str) -> EncodedColumn | None:
        """Encode the manifest column of a role, or return None if there is none."""
        column = self.column_names[role]
        return None if column is None else EncodedColumn.encode(self.manifest.table[column])

    def encode_group_column(self, name: str) -> EncodedColumn:
        """Encode a column of the manifest, or of the metadata if the manifest has no such column."""
        return EncodedColumn.encode(
            self.manifest.table[name] if name in self.manifest.table.column_names else self.metadata[name]
        )

    def read_numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column of the metadata as floats (n,), with NaN for no value."""
        cast = self.metadata[name].cast(import_arrow().float64())
        return np.asarray(cast.to_numpy(zero_copy_only=False), np.float64)

    def read_fixed_length_lists(self, name: str, length: int) -> tuple[Codes, NDArray[np.float64]]:
        """Return the rows whose list has this length, and their lists (m,length)."""
        compute, column = import_arrow("compute"), self.metadata[name].combine_chunks()
        lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(lengths == length)
        values = compute.list_flatten(column.take(import_arrow().array(rows)))
        return rows, values.to_numpy(zero_copy_only=False).astype(np.float64).reshape(len(rows), length)


def resolve_column_names(manifest: Manifest, requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the column of each role: the requested one, or else the first of the usual names that the manifest has."""
    existing = manifest.table.column_names
    for role, name in requested.items():
        if name is not None and name not in existing:
            raise InputError(f"no column {name!r} for the {role}; the columns are {', '.join(existing)}")
    return {
        role: requested.get(role) or next((name for name in names if name in existing), None)
        for role, names in DEFAULT_COLUMNS.items()
    }


def rows_in_mixed_groups(groups: EncodedColumn, values: EncodedColumn) -> tuple[Codes, Codes]:
    """Return the rows of groups that have several distinct values, sorted by group, and their group codes."""
    both_known = np.flatnonzero((groups.codes >= 0) & (values.codes >= 0))
    n_values = max(1, len(values.values))
    pairs = np.unique(groups.codes[both_known] * n_values + values.codes[both_known])
    is_mixed = np.bincount(pairs // n_values, minlength=len(groups.values)) > 1
    return _sort_by_group(both_known[is_mixed[groups.codes[both_known]]], groups.codes)


def repeated_rows(column: EncodedColumn) -> tuple[Codes, Codes]:
    """Return the rows that share their value with other rows, sorted by value, and their codes."""
    with_value = np.flatnonzero(column.codes >= 0)
    return _sort_by_group(with_value[column.counts[column.codes[with_value]] > 1], column.codes)


def _sort_by_group(rows: Codes, codes: Codes) -> tuple[Codes, Codes]:
    rows = rows[np.argsort(codes[rows], kind="stable")]
    return rows, codes[rows]


def split_into_groups(rows: Codes, group_codes: Codes) -> tuple[tuple[int, ...], ...]:
    """Split rows that are sorted by group into tuples, and return the first `MAX_GROUPS_PER_ISSUE` of them."""
    starts = np.flatnonzero(np.diff(group_codes)) + 1
    return tuple(tuple(part.tolist()) for part in np.split(rows, starts)[:MAX_GROUPS_PER_ISSUE]) if len(rows) else ()
