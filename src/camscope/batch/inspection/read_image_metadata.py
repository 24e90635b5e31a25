"""Read the metadata of one image, such as format, size, unit and orientation, without patient data."""

import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from camscope.batch.image_manifest import Manifest, import_arrow
from camscope.batch.inspection.dataset_issue_codes import convert_flags_to_issue_codes
from camscope.batch.path_resolver import is_url, read_image_source
from camscope.errors import CamscopeError, ImageError, InputError
from camscope.images.files.find_and_open_image_files import selected_source, split_path_and_index
from camscope.images.files.redacted_errors_and_file_pseudonyms import redact_errors, suppress_library_output
from camscope.images.mask_file_reader import SegmentationObjectError, read_label_image, read_mask_scan
from camscope.images.photo_reader import EXIF_ORIENTATION_TAG, find_suffix_and_frame_warnings, read_photo
from camscope.images.scans import dicom_header_values
from camscope.images.scans.dicom_file_reader import build_scan, load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_slice_positions import read_plane_and_flags
from camscope.images.scans.nifti_reader import is_nifti
from camscope.images.scans.png_tiff_reader import read_png_or_tiff_scan
from camscope.images.scans.scan import Affine, Scan
from camscope.images.scans.scan_preprocess import get_axis_codes
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.mask_labels import MAX_LISTED_NAMES, LabelImage

if TYPE_CHECKING:
    import pyarrow as pa
    from pydicom.dataset import Dataset

