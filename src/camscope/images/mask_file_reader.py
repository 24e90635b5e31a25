"""Read mask files as label images, with one integer label for each pixel or voxel."""

from io import BytesIO
from pathlib import Path

from camscope.atomic_writes_and_folder_locks import open_regular_file
from camscope.errors import ImageError
from camscope.images.files.redacted_errors_and_file_pseudonyms import suppress_library_output
from camscope.images.photo_reader import read_photo
from camscope.images.scans.png_tiff_reader import read_png_or_tiff_scan
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.mask_labels import LabelImage

SEGMENTATION = "SEG"  # DICOM modality
EXIF_ORIENTATION_TAG = 0x0112  # EXIF tag
SEGMENTATION_OBJECT_PROBLEM = (
    "it is a DICOM segmentation object (SEG), whose frames are segments; expected one label for each pixel. Convert it to NIfTI "
    "with segimage2itkimage of dcmqi, or to an array with highdicom"
)


class SegmentationObjectError(ImageError):
    """Raised for a mask that is a DICOM segmentation object."""


def read_label_image(source: str | Path | bytes, *, is_volume: bool = False) -> LabelImage:
    """Read the labels (H,W) or (D,H,W) of a mask file. In a color image, each color is one label.

    If `is_volume` is true, the pages of a TIFF are slices. Gray images of 16 bits and more are not scaled to 8 bits, since
    small labels would become 0. Raises ImageError for a file that cannot be read.
    """
    if is_volume or is_scan(source):
        scan = read_mask_scan(source)
        return LabelImage.from_colors(scan.values) if scan.is_color else LabelImage(scan.values)
    if _has_high_bit_depth(source):
        return LabelImage(read_png_or_tiff_scan(source, frame=0).values)
    return LabelImage.from_colors(read_photo(source).pixels)


def read_mask_scan(file: str | Path | bytes) -> Scan:
    """Read a mask from a medical image file. Raise SegmentationObjectError for a DICOM segmentation object."""
    scan = read_scan(file)
    if scan.modality == SEGMENTATION:
        raise SegmentationObjectError(f"{scan.name}: {SEGMENTATION_OBJECT_PROBLEM}")
    return scan


def _has_high_bit_depth(source: str | Path | bytes) -> bool:
    """Return whether a file is a gray PNG or TIFF with more than 8 bits. For an unreadable file, return False."""
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
        raise ImageError(
            f"{name}: a mask of more than 8 bits must not have an EXIF orientation; rotate it and save it again"
        )
    return is_high_bit_depth
