"""Checks of a set of images as a whole: mixed metadata, duplicates, slices, splits, targets and masks."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.batch.image_manifest import LABEL_COLUMN, find_reserved_names, import_arrow
from camscope.batch.inspection.dataset_issue_codes import DatasetIssue, convert_flags_to_issue_codes
from camscope.batch.inspection.value_counts_and_prevalence import (
    MAX_GROUPS_PER_ISSUE,
    NO_ROWS,
    EncodedColumn,
    GroupedRows,
    InspectionTable,
    IntArray,
    TargetPrevalence,
)
from camscope.images.scans.dicom_slice_positions import DIRECTION_TOLERANCE, MAX_SPACING_DEVIATION
from camscope.mask_labels import MAX_LISTED_NAMES

MAX_DETAILS_PER_ISSUE = 20  # details that an issue lists
LARGE_SPACING_RATIO, NOTICEABLE_SPACING_RATIO = 2.0, 1.01  # ratios of voxel sizes
MIN_ANISOTROPY = 3.0  # length of a voxel divided by its width
SAME_POSITION_MM = 1e-4  # mm
SLICE_PLANE_LENGTH = 11  # position, across, down, spacing
MIN_ASSOCIATION_FOR_ISSUE, MIN_ROWS_FOR_ISSUE = 0.5, 30  # Cramér's V, rows
UNKNOWN_TARGET_PATTERN = re.compile(r"\?+|-1|unknown|unlabell?ed|nan|null|n/?a|missing|tbd|todo|-+", re.IGNORECASE)
SPLIT_NAME_PATTERN = re.compile(
    r"train(ing)?|val(id(ation)?)?|dev(elopment)?|test(ing)?|hold-?out|internal|external|(fold[ _-]?)?\d{1,2}", re.I
)
FAILURE_CODES = ("missing-file", "missing-codec", "no-pixels", "ambiguous-series", "unreadable")
FLAG_CODES = ("missing-slices", "irregular-slices", "skipped-files", "no-position", "other-flag", "wrong-suffix")
MIXED_COLUMN_CODES = {
    "modality": "mixed-modalities",
    "format": "mixed-formats",
    "codec": "mixed-codecs",
    "stored_type": "mixed-stored-types",
    "orientation": "mixed-orientations",
}


def check_dataset(
    table: InspectionTable, class_names: Sequence[str], prevalences: Sequence[TargetPrevalence], *, pseudonymize: bool
) -> Iterator[DatasetIssue]:
    """Run all checks. Yield one issue for each check. If a check finds no problem, its issue has no rows."""
    yield from _collect_row_issues(table)
    yield from _check_repeated_ids_and_reserved_columns(table)
    yield from _check_mask_labels(table)
    yield from _check_mixed_metadata(table)
    yield from _check_spacings(table)
    yield from _check_slice_positions(table)
    yield from _check_duplicates(table)
    yield from _check_splits(table, pseudonymize=pseudonymize)
    yield from _check_targets(table, class_names)
    row_counts = {
        f"{prevalence.column} (Cramér's V {prevalence.association:.2f})": int(prevalence.counts.sum())
        for prevalence in prevalences
        if prevalence.counts.sum() >= MIN_ROWS_FOR_ISSUE and (prevalence.association or 0) >= MIN_ASSOCIATION_FOR_ISSUE
    }
    rows = np.arange(len(table.manifest)) if row_counts else NO_ROWS
    yield DatasetIssue("target-associated-with-group", rows, row_counts)


def _build_grouped_issue(code: str, groups: GroupedRows, row_counts: Mapping[str, int] | None = None) -> DatasetIssue:
    """Build an issue whose rows form groups. For example, each group has rows with equal pixels."""
    rows, group_codes = groups
    parts = np.split(rows, np.flatnonzero(np.diff(group_codes)) + 1)[:MAX_GROUPS_PER_ISSUE] if len(rows) else []
    return DatasetIssue(code, rows, row_counts or {}, tuple(tuple(part.tolist()) for part in parts))


def _collect_row_issues(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Collect the issues of single images by code. Also count the reasons for failures."""
    compute, column = import_arrow("compute"), table.metadata["issue_codes"].combine_chunks()
    issue_codes = EncodedColumn.encode(compute.list_flatten(column))
    row_of_code = compute.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    for index, code in enumerate(issue_codes.values):
        rows = np.unique(row_of_code[issue_codes.codes == index])
        yield DatasetIssue(code, rows, _count_reasons(table, code, rows))
    is_lossy = table.read_number_column("is_lossy")
    yield DatasetIssue("mixed-lossy-compression", np.flatnonzero(is_lossy == 1) if (is_lossy == 0).any() else NO_ROWS)


