"""`inspect_images`: check a set of images. `DatasetInspection`: its result as issues, as a table, and as JSON."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camscope.atomic_writes_and_folder_locks import open_atomic, write_bytes
from camscope.batch.build_manifest_from_source import build_manifest
from camscope.batch.csv_export import write_escaped_csv
from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.image_manifest import Manifest, contains_scans, import_arrow, pseudonymize_manifest, require_columns
from camscope.batch.inspection.dataset_issue_codes import ISSUE_ORDER, SEVERITIES, DatasetIssue, RowNumbers
from camscope.batch.inspection.duplicates_and_mixed_metadata import check_dataset
from camscope.batch.inspection.read_image_metadata import (
    INTERNAL_COLUMNS,
    METADATA_COLUMNS,
    ImageMetadata,
    ImageMetadataReader,
    metadata_to_table,
)
from camscope.batch.inspection.value_counts_and_prevalence import (
    DEFAULT_COLUMNS,
    InspectionTable,
    TargetPrevalence,
    compute_pixel_value_and_side_length_ranges,
    compute_prevalences,
    count_metadata_values,
    resolve_column_names,
)
from camscope.errors import InputError, OutputError
from camscope.images.files.redacted_errors_and_file_pseudonyms import load_pseudonym_key
from camscope.plurals import plural
from camscope.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = "camscope/inspection/2"
MAX_NAMED_ROWS = 1000  # row ids per issue in the JSON; the table has all of them
DATASET_LEVEL_CODES = ("reserved-columns", "target-associated-with-group")  # issues that concern no single row


@dataclass(frozen=True, eq=False)
class DatasetInspection:
    """The result of `inspect_images`.

    Attributes:
        visible_columns: The columns `row`, `id` and `path`, and those of the manifest that may be shown.
        metadata: The metadata of each row, in the same order.
        issues: The issues, the most severe first.
        value_counts: Number of images, by kind of metadata and by value.
        value_ranges: Minimum and maximum of the pixel values ("values"), and of the side lengths ("sides").
        prevalences: For each column of `group_by`, the number of rows of each target in each group.
        missing_roles: The roles without a column: patient, split, target or mask.
        profile: "research", "clinical" or "all".

    >>> import numpy as np
    >>> from camscope import inspect_images
    >>> inspection = inspect_images([np.arange(192, dtype=np.uint8).reshape(8, 8, 3)])
    >>> inspection.n_readable, inspection.value_counts["size"]
    (1, {'8 x 8': 1})

    """

    visible_columns: "pa.Table"
    metadata: "pa.Table"
    issues: tuple[DatasetIssue, ...]
    value_counts: dict[str, dict[str, int]]
    value_ranges: dict[str, list[Any]]
    prevalences: tuple[TargetPrevalence, ...]
    missing_roles: tuple[str, ...]
    profile: str

    def __len__(self) -> int:
        return int(self.metadata.num_rows)

    @property
    def n_readable(self) -> int:
        """The number of images that could be read."""
        return int(self.metadata["error"].null_count)

    @cached_property
    def severity_counts(self) -> dict[str, int]:
        """A dict from severity to the number of issues with this severity."""
        return {severity: sum(issue.severity == severity for issue in self.issues) for severity in SEVERITIES}

    def row_ids(self, rows: RowNumbers | Sequence[int], max_ids: int = MAX_NAMED_ROWS) -> list[str]:
        """Return the ids of the given rows. At most `max_ids` ids are returned.

        Args:
            rows: Numbers of rows.
            max_ids: Largest number of ids.

        Returns:
            The ids.

        >>> from camscope import inspect_images
        >>> len(inspect_images(image_folder).row_ids([0, 1], max_ids=1))  # a folder of image files
        1

        """
        indices = import_arrow().array(list(rows[:max_ids]), import_arrow().int64())
        ids: list[str] = self.visible_columns["id"].take(indices).to_pylist()
        return ids

    def to_table(self) -> "pa.Table":
        """Return a table with one row per image. It holds id, path, status, metadata, issue codes and visible columns.

        Returns:
            The table.

        >>> from camscope import inspect_images
        >>> inspect_images(image_folder).to_table().num_rows  # a folder of twelve image files
        12

        """
        pa = import_arrow()
        codes: list[list[str]] = [[] for _ in range(len(self))]  # with those of checks of the whole set
        for issue in self.issues:
            for row in issue.rows.tolist() if issue.code not in DATASET_LEVEL_CODES else ():
                codes[row].append(issue.code)
        columns = {name: self.visible_columns[name] for name in ("row", "id", "path")}
        columns["status"] = ["ok" if error is None else "failed" for error in self.metadata["error"].to_pylist()]
        for name in METADATA_COLUMNS:
            column = self.metadata[name]
            columns[name] = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        columns["issue_codes"] = pa.array(codes, pa.list_(pa.string()))
        further = set(self.visible_columns.column_names) - {*columns, *INTERNAL_COLUMNS}
        columns |= {name: self.visible_columns[name] for name in self.visible_columns.column_names if name in further}
        return pa.table(columns)

    @property
    def summary(self) -> dict[str, Any]:
        """The issues, value counts and prevalences, in a form that can be written as JSON."""
        return {
            "schema": SCHEMA_VERSION,
            "camscope": __version__,
            "profile": self.profile,
            "n_images": len(self),
            "n_readable": self.n_readable,
            "severity_counts": self.severity_counts,
            "value_counts": self.value_counts,
            "value_ranges": self.value_ranges,
            "issues": [
                {
                    "code": issue.code,
                    "severity": issue.severity,
                    "message": issue.message,
                    "n_rows": issue.n_rows,
                    "details": dict(issue.row_counts),
                    "row_ids": [] if issue.code in DATASET_LEVEL_CODES else self.row_ids(issue.rows),
                    "row_groups": [self.row_ids(group) for group in issue.row_groups],
                }
                for issue in self.issues
            ],
            "prevalence": [
                {
                    "column": prevalence.column,
                    "association": prevalence.association,
                    "groups": [
                        {"group": group, "target": target, "count": int(count), "share": float(share)}
                        for group, counts, shares in zip(
                            prevalence.groups, prevalence.counts, prevalence.shares, strict=True
                        )
                        for target, count, share in zip(prevalence.targets, counts, shares, strict=True)
                    ],
                }
                for prevalence in self.prevalences
            ],
            "missing_roles": list(self.missing_roles),
        }

    def to_json(self) -> str:
        """Convert `summary` to JSON text with sorted keys.

        Returns:
            The text.

        >>> from camscope import inspect_images
        >>> inspect_images(image_folder).to_json()[0]  # a folder of image files
        '{'

        """
        return json.dumps(self.summary, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `summary` to a .json file, or write the table of `to_table` to a .parquet or .csv file.

        Args:
            path: File to write.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file exists.

        >>> import tempfile
        >>> from camscope import inspect_images
        >>> inspect_images(image_folder).save(f"{tempfile.mkdtemp()}/inspection.csv").name  # a folder of image files
        'inspection.csv'

        """
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            return write_bytes(path, self.to_json().encode(), overwrite=overwrite)
        if suffix not in (".parquet", ".csv"):
            raise OutputError(f"{path}: expected a file of .json, .parquet or .csv")
        with open_atomic(path, overwrite=overwrite) as file:
            if suffix == ".parquet":
                import_arrow("parquet").write_table(self.to_table(), file)
            else:
                table = self.to_table()
                batches = table.to_batches(max_chunksize=4096)
                rows = (row.values() for batch in batches for row in batch.to_pylist())
                write_escaped_csv(file, table.column_names, rows)
        return Path(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {severity}s" for severity, count in self.severity_counts.items())
        return f"<DatasetInspection of {plural(len(self), 'image', spec=',')}, {self.n_readable:,} readable: {counts}>"


ROWS_PER_CHUNK = 4096  # rows that are converted to Python at a time
SCAN_FORMATS = ("DICOM", "DICOM series", "NIfTI", "NRRD", "MetaImage")
ProgressCallback = Callable[[int, int], None]


def inspect_images(
    source: Any,
    *,
    root: str | Path | None = None,
    patient_column: str | None = None,
    split_column: str | None = None,
    target_column: str | None = None,
    mask_column: str | None = None,
    group_by: Sequence[str] = (),
    class_names: Sequence[str] = (),
    profile: Literal["research", "clinical"] | None = None,
    keep_columns: Sequence[str] = (),
    all_scans: bool = False,
    num_threads: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> DatasetInspection:
    """Inspect a set of images before a model uses it. Each image is read once, and is not kept in memory.

    Args:
        source: The images, photos and scans in any mixture: see `build_manifest`.
        root: The folder where relative paths begin: see `build_manifest`.
        patient_column: The column of the patient. Default: `patient` or `patient_id`, if the manifest has one.
        split_column: The column of the split. Default: `split`.
        target_column: The column of the target. Default: `target`.
        mask_column: The column of the mask. Default: `mask` or `mask_path`.
        group_by: Columns of the manifest or of the metadata (such as "modality") by whose values targets are counted.
        class_names: All targets that are allowed. Default: all targets are allowed.
        profile: "research" shows no file names, and only the manifest columns of the target, `group_by` and
            `keep_columns`. "clinical" shows everything. Default: "research" if any image is a scan.
        keep_columns: Further columns that the profile "research" shows.
        all_scans: Treat all images as scans, so that the pages of a TIFF are slices of a volume.
        num_threads: Threads that read images. Default: one per CPU core.
        on_progress: Called with the number of images that are done, and the number of all images.

    Returns:
        The inspection: its issues, and a table with one row per image.

    Raises:
        InputError: The source or a column does not exist, or an option is invalid.

    >>> import numpy as np
    >>> image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    >>> inspect_images([image, image]).issues
    (<warning: duplicates, 2 rows: the same pixels as in another row>,)

    """
    if profile not in (None, "research", "clinical"):
        raise InputError(f"profile={profile!r}: expected 'research' or 'clinical'")
    require_valid_num_threads(num_threads)
    manifest = build_manifest(source, root, strict=False)
    columns = resolve_column_names(
        manifest, {"patient": patient_column, "split": split_column, "target": target_column, "mask": mask_column}
    )
    existing = manifest.table.column_names
    require_columns(keep_columns, existing, "to keep")
    metadata = _read_metadata(manifest, columns["mask"], all_scans, num_threads or os.cpu_count() or 1, on_progress)
    table = InspectionTable(manifest, metadata_to_table(metadata), columns)
    is_scan_format = set(SCAN_FORMATS).intersection(table.encode_metadata_column("format").values)
    pseudonymize = profile == "research" or (profile is None and (bool(is_scan_format) or contains_scans(manifest)))
    prevalences = compute_prevalences(table, group_by)
    issues = check_dataset(table, class_names, prevalences, pseudonymize=pseudonymize)
    visible_names = [
        name for name in (columns["target"], *group_by, *keep_columns, split_column) if name and name in existing
    ]
    return DatasetInspection(
        visible_columns=_select_visible_columns(manifest, visible_names) if pseudonymize else manifest.table,
        metadata=table.metadata,
        issues=tuple(sorted((issue for issue in issues if issue.n_rows), key=lambda issue: ISSUE_ORDER[issue.code])),
        value_counts=count_metadata_values(table),
        value_ranges=compute_pixel_value_and_side_length_ranges(table),
        prevalences=tuple(prevalences),
        missing_roles=tuple(role for role in DEFAULT_COLUMNS if columns[role] is None),
        profile="research" if pseudonymize else profile or "all",
    )


def _read_metadata(
    manifest: Manifest, mask_column: str | None, all_scans: bool, num_threads: int, on_progress: ProgressCallback | None
) -> Iterator[ImageMetadata]:
    """Yield the metadata of each image in the order of the rows. Threads read the images."""
    hash_key = hashlib.sha256(load_pseudonym_key()).digest()
    reader = ImageMetadataReader(manifest, mask_column, hash_key, all_scans)
    cells = manifest.table.select([name for name in ("row", "path", mask_column) if name is not None])
    rows = (row for batch in cells.to_batches(ROWS_PER_CHUNK) for row in batch.to_pylist())
    for n_done, metadata in enumerate(map_in_order(reader, rows, num_threads), start=1):
        if on_progress is not None:
            on_progress(n_done, len(manifest))
        yield metadata


def _select_visible_columns(manifest: Manifest, names: Sequence[str]) -> "pa.Table":
    """Return a table with the columns `row`, `id` and `path`, in which pseudonyms hide names. Add the columns in `names`."""
    pseudonyms = pseudonymize_manifest(manifest).table
    columns = {name: pseudonyms[name] for name in ("row", "id", "path")}
    return import_arrow().table({**columns, **{name: manifest.table[name] for name in names if name not in columns}})
