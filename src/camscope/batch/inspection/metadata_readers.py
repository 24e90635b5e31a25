"""Read the metadata of single images: photos, scans and masks."""

import hashlib
import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from camscope.batch.inspection.image_metadata import Array, ImageMetadata
from camscope.batch.inspection.issues import flags_to_codes
from camscope.errors import CamscopeError, ImageError
from camscope.images.files.redaction import pseudonymize_source, redact_errors, suppress_library_output
from camscope.images.files.source_files import split_selector
from camscope.images.mask_files import SegmentationObjectError, read_label_image, read_mask_scan
from camscope.images.photo import EXIF_ORIENTATION_TAG, find_file_flags, read_photo
from camscope.images.scans.dicom import build_scan
from camscope.images.scans.dicom_file import load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_geometry import read_plane
from camscope.images.scans.dicom_tags import (
    MODALITIES,
    PHOTOMETRIC_INTERPRETATIONS,
    get_uid_name,
    has_burned_in_text,
    iter_macro_items,
    read_code,
    read_functional_groups,
    read_integer,
    read_numbers,
)
from camscope.images.scans.nifti import is_nifti
from camscope.images.scans.raster import read_raster
from camscope.images.scans.scan import Affine, Scan
from camscope.images.scans.scan_preprocess import get_axis_codes
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.mask_labels import MAX_LISTED_NAMES, LabelImage

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


HIGH_BIT_DEPTH_MODES = ("I", "F")  # the beginnings of Pillow's modes with more than 8 bits
BIT_DEPTH_NAMES = {"1": "1 bit", "P": "8 bits, palette", "I": "32 bits", "F": "32 bits, floating point"}


def read_photo_metadata(source: Any, path: str, metadata: ImageMetadata, key: bytes) -> None:
    """Fill in the metadata of a photo: the bytes of a file, or an image of a dataset."""
    if not isinstance(source, bytes):
        metadata.format, values = "decoded", _read_decoded_values(source)
        metadata.stored_type = str(values.dtype)
        metadata.record_pixel_statistics(
            values, is_color=values.dtype == np.uint8 and values.ndim == 3 and values.shape[-1] == 3, key=key
        )
        return
    has_high_bit_depth = _read_photo_header(source, metadata)
    values = read_raster(source, frame=0).values if has_high_bit_depth else read_photo(source).pixels
    metadata.record_pixel_statistics(values, is_color=values.ndim == 3, key=key)
    metadata.flags = find_file_flags(source, path)
    metadata.issue_codes += flags_to_codes(metadata.flags)


def _read_photo_header(data: bytes, metadata: ImageMetadata) -> bool:
    """Read the header of a photo and return whether it has a high bit depth. Invalid files are left to the reader."""
    from PIL import Image

    try:
        with suppress_library_output(), Image.open(io.BytesIO(data)) as image:
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


def _read_decoded_values(source: Any) -> Array:
    """Return the values of a decoded image: (H,W), (H,W,3), or (C,H,W) for a floating-point tensor."""
    if isinstance(source, Tensor) and source.is_floating_point():
        values = source.detach().cpu().numpy()
        if not values.size:
            raise ImageError(f"a tensor of shape {tuple(values.shape)}; expected at least one value")
        return np.asarray(values)
    return read_photo(source).pixels


