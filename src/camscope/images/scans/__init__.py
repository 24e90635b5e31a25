"""Medical scans: DICOM, NIfTI, ITK files and MONAI tensors."""
