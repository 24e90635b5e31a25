"""Checks of a set of images as a whole: mixed metadata, duplicates, slices, splits, targets and masks."""

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

MAX_DETAILS_PER_ISSUE = 20  # details that an issue lists
LARGE_SPACING_RATIO, NOTICEABLE_SPACING_RATIO = 2.0, 1.01  # ratios of voxel sizes
MIN_ANISOTROPY = 3.0  # length of a voxel divided by its width
UNKNOWN_TARGET_PATTERN = re.compile(r"\?+|-1|unknown|unlabell?ed|nan|null|n/?a|missing|tbd|todo|-+", re.IGNORECASE)
SPLIT_NAME_PATTERN = re.compile(
    r"train(ing)?|val(id(ation)?)?|dev(elopment)?|test(ing)?|hold-?out|internal|external|(fold[ _-]?)?\d{1,2}", re.I
)
FAILURE_CODES = ("missing-file", "missing-codec", "no-pixels", "ambiguous-series", "unreadable")
FLAG_CODES = ("missing-slices", "irregular-slices", "skipped-files", "no-position", "other-flag", "wrong-suffix")
LabeledRow = tuple[int, list[str]]  # a row and the labels of its mask
MIXED_COLUMN_CODES = {
    "modality": "mixed-modalities",
    "format": "mixed-formats",
    "codec": "mixed-codecs",
    "stored_type": "mixed-stored-types",
}


def check_dataset(table: InspectionTable, class_names: Sequence[str], *, pseudonymize: bool) -> list[DatasetIssue]:
    """Run all checks, and return the issues, the most severe first."""
    issues = [
        *collect_row_issues(table),
        *check_manifest_columns(table),
        *check_mask_labels(table),
        *check_mixed_metadata(table),
        *check_spacings(table),
        *check_slice_positions(table),
        *check_duplicates(table),
        *check_splits(table, pseudonymize=pseudonymize),
        *check_targets(table, class_names),
    ]
    return sorted((issue for issue in issues if issue.n_rows), key=lambda issue: ISSUE_ORDER[issue.code])


