"""What leaves for viewers of medical images, at the place of the scan: NIfTI, DICOM Parametric Maps, Secondary Captures."""

from camscope.medical.equipment import device_uid
from camscope.medical.export import KINDS, export
from camscope.medical.nifti import to_nifti
from camscope.medical.parametric_map import to_parametric_map
from camscope.medical.secondary_capture import to_secondary_capture

__all__ = ["KINDS", "device_uid", "export", "to_nifti", "to_parametric_map", "to_secondary_capture"]
