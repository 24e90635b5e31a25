"""inspect_images: each image of a set read once, by threads, and what is then to be said of the set.

One row of a manifest read once: its image, its mask, and the reason where that cannot be done.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camscope.batch.image_loading import map_in_order, require_valid_num_threads
from camscope.batch.inspection import metadata_readers
from camscope.batch.inspection.checks import check_dataset
from camscope.batch.inspection.distributions import (
    check_group_association,
    compute_prevalences,
    value_counts,
    value_ranges,
)
from camscope.batch.inspection.image_metadata import ImageMetadata, metadata_to_table
from camscope.batch.inspection.inspection_table import DEFAULT_COLUMNS, InspectionTable, resolve_column_names
from camscope.batch.inspection.issues import ISSUE_ORDER
from camscope.batch.inspection.report import DatasetInspection
from camscope.batch.manifest import Manifest, import_arrow
from camscope.batch.path_resolver import is_url, read_image_source
from camscope.batch.pseudonymize import contains_scans, pseudonymize_manifest
from camscope.batch.sources import build_manifest
from camscope.errors import CamscopeError, InputError, MissingExtraError
from camscope.images.files.redaction import load_pseudonym_key
from camscope.images.scans.scan import Affine
from camscope.images.scans.scan_reader import is_scan

if TYPE_CHECKING:
    import pyarrow as pa


ROWS_PER_CHUNK = 4096  # rows that are Python objects at once
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
    """What is in a set of images, before any model sees it; no image is held longer than it is read.

    `source`, `root`: see `build_manifest`; photographs, medical images, and both. `patient_column`, `split_column`, `target_column`, `mask_column`: columns;
    default: patient or patient_id, split, target, mask or mask_path, where there are such. `group_by`: columns, or facts such as
    modality, by whose values targets are counted. `class_names`: all targets that there may be.

    `profile`: "research" shows no file's name, and of the manifest's columns the target, those counted by, and those to
    `keep_columns`; it is that of every set with a medical image. "clinical" shows all. `all_scans`: all images are medical, whatever their
    files are called: the pages of a TIFF are slices of a volume. `on_progress`: called with how many images are
    done, of how many.
    """
    if profile not in (None, "research", "clinical"):
        raise InputError(f"profile={profile!r}: expected 'research' or 'clinical'")
    require_valid_num_threads(num_threads)
    manifest = build_manifest(source, root, strict=False)
    columns = resolve_column_names(
        manifest, {"patient": patient_column, "split": split_column, "target": target_column, "mask": mask_column}
    )
    if unknown := [name for name in keep_columns if name not in manifest.table.column_names]:
        raise InputError(f"no column {unknown[0]!r} to keep; there are {', '.join(manifest.table.column_names)}")
    key = hashlib.sha256(load_pseudonym_key()).digest()
    reader = ImageMetadataReader(manifest, columns["mask"], key, all_scans)
    read = map_in_order(reader, _iter_manifest_rows(manifest, columns["mask"]), num_threads or os.cpu_count() or 1)
    seen = InspectionTable(manifest, metadata_to_table(_report_progress(read, len(manifest), on_progress)), columns)
    private = profile == "research" or (profile is None and (contains_scans(manifest) or _has_scan_formats(seen)))
    counted = compute_prevalences(seen, group_by)
    made = [*check_dataset(seen, class_names, pseudonymize=private), *check_group_association(seen, counted)]
    allowed = [
        name
        for name in (columns["target"], *group_by, *keep_columns, split_column)
        if name in manifest.table.column_names
    ]
    return DatasetInspection(
        _select_visible_columns(manifest, private, allowed),
        seen.metadata,
        tuple(sorted(made, key=lambda one: ISSUE_ORDER[one.code])),
        value_counts(seen),
        value_ranges(seen),
        tuple(counted),
        tuple(meaning for meaning in DEFAULT_COLUMNS if columns[meaning] is None),
        "research" if private else profile or "all",
    )


def _iter_manifest_rows(manifest: Manifest, mask_column: str | None) -> Iterator[Mapping[str, Any]]:
    """What a reader needs of each row, and no more: of a million rows a few are Python objects at a time."""
    needed = manifest.table.select([name for name in ("row", "path", mask_column) if name is not None])
    for start in range(0, len(manifest), ROWS_PER_CHUNK):
        yield from needed.slice(start, ROWS_PER_CHUNK).to_pylist()


def _report_progress(
    metadata: Iterator[ImageMetadata], total: int, on_progress: ProgressCallback | None
) -> Iterator[ImageMetadata]:
    for done, one in enumerate(metadata, start=1):
        if on_progress is not None:
            on_progress(done, total)
        yield one


def _has_scan_formats(table: InspectionTable) -> bool:
    """Whether anything turned out to be a medical image, whatever its name."""
    return not {*SCAN_FORMATS}.isdisjoint(table.encode_metadata("format").values)


def _select_visible_columns(manifest: Manifest, pseudonymize: bool, allowed: Sequence[str | None]) -> "pa.Table":
    """row, id, path and other columns, as the profile has them."""
    if not pseudonymize:
        return manifest.table
    kept = [name for name in dict.fromkeys(allowed) if name is not None and name not in ("row", "id", "path")]
    hidden = pseudonymize_manifest(manifest).table.select(["row", "id", "path"])
    for name in kept:
        hidden = hidden.append_column(name, manifest.table[name])
    return import_arrow().table(hidden)


ERROR_CODE_PATTERNS = (
    ("no such f", "missing-file"),  # file or folder
    ("is not installed", "missing-codec"),
    ("the file has no pixels", "no-pixels"),
    ("choose one", "ambiguous"),
)


@dataclass(frozen=True)
class ImageMetadataReader:
    """Rows -> facts; it runs in many threads. No reason names a file, and none quotes one. `all_scans`: no image is a photograph."""

    manifest: Manifest
    mask_column: str | None
    hash_key: bytes
    all_scans: bool = False

    def __call__(self, row: Mapping[str, Any]) -> ImageMetadata:
        """A row's facts: never an error."""
        facts, world = ImageMetadata(row["row"]), None
        try:
            world = self._read_image(row, facts)
        except MissingExtraError as error:
            facts.record_failure("missing-codec", str(error))
        except CamscopeError as error:
            text = str(error)
            facts.record_failure(
                next((code for words, code in ERROR_CODE_PATTERNS if words in text), "unreadable"), text
            )
        except FileNotFoundError:
            facts.record_failure("missing-file", "there is no such file")
        except Exception as error:  # a store, a network, a dataset and a damaged file may raise anything
            words = getattr(error, "strerror", None) or type(error).__name__
            facts.record_failure("unreadable", f"it cannot be read: {words}")
        if self.mask_column is not None:
            facts.mask_status, facts.mask_labels = self._check_mask_cell(row[self.mask_column], facts, world)
            facts.issue_codes += (
                [facts.mask_status] if facts.mask_status is not None and facts.mask_status.startswith("mask-") else []
            )
        return facts

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
                metadata.record_failure("outside", "its path leads elsewhere")
                return None
        if isinstance(source, Path) or is_scan(source):
            return metadata_readers.read_scan_metadata(source, metadata, self.hash_key).affine
        metadata_readers.read_photo_metadata(source, row["path"], metadata, self.hash_key)
        return None

    def _read_source(self, path: str) -> bytes | Path:
        """A file's bytes; of a scan its place, for it may be of several files."""
        place = self.manifest.resolve_path(path)
        return (
            Path(place) if self.all_scans and not is_url(place) and Path(place).exists() else read_image_source(place)
        )

    def _check_mask_cell(
        self, cell: Any, metadata: ImageMetadata, image_affine: Affine | None
    ) -> tuple[str | None, tuple[str, ...]]:
        """A word, None where the row has no mask; and the labels of the mask."""
        if cell is None or cell in ("", []):
            return None, ()
        if not isinstance(cell, str) or cell.lstrip().startswith(metadata_readers.NON_FILE_PREFIXES):
            return "not a file", ()
        try:
            source = self._read_source(cell)
        except FileNotFoundError:
            return "mask-missing", ()
        except (CamscopeError, OSError):
            return "mask-unreadable", ()
        return metadata_readers.check_mask(source, metadata.shape, image_affine)
