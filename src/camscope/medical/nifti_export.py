"""Export a map as a NIfTI file with the geometry of its scan."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import OutputError
from camscope.explanation import Explanation
from camscope.images.scans.nifti_reader import read_nifti_header
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import read_scan
from camscope.medical.scan_space_map import ScanSpaceMap, build_json_sidecar, resample_map_to_scan, to_dicom_ascii
from camscope.optional_packages import require

# copied from the source's header: only numbers that define voxel positions
GEOMETRY_FIELDS = (
    *("sform_code", "qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)
SCANNER_CODE, ALIGNED_CODE = 1, 2  # xform codes: scanner space; the scan's own space, whichever it is
NO_EXTENSIONS = bytes(4)


def to_nifti(
    explanation: Explanation, path: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False
) -> Path:
    """Write a map as a NIfTI file (`.nii` or `.nii.gz`). It has the voxels and axes of the scan.

    Values are float32 in score units. A 2-D image becomes a volume of one slice. Voxels that the model did not see are 0. If
    there are any, a second file `…_covered` marks the others with 1. A `.json` sidecar holds method, layer, target, score,
    versions, model digest and steps. None of the files contains patient data.

    Args:
        explanation: The explanation of the scan.
        path: The file to write.
        source: The scan that was explained: a path, its bytes or a `Scan`. The affines, codes, zooms and units of a
            NIfTI file are copied. Without a source the affine is that of the explanation, with code 2 ("aligned").
        overwrite: Whether existing files are replaced.

    Returns:
        The path that was written.

    Raises:
        OutputError: If a file exists, or the suffix is not that of NIfTI.
        GeometryError: If the map belongs to another scan.

    >>> import tempfile
    >>> from pydicom.data import get_testdata_file
    >>> from camscope import GradCAM, ScanPreprocess, load_model
    >>> dicom_file = get_testdata_file("CT_small.dcm")
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(window="100,200", resize=64))
    >>> explanation = explainer.explain(dicom_file, "nodule")
    >>> to_nifti(explanation, f"{tempfile.mkdtemp()}/map.nii.gz").name
    'map.nii.gz'

    """
    path = Path(path)
    suffix = next(
        (end for end in (".nii.gz", ".nii") if path.name.lower().endswith(end) and path.name.lower() != end), ""
    )
    if not suffix:
        raise OutputError(f"{path} is not a NIfTI file name; expected a name that ends in .nii or .nii.gz")
    stem = path.name[: -len(suffix)]
    require("nibabel", extra="medical")  # before anything is read
    scan = None if source is None else read_scan(source)
    scan_map = resample_map_to_scan(explanation, scan)
    header = _build_header(scan_map, scan, source)
    mask_path, sidecar_path = path.with_name(f"{stem}_covered{suffix}"), path.with_name(f"{stem}.json")
    for existing_path in () if overwrite else filter(os.path.lexists, (path, mask_path, sidecar_path)):
        raise OutputError(f"{existing_path} exists; allow overwriting, or choose another name")
    if scan_map.covered.all() and mask_path.exists() and not _is_camscope_map(mask_path):
        raise OutputError(f"{mask_path} exists and was not written by camscope; move it, or choose another name")
    header["cal_min"], header["cal_max"] = scan_map.value_range
    header["descrip"] = to_dicom_ascii(f"camscope {explanation.method}", 79).encode()
    write_bytes(path, _encode_nifti(header, _to_volume(scan_map.values, scan), suffix), overwrite=overwrite)
    if scan_map.covered.all():
        mask_path.unlink(missing_ok=True)  # left over from a former map
    else:
        header["cal_min"], header["cal_max"] = 0, 1
        covered = _to_volume(scan_map.covered, scan).astype(np.uint8)
        write_bytes(mask_path, _encode_nifti(header, covered, suffix), overwrite=overwrite)
    data = json.dumps(build_json_sidecar(explanation, scan_map), indent=1, allow_nan=False).encode()
    write_bytes(sidecar_path, data, overwrite=overwrite)
    return path


def _is_camscope_map(path: Path) -> bool:
    """Return whether a file is a NIfTI map from camscope."""
    import nibabel

    try:
        header: Any = nibabel.load(path).header
        return bytes(header["descrip"]).startswith(b"camscope")
    except Exception:  # a file of another kind may raise anything
        return False


def _to_volume(values: NDArray[Any], scan: Scan | None) -> NDArray[Any]:
    """Convert values (H,W) to a volume of one slice. Return values (D,H,W) unchanged."""
    if values.ndim == 3:
        return values
    # a 2-D NIfTI file has the axes i and j, so that the slice is the last axis
    return values[..., None] if scan is not None and scan.format_codes is not None else values[None]


def _build_header(scan_map: ScanSpaceMap, scan: Scan | None, scan_source: Any) -> Any:
    """Build a NIfTI header with the geometry of the scan. Text in the header of the scan is not copied."""
    from nibabel.nifti1 import Nifti1Header

    source = None
    if (
        scan is not None and scan.format_codes is not None
    ):  # a NIfTI file, or a `Scan` that may have been read from bytes
        file = scan_source if isinstance(scan_source, bytes) else next(iter(scan.sources), None)
        source = None if file is None else read_nifti_header(file)
    kind: Any = Nifti1Header if source is None else type(source)
    header = kind()
    header.set_data_shape(_to_volume(scan_map.values, scan).shape)
    if source is not None:
        for key in GEOMETRY_FIELDS:
            header[key] = source[key]
        sides = np.abs(source["pixdim"][1:4])
        header["pixdim"][:4] = source["pixdim"][0], *np.where(sides > 0, sides, 1)
        header["xyzt_units"] = source["xyzt_units"]
        return header
    header.set_xyzt_units("mm")
    if scan_map.affine is not None:
        default = ALIGNED_CODE if scan is None else SCANNER_CODE
        codes = (scan and scan.format_codes) or {}
        _set_affine(header, scan_map.affine, max(codes.get("sform_code", default), 1))
    elif scan is not None and scan.spacing is not None:
        header["pixdim"][1:4] = (*(1.0,) * (3 - len(scan.spacing)), *scan.spacing)
    return header


def _set_affine(header: Any, affine: NDArray[np.float64], code: int) -> None:
    """Set the sform of a NIfTI header to an affine. If the affine is not sheared, also set the qform."""
    header.set_sform(affine, code)
    header.set_qform(affine, code)
    sides = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(header.get_qform()[:3, :3], affine[:3, :3], atol=1e-3 * sides.min()):
        header["qform_code"] = 0


def _encode_nifti(header: Any, values: NDArray[Any], suffix: str) -> bytes:
    """Encode values as a NIfTI file. Equal maps give equal bytes, also if compressed."""
    header.set_data_dtype(values.dtype)
    header.set_slope_inter(1, 0)
    header["vox_offset"] = len(header.binaryblock) + len(NO_EXTENSIONS)
    data: bytes = header.binaryblock + NO_EXTENSIONS + values.astype(header.get_data_dtype(), copy=False).tobytes("F")
    # without time and name, so that equal maps give equal bytes
    return gzip.compress(data, 1, mtime=0) if suffix == ".nii.gz" else data
