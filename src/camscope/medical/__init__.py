"""Explain volumes by slices or patches and whole-slide images by tiles, and export explanations to DICOM, NIfTI and GeoJSON."""

from camscope.medical.attention_mil import GatedAttention, explain_slide
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
from camscope.medical.slide_explanation import SlideExplanation
from camscope.medical.slide_tiles import SlideTiles, read_slide_tiles

__all__ = [
    "EXPORT_KINDS",
    "GatedAttention",
    "SliceExplanations",
    "SlideExplanation",
    "SlideTiles",
    "compute_device_uid",
    "explain_patch",
    "explain_patches",
    "explain_slices",
    "explain_slide",
    "explain_sliding_windows",
    "export",
    "read_slide_tiles",
    "to_nifti",
    "to_parametric_map",
    "to_secondary_capture",
]