FORMAT_BY_SUFFIX = {".nii": "NIfTI", ".nii.gz": "NIfTI", ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage"}
FORMAT_BY_SUFFIX |= {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG"}  # as scans, not as photos
BURNED_IN_TEXT = {True: "yes", False: "no", None: "not stated"}


def read_scan_metadata(source: Path | bytes, metadata: ImageMetadata, hash_key: bytes) -> Scan:
    """Fill in the metadata of a scan as far as it can be read; raise an ImageError if it cannot be used."""
    metadata.format = _scan_format(source)
    if metadata.format == "DICOM":
        scan = _read_dicom_metadata(source, metadata, hash_key)
    else:
        scan = read_scan(source)
        if metadata.format == "DICOM series" and scan.sources:
            with redact_errors(scan.name):
                _read_dicom_header(
                    load_dicom_dataset(scan.sources[0], scan.name, with_pixels=False)[0], metadata, hash_key
                )
            metadata.series_digest = metadata.slice_plane = None  # the row holds the whole series
            metadata.burned_in = BURNED_IN_TEXT[scan.has_burned_in_text]
    _copy_scan_attributes(scan, metadata)
    metadata.record_pixel_statistics(scan.values, is_color=scan.is_color, key=hash_key)
    return scan


def _scan_format(source: Path | bytes) -> str:
    if isinstance(source, bytes):
        return "NIfTI" if is_nifti(source[:4096]) else "DICOM"
    path, _ = split_selector(source)
    if path.is_dir():
        return "DICOM series"
    return next((name for suffix, name in FORMAT_BY_SUFFIX.items() if path.name.lower().endswith(suffix)), "DICOM")


def _read_dicom_metadata(source: Path | bytes, metadata: ImageMetadata, hash_key: bytes) -> Scan:
    """Read the header and the pixels of a DICOM file, which is parsed once."""
    path, selector = split_selector(source)
    name = pseudonymize_source(path)
    require_pydicom()
    with redact_errors(name):
        dataset, flags = load_dicom_dataset(path, name)
        _read_dicom_header(dataset, metadata, hash_key)
        return build_scan(dataset, selector, name, (), flags)


def _read_dicom_header(dataset: "Dataset", metadata: ImageMetadata, hash_key: bytes) -> None:
    metadata.codec = get_uid_name(dataset.file_meta.TransferSyntaxUID) or "unknown transfer syntax"
    metadata.modality = read_code(dataset, "Modality", MODALITIES) or None
    metadata.photometric = read_code(dataset, "PhotometricInterpretation", PHOTOMETRIC_INTERPRETATIONS) or None
    metadata.burned_in = BURNED_IN_TEXT[has_burned_in_text(dataset)]
    metadata.is_lossy = read_code(dataset, "LossyImageCompression", {"00", "01"}) == "01"
    groups = read_functional_groups(dataset, [0])
    _read_window(groups[0], metadata)
    metadata.study_digest, metadata.series_digest = (
        _hash_uid(dataset, uid, hash_key) for uid in ("StudyInstanceUID", "SeriesInstanceUID")
    )
    plane, _ = read_plane(groups[0])
    if plane is not None and (read_integer(dataset, "NumberOfFrames") or 1) == 1:
        metadata.slice_plane = (*plane.position, *plane.row_cosines, *plane.column_cosines, *plane.spacing)


def _read_window(groups: "list[Dataset]", metadata: ImageMetadata) -> None:
    for item in iter_macro_items(groups, "FrameVOILUTSequence"):
        centers, widths = read_numbers(item, "WindowCenter"), read_numbers(item, "WindowWidth")
        if centers and widths:
            metadata.window, metadata.n_windows = (centers[0], widths[0]), min(len(centers), len(widths))
            return
    metadata.n_windows = 0


def _hash_uid(dataset: "Dataset", uid: str, hash_key: bytes) -> str | None:
    value = str(dataset.get(uid, "") or "")
    return hashlib.blake2b(value.encode(), digest_size=8, key=hash_key).hexdigest() if value else None


def _copy_scan_attributes(scan: Scan, metadata: ImageMetadata) -> None:
    metadata.stored_type = next((step[8:] for step in scan.steps if step.startswith("stored: ")), None)
    metadata.modality = scan.modality or metadata.modality
    metadata.value_unit, metadata.spacing = scan.unit or None, scan.spacing
    metadata.orientation = None if scan.affine is None else get_axis_codes(scan.affine)
    metadata.flags = scan.flags
    metadata.issue_codes += flags_to_codes(scan.flags)


NON_FILE_PREFIXES = ("[", "{")  # boxes, points, outlines


def check_mask(
    source: bytes | Path, image_shape: Sequence[int] | None, image_affine: Affine | None
) -> tuple[str, tuple[str, ...]]:
    """Return the status of a mask ("ok" or an issue code) and its labels, at most one more than a message lists.

    The size of the image is (H,W) or (D,H,W).
    """
    try:
        labels, mask_affine = _read_mask(source)
    except FileNotFoundError:
        return "mask-missing", ()
    except SegmentationObjectError:
        return "mask-segmentation", ()
    except (CamscopeError, OSError) as error:
        return "mask-missing" if "no such file" in str(error) else "mask-unreadable", ()
    shape, names = labels.values.shape, labels.label_names(MAX_LISTED_NAMES + 1)
    if image_shape is not None and _drop_singleton_axes(shape) != _drop_singleton_axes(image_shape):
        return "mask-size", names
    if image_affine is None or mask_affine is None:
        return "ok" if names else "mask-empty", names
    if _max_corner_distance(image_affine, mask_affine, shape) > 1:
        return "mask-position", names
    return "ok" if names else "mask-empty", names


def _read_mask(source: bytes | Path) -> tuple[LabelImage, Affine | None]:
    """Read the label image of a mask, and its affine if it is a scan."""
    if isinstance(source, Path) or is_scan(source):
        scan = read_mask_scan(source)
        return LabelImage.from_colors(scan.values) if scan.is_color else LabelImage(scan.values), scan.affine
    return read_label_image(source), None


def _drop_singleton_axes(shape: Sequence[int]) -> list[int]:
    """Return the sides that are longer than one voxel."""
    return [side for side in shape if side != 1]


def _max_corner_distance(image_affine: Affine, mask_affine: Affine, shape: Sequence[int]) -> float:
    """Return the largest distance between the corners of an array under two affines, in voxels of the image."""
    sides = (1,) * (3 - len(shape)) + tuple(shape)
    corners = np.array([[*corner, 1.0] for corner in product(*((0, side - 1) for side in sides))]).T
    displacement = (np.asarray(mask_affine) - np.asarray(image_affine)) @ corners
    voxel_size = np.linalg.norm(np.asarray(image_affine)[:3, :3], axis=0)[-len(shape) :].min()
    return float(np.linalg.norm(displacement[:3], axis=0).max() / voxel_size)
