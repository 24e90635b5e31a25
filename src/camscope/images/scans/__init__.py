"""Medical scans: readers for DICOM, NIfTI, ITK formats and raster files, and their preprocessing."""
