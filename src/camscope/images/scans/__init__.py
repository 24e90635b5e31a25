"""Read medical scans (DICOM, NIfTI, NRRD, MetaImage, PNG and TIFF) and preprocess them."""
