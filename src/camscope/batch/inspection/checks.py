"""What is to be seen in a set as a whole: mixes, copies, gaps, splits that share a patient, targets that are none.

Slices that are rows of their own, put together by their series: which are missing, and which lie at one place.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.inspection_table import (
    MAX_GROUPS_PER_ISSUE,
    Codes,
    EncodedColumn,
    InspectionTable,
    repeated_rows,
    rows_in_mixed_groups,
    split_into_groups,
)
from camscope.batch.inspection.issues import ISSUE_ORDER, DatasetIssue, flags_to_codes
from camscope.batch.manifest import import_arrow, reserved_names
from camscope.images.scans.dicom_geometry import DIRECTION_TOLERANCE, MAX_SPACING_DEVIATION
from camscope.mask_labels import MAX_LISTED_NAMES

MAX_DETAILS_PER_ISSUE = 20  # that a finding lists
LARGE_SPACING_RATIO, NOTICEABLE_SPACING_RATIO = 2.0, 1.01  # ratios of spacings
MIN_ANISOTROPY = 3.0  # voxels this many times as long as wide
UNKNOWN_TARGET_PATTERN = re.compile(r"\?+|-1|unknown|unlabell?ed|nan|null|n/?a|missing|tbd|todo|-+", re.IGNORECASE)
SPLIT_NAME_PATTERN = re.compile(
    r"train(ing)?|val(id(ation)?)?|dev(elopment)?|test(ing)?|hold-?out|internal|external|(fold[ _-]?)?\d{1,2}", re.I
)
FAILURE_CODES = ("missing-file", "missing-codec", "no-pixels", "ambiguous", "unreadable")
FLAG_CODES = ("gap", "geometry", "left-out", "no-place", "odd", "suffix")
Labeled = tuple[int, list[str]]  # a row, and the labels of its mask
MIXED_COLUMN_CODES = {"modality": "modality-mix", "format": "format-mix", "codec": "codec-mix", "stored": "stored-mix"}


def check_dataset(table: InspectionTable, class_names: Sequence[str], *, pseudonymize: bool) -> list[DatasetIssue]:
    """All of them, the gravest first."""
    made = [
        *collect_row_issues(table),
        *check_manifest_columns(table),
        *mask_labels(table),
        *check_mixed_metadata(table),
        *check_spacings(table),
        *check_slice_positions(table),
        *check_duplicates(table),
        *check_splits(table, pseudonymize=pseudonymize),
        *check_targets(table, class_names),
    ]
    return sorted((one for one in made if one.n_rows), key=lambda one: ISSUE_ORDER[one.code])


def collect_row_issues(table: InspectionTable) -> Iterator[DatasetIssue]:
    """What each row says of itself, by code, with the reasons of failures."""
    compute, column = import_arrow("compute"), table.metadata["findings"].combine_chunks()
    found = EncodedColumn.encode(compute.list_flatten(column))
    parents = compute.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    lossless = _rows_true_if_mixed(table, "lossy")
    for at, code in enumerate(found.values):
        rows = np.unique(parents[found.codes == at])
        yield DatasetIssue(code, rows, _count_reasons(table, code, rows))
    yield DatasetIssue("lossy-mix", lossless)


def _count_reasons(table: InspectionTable, code: str, rows: Codes) -> dict[str, int]:
    """What the rows say themselves of what was found: why they cannot be read, where the gaps are."""
    chosen = table.metadata.select(["error", "flags"]).take(import_arrow().array(rows)).to_pylist()
    if code in FLAG_CODES:
        said = Counter(flag for row in chosen for flag in row["flags"] if flags_to_codes([flag]) == [code])
    else:
        said = Counter(row["error"] for row in chosen if row["error"] and code in FAILURE_CODES)
    return dict(said.most_common(MAX_DETAILS_PER_ISSUE))


def _rows_true_if_mixed(table: InspectionTable, name: str) -> Codes:
    """The rows where a fact is true, if it is false in others."""
    values = table.read_numbers(name)
    return np.flatnonzero(values == 1) if (values == 0).any() else np.empty(0, np.int64)


def check_manifest_columns(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Ids that are not unique, columns in the way of a result, masks that only some have."""
    ids = EncodedColumn.encode(table.manifest.table["id"])
    rows, groups = repeated_rows(ids)
    yield DatasetIssue("repeated-id", rows, row_groups=split_into_groups(rows, groups))
    names = [name for name in reserved_names(table.manifest.table.column_names) if name not in ("row", "target")]
    if names:
        yield DatasetIssue("columns", np.arange(len(table.manifest)), dict.fromkeys(names, len(table.manifest)))
    masks = table.encode_manifest_column("mask")
    if masks is not None:
        yield DatasetIssue("no-mask", masks.missing_rows)