def _count_reasons(table: InspectionTable, code: str, rows: IntArray) -> dict[str, int]:
    """Count the reasons for an issue over its rows. A reason is an error message or a flag."""
    metadata = table.metadata.select(["error", "flags"]).take(import_arrow().array(rows)).to_pylist()
    if code in FLAG_CODES:
        reasons = Counter(
            flag for row in metadata for flag in row["flags"] if convert_flags_to_issue_codes([flag]) == [code]
        )
    else:
        reasons = Counter(row["error"] for row in metadata if row["error"] and code in FAILURE_CODES)
    return dict(reasons.most_common(MAX_DETAILS_PER_ISSUE))


def _check_repeated_ids_and_reserved_columns(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check the columns of the manifest for repeated ids, reserved names and missing masks."""
    yield _build_grouped_issue("repeated-id", EncodedColumn.encode(table.manifest.table["id"]).repeated_rows)
    n_rows = len(table.manifest)
    columns = table.manifest.table.column_names
    allowed = ("row", "target") if LABEL_COLUMN in columns else ("row", "target", "label")  # which a run renames
    names = [name for name in find_reserved_names(columns) if name not in allowed]
    yield DatasetIssue("reserved-columns", np.arange(n_rows) if names else NO_ROWS, dict.fromkeys(names, n_rows))
    masks = table.encode_manifest_column("mask")
    if masks is not None:
        yield DatasetIssue("no-mask", masks.rows_without_value)


def _check_mask_labels(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Find masks that have several labels. Count how many masks have each label."""
    labels = table.metadata["mask_labels"].to_pylist()
    n_labels = np.array([len(names) for names in labels])
    several = np.flatnonzero((n_labels > 1) & (n_labels <= MAX_LISTED_NAMES))
    counts = Counter(name for row in several for name in labels[row])
    yield DatasetIssue("mask-labels", several, dict(counts.most_common(MAX_DETAILS_PER_ISSUE)))
    yield DatasetIssue("mask-levels", np.flatnonzero(n_labels > MAX_LISTED_NAMES))
    single = {row: labels[row][0] for row in np.flatnonzero(n_labels == 1).tolist()}
    common = Counter(single.values()).most_common(MAX_DETAILS_PER_ISSUE)
    other_rows = np.array([row for row, name in single.items() if name != common[0][0]], np.int64)
    yield DatasetIssue("mask-labels-differ", other_rows, dict(common) if len(other_rows) else {})


def _check_mixed_metadata(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Check whether metadata differ between images, such as modality, unit, color or window."""
    for name, code in MIXED_COLUMN_CODES.items():
        yield _build_mixed_values_issue(table.encode_metadata_column(name), code)
    yield _build_mixed_values_issue(_encode_value_units(table), "mixed-units")
    is_color = table.read_number_column("is_color")
    mostly_color = np.nanmean(is_color) >= 0.5 if np.isfinite(is_color).any() else True
    yield DatasetIssue("mixed-colors", np.flatnonzero(is_color == (0 if mostly_color else 1)))
    photometric = table.encode_metadata_column("photometric")
    code_by_name = {name: code for code, name in enumerate(photometric.values)}
    inverted = np.flatnonzero(photometric.codes == code_by_name.get("MONOCHROME1", -2))
    yield DatasetIssue("monochrome1" if "MONOCHROME2" in code_by_name else "all-monochrome1", inverted)
    lengths = import_arrow("compute").list_value_length(table.metadata["shape"])
    flat, volumes = (np.flatnonzero(np.asarray(lengths.fill_null(0)) == n_axes) for n_axes in (2, 3))
    details = {"2-D images": len(flat), "volumes": len(volumes)} if len(flat) and len(volumes) else {}
    yield DatasetIssue("mixed-dimensions", min(flat, volumes, key=len), details)
    yield _check_display_windows(table)


def _build_mixed_values_issue(column: EncodedColumn, code: str) -> DatasetIssue:
    return DatasetIssue(code, column.minority_rows, column.value_counts if len(column.values) > 1 else {})


def _encode_value_units(table: InspectionTable) -> EncodedColumn:
    """Encode the value units of gray DICOM images if all have the same modality. A missing unit counts as "none"."""
    units, modality = table.encode_metadata_column("value_unit"), table.encode_metadata_column("modality")
    if len(modality.values) != 1 or not len(units.values):
        return EncodedColumn(np.full(len(units.codes), -1), [])
    dicom = (modality.codes >= 0) & (table.read_number_column("is_color") == 0)
    codes = np.where(dicom & (units.codes < 0), len(units.values), units.codes)
    return EncodedColumn(codes, [*units.values, "none"] if (codes == len(units.values)).any() else units.values)


def _check_display_windows(table: InspectionTable) -> DatasetIssue:
    """Find images that lack window tags or deviate from the most frequent window."""
    rows, pairs = table.read_fixed_length_lists("window", 2)
    without = np.flatnonzero((table.read_number_column("n_windows") == 0) & (table.read_number_column("is_color") == 0))
    if not len(rows):
        return DatasetIssue("mixed-windows", rows)
    windows, window_of_row, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    other_rows = rows[window_of_row.reshape(-1) != counts.argmax()]
    order = np.argsort(-counts, kind="stable")[:MAX_DETAILS_PER_ISSUE]
    details = {f"center {windows[n][0]:g}, width {windows[n][1]:g}": int(counts[n]) for n in order}
    if len(without):
        details["none"] = len(without)
    return DatasetIssue("mixed-windows", np.union1d(other_rows, without), details if len(details) > 1 else {})


def _check_spacings(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Find images with different or missing voxel sizes, and images with long, thin voxels."""
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
        yield DatasetIssue(code, np.sort(np.concatenate(deviating)) if deviating else NO_ROWS)
    is_medical = (table.encode_metadata_column("modality").codes >= 0) & np.isfinite(
        table.read_number_column("minimum")
    )
    without = np.flatnonzero(is_medical & ~has_spacing) if has_spacing.any() else NO_ROWS
    yield DatasetIssue("no-spacing", without)


def _check_duplicates(table: InspectionTable) -> Iterator[DatasetIssue]:
    """Find images with equal pixels. Images with a single constant value are ignored."""
    pixels, targets = _encode_pixel_digests(table), table.encode_manifest_column("target")
    yield _build_grouped_issue("duplicates", pixels.repeated_rows)
    if targets is not None:
        yield _build_grouped_issue(
            "duplicates-with-different-targets", pixels.rows_of_groups_with_several_values(targets)
        )


def _encode_pixel_digests(table: InspectionTable) -> EncodedColumn:
    pixels = table.encode_metadata_column("pixel_digest")
    is_constant = table.read_number_column("minimum") == table.read_number_column("maximum")
    return EncodedColumn(np.where(is_constant, -1, pixels.codes), pixels.values)


def _check_splits(table: InspectionTable, *, pseudonymize: bool) -> Iterator[DatasetIssue]:
    """Find patients, studies and pixels that occur in several splits. `pseudonymize` hides unusual split names."""
    split, patient = table.encode_manifest_column("split"), table.encode_manifest_column("patient")
    if patient is not None:
        yield DatasetIssue("no-patient", patient.rows_without_value)
    if split is None:
        return
    yield DatasetIssue("no-split", split.rows_without_value)
    columns = {
        "study-in-several-splits": table.encode_metadata_column("study_digest"),
        "pixels-in-several-splits": _encode_pixel_digests(table),
    }
    if patient is not None:
        columns["patient-in-several-splits"] = patient
    names = [
        name if not pseudonymize or SPLIT_NAME_PATTERN.fullmatch(name) else f"split {number}"
        for number, name in enumerate(split.values, 1)
    ]
    for code, column in columns.items():
        groups = column.rows_of_groups_with_several_values(split)
        counts = np.bincount(split.codes[groups.rows], minlength=len(names)).tolist()
        yield _build_grouped_issue(
            code, groups, {name: count for name, count in zip(names, counts, strict=True) if count}
        )


def _check_targets(table: InspectionTable, class_names: Sequence[str]) -> Iterator[DatasetIssue]:
    """Find missing targets, placeholders such as "unknown", and targets that are not names of classes."""
    targets = table.encode_manifest_column("target")
    if targets is None:
        return
    yield DatasetIssue("no-target", targets.rows_without_value)
    allowed = {*class_names, *map(str, range(len(class_names)))}
    foreign = [name for name in targets.values if name not in allowed]
    placeholders = {name for name in foreign if UNKNOWN_TARGET_PATTERN.fullmatch(name)}
    unknown = {name for name in foreign if class_names and name not in placeholders}
    for code, names in (("placeholder-target", placeholders), ("unknown-target", unknown)):
        rows = np.flatnonzero(np.isin(targets.codes, [n for n, name in enumerate(targets.values) if name in names]))
        details = [(name, count) for name, count in targets.value_counts.items() if name in names]
        yield DatasetIssue(code, rows, dict(details[:MAX_DETAILS_PER_ISSUE]))


def _check_slice_positions(table: InspectionTable) -> Iterator[DatasetIssue]:
    """In series with one row per slice, find missing slices, and positions that several slices share."""
    rows, planes = table.read_fixed_length_lists("slice_plane", SLICE_PLANE_LENGTH)
    plane_index = np.full(len(table.manifest), -1)
    plane_index[rows] = np.arange(len(rows))
    slices, series = table.encode_metadata_column("series_digest").repeated_rows
    pixels = table.encode_metadata_column("pixel_digest").codes
    has_plane = plane_index[slices] >= 0
    slices, series = slices[has_plane], series[has_plane]
    next_to_gaps: list[IntArray] = [NO_ROWS]
    groups: list[tuple[int, ...]] = []
    for series_rows in np.split(slices, np.flatnonzero(np.diff(series)) + 1) if len(slices) else []:
        remaining = series_rows
        while len(remaining):  # slices with the same orientation: a localizer has three views in one series
            directions = planes[plane_index[remaining], 3:9]
            is_parallel = np.abs(directions - directions[0]).max(axis=1) < DIRECTION_TOLERANCE
            stack, remaining = remaining[is_parallel], remaining[~is_parallel]
            gap_rows, same_position_groups = _find_slice_gaps_and_overlaps(stack, planes[plane_index[stack]])
            next_to_gaps.append(gap_rows)
            # slices with the same pixels are duplicates
            groups += [group for group in same_position_groups if len({*pixels[list(group)].tolist()}) > 1]
    n_series_with_gaps = sum(len(rows) > 0 for rows in next_to_gaps)
    details = {"series whose slices are separate rows": n_series_with_gaps} if n_series_with_gaps else {}
    yield DatasetIssue("missing-slices", np.unique(np.concatenate(next_to_gaps)), details)
    same_position = np.unique(np.array([row for group in groups for row in group], np.int64))
    yield DatasetIssue("slices-at-same-position", same_position, row_groups=tuple(groups[:MAX_GROUPS_PER_ISSUE]))


class SliceGapsAndOverlaps(NamedTuple):
    """The rows on both sides of a gap, and the groups of rows that share a position."""

    rows_next_to_gaps: IntArray
    rows_at_same_position: list[tuple[int, ...]]


def _find_slice_gaps_and_overlaps(rows: IntArray, planes: NDArray[np.float64]) -> SliceGapsAndOverlaps:
    """Find gaps and overlaps in a series that has one row per slice."""
    normal = np.cross(planes[0, 3:6], planes[0, 6:9])
    depths = planes[:, :3] @ normal
    order = np.argsort(depths, kind="stable")
    distances = np.diff(depths[order])
    is_apart = distances > SAME_POSITION_MM
    positions = np.concatenate([[0], np.cumsum(is_apart)])
    is_shared = np.bincount(positions)[positions] > 1
    groups = [tuple(rows[order[positions == position]].tolist()) for position in np.unique(positions[is_shared])]
    if np.count_nonzero(is_apart) < 2:
        return SliceGapsAndOverlaps(NO_ROWS, groups)
    usual = float(np.median(distances[is_apart]))
    unusual = np.flatnonzero(is_apart & (abs(distances - usual) > max(MAX_SPACING_DEVIATION * usual, 0.01)))
    return SliceGapsAndOverlaps(rows[order[np.union1d(unusual, unusual + 1)]], groups)
