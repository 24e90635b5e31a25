"""Columns of an inspected set as numbers: a code for each distinct value, and which rows share one."""

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
MAX_GROUPS_PER_ISSUE = 50  # groups of rows that a finding names
METADATA_GROUP_COLUMNS = (
    "format",
    "codec",
    "modality",
    "photometric",
    "stored",
    "unit",
    "orientation",
    "burned_in",
    "colour",
)


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """`codes` (n,): of each row the number of its value among `values`, -1 where it has none."""

    codes: Codes
    values: Sequence[str]

    @classmethod
    def encode(cls, column: Any) -> "EncodedColumn":
        """Texts and numbers as texts; an empty one is none."""
        pa, compute = import_arrow(), import_arrow("compute")
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.string())
        if pa.types.is_floating(column.type):
            column = compute.if_else(compute.is_nan(column), None, column)
        if not pa.types.is_string(column.type):
            column = pa.array([None if one is None else str(one) for one in column.to_pylist()], pa.string())
        column = compute.utf8_trim_whitespace(column)
        found = compute.if_else(compute.equal(column, ""), None, column)
        if isinstance(found, pa.ChunkedArray):
            found = found.combine_chunks()
        encoded = found.dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return cls(codes, encoded.dictionary.to_pylist())

    @cached_property
    def counts(self) -> Codes:
        """(values,): how many rows have each."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values)).astype(np.int64)

    @cached_property
    def value_counts(self) -> dict[str, int]:
        """How many rows have each value, the most frequent first."""
        order = sorted(range(len(self.values)), key=lambda at: (-int(self.counts[at]), self.values[at]))
        return {self.values[at]: int(self.counts[at]) for at in order}

    @property
    def minority_rows(self) -> Codes:
        """The rows whose value is not the most frequent one; those without a value do not count."""
        return (
            np.flatnonzero((self.codes >= 0) & (self.codes != self.counts.argmax()))
            if len(self.values)
            else _empty_codes()
        )

    @property
    def missing_rows(self) -> Codes:
        """The rows without a value."""
        return np.flatnonzero(self.codes < 0)


def _empty_codes() -> Codes:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class InspectionTable:
    """The facts of a set and the manifest's own columns, by what they mean."""

    manifest: Manifest
    metadata: "pa.Table"
    column_names: Mapping[str, str | None]  # patient, split, target, mask: their columns

    def encode_metadata(self, name: str) -> EncodedColumn:
        """A column of the facts."""
        return EncodedColumn.encode(self.metadata[name])

    def encode_manifest_column(self, role: str) -> EncodedColumn | None:
        """The manifest's column of the patient, split, target or mask."""
        column = self.column_names[role]
        return None if column is None else EncodedColumn.encode(self.manifest.table[column])

    def encode_group_column(self, name: str) -> EncodedColumn:
        """A column of the manifest, or a fact, by which rows are counted."""
        return EncodedColumn.encode(
            self.manifest.table[name] if name in self.manifest.table.column_names else self.metadata[name]
        )

    def read_numbers(self, name: str) -> NDArray[np.float64]:
        """(n,) of a column of the facts, NaN where there is none."""
        cast = self.metadata[name].cast(import_arrow().float64())
        return np.asarray(cast.to_numpy(zero_copy_only=False), np.float64)

    def read_fixed_length_lists(self, name: str, length: int) -> tuple[Codes, NDArray[np.float64]]:
        """The rows whose list has this length, and the lists (m,length)."""
        compute, column = import_arrow("compute"), self.metadata[name].combine_chunks()
        lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(lengths == length)
        values = compute.list_flatten(column.take(import_arrow().array(rows)))
        return rows, values.to_numpy(zero_copy_only=False).astype(np.float64).reshape(len(rows), length)


def resolve_column_names(manifest: Manifest, requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """Which columns are the patient, the split, the target and the mask: those named, else those of the usual names."""
    there = manifest.table.column_names
    for meaning, name in requested.items():
        if name is not None and name not in there:
            raise InputError(f"no column {name!r} for the {meaning}; there are {', '.join(there)}")
    return {
        meaning: requested.get(meaning) or next((name for name in names if name in there), None)
        for meaning, names in DEFAULT_COLUMNS.items()
    }


def rows_in_mixed_groups(groups: EncodedColumn, values: EncodedColumn) -> tuple[Codes, Codes]:
    """The rows of those groups that have several of the other values, sorted by group, and their groups."""
    both = np.flatnonzero((groups.codes >= 0) & (values.codes >= 0))
    pairs = np.unique(groups.codes[both] * max(1, len(values.values)) + values.codes[both])
    spread = np.bincount(pairs // max(1, len(values.values)), minlength=len(groups.values)) > 1
    return _sort_by_group(both[spread[groups.codes[both]]], groups.codes)


def repeated_rows(column: EncodedColumn) -> tuple[Codes, Codes]:
    """The rows that share their value with others, sorted by group, and their groups."""
    there = np.flatnonzero(column.codes >= 0)
    return _sort_by_group(there[column.counts[column.codes[there]] > 1], column.codes)


def _sort_by_group(rows: Codes, codes: Codes) -> tuple[Codes, Codes]:
    rows = rows[np.argsort(codes[rows], kind="stable")]
    return rows, codes[rows]


def split_into_groups(rows: Codes, group_codes: Codes) -> tuple[tuple[int, ...], ...]:
    """The first of the groups that rows, sorted by group, make."""
    starts = np.flatnonzero(np.diff(group_codes)) + 1
    return tuple(tuple(part.tolist()) for part in np.split(rows, starts)[:MAX_GROUPS_PER_ISSUE]) if len(rows) else ()
