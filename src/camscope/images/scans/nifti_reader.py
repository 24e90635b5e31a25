"""Read NIfTI files (versions 1 and 2), with the same voxels and affine as nibabel.

The axes are those of the file: i, j, k. nibabel's array proxy is not used, since it allocates what a header declares. With
the proxy, a file of 1 kB whose header declares 1 GiB costs 1 GiB (2 GiB if compressed). Here it costs 16 MiB.
"""

import math
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.files.find_and_open_image_files import (
    GZIP_MAGIC,
    decompressed_stream,
    discard_bytes,
    list_paths_unless_bytes,
    open_source,
    read_exactly,
    selected_source,
    skip_bytes,
)
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source, redact_errors
from camscope.images.scans.scan import Scan, build_non_finite_flags, check_volume_index, check_voxel_count
from camscope.optional_packages import require
from camscope.plurals import plural

Array = NDArray[Any]
MAX_VOXEL_OFFSET = 2**26  # bytes of header extensions before the voxels
MAX_TRAILING_BYTES = 2**26  # bytes after the voxels that are decompressed for the checksum
# length and magic of the header by NIfTI version
HEADER_SIZES = {1: 348, 2: 540}
SINGLE_FILE_MAGICS = {1: (344, b"n+1\0"), 2: (4, b"n+2\0\r\n\x1a\n")}
PAIRED_FILE_MAGICS = {1: b"ni1\0", 2: b"ni2\0\r\n\x1a\n"}
RGB_DTYPE = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])


def read_nifti(source: str | Path | bytes, *, volume: int | None = None) -> Scan:
    """Read a NIfTI file as a scan (I,J,K) float32. The axes have the same order as in the file.

    Values are scaled by scl_slope and scl_inter. RGB24 is read as color. `file.nii.gz#2` or `volume=2` selects one volume of
    a 4-D file, counted from 0. A 4-D file without a selection is rejected. The `affine` is the sform. If its code is not
    set, it is the qform, or None if both codes are not set.
    """
    require("nibabel", extra="medical")
    with (
        selected_source(source, volume, "volume") as (path, name, volume),
        open_source(path, name) as file,
        decompressed_stream(file) as stream,
    ):
        return _read_nifti_scan(stream, volume, name, list_paths_unless_bytes(path))


def is_nifti(head: bytes) -> bool:
    """Return whether the first bytes of a file have the signature of NIfTI. The file may be compressed."""
    if head.startswith(GZIP_MAGIC):
        try:
            head = zlib.decompressobj(31).decompress(head, 540)
        except zlib.error:
            return False
    return _detect_version(head) is not None


def _detect_version(head: bytes) -> int | None:
    for version, (at, magic) in SINGLE_FILE_MAGICS.items():
        if head[at : at + len(magic)] in (magic, PAIRED_FILE_MAGICS[version]):
            return version
    return None


def _read_nifti_scan(stream: BinaryIO, volume_index: int | None, name: str, sources: tuple[Path, ...]) -> Scan:
    """Read a scan, or one volume of several, from a NIfTI stream."""
    header, length = _read_header_and_length(stream, name)
    dtype, is_color = _parse_dtype_and_is_color(header, name)
    shape, volumes = _parse_shape_and_volume_count(header, volume_index, name)
    check_voxel_count((*shape, 3) if is_color else shape, name)
    count = math.prod(shape)
    voxel_offset = max(int(header["vox_offset"]), length)
    if voxel_offset > MAX_VOXEL_OFFSET:
        raise ImageError(f"{name}: the voxels start at byte {voxel_offset}; the limit is {MAX_VOXEL_OFFSET}")
    start = voxel_offset + (volume_index or 0) * count * dtype.itemsize
    skip_bytes(stream, start - length, name)
    data = read_exactly(stream, count * dtype.itemsize, name)
    discard_bytes(stream, MAX_TRAILING_BYTES)  # so that the checksum of a gzip stream is verified
    stored = np.frombuffer(data, dtype).reshape(shape, order="F")
    values, scaling_steps = _apply_scaling_and_describe(header, stored)
    affine, pixel_spacing, geometry_step, geometry_flags = _parse_geometry(header, len(shape))
    volume_steps = (f"volume: {volume_index} of {volumes}, counted from 0",) if volume_index is not None else ()
    return Scan(
        values,
        name,
        affine=affine,
        is_color=is_color,
        steps=(*volume_steps, f"stored: {dtype.name if not is_color else 'RGB24'}", *scaling_steps, geometry_step),
        flags=(*geometry_flags, *(() if is_color else build_non_finite_flags(values))),
        sources=sources,
        pixel_spacing=pixel_spacing,
        format_codes={key: int(header[key]) for key in ("sform_code", "qform_code", "xyzt_units", "datatype")},
    )


