"""Export an explanation to NIfTI or DICOM."""

import os
from pathlib import Path
from typing import Any

from camscope.errors import InputError
from camscope.explanation import Explanation
from camscope.medical.dicom_export import to_parametric_map, to_secondary_capture
from camscope.medical.dicom_export_headers import require_highdicom
from camscope.medical.nifti_export import to_nifti
from camscope.optional_packages import require

EXPORT_KINDS = ("nifti", "pmap", "sc")


def check_export_packages_installed(kind: str) -> None:
    """Raise a MissingExtraError if the package for the export format `kind` is missing."""
    if kind == "nifti":
        require("nibabel", extra="medical")
    else:
        require_highdicom()


def export(
    explanation: Explanation,
    path: str | os.PathLike[str],
    kind: str,
    *,
    source: Any = None,
    profile: str = "research",
    overwrite: bool = False,
) -> Path:
    """Write a map as NIfTI, as DICOM Parametric Map or as DICOM Secondary Capture.

    Args:
        explanation: The explanation of the scan.
        path: The file to write, or the folder for Secondary Captures of a volume.
        kind: "nifti", "pmap" (Parametric Map) or "sc" (Secondary Capture).
        source: The scan that was explained. DICOM needs it.
        profile: DICOM needs "clinical", which allows patient data to be copied from the source.
        overwrite: Whether existing output is replaced.

    Returns:
        The path that was written.

    Raises:
        InputError: If `kind` is unknown, or DICOM has no `source`.
        OutputError: If the output exists, or the profile forbids it.

    >>> import tempfile
    >>> from pydicom.data import get_testdata_file
    >>> from camscope import GradCAM, ScanPreprocess, load_model
    >>> dicom_file = get_testdata_file("CT_small.dcm")
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(window="100,200", resize=64))
    >>> explanation = explainer.explain(dicom_file, "nodule")
    >>> export(explanation, f"{tempfile.mkdtemp()}/map.nii", "nifti").name
    'map.nii'

    """
    if kind == "nifti":
        return to_nifti(explanation, path, source=source, overwrite=overwrite)
    if kind not in EXPORT_KINDS:
        raise InputError(f"kind={kind!r}; expected one of {', '.join(EXPORT_KINDS)}")
    write = to_parametric_map if kind == "pmap" else to_secondary_capture
    if source is None and profile == "clinical":
        raise InputError(f'kind="{kind}" needs source=, the explained DICOM files')
    return write(explanation, source, path, profile=profile, overwrite=overwrite)
