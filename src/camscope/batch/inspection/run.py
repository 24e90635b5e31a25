"""`inspect_images`: read each image of a set once, in threads, and report what is unusual."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.inspection.dataset_checks import check_dataset
from camscope.batch.inspection.image_metadata import (
    NON_FILE_PREFIXES,
    ImageMetadata,
    check_mask,
    metadata_to_table,
    read_photo_metadata,
    read_scan_metadata,
)
from camscope.batch.inspection.inspection_table import (
    DEFAULT_COLUMNS,
    InspectionTable,
    compute_prevalences,
    compute_value_ranges,
    count_values,
    resolve_column_names,
)
from camscope.batch.inspection.issues import ISSUE_ORDER
from camscope.batch.inspection.report import DatasetInspection
from camscope.batch.manifest import Manifest
from camscope.batch.path_resolver import is_url, read_image_source
from camscope.batch.pseudonymize import contains_scans, pseudonymize_manifest
from camscope.batch.sources import build_manifest
from camscope.errors import CamscopeError, InputError, MissingExtraError
from camscope.images.files.redaction import load_pseudonym_key
from camscope.images.scans.scan import Affine
from camscope.images.scans.scan_reader import is_scan

if TYPE_CHECKING:
    import pyarrow as pa


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
    """Inspect a set of images before a model sees it. Each image is read once and not kept.

    Args:
        source: The images, photos and scans in any mixture: see `build_manifest`.
        root: The folder where relative paths begin: see `build_manifest`.
        patient_column: The column of the patient. Default: `patient` or `patient_id`, if the manifest has one.
        split_column: The column of the split. Default: `split`.
        target_column: The column of the target. Default: `target`.
        mask_column: The column of the mask. Default: `mask` or `mask_path`.
        group_by: Columns of the manifest or of the metadata (such as "modality") by whose values targets are counted.
        class_names: All targets that are allowed. Default: any target is.
        profile: "research" shows no file names, and of the manifest only the target, `group_by` and `keep_columns`.
            "clinical" shows all. Default: "research" for a set with any scan.
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
    if unknown := [name for name in keep_columns if name not in existing]:
        raise InputError(f"no column {unknown[0]!r} to keep; the columns are {', '.join(existing)}")
    hash_key = hashlib.sha256(load_pseudonym_key()).digest()
    reader = ImageMetadataReader(manifest, columns["mask"], hash_key, all_scans)
    cells = manifest.table.select([name for name in ("row", "path", columns["mask"]) if name is not None])
    rows = (row for batch in cells.to_batches(ROWS_PER_CHUNK) for row in batch.to_pylist())
    images = map_in_order(reader, rows, num_threads or os.cpu_count() or 1)
    table = InspectionTable(manifest, metadata_to_table(_report_progress(images, len(manifest), on_progress)), columns)
    is_scan_format = set(SCAN_FORMATS).intersection(table.encode_metadata("format").values)
    pseudonymize = profile == "research" or (profile is None and (bool(is_scan_format) or contains_scans(manifest)))
    prevalences = compute_prevalences(table, group_by)
    issues = check_dataset(table, class_names, prevalences, pseudonymize=pseudonymize)
    visible_names = [name for name in (columns["target"], *group_by, *keep_columns, split_column) if name in existing]
    return DatasetInspection(
        visible_columns=_select_visible_columns(manifest, visible_names) if pseudonymize else manifest.table,
        metadata=table.metadata,
        issues=tuple(sorted((issue for issue in issues if issue.n_rows), key=lambda issue: ISSUE_ORDER[issue.code])),
        value_counts=count_values(table),
        value_ranges=compute_value_ranges(table),
        prevalences=tuple(prevalences),
        missing_roles=tuple(role for role in DEFAULT_COLUMNS if columns[role] is None),
        profile="research" if pseudonymize else profile or "all",
    )