def _read_header_and_length(stream: BinaryIO, name: str) -> tuple[Any, int]:
    """Read the header of a NIfTI stream. Return nibabel's header object and the length of the header in bytes."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    head = read_exactly(stream, 348, name)
    version = _detect_version(head)
    if version is None:
        raise ImageError(f"{name}: this is not a NIfTI file: the header has no NIfTI signature")
    if head[SINGLE_FILE_MAGICS[version][0] :].startswith(PAIRED_FILE_MAGICS[version]):
        raise ImageError(f"{name}: the voxels of this NIfTI header are in another file; save both as one .nii")
    if version == 2:
        head += read_exactly(stream, HEADER_SIZES[2] - 348, name)
    kind: Any = Nifti1Header if version == 1 else Nifti2Header
    return kind(head, check=False), HEADER_SIZES[version]


def _parse_dtype_and_is_color(header: Any, name: str) -> tuple[np.dtype[Any], bool]:
    """Return the data type of the voxels, and whether a voxel is a color."""
    datatype = int(header["datatype"])
    try:
        dtype = np.dtype(header.get_data_dtype())
    except Exception:
        raise ImageError(f"{name}: NIfTI data type {datatype} is unknown") from None
    if dtype.fields is not None and datatype == 128:
        return RGB_DTYPE, True
    if dtype.fields is not None or dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ImageError(
            f"{name}: NIfTI data type {datatype} ({dtype.name}) is not supported; expected real numbers or RGB24"
        )
    return dtype, False


def _parse_shape_and_volume_count(header: Any, volume_index: int | None, name: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of one volume, (I,J,K) or (I,J), and the number of volumes."""
    rank = int(header["dim"][0])
    sides = [int(side) for side in header["dim"][1 : rank + 1]] if 1 <= rank <= 7 else []
    if not sides or min(sides) < 1:
        raise ImageError(f"{name}: the header declares {plural(rank, 'axis')} with sides {sides}, which is invalid")
    while len(sides) > 3 and sides[-1] == 1:
        sides.pop()
    shape, further = tuple(sides[:3]), sides[3:]
    if len(shape) < 2:
        raise ImageError(f"{name}: an image needs at least 2 axes; the file has one, of {plural(shape[0], 'value')}")
    if len(further) > 1:
        raise ImageError(
            f"{name}: the file has {plural(len(sides), 'axis')} ({' x '.join(map(str, sides))}); at most 4 are read"
        )
    volumes = further[0] if further else 1
    check_volume_index(volume_index, volumes, name)
    return shape, volumes


def _apply_scaling_and_describe(header: Any, stored: Array) -> tuple[Array, tuple[str, ...]]:
    """Scale the stored voxels by the header's slope and intercept. Return the values and a text about this step.

    Colors are not scaled. As NIfTI defines, a slope of 0 or NaN means no scaling.
    """
    if stored.dtype.fields is not None:
        return np.stack([stored[channel] for channel in "RGB"], axis=-1), ()
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    intercept = intercept if math.isfinite(intercept) else 0.0
    if not math.isfinite(slope) or slope == 0 or (slope == 1 and intercept == 0):
        return np.ascontiguousarray(stored, np.float32), ()
    scaled = np.ascontiguousarray(stored * np.float64(slope) + intercept, np.float32)
    return scaled, (f"rescale: slope {slope:.10g}, intercept {intercept:.10g}",)


class NiftiGeometry(NamedTuple):
    """The affine and the voxel spacing in mm (None if unknown), a description of their origin, and warnings."""

    affine: Array | None
    pixel_spacing: tuple[float, ...] | None
    step: str
    flags: tuple[str, ...]


def _parse_geometry(header: Any, n_axes: int) -> NiftiGeometry:
    """Read the affine and the voxel spacing from a NIfTI header, in millimeters."""
    codes = {"sform": int(header["sform_code"]), "qform": int(header["qform_code"])}
    declared_codes = f"sform code {codes['sform']}, qform code {codes['qform']}"
    units = {1: (1000.0, "; meters converted to mm"), 3: (1e-3, "; micrometers converted to mm")}
    unit, unit_note = units.get(int(header["xyzt_units"]) & 7, (1.0, ""))
    declared_codes += unit_note
    spacing = tuple(abs(float(side)) * unit for side in header["pixdim"][1 : n_axes + 1])
    pixel_spacing = spacing if all(0 < side < 1e6 for side in spacing) else None
    flag = "no place: neither sform nor qform is set"
    if kind := next((kind for kind, code in codes.items() if code > 0), None):
        try:
            affine = np.array(header.get_sform() if kind == "sform" else header.get_qform(), np.float64)
        except Exception:
            affine = np.full((4, 4), np.nan)
        affine[:3] *= unit
        if np.isfinite(affine).all() and abs(affine).max() < 1e9 and abs(np.linalg.det(affine[:3, :3])) > 1e-12:
            # in a 2-D file the first index is always 0; the second and third are i and j
            world_affine = affine if n_axes == 3 else affine[:, [2, 0, 1, 3]]
            return NiftiGeometry(world_affine, pixel_spacing, f"place: the {kind} ({declared_codes})", ())
        flag = f"no place: the {kind} is not an invertible matrix"
    return NiftiGeometry(None, pixel_spacing, f"place: none ({declared_codes})", (flag,))


def read_nifti_header(source: Path | bytes) -> Any:
    """Read the header of a NIfTI file. Return nibabel's header object without changes."""
    name = pseudonymize_source(source)
    with redact_errors(name), open_source(source, name) as file, decompressed_stream(file) as stream:
        return _read_header_and_length(stream, name)[0]
