"""A map as NIfTI, with the geometry of its scan, for 3D Slicer, ITK-SNAP, FSLeyes, NiiVue and their kin."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import OutputError
from camscope.explanation import Explanation
from camscope.images.scans.nifti import read_nifti_header
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import read_scan
from camscope.medical.export_metadata import build_sidecar, to_dicom_ascii
from camscope.medical.scan_space import ScanSpaceMap, resample_to_scan
from camscope.optional import require
from camscope.safe_files import write_bytes

# all that is taken over of a source's header: numbers that say where voxels lie
GEOMETRY_FIELDS = (
    *("sform_code", "qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)
SCANNER_CODE, ALIGNED_CODE = 1, 2  # codes: in the scanner's millimetres; in those of the scan, whichever they are
NO_EXTENSIONS = bytes(4)  # none


def to_nifti(
    explanation: Explanation, path: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False
) -> Path:
    """Write the map (D,H,W) as `.nii` or `.nii.gz`: float32 in score units on the scan's own voxels, in its own axes.

    `source`: the scan that was explained, a path, its bytes or a `Scan`: of a NIfTI file both its matrices, codes, zooms and units
        are taken over as they are. Without it the place is the explanation's, under code 2 ("aligned").
    An image of two axes is a volume of one slice. Voxels that the model was not shown are 0, and 0 in a second file,
    `…_covered`, which is there only where there are such. A `.json` beside it tells method, layer, target, score, versions, the
    model's digest and the steps. Nothing of a patient is in any of them.
    """
    path = Path(path)
    stem, suffix = _split_nifti_suffix(path)
    require_nibabel()
    scan = None if source is None else read_scan(source)
    scan_map = resample_to_scan(explanation, scan)
    header = _build_header(scan_map, scan, source)
    mask_path, sidecar_path = path.with_name(f"{stem}_covered{suffix}"), path.with_name(f"{stem}.json")
    _check_paths_free((path, mask_path, sidecar_path), overwrite)
    if scan_map.covered.all() and mask_path.exists() and not _is_camscope_map(mask_path):
        raise OutputError(f"{mask_path} exists and was not written here; move it away, or choose another name")
    values = _to_volume(scan_map.values, scan)
    header["cal_min"], header["cal_max"] = scan_map.value_range
    header["descrip"] = to_dicom_ascii(f"camscope {explanation.method}", 79).encode()
    write_bytes(path, _encode_nifti(header, values, suffix), overwrite=overwrite)
    if scan_map.covered.all():
        mask_path.unlink(missing_ok=True)  # of the map that was here before
    else:
        header["cal_min"], header["cal_max"] = 0, 1
        write_bytes(
            mask_path,
            _encode_nifti(header, _to_volume(scan_map.covered, scan).astype(np.uint8), suffix),
            overwrite=overwrite,
        )
    data = json.dumps(build_sidecar(explanation, scan_map), indent=1, allow_nan=False).encode()
    write_bytes(sidecar_path, data, overwrite=overwrite)
    return path


def require_nibabel() -> None:
    """MissingExtraError where it is not, before anything is read."""
    require("nibabel", extra="medical")


def _split_nifti_suffix(path: Path) -> tuple[str, str]:
    """`sum_maps.nii.gz` -> `sum_maps`, `.nii.gz`."""
    for suffix in (".nii.gz", ".nii"):
        if path.name.lower().endswith(suffix) and len(path.name) > len(suffix):
            return path.name[: -len(suffix)], suffix
    raise OutputError(f"{path}: a NIfTI file is called .nii or .nii.gz")


def _check_paths_free(paths: tuple[Path, ...], overwrite: bool) -> None:
    for path in () if overwrite else paths:
        if os.path.lexists(path):
            raise OutputError(f"{path} exists; allow overwriting, or choose another name")


def _is_camscope_map(path: Path) -> bool:
    """Whether a file is a map that was written here."""
    import nibabel

    try:
        header: Any = nibabel.load(path).header
        return bytes(header["descrip"]).startswith(b"camscope")
    except Exception:  # a file of another kind may raise anything
        return False


def _to_volume(values: NDArray[Any], scan: Scan | None) -> NDArray[Any]:
    """(D,H,W); of a flat NIfTI file, whose axes are i and j, the one slice is the last."""
    if values.ndim == 3:
        return values
    return values[..., None] if scan is not None and scan.format_codes is not None else values[None]


def _build_header(scan_map: ScanSpaceMap, scan: Scan | None, scan_source: Any) -> Any:
    """Nibabel's header with the geometry, and no word."""
    from nibabel.nifti1 import Nifti1Header

    source = _read_source_header(scan, scan_source)
    kind: Any = Nifti1Header if source is None else type(source)
    header = kind()
    header.set_data_shape(_to_volume(scan_map.values, scan).shape)
    if source is not None:
        for key in GEOMETRY_FIELDS:
            header[key] = source[key]
        sides = np.abs(source["pixdim"][1:4])
        header["pixdim"][0] = source["pixdim"][0]
        header["pixdim"][1:4] = np.where(sides > 0, sides, 1)
        header["xyzt_units"] = int(source["xyzt_units"]) & 7
        return header
    header.set_xyzt_units("mm")
    if scan_map.affine is not None:
        codes = scan.format_codes if scan is not None else None
        default = ALIGNED_CODE if scan is None else SCANNER_CODE
        _set_affine(header, scan_map.affine, max((codes or {}).get("sform_code", default), 1))
    elif scan is not None and scan.spacing is not None:
        header["pixdim"][1:4] = (*(1.0,) * (3 - len(scan.spacing)), *scan.spacing)
    return header


def _read_source_header(scan: Scan | None, scan_source: Any) -> Any:
    """That of the NIfTI file that was given; None of any other, and of a `Scan` that was read from bytes."""
    if scan is None or scan.format_codes is None:
        return None
    source = scan_source if isinstance(scan_source, bytes) else next(iter(scan.sources), None)
    return None if source is None else read_nifti_header(source)


def _set_affine(header: Any, affine: NDArray[np.float64], code: int) -> None:
    """Both matrices; the quaternion only where it can say the same, which it cannot of sheared voxels."""
    header.set_sform(affine, code)
    header.set_qform(affine, code)
    sides = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(header.get_qform()[:3, :3], affine[:3, :3], atol=1e-3 * sides.min()):
        header["qform_code"] = 0


def _encode_nifti(header: Any, values: NDArray[Any], suffix: str) -> bytes:
    header.set_data_dtype(values.dtype)
    header.set_slope_inter(1, 0)
    header["vox_offset"] = len(header.binaryblock) + len(NO_EXTENSIONS)
    data: bytes = header.binaryblock + NO_EXTENSIONS + values.astype(header.get_data_dtype(), copy=False).tobytes("F")
    # without a time and a name: the same map is the same bytes
    return gzip.compress(data, 1, mtime=0) if suffix == ".nii.gz" else data
