"""Masks in files: the label of each pixel or voxel, as it is stored."""

from io import BytesIO
from pathlib import Path

from camscope.errors import ImageError
from camscope.images.files.redaction import suppress_library_output
from camscope.images.photo import read_photo
from camscope.images.scans.raster import read_raster
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.mask_labels import LabelImage
from camscope.safe_files import open_regular_file

SEGMENTATION = "SEG"  # the modality of DICOM
EXIF_ORIENTATION_TAG = 0x0112  # the tag of EXIF
NO_SEGMENTATION = (
    "it is a DICOM segmentation object (SEG), whose frames are segments; expected one label for each pixel: convert it to NIfTI, "
    "as with segimage2itkimage of dcmqi, or to an array with highdicom"
)


class SegmentationObjectError(ImageError):
    """A mask that is a DICOM segmentation object."""


def read_label_image(source: str | Path | bytes, *, is_volume: bool = False) -> LabelImage:
    """(H,W) or (D,H,W) labels of a mask's file, by its path or its bytes; colors are labels, too.

    `is_volume`: the pages of a TIFF are its slices. Gray images of 16 bits and more are read as stored: converted to 8
    bits, their small labels would all be black. ImageError for a file that cannot be read.
    """
    if is_volume or is_scan(source):
        scan = read_mask_scan(source)
        return LabelImage.from_colors(scan.values) if scan.is_color else LabelImage(scan.values)
    if _has_high_bit_depth(source):
        return LabelImage(read_raster(source, frame=0).values)
    return LabelImage.from_colors(read_photo(source).pixels)


def read_mask_scan(file: str | Path | bytes) -> Scan:
    """A mask that is a medical image. ImageError for a segmentation object: frames of several segments look like slices."""
    scan = read_scan(file)
    if scan.modality == SEGMENTATION:
        raise SegmentationObjectError(f"{scan.name}: {NO_SEGMENTATION}")
    return scan


def _has_high_bit_depth(source: str | Path | bytes) -> bool:
    """Whether it is a gray PNG or TIFF of more than 8 bits; what cannot be opened is for `read_photo` to report."""
    from PIL import Image

    try:
        stream = BytesIO(source) if isinstance(source, bytes) else open_regular_file(source)
        with suppress_library_output(), stream, Image.open(stream, formats=("PNG", "TIFF")) as image:
            is_high_bit_depth = image.mode.startswith("I") or image.mode == "F"
            turned = is_high_bit_depth and image.getexif().get(EXIF_ORIENTATION_TAG, 1) != 1
    except Exception:  # a damaged file may raise anything
        return False
    if turned:
        name = "its bytes" if isinstance(source, bytes) else source
        raise ImageError(f"{name}: a mask of 16 bits with an EXIF orientation; save it upright")
    return is_high_bit_depth