def mask_labels(seen: InspectionTable) -> Iterator[DatasetIssue]:
    """Masks of which no metric knows what counts, until a label is chosen; with how many masks have each label."""
    several: list[Labeled] = []
    levels: list[Labeled] = []
    single: list[Labeled] = []
    for row, names in enumerate(seen.metadata["mask_labels"].to_pylist()):
        if names:
            (single if len(names) == 1 else several if len(names) <= MAX_LISTED_NAMES else levels).append((row, names))
    yield _labels("mask-labels", several)
    yield _labels("mask-levels", levels, named=False)
    counts = Counter(name for _, (name,) in single)
    usual = counts.most_common(1)[0][0] if counts else ""
    rows = [row for row, (name,) in single if name != usual]
    yield DatasetIssue(
        "mask-labels-differ", np.array(rows, np.int64), dict(counts.most_common(MAX_DETAILS_PER_ISSUE)) if rows else {}
    )


def _labels(code: str, found: Sequence[Labeled], *, named: bool = True) -> DatasetIssue:
    counts = Counter(name for _, names in found if named for name in names)
    return DatasetIssue(
        code, np.array([row for row, _ in found], np.int64), dict(counts.most_common(MAX_DETAILS_PER_ISSUE))
    )


def check_mixed_metadata(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Facts that are not the same for all images that have them."""
    for name, code in MIXED_COLUMN_CODES.items():
        yield _mixed_values_issue(table.encode_metadata(name), code)
    yield _mixed_values_issue(_encode_units(table), "unit-mix")
    yield _mixed_values_issue(table.encode_metadata("orientation"), "orientation-mix")
    colour = table.read_numbers("colour")
    usual = np.nanmean(colour) >= 0.5 if np.isfinite(colour).any() else True
    yield DatasetIssue("colour-mix", np.flatnonzero(colour == (0 if usual else 1)))
    yield _check_monochrome1(table.encode_metadata("photometric"))
    yield _check_dimensions(table)
    yield _check_windows(table)


def _mixed_values_issue(column: EncodedColumn, code: str) -> DatasetIssue:
    return DatasetIssue(code, column.minority_rows, column.value_counts if len(column.values) > 1 else {})


def _encode_units(table: InspectionTable) -> EncodedColumn:
    """Of grey DICOM images, where none is a unit of its own."""
    units, modality = table.encode_metadata("unit"), table.encode_metadata("modality")
    if len(modality.values) != 1 or not len(units.values):
        return EncodedColumn(np.full(len(units.codes), -1), [])
    dicom = (modality.codes >= 0) & (table.read_numbers("colour") == 0)
    codes = np.where(dicom & (units.codes < 0), len(units.values), units.codes)
    return EncodedColumn(codes, [*units.values, "none"] if (codes == len(units.values)).any() else units.values)


def _check_monochrome1(photometric: EncodedColumn) -> DatasetIssue:
    known = {name: at for at, name in enumerate(photometric.values)}
    rows = np.flatnonzero(photometric.codes == known.get("MONOCHROME1", -2))
    return DatasetIssue("monochrome1" if "MONOCHROME2" in known else "all-monochrome1", rows)


def _check_dimensions(table: InspectionTable) -> DatasetIssue:
    lengths = import_arrow("compute").list_value_length(table.metadata["size"])
    flat, deep = (np.flatnonzero(np.asarray(lengths.fill_null(0)) == axes) for axes in (2, 3))
    details = {"flat": len(flat), "volumes": len(deep)}
    return DatasetIssue("axes-mix", min(flat, deep, key=len), details if min(len(flat), len(deep)) else {})


def _check_windows(table: InspectionTable) -> DatasetIssue:
    """Rows whose window is not the most frequent one, or that have none where others have."""
    rows, pairs = table.read_fixed_length_lists("window", 2)
    without = np.flatnonzero((table.read_numbers("windows") == 0) & (table.read_numbers("colour") == 0))
    if not len(rows):
        return DatasetIssue("window-mix", rows)
    kinds, which, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    other = rows[which.reshape(-1) != counts.argmax()]
    named = {
        f"centre {kinds[at][0]:g}, width {kinds[at][1]:g}": int(counts[at]) for at in np.argsort(-counts, kind="stable")
    }
    details = dict(list(named.items())[:MAX_DETAILS_PER_ISSUE]) | ({"none": len(without)} if len(without) else {})
    return DatasetIssue("window-mix", np.union1d(other, without), details if len(details) > 1 else {})


def check_spacings(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Voxels of different sizes, of none, and those much longer than wide."""
    found, some = {}, np.zeros(len(table.manifest), np.bool_)
    for axes in (2, 3):
        rows, sizes = table.read_fixed_length_lists("spacing", axes)
        some[rows] = True
        if not len(rows):
            continue
        ratio = sizes / np.median(sizes, axis=0)
        found[axes] = rows, np.maximum(ratio, 1 / ratio).max(axis=1), float((sizes.max(0) / sizes.min(0)).max())
        if axes == 3:
            yield DatasetIssue("anisotropic", rows[sizes.max(1) / sizes.min(1) >= MIN_ANISOTROPY])
    for code, least, most in (
        ("spacing-mix", LARGE_SPACING_RATIO, np.inf),
        ("spacing-differs", NOTICEABLE_SPACING_RATIO, LARGE_SPACING_RATIO),
    ):
        far = [
            rows[apart > np.sqrt(least)] if least == LARGE_SPACING_RATIO else rows[apart > least]
            for rows, apart, spread in found.values()
            if least < spread <= most
        ]
        yield DatasetIssue(code, np.sort(np.concatenate(far)) if far else np.empty(0, np.int64))
    medical = (table.encode_metadata("modality").codes >= 0) & np.isfinite(table.read_numbers("minimum"))
    yield DatasetIssue("no-spacing", np.flatnonzero(medical & ~some) if some.any() else np.empty(0, np.int64))


def check_duplicates(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Rows of equal pixels; those that have one value everywhere are told by that."""
    pixels = _encode_pixel_digests(table)
    rows, groups = repeated_rows(pixels)
    yield DatasetIssue("duplicates", rows, row_groups=split_into_groups(rows, groups))
    wanted = table.encode_manifest_column("target")
    if wanted is not None:
        rows, groups = rows_in_mixed_groups(pixels, wanted)
        yield DatasetIssue("duplicate-targets", rows, row_groups=split_into_groups(rows, groups))


def _encode_pixel_digests(table: InspectionTable) -> EncodedColumn:
    pixels = table.encode_metadata("pixels")
    flat = table.read_numbers("minimum") == table.read_numbers("maximum")
    return EncodedColumn(np.where(flat, -1, pixels.codes), pixels.values)


def check_splits(table: InspectionTable, *, pseudonymize: bool) -> Iterator[DatasetIssue]:
    """Patients, studies and pixels that are in several splits; rows that are in none, or of no patient."""
    split, patient = table.encode_manifest_column("split"), table.encode_manifest_column("patient")
    if patient is not None:
        yield DatasetIssue("no-patient", patient.missing_rows)
    if split is None:
        return
    yield DatasetIssue("no-split", split.missing_rows)
    whole = {"study-in-splits": table.encode_metadata("study"), "pixels-in-splits": _encode_pixel_digests(table)}
    if patient is not None:
        whole["patient-in-splits"] = patient
    for code, groups in whole.items():
        rows, own = rows_in_mixed_groups(groups, split)
        yield DatasetIssue(
            code, rows, _count_by_split(split, rows, pseudonymize=pseudonymize), split_into_groups(rows, own)
        )


def _count_by_split(split: EncodedColumn, rows: Codes, *, pseudonymize: bool) -> dict[str, int]:
    """How many of the rows are in each split, by its name where that is one of the usual."""
    counts = np.bincount(split.codes[rows], minlength=len(split.values))
    shown = {at: name for at, name in enumerate(split.values) if counts[at]}
    return {
        name if not pseudonymize or SPLIT_NAME_PATTERN.fullmatch(name) else f"split {at + 1}": int(counts[at])
        for at, name in shown.items()
    }


def check_targets(table: InspectionTable, class_names: Sequence[str]) -> Iterator[DatasetIssue]:
    """Targets that are missing, say that nothing is known, or are none of the classes."""
    wanted = table.encode_manifest_column("target")
    if wanted is None:
        return
    yield DatasetIssue("no-target", wanted.missing_rows)
    allowed = {*class_names, *map(str, range(len(class_names)))}
    doubtful = [bool(UNKNOWN_TARGET_PATTERN.fullmatch(name)) and name not in allowed for name in wanted.values]
    unknown = [
        bool(class_names) and name not in allowed and not odd for name, odd in zip(wanted.values, doubtful, strict=True)
    ]
    for code, which in (("doubtful-target", doubtful), ("unknown-target", unknown)):
        names = {name for name, odd in zip(wanted.values, which, strict=True) if odd}
        details = [(name, count) for name, count in wanted.value_counts.items() if name in names]
        yield DatasetIssue(
            code, np.flatnonzero(np.isin(wanted.codes, np.flatnonzero(which))), dict(details[:MAX_DETAILS_PER_ISSUE])
        )


Floats = NDArray[np.float64]
SAME_POSITION_MM = 1e-4  # mm
SLICE_PLANE_LENGTH = 11  # position, across, down, spacing


def check_slice_positions(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Beside which slices others are missing, and which lie at the same place; series as they stand in single rows."""
    rows, planes = table.read_fixed_length_lists("plane", SLICE_PLANE_LENGTH)
    where = np.full(len(table.manifest), -1)
    where[rows] = np.arange(len(rows))
    members, series = repeated_rows(table.encode_metadata("series"))
    pixels = table.encode_metadata("pixels").codes
    known = where[members] >= 0
    members, series = members[known], series[known]
    beside: list[Codes] = []
    same: list[Codes] = []
    groups: list[tuple[int, ...]] = []
    broken = 0
    for part in np.split(members, np.flatnonzero(np.diff(series)) + 1) if len(members) else []:
        for own in _iter_parallel_slices(part, planes[where[part]]):
            found, groups_at_one = _check_slice_stack(own, planes[where[own]])
            broken += bool(len(found))
            beside.append(found)
            groups_at_one = [one for one in groups_at_one if len({*pixels[list(one)].tolist()}) > 1]  # else copies
            same += [np.array(one) for one in groups_at_one]
            groups += groups_at_one
    yield DatasetIssue("gap", _concatenate_rows(beside), {"of series whose slices are rows": broken} if broken else {})
    yield DatasetIssue("same-place", _concatenate_rows(same), row_groups=tuple(groups[:MAX_GROUPS_PER_ISSUE]))


def _concatenate_rows(parts: list[Codes]) -> Codes:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _iter_parallel_slices(rows: Codes, planes: Floats) -> Iterator[Codes]:
    """Slices whose rows and columns point the same way, group by group: a localiser is in one series with three views."""
    rest = np.arange(len(rows))
    while len(rest):
        alike = np.abs(planes[rest, 3:9] - planes[rest[0], 3:9]).max(axis=1) < DIRECTION_TOLERANCE
        yield rows[rest[alike]]
        rest = rest[~alike]


def _check_slice_stack(rows: Codes, planes: Floats) -> tuple[Codes, list[tuple[int, ...]]]:
    """The rows beside a distance that is not the usual one; the groups of rows that lie at one place."""
    normal = np.cross(planes[0, 3:6], planes[0, 6:9])
    along = planes[:, :3] @ normal
    order = np.argsort(along, kind="stable")
    steps = np.diff(along[order])
    apart = steps > SAME_POSITION_MM
    places = np.concatenate([[0], np.cumsum(apart)])
    twice = np.bincount(places)[places] > 1
    at_one = [tuple(rows[order[places == at]].tolist()) for at in np.unique(places[twice])]
    if np.count_nonzero(apart) < 2:
        return np.empty(0, np.int64), at_one
    usual = float(np.median(steps[apart]))
    odd = np.flatnonzero(apart & (abs(steps - usual) > max(MAX_SPACING_DEVIATION * usual, 0.01)))
    return rows[order[np.union1d(odd, odd + 1)]], at_one
