"""Explain volumes slice by slice or patch by patch, and export explanations to DICOM and NIfTI."""

from camscope.medical.dicom_export import to_parametric_map, to_secondary_capture
from camscope.medical.dicom_export_common import compute_device_uid
from camscope.medical.export import EXPORT_KINDS, export
from camscope.medical.nifti_export import to_nifti
from camscope.medical.slices_and_patches import SliceExplanations, explain_patch, explain_patches, explain_slices

__all__ = [
    "EXPORT_KINDS",
    "SliceExplanations",
    "compute_device_uid",
    "explain_patch",
    "explain_patches",
    "explain_slices",
    "export",
    "to_nifti",
    "to_parametric_map",
    "to_secondary_capture",
]