Array = NDArray[Any]
IMAGES_PER_TABLE = 4096  # images converted to Arrow at once
VALUES_PER_HASH_UPDATE = 1 << 20  # values
SOURCE_PREFIX_PATTERN = re.compile(r"(scan-[0-9a-f]{8}|the file|bytes|tensor|array): ")
UNIQUE_TEXTS = ("error", "pixel_digest", "study_digest", "series_digest")  # texts that few images share
INTERNAL_COLUMNS = ("study_digest", "series_digest", "slice_plane", "mask_labels")  # only used to compare rows
IMAGE_ONLY_FIELDS = (
    "modality",
    "photometric",
    "window",
    "n_windows",
    "burned_in",
    "is_lossy",
    "study_digest",
    "series_digest",
    "slice_plane",
)
HIGH_BIT_DEPTH_MODES = ("I", "F")  # the beginnings of Pillow's modes with more than 8 bits
BIT_DEPTH_NAMES = {"1": "1 bit", "P": "8 bits, palette", "I": "32 bits", "F": "32 bits, floating point"}
FORMAT_BY_SUFFIX = {".nii": "NIfTI", ".nii.gz": "NIfTI", ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage"}
FORMAT_BY_SUFFIX |= {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG"}  # as scans, not as photos
BURNED_IN_TEXT = {True: "yes", False: "no", None: "not stated"}
NON_FILE_PREFIXES = ("[", "{")  # boxes, points, outlines


@dataclass(slots=True)
class ImageMetadata:
    """The metadata of one image. Digests are keyed hashes. `pixel_digest` is the same in all file formats.

    `window` is the first of `n_windows` display windows. `slice_plane` holds the position of a slice, its row and column
    direction, and its spacing.
    """

    row: int
    error: str | None = None
    format: str | None = None
    codec: str | None = None
    modality: str | None = None
    photometric: str | None = None
    stored_type: str | None = None
    value_unit: str | None = None
    is_color: bool | None = None
    shape: tuple[int, ...] | None = None
    spacing: tuple[float, ...] | None = None
    orientation: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    n_not_finite: int | None = None
    window: tuple[float, float] | None = None
    n_windows: int | None = None
    burned_in: str | None = None
    is_lossy: bool | None = None
    exif_orientation: int | None = None
    mask_status: str | None = None
    pixel_digest: str | None = None
    flags: tuple[str, ...] = ()
    issue_codes: list[str] = field(default_factory=list)
    study_digest: str | None = None
    series_digest: str | None = None
    slice_plane: tuple[float, ...] | None = None
    mask_labels: tuple[str, ...] = ()

    def record_failure(self, code: str, reason: str) -> None:
        """Record that the image cannot be used, and the reason without the name of the file."""
        self.error = SOURCE_PREFIX_PATTERN.sub("", reason, count=1)
        self.issue_codes.append(code)
        if code == "no-pixels":  # its header does not describe an image
            for name in IMAGE_ONLY_FIELDS:
                setattr(self, name, None)

    def record_pixel_statistics(self, values: Array, *, is_color: bool, hash_key: bytes) -> None:
        """Record the shape, value range and digest of an image or volume. Color pixels have a last axis of length 3."""
        if is_color and (values[..., :1] == values).all():  # gray, stored in three channels
            values, is_color = values[..., 0], False
        self.is_color, self.shape = is_color, values.shape[: values.ndim - is_color]
        finite = np.isfinite(values) if values.dtype.kind == "f" else None
        self.n_not_finite = 0 if finite is None else values.size - int(np.count_nonzero(finite))
        finite_values = values if finite is None or not self.n_not_finite else values[finite]
        if finite_values.size:
            self.minimum, self.maximum = float(finite_values.min()), float(finite_values.max())
        if finite_values.size and self.minimum == self.maximum and values.size > 1:
            self.issue_codes.append("constant-pixels")
        self.pixel_digest = hash_pixels(values, is_color=is_color, hash_key=hash_key)


METADATA_COLUMNS = [column.name for column in fields(ImageMetadata) if column.name not in ("row", *INTERNAL_COLUMNS)]


def hash_pixels(values: Array, *, is_color: bool, hash_key: bytes) -> str:
    """Return a keyed hash of the shape and the values of pixels. It has 32 hex digits.

    Axes of length 1 and the sign of zero have no effect.
    """
    shape = [side for side in values.shape if side != 1]
    digest = hashlib.blake2b(repr((shape, is_color)).encode(), digest_size=16, key=hash_key)
    flat = values.reshape(-1)
    for start in range(0, flat.size, VALUES_PER_HASH_UPDATE):
        piece = flat[start : start + VALUES_PER_HASH_UPDATE]
        if not is_color:
            piece = piece.astype("<f4") + np.float32(0)
            piece[np.isnan(piece)] = np.nan
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def metadata_to_table(metadata: Iterable[ImageMetadata]) -> "pa.Table":
    """Convert image metadata to a table. It has one row per image, in the same order."""
    pa, source = import_arrow(), iter(metadata)
    text, number, texts, numbers = pa.string(), pa.float64(), pa.list_(pa.string()), pa.list_(pa.float64())
    arrow_types: dict[Any, Any] = {
        int: pa.int64(),
        str | None: pa.dictionary(pa.int32(), text),
        bool | None: pa.bool_(),
        int | None: pa.int64(),
        float | None: number,
        tuple[int, ...] | None: pa.list_(pa.int32()),
        **dict.fromkeys((tuple[float, ...] | None, tuple[float, float] | None), numbers),
        **dict.fromkeys((tuple[str, ...], list[str]), texts),
    }
    columns = {column.name: arrow_types[column.type] for column in fields(ImageMetadata)} | dict.fromkeys(
        UNIQUE_TEXTS, text
    )
    pieces = iter(lambda: list(islice(source, IMAGES_PER_TABLE)), [])
    tables = [
        pa.table({name: pa.array([getattr(image, name) for image in piece], kind) for name, kind in columns.items()})
        for piece in pieces
    ]
    return pa.concat_tables(tables).unify_dictionaries()


def fill_in_photo_metadata(source: Any, path: str, metadata: ImageMetadata, hash_key: bytes) -> None:
    """Fill in the metadata of a photo. `source` is the bytes of a file, or an image from a dataset."""
    if not isinstance(source, bytes):
        metadata.format = "decoded"
        if isinstance(source, Tensor) and source.is_floating_point():
            values = np.asarray(source.detach().cpu().numpy())  # (C,H,W)
            if not values.size:
                raise ImageError(f"the image is a tensor of shape {tuple(values.shape)}; expected at least one value")
        else:
            values = read_photo(source).pixels
        metadata.stored_type = str(values.dtype)
        is_color = values.dtype == np.uint8 and values.ndim == 3 and values.shape[-1] == 3
        metadata.record_pixel_statistics(values, is_color=is_color, hash_key=hash_key)
        return
    has_high_bit_depth = _fill_in_header_and_detect_high_bit_depth(source, metadata)
    values = read_png_or_tiff_scan(source, frame=0).values if has_high_bit_depth else read_photo(source).pixels
    metadata.record_pixel_statistics(values, is_color=values.ndim == 3, hash_key=hash_key)
    metadata.flags = find_suffix_and_frame_warnings(source, path)
    metadata.issue_codes += convert_flags_to_issue_codes(metadata.flags)


def _fill_in_header_and_detect_high_bit_depth(file_bytes: bytes, metadata: ImageMetadata) -> bool:
    """Read the header of a photo into the metadata. Return True for more than 8 bits per channel."""
    from PIL import Image

    try:
        with suppress_library_output(), Image.open(io.BytesIO(file_bytes)) as image:
            mode = image.mode
            metadata.format = "JPEG" if image.format == "MPO" else image.format
            metadata.photometric = mode.partition(";")[0]
            is_16_bit = mode.startswith("I;16") or (mode == "I" and image.format == "PNG")
            metadata.stored_type = "16 bits" if is_16_bit else BIT_DEPTH_NAMES.get(mode, "8 bits")
            metadata.exif_orientation = int(image.getexif().get(EXIF_ORIENTATION_TAG, 1))
    except Exception:
        return False
    if metadata.exif_orientation not in (0, 1):
        metadata.issue_codes.append("exif-rotation")
    has_high_bit_depth = mode.startswith(HIGH_BIT_DEPTH_MODES) and metadata.format in ("PNG", "TIFF")
    if has_high_bit_depth and not is_16_bit:
        metadata.issue_codes.append("unknown-value-range")
    return has_high_bit_depth


def read_scan_and_fill_in_metadata(source: Path | bytes, metadata: ImageMetadata, hash_key: bytes) -> Scan:
    """Read a scan and fill in its metadata. Raise an ImageError if the scan cannot be used."""
    metadata.format = _detect_scan_format(source)
    if metadata.format == "DICOM":  # the file is parsed once
        require_pydicom()
        with selected_source(source, None, "frame") as (path, name, frame):
            dataset, flags = load_dicom_dataset(path, name)
            _fill_in_dicom_metadata(dataset, metadata, hash_key)
            scan = build_scan(dataset, frame, name, (), flags)
    else:
        scan = read_scan(source)
        if metadata.format == "DICOM series" and scan.sources:
            with redact_errors(scan.name):
                dataset, _ = load_dicom_dataset(scan.sources[0], scan.name, with_pixels=False)
                _fill_in_dicom_metadata(dataset, metadata, hash_key)
            metadata.series_digest = metadata.slice_plane = None  # the row holds the whole series
            metadata.burned_in = BURNED_IN_TEXT[scan.has_burned_in_text]
    metadata.stored_type = next((step[8:] for step in scan.steps if step.startswith("stored: ")), None)
    metadata.modality = scan.modality or metadata.modality
    metadata.value_unit, metadata.spacing, metadata.flags = scan.unit or None, scan.spacing, scan.flags
    metadata.orientation = None if scan.affine is None else get_axis_codes(scan.affine)
    metadata.issue_codes += convert_flags_to_issue_codes(scan.flags)
    metadata.record_pixel_statistics(scan.values, is_color=scan.is_color, hash_key=hash_key)
    return scan


def _detect_scan_format(source: Path | bytes) -> str:
    """Return the name of a scan's format, from the first bytes or the name of the file."""
    if isinstance(source, bytes):
        return "NIfTI" if is_nifti(source[:4096]) else "DICOM"
    path, _ = split_path_and_index(source)
    if path.is_dir():
        return "DICOM series"
    return next((name for suffix, name in FORMAT_BY_SUFFIX.items() if path.name.lower().endswith(suffix)), "DICOM")


def _fill_in_dicom_metadata(dataset: "Dataset", metadata: ImageMetadata, hash_key: bytes) -> None:
    """Fill in the metadata from a DICOM header. Identifiers are stored as keyed hashes."""
    metadata.codec = dicom_header_values.get_uid_name(dataset.file_meta.TransferSyntaxUID) or "unknown transfer syntax"
    metadata.modality = (
        dicom_header_values.read_allowed_code_word(dataset, "Modality", dicom_header_values.MODALITIES) or None
    )
    metadata.photometric = (
        dicom_header_values.read_allowed_code_word(
            dataset, "PhotometricInterpretation", dicom_header_values.PHOTOMETRIC_INTERPRETATIONS
        )
        or None
    )
    metadata.burned_in = BURNED_IN_TEXT[dicom_header_values.has_burned_in_text(dataset)]
    metadata.is_lossy = (
        dicom_header_values.read_allowed_code_word(dataset, "LossyImageCompression", {"00", "01"}) == "01"
    )
    groups = dicom_header_values.read_functional_groups(dataset, [0])
    windows = (
        (dicom_header_values.read_numbers(item, "WindowCenter"), dicom_header_values.read_numbers(item, "WindowWidth"))
        for item in dicom_header_values.iter_macro_items(groups[0], "FrameVOILUTSequence")
    )
    centers, widths = next(((centers, widths) for centers, widths in windows if centers and widths), ((), ()))
    metadata.n_windows = min(len(centers), len(widths))
    metadata.window = (centers[0], widths[0]) if centers else None
    metadata.study_digest, metadata.series_digest = (
        hashlib.blake2b(uid.encode(), digest_size=8, key=hash_key).hexdigest() if uid else None
        for uid in (str(dataset.get(name, "") or "") for name in ("StudyInstanceUID", "SeriesInstanceUID"))
    )
    plane, _ = read_plane_and_flags(groups[0])
    if plane is not None and (dicom_header_values.read_integer(dataset, "NumberOfFrames") or 1) == 1:
        metadata.slice_plane = (*plane.position, *plane.row_cosines, *plane.column_cosines, *plane.spacing)


ERROR_CODE_PATTERNS = (
    ("no such f", "missing-file"),  # file or folder
    ("is not installed", "missing-codec"),
    ("the file has no pixels", "no-pixels"),
    ("choose one", "ambiguous-series"),
)


class MaskCheck(NamedTuple):
    """The status of a mask, "ok" or an issue code, and the names of its labels."""

    status: str
    label_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageMetadataReader:
    """Reads the metadata of rows. Several threads can call it. Recorded errors contain no file name and no file content."""

    manifest: Manifest
    mask_column: str | None
    hash_key: bytes
    all_scans: bool = False

    def __call__(self, row: Mapping[str, Any]) -> ImageMetadata:
        """Return the metadata of a row. Errors do not stop it, but are recorded in the metadata."""
        metadata, affine = ImageMetadata(row["row"]), None
        try:
            affine = self._read_image(row, metadata)
        except CamscopeError as error:
            message = str(error)
            codes = (code for pattern, code in ERROR_CODE_PATTERNS if pattern in message)
            metadata.record_failure(next(codes, "unreadable"), message)
        except FileNotFoundError:
            metadata.record_failure("missing-file", "there is no such file")
        except Exception as error:  # a store, a network, a dataset and a damaged file may raise anything
            reason = getattr(error, "strerror", None) or type(error).__name__
            metadata.record_failure("unreadable", f"it cannot be read: {reason}")
        cell = None if self.mask_column is None else row[self.mask_column]
        if cell is not None and cell not in ("", []):
            metadata.mask_status, metadata.mask_labels = self._check_mask(cell, metadata.shape, affine)
            metadata.issue_codes += [metadata.mask_status] if metadata.mask_status.startswith("mask-") else []
        return metadata

    def _read_image(self, row: Mapping[str, Any], metadata: ImageMetadata) -> Affine | None:
        """Read the image of a row and fill in its metadata. Return the affine of a scan."""
        if self.manifest.images is not None:
            source: Any = self.manifest.images[row["row"]]
        elif not row["path"]:
            metadata.record_failure("missing-file", "its row has no path")
            return None
        else:
            try:
                source = self._read_source(row["path"])
            except InputError:
                metadata.record_failure("outside-root", "its path leads out of the root folder")
                return None
        if isinstance(source, Path) or is_scan(source):
            return read_scan_and_fill_in_metadata(source, metadata, self.hash_key).affine
        fill_in_photo_metadata(source, row["path"], metadata, self.hash_key)
        return None

    def _read_source(self, path: str) -> bytes | Path:
        """Return the bytes of an image file. For a scan, return its path."""
        location = self.manifest.path_resolver.resolve(path)
        if self.all_scans and not is_url(location) and Path(location).exists():
            return Path(location)
        return read_image_source(location)

    def _check_mask(self, cell: Any, image_shape: Sequence[int] | None, image_affine: Affine | None) -> MaskCheck:
        """Check whether the mask of a row fits its image."""
        if not isinstance(cell, str) or cell.lstrip().startswith(NON_FILE_PREFIXES):
            return MaskCheck("not a file")
        mask_affine = None
        try:
            source = self._read_source(cell)
            if isinstance(source, Path) or is_scan(source):
                scan = read_mask_scan(source)
                labels = LabelImage.from_colors(scan.values) if scan.is_color else LabelImage(scan.values)
                mask_affine = scan.affine
            else:
                labels = read_label_image(source)
        except FileNotFoundError:
            return MaskCheck("mask-missing")
        except SegmentationObjectError:
            return MaskCheck("mask-segmentation")
        except (CamscopeError, OSError) as error:
            return MaskCheck("mask-missing" if "no such file" in str(error) else "mask-unreadable")
        shape, names = labels.values.shape, labels.label_names(MAX_LISTED_NAMES + 1)
        if image_shape is not None and [n for n in shape if n != 1] != [n for n in image_shape if n != 1]:
            return MaskCheck("mask-size", names)
        if image_affine is not None and mask_affine is not None:
            # the largest distance between the corners of the array under the two affines, in voxels of the image
            sides = (1,) * (3 - len(shape)) + tuple(shape)
            corners = np.array([[*corner, 1.0] for corner in product(*((0, side - 1) for side in sides))]).T
            displacement = (np.asarray(mask_affine) - np.asarray(image_affine)) @ corners
            voxel_size = np.linalg.norm(np.asarray(image_affine)[:3, :3], axis=0)[-len(shape) :].min()
            if np.linalg.norm(displacement[:3], axis=0).max() / voxel_size > 1:
                return MaskCheck("mask-position", names)
        return MaskCheck("ok" if names else "mask-empty", names)