def collect_row_issues(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Group the issues that were recorded for single images by code, with the reasons of failures."""
    compute, column = import_arrow("compute"), table.metadata["issue_codes"].combine_chunks()
    issue_codes = EncodedColumn.encode(compute.list_flatten(column))
    row_of_code = compute.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    for index, code in enumerate(issue_codes.values):
        rows = np.unique(row_of_code[issue_codes.codes == index])
        yield DatasetIssue(code, rows, _count_reasons(table, code, rows))
    yield DatasetIssue("mixed-lossy-compression", _rows_true_if_mixed(table, "is_lossy"))


def _count_reasons(table: InspectionTable, code: str, rows: Codes) -> dict[str, int]:
    """Count the errors or flags that explain an issue."""
    metadata = table.metadata.select(["error", "flags"]).take(import_arrow().array(rows)).to_pylist()
    if code in FLAG_CODES:
        reasons = Counter(flag for row in metadata for flag in row["flags"] if flags_to_codes([flag]) == [code])
    else:
        reasons = Counter(row["error"] for row in metadata if row["error"] and code in FAILURE_CODES)
    return dict(reasons.most_common(MAX_DETAILS_PER_ISSUE))


def _rows_true_if_mixed(table: InspectionTable, name: str) -> Codes:
    """Return the rows where a column is true, if it is false in other rows."""
    values = table.read_numbers(name)
    return np.flatnonzero(values == 1) if (values == 0).any() else np.empty(0, np.int64)


def check_manifest_columns(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check the columns of the manifest: repeated ids, reserved names, missing masks."""
    ids = EncodedColumn.encode(table.manifest.table["id"])
    rows, groups = repeated_rows(ids)
    yield DatasetIssue("repeated-id", rows, row_groups=split_into_groups(rows, groups))
    names = [name for name in reserved_names(table.manifest.table.column_names) if name not in ("row", "target")]
    if names:
        yield DatasetIssue(
            "reserved-columns", np.arange(len(table.manifest)), dict.fromkeys(names, len(table.manifest))
        )
    masks = table.encode_manifest_column("mask")
    if masks is not None:
        yield DatasetIssue("no-mask", masks.missing_rows)


def check_mask_labels(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check for masks whose labels are ambiguous until a label is chosen, and count the masks with each label."""
    with_one_label: list[LabeledRow] = []
    with_several_labels: list[LabeledRow] = []
    with_many_levels: list[LabeledRow] = []
    for row, names in enumerate(table.metadata["mask_labels"].to_pylist()):
        if names:
            few = with_one_label if len(names) == 1 else with_several_labels
            (few if len(names) <= MAX_LISTED_NAMES else with_many_levels).append((row, names))
    label_counts = Counter(name for _, names in with_several_labels for name in names)
    yield DatasetIssue("mask-labels", _list_rows(with_several_labels), _list_most_common(label_counts))
    yield DatasetIssue("mask-levels", _list_rows(with_many_levels))
    counts = Counter(name for _, (name,) in with_one_label)
    most_common = counts.most_common(1)[0][0] if counts else ""
    other_rows = _list_rows([(row, names) for row, names in with_one_label if names != [most_common]])
    yield DatasetIssue("mask-labels-differ", other_rows, _list_most_common(counts) if len(other_rows) else {})


def _list_rows(labeled_rows: Sequence[LabeledRow]) -> Codes:
    return np.array([row for row, _ in labeled_rows], np.int64)


def _list_most_common(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common(MAX_DETAILS_PER_ISSUE))


def check_mixed_metadata(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check for metadata that are not the same for all images that have them."""
    for name, code in MIXED_COLUMN_CODES.items():
        yield _mixed_values_issue(table.encode_metadata(name), code)
    yield _mixed_values_issue(_encode_units(table), "mixed-units")
    yield _mixed_values_issue(table.encode_metadata("orientation"), "mixed-orientations")
    is_color = table.read_numbers("is_color")
    mostly_color = np.nanmean(is_color) >= 0.5 if np.isfinite(is_color).any() else True
    yield DatasetIssue("mixed-colors", np.flatnonzero(is_color == (0 if mostly_color else 1)))
    yield _check_monochrome1(table.encode_metadata("photometric"))
    yield _check_dimensions(table)
    yield _check_windows(table)


def _mixed_values_issue(column: EncodedColumn, code: str) -> DatasetIssue:
    return DatasetIssue(code, column.minority_rows, column.value_counts if len(column.values) > 1 else {})


def _encode_units(table: InspectionTable) -> EncodedColumn:
    """Encode the units of gray DICOM images of one modality, where a missing unit counts as the unit "none"."""
    units, modality = table.encode_metadata("value_unit"), table.encode_metadata("modality")
    if len(modality.values) != 1 or not len(units.values):
        return EncodedColumn(np.full(len(units.codes), -1), [])
    dicom = (modality.codes >= 0) & (table.read_numbers("is_color") == 0)
    codes = np.where(dicom & (units.codes < 0), len(units.values), units.codes)
    return EncodedColumn(codes, [*units.values, "none"] if (codes == len(units.values)).any() else units.values)


def _check_monochrome1(photometric: EncodedColumn) -> DatasetIssue:
    code_by_name = {name: code for code, name in enumerate(photometric.values)}
    rows = np.flatnonzero(photometric.codes == code_by_name.get("MONOCHROME1", -2))
    return DatasetIssue("monochrome1" if "MONOCHROME2" in code_by_name else "all-monochrome1", rows)


def _check_dimensions(table: InspectionTable) -> DatasetIssue:
    lengths = import_arrow("compute").list_value_length(table.metadata["shape"])
    flat, volumes = (np.flatnonzero(np.asarray(lengths.fill_null(0)) == n_axes) for n_axes in (2, 3))
    details = {"2-D images": len(flat), "volumes": len(volumes)} if len(flat) and len(volumes) else {}
    return DatasetIssue("mixed-dimensions", min(flat, volumes, key=len), details)


def _check_windows(table: InspectionTable) -> DatasetIssue:
    """Check for rows whose window is not the most frequent one, or is missing while others have one."""
    rows, pairs = table.read_fixed_length_lists("window", 2)
    without = np.flatnonzero((table.read_numbers("n_windows") == 0) & (table.read_numbers("is_color") == 0))
    if not len(rows):
        return DatasetIssue("mixed-windows", rows)
    windows, window_of_row, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    other_rows = rows[window_of_row.reshape(-1) != counts.argmax()]
    order = np.argsort(-counts, kind="stable")[:MAX_DETAILS_PER_ISSUE]
    details = {f"center {windows[n][0]:g}, width {windows[n][1]:g}": int(counts[n]) for n in order}
    if len(without):
        details["none"] = len(without)
    return DatasetIssue("mixed-windows", np.union1d(other_rows, without), details if len(details) > 1 else {})


def check_spacings(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check for voxels of different sizes, missing sizes, and voxels much longer than wide."""
    spacings, has_spacing = [], np.zeros(len(table.manifest), np.bool_)
    for n_axes in (2, 3):
        rows, sizes = table.read_fixed_length_lists("spacing", n_axes)
        has_spacing[rows] = True
        if not len(rows):
            continue
        ratio = sizes / np.median(sizes, axis=0)
        spread = float((sizes.max(0) / sizes.min(0)).max())
        spacings.append((rows, np.maximum(ratio, 1 / ratio).max(axis=1), spread))
        if n_axes == 3:
            yield DatasetIssue("anisotropic", rows[sizes.max(1) / sizes.min(1) >= MIN_ANISOTROPY])
    for code, min_spread, max_spread, min_deviation in (
        ("mixed-spacings", LARGE_SPACING_RATIO, np.inf, np.sqrt(LARGE_SPACING_RATIO)),
        ("slightly-mixed-spacings", NOTICEABLE_SPACING_RATIO, LARGE_SPACING_RATIO, NOTICEABLE_SPACING_RATIO),
    ):
        deviating = [
            rows[deviation > min_deviation] for rows, deviation, spread in spacings if min_spread < spread <= max_spread
        ]
        yield DatasetIssue(code, np.sort(np.concatenate(deviating)) if deviating else np.empty(0, np.int64))
    is_medical = (table.encode_metadata("modality").codes >= 0) & np.isfinite(table.read_numbers("minimum"))
    without = np.flatnonzero(is_medical & ~has_spacing) if has_spacing.any() else np.empty(0, np.int64)
    yield DatasetIssue("no-spacing", without)


def check_duplicates(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check for rows with equal pixels. Constant images are not compared: they are reported as such."""
    pixels = _encode_pixel_digests(table)
    rows, groups = repeated_rows(pixels)
    yield DatasetIssue("duplicates", rows, row_groups=split_into_groups(rows, groups))
    targets = table.encode_manifest_column("target")
    if targets is not None:
        rows, groups = rows_in_mixed_groups(pixels, targets)
        yield DatasetIssue("duplicates-with-different-targets", rows, row_groups=split_into_groups(rows, groups))


def _encode_pixel_digests(table: InspectionTable) -> EncodedColumn:
    pixels = table.encode_metadata("pixel_digest")
    is_constant = table.read_numbers("minimum") == table.read_numbers("maximum")
    return EncodedColumn(np.where(is_constant, -1, pixels.codes), pixels.values)


def check_splits(table: InspectionTable, *, pseudonymize: bool) -> Iterator[DatasetIssue]:
    """Check for patients, studies and pixels in several splits, and for rows without a split or patient."""
    split, patient = table.encode_manifest_column("split"), table.encode_manifest_column("patient")
    if patient is not None:
        yield DatasetIssue("no-patient", patient.missing_rows)
    if split is None:
        return
    yield DatasetIssue("no-split", split.missing_rows)
    columns = {
        "study-in-several-splits": table.encode_metadata("study_digest"),
        "pixels-in-several-splits": _encode_pixel_digests(table),
    }
    if patient is not None:
        columns["patient-in-several-splits"] = patient
    for code, column in columns.items():
        rows, group_codes = rows_in_mixed_groups(column, split)
        counts = _count_by_split(split, rows, pseudonymize=pseudonymize)
        yield DatasetIssue(code, rows, counts, split_into_groups(rows, group_codes))


def _count_by_split(split: EncodedColumn, rows: Codes, *, pseudonymize: bool) -> dict[str, int]:
    """Count the rows of each split. With `pseudonymize`, only usual names of splits are shown."""
    counts = np.bincount(split.codes[rows], minlength=len(split.values))
    return {
        name if not pseudonymize or SPLIT_NAME_PATTERN.fullmatch(name) else f"split {index + 1}": int(counts[index])
        for index, name in enumerate(split.values)
        if counts[index]
    }


def check_targets(table: InspectionTable, class_names: Sequence[str]) -> Iterator[DatasetIssue]:
    """Check for missing targets, placeholders such as "unknown", and targets that are not classes."""
    targets = table.encode_manifest_column("target")
    if targets is None:
        return
    yield DatasetIssue("no-target", targets.missing_rows)
    allowed = {*class_names, *map(str, range(len(class_names)))}
    foreign = [name for name in targets.values if name not in allowed]
    placeholders = {name for name in foreign if UNKNOWN_TARGET_PATTERN.fullmatch(name)}
    unknown = {name for name in foreign if class_names and name not in placeholders}
    for code, names in (("placeholder-target", placeholders), ("unknown-target", unknown)):
        is_listed = np.array([name in names for name in targets.values], np.bool_)
        rows = np.flatnonzero(np.isin(targets.codes, np.flatnonzero(is_listed)))
        details = [(name, count) for name, count in targets.value_counts.items() if name in names]
        yield DatasetIssue(code, rows, dict(details[:MAX_DETAILS_PER_ISSUE]))


Floats = NDArray[np.float64]
SAME_POSITION_MM = 1e-4  # mm
SLICE_PLANE_LENGTH = 11  # position, across, down, spacing


def check_slice_positions(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check series whose slices are separate rows for missing slices, and for slices at the same position."""
    rows, planes = table.read_fixed_length_lists("slice_plane", SLICE_PLANE_LENGTH)
    plane_index = np.full(len(table.manifest), -1)
    plane_index[rows] = np.arange(len(rows))
    slices, series = repeated_rows(table.encode_metadata("series_digest"))
    pixels = table.encode_metadata("pixel_digest").codes
    has_plane = plane_index[slices] >= 0
    slices, series = slices[has_plane], series[has_plane]
    next_to_gaps: list[Codes] = []
    groups: list[tuple[int, ...]] = []
    n_series_with_gaps = 0
    for series_rows in np.split(slices, np.flatnonzero(np.diff(series)) + 1) if len(slices) else []:
        for stack in _iter_parallel_slices(series_rows, planes[plane_index[series_rows]]):
            gap_rows, same_position_groups = _check_slice_stack(stack, planes[plane_index[stack]])
            n_series_with_gaps += bool(len(gap_rows))
            next_to_gaps.append(gap_rows)
            # slices with the same pixels are duplicates
            groups += [group for group in same_position_groups if len({*pixels[list(group)].tolist()}) > 1]
    details = {"series whose slices are separate rows": n_series_with_gaps} if n_series_with_gaps else {}
    yield DatasetIssue("missing-slices", _concatenate_rows(next_to_gaps), details)
    same_position_rows = _concatenate_rows([np.array(group) for group in groups])
    yield DatasetIssue("slices-at-same-position", same_position_rows, row_groups=tuple(groups[:MAX_GROUPS_PER_ISSUE]))


def _concatenate_rows(parts: list[Codes]) -> Codes:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _iter_parallel_slices(rows: Codes, planes: Floats) -> Iterator[Codes]:
    """Split slices into groups with the same orientation: a localizer has three views in one series."""
    remaining = np.arange(len(rows))
    while len(remaining):
        difference = np.abs(planes[remaining, 3:9] - planes[remaining[0], 3:9]).max(axis=1)
        is_parallel = difference < DIRECTION_TOLERANCE
        yield rows[remaining[is_parallel]]
        remaining = remaining[~is_parallel]


def _check_slice_stack(rows: Codes, planes: Floats) -> tuple[Codes, list[tuple[int, ...]]]:
    """Return the rows next to an unusual distance, and the groups of rows at the same position."""
    normal = np.cross(planes[0, 3:6], planes[0, 6:9])
    depths = planes[:, :3] @ normal
    order = np.argsort(depths, kind="stable")
    distances = np.diff(depths[order])
    is_apart = distances > SAME_POSITION_MM
    positions = np.concatenate([[0], np.cumsum(is_apart)])
    is_shared = np.bincount(positions)[positions] > 1
    groups = [tuple(rows[order[positions == position]].tolist()) for position in np.unique(positions[is_shared])]
    if np.count_nonzero(is_apart) < 2:
        return np.empty(0, np.int64), groups
    usual = float(np.median(distances[is_apart]))
    unusual = np.flatnonzero(is_apart & (abs(distances - usual) > max(MAX_SPACING_DEVIATION * usual, 0.01)))
    return rows[order[np.union1d(unusual, unusual + 1)]], groups
