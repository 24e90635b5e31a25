"""Read NRRD and MetaImage files with SimpleITK."""

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from camscope.errors import ImageError, describe_out_of_memory, is_out_of_memory
from camscope.images.files.find_and_open_image_files import open_source, selected_source
from camscope.images.scans.scan import MAX_VOXELS, Scan, build_non_finite_flags, check_volume_index, check_voxel_count
from camscope.optional_packages import require
from camscope.plurals import plural

ITK_SUFFIXES = (".nrrd", ".mha", ".mhd")
GEOMETRY_HEAD_BYTES = 4096  # of the header in which the geometry is searched
ORIENTATION_KEYWORDS = (b"space:", b"space directions:", b"transformmatrix", b"orientation", b"rotation")
SPACING_KEYWORDS = (b"spacings:", b"elementspacing", b"elementsize")
REFERENCE_HEAD_BYTES = 1 << 16  # of the header in which a reference to another file is searched


def read_nrrd_or_metaimage(source: str | Path, *, volume: int | None = None) -> Scan:
    """Read a .nrrd, .mha or .mhd file as a scan (D,H,W) float32.

    The axes are in NumPy's order. The `affine` leads to RAS+ coordinates, not to the LPS coordinates of ITK.
    `source.nrrd#2` or `volume=2` selects one volume of a 4-D file, counted from 0. Only an .mhd file may have its voxels
    in a separate file, which must be in the same folder.
    """
    sitk = require("SimpleITK", extra="itk")
    with selected_source(source, volume, "volume") as (path, name, volume):
        _check_voxels_are_in_allowed_file(path, name)
        return _read_itk_scan(sitk, path, volume, name)


def _check_voxels_are_in_allowed_file(path: Path, name: str) -> None:
    """Check that the voxels are in this file, and that compressed voxels are undamaged. Otherwise raise ImageError.

    Only an .mhd file may have its voxels in another file, in the same folder.
    """
    with open_source(path, name) as file:
        head = file.read(REFERENCE_HEAD_BYTES)
    kind = path.suffix.lower()
    if kind == ".nrrd":
        if not head.startswith(b"NRRD"):
            raise ImageError(f"{name}: this is not a NRRD file")
        if re.search(rb"(?im)^data ?file\s*:", head.split(b"\n\n")[0].split(b"\r\n\r\n")[0]):
            raise ImageError(f"{name}: the voxels of this NRRD header are in another file; save both as one .nrrd")
        return
    match = re.search(rb"(?im)^\s*ElementDataFile\s*=\s*([^\r\n]+)\r?\n?", head)
    if match is None:
        raise ImageError(f"{name}: this is not a MetaImage file: ElementDataFile is missing")
    data_file = match[1].strip().decode("latin-1")
    is_local = data_file.upper() == "LOCAL"
    if not is_local and (
        kind == ".mha" or not re.fullmatch(r"[\w.+-]+", data_file) or data_file.upper() == "LIST" or ".." in data_file
    ):
        raise ImageError(f"{name}: the voxels are in another file that may not be read; save both as one .mha")
    voxels = path if is_local else path.with_name(data_file)
    with open_source(voxels, name):  # rejects a pipe, on which ITK would block
        pass
    if re.search(rb"(?im)^\s*CompressedData\s*=\s*T", head[: match.start()]):
        _check_compressed_voxels(voxels, match.end() if is_local else 0, name)


def _check_compressed_voxels(path: Path, voxel_start: int, name: str) -> None:
    """Raise ImageError if the compressed voxels are truncated, corrupt or too large. They start at byte `voxel_start`.

    ITK would fill the missing voxels with zeros.
    """
    inflater, remaining = zlib.decompressobj(), 8 * MAX_VOXELS
    with open_source(path, name) as file:
        file.seek(voxel_start)
        while not inflater.eof and remaining > 0 and (data := inflater.unconsumed_tail or file.read(1 << 20)):
            remaining -= len(inflater.decompress(data, 1 << 22))
    if not inflater.eof:
        raise ImageError(f"{name}: the compressed voxels are truncated or too large")


def _read_itk_scan(sitk: Any, path: Path, volume_index: int | None, name: str) -> Scan:
    """Read an NRRD or MetaImage file by SimpleITK. Raise an ImageError if it is damaged or too large."""
    warned_before = sitk.ProcessObject.GetGlobalWarningDisplay()
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        reader = sitk.ImageFileReader()
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
        size, n_components = reader.GetSize(), reader.GetNumberOfComponents()
        if len(size) not in (2, 3, 4):
            raise ImageError(f"{name}: the image has {plural(len(size), 'axis')}; expected 2, 3 or 4")
        check_voxel_count((*size[::-1], n_components), name)
        image = reader.Execute()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ImageError(f"{name}: {describe_out_of_memory(error)} while reading the file") from None
        raise ImageError(f"{name}: SimpleITK cannot read it: the file is damaged or has an unknown format") from None
    finally:
        sitk.ProcessObject.SetGlobalWarningDisplay(warned_before)
    is_4d, volume_steps = image.GetDimension() == 4, tuple[str, ...]()
    count = image.GetSize()[3] if is_4d else 1
    check_volume_index(volume_index, count, name)
    if is_4d:
        image = image[:, :, :, volume_index or 0]
        volume_steps = (f"volume: {volume_index or 0} of {count}, counted from 0",)
    stored = sitk.GetArrayFromImage(image)
    is_color = n_components == 3 and stored.dtype == np.uint8
    if (n_components > 1 and not is_color) or stored.dtype.kind not in "iuf":
        received = f"{plural(n_components, 'number')} of {stored.dtype} a voxel"
        raise ImageError(f"{name}: {received}; expected one real number a voxel, or RGB in uint8")
    values = stored if is_color else stored.astype(np.float32)
    with path.open("rb") as file:  # ITK replaces missing orientation and spacing by defaults
        head = file.read(GEOMETRY_HEAD_BYTES).lower()
    has_orientation, has_spacing = (
        any(word in head for word in words) for words in (ORIENTATION_KEYWORDS, SPACING_KEYWORDS)
    )
    return Scan(
        values,
        name,
        affine=_build_affine(image) if has_orientation else None,
        is_color=is_color,
        steps=(*volume_steps, f"stored: {stored.dtype.name}"),
        flags=() if is_color else build_non_finite_flags(values),
        sources=(path,),
        pixel_spacing=tuple(image.GetSpacing()[::-1]) if has_spacing and not has_orientation else None,
    )


def _build_affine(image: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the affine matrix (4,4) that converts NumPy indices (depth,row,column) to RAS+ coordinates in mm."""
    axes = image.GetDimension()
    columns = np.array(image.GetDirection()).reshape(axes, axes) * image.GetSpacing()
    affine = np.eye(4)
    affine[:axes, 3] = image.GetOrigin()
    affine[:axes, 3 - axes : 3] = columns[:, ::-1]
    if axes == 2:
        affine[:3, 0] = (0.0, 0.0, 1.0)
    return np.asarray(np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine)
