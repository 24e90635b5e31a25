"""Facts of single images: photographs, medical images, and their masks.

- The facts of photographs: what the file says, and its pixels as they are seen, or as stored where they are finer.
- The facts of medical images: headers by numbers and known words, pixels as any model would get them.
- Whether the mask of an image fits it: there, readable, of the same size, at the same place, and not empty.
"""

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


HIGH_BIT_DEPTH_MODES = ("I", "F")  # Pillow's modes of more than 8 bits, and those that begin so
BIT_DEPTH_NAMES = {"1": "1 bit", "P": "8 bits, of a palette", "I": "32 bits", "F": "32 bits, floating point"}


def read_photo_metadata(source: Any, path: str, metadata: ImageMetadata, key: bytes) -> None:
    """Fill in what a photograph says of itself: a file's bytes, or an image of a dataset as it comes."""
    if not isinstance(source, bytes):
        metadata.format, values = "decoded", _read_decoded_values(source)
        metadata.stored_type = str(values.dtype)
        metadata.record_pixel_statistics(
            values, is_color=values.dtype == np.uint8 and values.ndim == 3 and values.shape[-1] == 3, key=key
        )
        return
    fine = _read_photo_header(source, metadata)
    values = read_raster(source, frame=0).values if fine else read_photo(source).pixels
    metadata.record_pixel_statistics(values, is_color=values.ndim == 3, key=key)
    metadata.flags = find_file_flags(source, path)
    metadata.issue_codes += flags_to_codes(metadata.flags)


def _read_photo_header(data: bytes, metadata: ImageMetadata) -> bool:
    """Whether its pixels are finer than those of a photograph; what is no image is left to the reader to refuse."""
    from PIL import Image

    try:
        with suppress_library_output(), Image.open(io.BytesIO(data)) as image:
            mode = image.mode
            metadata.format = "JPEG" if image.format == "MPO" else image.format
            metadata.photometric = mode.partition(";")[0]
            sixteen = mode.startswith("I;16") or (mode == "I" and image.format == "PNG")
            metadata.stored_type = "16 bits" if sixteen else BIT_DEPTH_NAMES.get(mode, "8 bits")
            metadata.exif_orientation = int(image.getexif().get(EXIF_ORIENTATION_TAG, 1))
    except Exception:
        return False
    if metadata.exif_orientation not in (0, 1):
        metadata.issue_codes.append("exif")
    fine = mode.startswith(HIGH_BIT_DEPTH_MODES) and metadata.format in ("PNG", "TIFF")
    if fine and not sixteen:
        metadata.issue_codes.append("no-range")
    return fine


def _read_decoded_values(source: Any) -> Array:
    """(H,W), (H,W,3) or, of a tensor for a model, (C,H,W) as it is."""
    if isinstance(source, Tensor) and source.is_floating_point():
        values = source.detach().cpu().numpy()
        if not values.size:
            raise ImageError(f"a tensor of shape {tuple(values.shape)}")
        return np.asarray(values)
    return read_photo(source).pixels


FORMAT_BY_SUFFIX = {".nii": "NIfTI", ".nii.gz": "NIfTI", ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage"}
FORMAT_BY_SUFFIX |= {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG"}  # of numbers, not of colours
BURNED_IN_TEXT = {True: "yes", False: "no", None: "not said"}


def read_scan_metadata(source: Path | bytes, metadata: ImageMetadata, hash_key: bytes) -> Scan:
    """Fill in what a scan says of itself, as far as it can be read; an ImageError where that is not far enough."""
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
            metadata.series_digest = metadata.slice_plane = None  # the row has all of it
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
    return next((kind for ending, kind in FORMAT_BY_SUFFIX.items() if path.name.lower().endswith(ending)), "DICOM")


def _read_dicom_metadata(source: Path | bytes, metadata: ImageMetadata, hash_key: bytes) -> Scan:
    """The file is read and parsed once, for its header and for its pixels."""
    path, part = split_selector(source)
    name = pseudonymize_source(path)
    require_pydicom()
    with redact_errors(name):
        dataset, odd = load_dicom_dataset(path, name)
        _read_dicom_header(dataset, metadata, hash_key)
        return build_scan(dataset, part, name, (), odd)


def _read_dicom_header(dataset: "Dataset", metadata: ImageMetadata, hash_key: bytes) -> None:
    metadata.codec = get_uid_name(dataset.file_meta.TransferSyntaxUID) or "an unknown transfer syntax"
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
    for place in iter_macro_items(groups, "FrameVOILUTSequence"):
        centres, widths = read_numbers(place, "WindowCenter"), read_numbers(place, "WindowWidth")
        if centres and widths:
            metadata.window, metadata.n_windows = (centres[0], widths[0]), min(len(centres), len(widths))
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
    """`ok`, or what is wrong with the mask of an image of this size (H,W) or (D,H,W): a word of `codes`; and its labels.

    At most one label more than a message lists is named.
    """
    try:
        labels, place = _read_mask(source)
    except FileNotFoundError:
        return "mask-missing", ()
    except SegmentationObjectError:
        return "mask-segmentation", ()
    except (CamscopeError, OSError) as error:
        return "mask-missing" if "no such file" in str(error) else "mask-unreadable", ()
    shape, names = labels.values.shape, labels.label_names(MAX_LISTED_NAMES + 1)
    if image_shape is not None and _drop_singleton_axes(shape) != _drop_singleton_axes(image_shape):
        return "mask-size", names
    if image_affine is not None and place is not None and _max_corner_distance(image_affine, place, shape) > 1:
        return "mask-place", names
    return "ok" if names else "mask-empty", names


def _read_mask(source: bytes | Path) -> tuple[LabelImage, Affine | None]:
    """Labels as a mask of `camscope measure` has them, and where a medical image lies."""
    if isinstance(source, Path) or is_scan(source):
        scan = read_mask_scan(source)
        return LabelImage.from_colors(scan.values) if scan.is_color else LabelImage(scan.values), scan.affine
    return read_label_image(source), None


def _drop_singleton_axes(shape: Sequence[int]) -> list[int]:
    """Axes of one voxel do not count."""
    return [side for side in shape if side != 1]


def _max_corner_distance(image_affine: Affine, mask_affine: Affine, shape: Sequence[int]) -> float:
    """How far two places of one array are apart at most at its corners, in voxels of the image."""
    sides = (1,) * (3 - len(shape)) + tuple(shape)
    corners = np.array([[*corner, 1.0] for corner in product(*((0, side - 1) for side in sides))]).T
    moved = (np.asarray(mask_affine) - np.asarray(image_affine)) @ corners
    step = np.linalg.norm(np.asarray(image_affine)[:3, :3], axis=0)[-len(shape) :].min()
    return float(np.linalg.norm(moved[:3], axis=0).max() / step)