def _report_progress(
    metadata: Iterator[ImageMetadata], total: int, on_progress: ProgressCallback | None
) -> Iterator[ImageMetadata]:
    for n_done, image_metadata in enumerate(metadata, start=1):
        if on_progress is not None:
            on_progress(n_done, total)
        yield image_metadata


def _select_visible_columns(manifest: Manifest, names: Sequence[str | None]) -> "pa.Table":
    """Return the pseudonymized columns `row`, `id` and `path`, and further columns by name."""
    table = pseudonymize_manifest(manifest).table.select(["row", "id", "path"])
    for name in dict.fromkeys(names):
        if name is not None and name not in ("row", "id", "path"):
            table = table.append_column(name, manifest.table[name])
    return table


ERROR_CODE_PATTERNS = (
    ("no such f", "missing-file"),  # file or folder
    ("is not installed", "missing-codec"),
    ("the file has no pixels", "no-pixels"),
    ("choose one", "ambiguous-series"),
)


@dataclass(frozen=True)
class ImageMetadataReader:
    """Read the metadata of a row. It runs in several threads. No error that it records names or quotes a file."""

    manifest: Manifest
    mask_column: str | None
    hash_key: bytes
    all_scans: bool = False

    def __call__(self, row: Mapping[str, Any]) -> ImageMetadata:
        """Return the metadata of a row; errors are recorded, not raised."""
        metadata, affine = ImageMetadata(row["row"]), None
        try:
            affine = self._read_image(row, metadata)
        except MissingExtraError as error:
            metadata.record_failure("missing-codec", str(error))
        except CamscopeError as error:
            message = str(error)
            codes = (code for pattern, code in ERROR_CODE_PATTERNS if pattern in message)
            metadata.record_failure(next(codes, "unreadable"), message)
        except FileNotFoundError:
            metadata.record_failure("missing-file", "there is no such file")
        except Exception as error:  # a store, a network, a dataset and a damaged file may raise anything
            reason = getattr(error, "strerror", None) or type(error).__name__
            metadata.record_failure("unreadable", f"it cannot be read: {reason}")
        if self.mask_column is not None:
            status, metadata.mask_labels = self._check_mask_cell(row[self.mask_column], metadata, affine)
            metadata.mask_status = status
            if status is not None and status.startswith("mask-"):
                metadata.issue_codes.append(status)
        return metadata

    def _read_image(self, row: Mapping[str, Any], metadata: ImageMetadata) -> Affine | None:
        if self.manifest.images is not None:
            source: Any = self.manifest.images[row["row"]]
        elif not row["path"]:
            metadata.record_failure("missing-file", "its row has no path")
            return None
        else:
            try:
                source = self._read_source(row["path"])
            except MissingExtraError:
                raise
            except InputError:
                metadata.record_failure("outside-root", "its path leads out of the root folder")
                return None
        if isinstance(source, Path) or is_scan(source):
            return read_scan_metadata(source, metadata, self.hash_key).affine
        read_photo_metadata(source, row["path"], metadata, self.hash_key)
        return None

    def _read_source(self, path: str) -> bytes | Path:
        """Return the bytes of a file, or the path of a scan, which may be several files."""
        location = self.manifest.path_resolver.resolve(path)
        if self.all_scans and not is_url(location) and Path(location).exists():
            return Path(location)
        return read_image_source(location)

    def _check_mask_cell(
        self, cell: Any, metadata: ImageMetadata, image_affine: Affine | None
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return the status of a mask, or None if the row has none, and the labels of the mask."""
        if cell is None or cell in ("", []):
            return None, ()
        if not isinstance(cell, str) or cell.lstrip().startswith(NON_FILE_PREFIXES):
            return "not a file", ()
        try:
            source = self._read_source(cell)
        except FileNotFoundError:
            return "mask-missing", ()
        except (CamscopeError, OSError):
            return "mask-unreadable", ()
        return check_mask(source, metadata.shape, image_affine)
