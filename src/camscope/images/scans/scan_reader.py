"""The one door to medical images: which sources are scans, and the reader of each."""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from camscope.errors import CamscopeError, ImageError
from camscope.images.files.redaction import scan_name, told
from camscope.images.files.source_files import MEDICAL, PICTURES, selected
from camscope.images.scans.dicom import read_dicom
from camscope.images.scans.dicom_file import has_dicom_mark, load, pydicom_there
from camscope.images.scans.dicom_series import read_series
from camscope.images.scans.dicom_tags import burned_in
from camscope.images.scans.itk import SUFFIXES as ITK
from camscope.images.scans.itk import read_itk
from camscope.images.scans.nifti import is_nifti, read_nifti
from camscope.images.scans.raster import read_raster
from camscope.images.scans.scan import Scan
from camscope.safe_files import open_regular

DICOM, NIFTI, RASTER = (".dcm", ".dicom"), (".nii", ".nii.gz"), (".png", ".tif", ".tiff")
ENOUGH = 64  # files of a folder that are looked into
HEAD = 4096  # bytes


def is_scan(source: object) -> bool:
    """Whether a source is a medical image: by its suffix, by its first bytes, or a folder that has DICOM files.

    PNG and TIFF are photographs, unless a preprocessing takes scans: then `read_scan` reads them too.
    """
    if isinstance(source, bytes):
        return has_dicom_mark(source[:132]) or is_nifti(source[:HEAD])
    if not isinstance(source, str | Path):
        return False
    path, _ = selected(source)
    if path.name.lower().endswith(PICTURES):
        return False
    try:
        if path.is_dir():
            return _has_scans(path)
        return path.name.lower().endswith(MEDICAL) or (path.is_file() and _begins_as_scan(path))
    except (OSError, ValueError):  # no name that a file could have
        return False


def read_scan(source: Any, *, frame: int | None = None, window: Any = None) -> Scan:
    """A medical image of any kind: DICOM files and folders, NIfTI, NRRD, MetaImage, and PNG or TIFF as stored.

    `source`: a path, a folder of one series, a list of its files, or the bytes of a DICOM, NIfTI, PNG or TIFF file.
    `file#2` or `frame=2`: that frame, volume, page or, of a folder, series, counted from 0.
    `window`: takes the values to 0..1; a `Window`, (centre, width) or "40,400".
    """
    if isinstance(source, Scan):
        return source if window is None else source.windowed(window)
    if isinstance(source, bytes):
        return _of_bytes(source, frame, window)
    if not isinstance(source, str | Path):
        files = list(source) if isinstance(source, Iterable) and not hasattr(source, "shape") else []
        if not files or not all(isinstance(one, str | Path) for one in files):
            raise ImageError(
                f"the scan is a {type(source).__name__}; expected a path, a list of paths, a file's bytes, or of numbers a "
                f"camscope.images.scans.scan.Scan(values, name)"
            )
        return read_series(files, series=frame, window=window)
    path, _ = selected(source)
    if path.is_dir():
        return read_series(source, series=frame, window=window)
    name = path.name.lower()
    if name.endswith(ITK):
        return read_itk(source, volume=frame, window=window)
    if name.endswith(NIFTI) or (not name.endswith((*DICOM, *RASTER)) and is_nifti(_head(path))):
        return read_nifti(source, volume=frame, window=window)
    if name.endswith(RASTER):
        return read_raster(source, frame=frame, window=window)
    return read_dicom(source, frame=frame, window=window)


def may_be_shown(place: Path) -> bool:
    """Whether no text is known to be in the picture of what another reader takes: of DICOM by its headers, all else is."""
    if not is_scan(place) or place.name.lower().endswith((*NIFTI, *ITK)):
        return True
    path, _ = selected(place)
    try:
        files = list(islice((one for one in path.iterdir() if one.is_file()), ENOUGH)) if path.is_dir() else [path]
    except OSError:
        return False
    name = scan_name(path)
    return all(_said_clean(file, name) for file in files if has_dicom_mark(_head(file)) or file == path)


def _said_clean(file: Path, name: str) -> bool:
    try:
        pydicom_there()
        with told(name):
            return burned_in(load(file, name, pixels=False)[0]) is False
    except CamscopeError:  # nobody knows
        return is_nifti(_head(file))


def _of_bytes(data: bytes, frame: int | None, window: Any) -> Scan:
    if has_dicom_mark(data[:132]):
        return read_dicom(data, frame=frame, window=window)
    if is_nifti(data[:HEAD]):
        return read_nifti(data, volume=frame, window=window)
    if data.startswith((b"\x89PNG", b"II*\0", b"MM\0*")):
        return read_raster(data, frame=frame, window=window)
    raise ImageError(f"{scan_name(data)}: these bytes are no DICOM, NIfTI, PNG or TIFF file")


def _head(path: Path) -> bytes:
    """The first bytes of a regular file; none of anything else."""
    try:
        with open_regular(path) as file:
            return file.read(HEAD)
    except (OSError, ValueError):
        return b""


def _begins_as_scan(path: Path) -> bool:
    head = _head(path)
    return has_dicom_mark(head) or is_nifti(head)


def _has_scans(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(has_dicom_mark(_head(Path(entry.path))) for entry in islice(entries, ENOUGH) if entry.is_file())
