"""Explain volumes slice by slice or patch by patch, and export explanations to DICOM and NIfTI."""

from camscope.medical.dicom_export import to_parametric_map, to_secondary_capture
from camscope.medical.dicom_export_headers import compute_device_uid
from camscope.medical.explain_slices_and_patches import (
    SliceExplanations,
    explain_patch,
    explain_patches,
    explain_slices,
)
from camscope.medical.explain_sliding_windows import explain_sliding_windows
from camscope.medical.export_nifti_or_dicom import EXPORT_KINDS, export
from camscope.medical.nifti_export import to_nifti

__all__ = [
    "EXPORT_KINDS",
    "SliceExplanations",
    "compute_device_uid",
    "explain_patch",
    "explain_patches",
    "explain_slices",
    "explain_sliding_windows",
    "export",
    "to_nifti",
    "to_parametric_map",
    "to_secondary_capture",
]
