"""Read a medical image in any supported format, and tell medical images from photos."""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.errors import CamscopeError, ImageError
from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES, SCAN_SUFFIXES, split_path_and_index
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source, redact_errors
from camscope.images.scans.dicom_file_reader import has_dicom_signature, load_dicom_dataset, read_dicom, require_pydicom
from camscope.images.scans.dicom_header_values import has_burned_in_text
from camscope.images.scans.dicom_series_reader import read_series
from camscope.images.scans.nifti_reader import is_nifti, read_nifti
from camscope.images.scans.nrrd_metaimage_reader import ITK_SUFFIXES, read_nrrd_or_metaimage
from camscope.images.scans.png_tiff_reader import read_png_or_tiff_scan
from camscope.images.scans.scan import Scan

DICOM_SUFFIXES, NIFTI_SUFFIXES, RASTER_SUFFIXES = (".dcm", ".dicom"), (".nii", ".nii.gz"), (".png", ".tif", ".tiff")
MAX_PROBED_FILES = 64  # files of a folder whose first bytes are read
HEAD_BYTES = 4096


def is_scan(source: object) -> bool:
    """Return whether a source is a medical image, or a folder of DICOM files.

    A file is recognized by its suffix or its first bytes. PNG and TIFF count as photos here, although `read_scan` can read
    them for a preprocessing of scans.
    """
    if isinstance(source, bytes):
        return has_dicom_signature(source[:132]) or is_nifti(source[:HEAD_BYTES])
    if not isinstance(source, str | Path):
        return False
    path, _ = split_path_and_index(source)
    if path.name.lower().endswith(PHOTO_SUFFIXES):
        return False
    try:
        if path.is_dir():
            return _contains_dicom(path)
        return path.name.lower().endswith(SCAN_SUFFIXES) or (path.is_file() and is_scan(_read_head(path)))
    except (OSError, ValueError):  # not a valid file name
        return False


def read_scan(source: Any, *, frame: int | None = None, window: Any = None) -> Scan:
    """Read a medical image in any supported format: DICOM, NIfTI, NRRD, MetaImage, PNG or TIFF.

    Args:
        source: A path, a folder of one series, a list of its files, the bytes of a DICOM, NIfTI, PNG or TIFF file, or a
            Scan.
        frame: The frame, volume or page of a file, or the series of a folder, counted from 0. `file#2` does the same.
        window: Maps the values to 0..1: a `Window`, (center, width) or "40,400".

    Returns:
        The scan: values, spacing, affine and the steps from the stored values.

    Raises:
        ImageError: If the source cannot be read, or if none of several series or volumes is selected.

    >>> import tempfile
    >>> import numpy as np
    >>> from PIL import Image
    >>> path = f"{tempfile.mkdtemp()}/film.png"
    >>> Image.fromarray(np.zeros((8, 12), np.uint8)).save(path)
    >>> read_scan(path).shape
    (8, 12)

    """
    return (source if isinstance(source, Scan) else _read_file_or_folder(source, frame)).apply_window(window)


def _read_file_or_folder(source: Any, index: int | None) -> Scan:
    """Read a source with the reader for its format. `index` selects a frame, volume, page or series."""
    if isinstance(source, bytes):
        return _read_scan_bytes(source, index)
    if not isinstance(source, str | Path):
        files = list(source) if isinstance(source, Iterable) and not hasattr(source, "shape") else []
        if not files or not all(isinstance(item, str | Path) for item in files):
            raise ImageError(
                f"the scan is a {type(source).__name__}; expected a path, a list of paths, a file's bytes, or a "
                f"camscope.images.scans.scan.Scan(values, name)"
            )
        return read_series(files, series=index)
    path, _ = split_path_and_index(source)
    if path.is_dir():
        return read_series(source, series=index)
    name = path.name.lower()
    if name.endswith(ITK_SUFFIXES):
        return read_nrrd_or_metaimage(source, volume=index)
    if name.endswith(NIFTI_SUFFIXES) or (
        not name.endswith((*DICOM_SUFFIXES, *RASTER_SUFFIXES)) and is_nifti(_read_head(path))
    ):
        return read_nifti(source, volume=index)
    return (
        read_png_or_tiff_scan(source, frame=index)
        if name.endswith(RASTER_SUFFIXES)
        else read_dicom(source, frame=index)
    )


def is_safe_to_display(source: Path) -> bool:
    """Return whether an image may be displayed. Its DICOM header must not suggest burned-in text.

    Images of other formats are always safe.
    """
    if not is_scan(source) or source.name.lower().endswith((*NIFTI_SUFFIXES, *ITK_SUFFIXES)):
        return True
    path, _ = split_path_and_index(source)
    try:
        entries = path.iterdir() if path.is_dir() else iter([path])
        files = list(islice((entry for entry in entries if entry == path or entry.is_file()), MAX_PROBED_FILES))
    except OSError:
        return False
    name = pseudonymize_source(path)
    dicom_files = [file for file in files if file == path or has_dicom_signature(_read_head(file))]
    return all(_is_dicom_safe_to_display(file, name) for file in dicom_files)


def _is_dicom_safe_to_display(file: Path, name: str) -> bool:
    """Return whether a header says that there is no burned-in text. NIfTI files are safe, unreadable headers are not."""
    try:
        require_pydicom()
        with redact_errors(name):
            return has_burned_in_text(load_dicom_dataset(file, name, with_pixels=False)[0]) is False
    except CamscopeError:  # unknown: not safe, unless it is a NIfTI file
        return is_nifti(_read_head(file))


def _read_scan_bytes(file_bytes: bytes, frame: int | None) -> Scan:
    """Read a scan from bytes. Their first bytes decide the format."""
    if has_dicom_signature(file_bytes[:132]):
        return read_dicom(file_bytes, frame=frame)
    if is_nifti(file_bytes[:HEAD_BYTES]):
        return read_nifti(file_bytes, volume=frame)
    if file_bytes.startswith((b"\x89PNG", b"II*\0", b"MM\0*")):
        return read_png_or_tiff_scan(file_bytes, frame=frame)
    raise ImageError(f"{pseudonymize_source(file_bytes)}: the bytes are not a DICOM, NIfTI, PNG or TIFF file")


def _read_head(path: Path) -> bytes:
    """Return the first bytes of a file. If the path is no regular file, or cannot be read, return no bytes."""
    try:
        with open_regular_file(path) as file:
            return file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def _contains_dicom(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        files = (Path(entry.path) for entry in islice(entries, MAX_PROBED_FILES) if entry.is_file())
        return any(has_dicom_signature(_read_head(file)) for file in files)
