"""Read PNG and TIFF files as scans. The stored numbers are not scaled to 8 bits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.files.find_and_open_image_files import list_paths_unless_bytes, open_source, selected_source
from camscope.images.files.tiff_and_png_damage import load_pixels
from camscope.images.scans.scan import MAX_VOXELS, Scan, build_non_finite_flags, check_index_in_range, check_voxel_count
from camscope.plurals import plural

if TYPE_CHECKING:
    from PIL.Image import Image

Array = NDArray[Any]
RASTER_FORMATS = ("PNG", "TIFF")
GRAY_MODES = {"1", "L", "I;16", "I;16B", "I;16L", "I;16N", "I", "F"}


def read_png_or_tiff_scan(source: str | Path | bytes, *, frame: int | None = None) -> Scan:
    """Read a PNG or TIFF file as a scan. The scan is (H,W), or (D,H,W) if the file has several pages.

    Gray values are float32, colors are RGB uint8. `file.tif#2` or `frame=2` selects one page, counted from 0.
    """
    from PIL import Image

    with selected_source(source, frame, "frame") as (path, name, frame):
        try:
            with open_source(path, name) as file, Image.open(file, formats=RASTER_FORMATS) as image:
                # no codec compresses below a thousandth
                max_pixels = min(MAX_VOXELS, 4096 + 1100 * file.seek(0, 2))
                return _read_raster_scan(image, max_pixels, frame, name, list_paths_unless_bytes(path))
        except Image.DecompressionBombError:
            limit = plural(2 * (Image.MAX_IMAGE_PIXELS or 0), "pixel")
            raise ImageError(f"{name}: Pillow refuses it: the image has more than {limit}") from None


def _read_raster_scan(image: "Image", max_pixels: int, frame: int | None, name: str, sources: tuple[Path, ...]) -> Scan:
    """Read one page or all pages of a PNG or TIFF file, without a change of their values."""
    n_pages = int(getattr(image, "n_frames", 1))
    check_index_in_range(frame, n_pages, "frame", name)
    page_indices = list(range(n_pages)) if frame is None else [frame]
    check_voxel_count((len(page_indices), image.height, image.width), name)
    arrays = [_read_page(image, page, max_pixels, name) for page in page_indices]
    if len({(array.shape, array.dtype.kind) for array in arrays}) > 1:
        pages = plural(n_pages, "page")
        raise ImageError(f"{name}: the {pages} differ in size or type; choose one: file#0 .. file#{n_pages - 1}")
    is_color = arrays[0].ndim == 3
    values = arrays[0] if len(arrays) == 1 else np.stack(arrays)
    stored = (f"stored: {values.dtype.name}",)
    values = values if is_color else values.astype(np.float32)
    page_steps = (f"frame: {frame} of {n_pages}, counted from 0",) if frame is not None and n_pages > 1 else ()
    flags = () if is_color else build_non_finite_flags(values)
    return Scan(values, name, is_color=is_color, steps=(*page_steps, *stored), flags=flags, sources=sources)


def _read_page(image: "Image", page_index: int, max_pixels: int, name: str) -> Array:
    """Read one page as an array. Raise an ImageError if it is neither gray nor RGB."""
    if page_index or image.tell():
        image.seek(page_index)
    # a fax page of 1-bit pixels can compress to almost nothing
    check_voxel_count((image.height, image.width), name, MAX_VOXELS if image.mode == "1" else max_pixels)
    load_pixels(image, name)
    if image.mode == "RGB":
        return np.array(image)
    if image.mode not in GRAY_MODES:
        raise ImageError(f"{name}: the pixels have mode {image.mode}; expected gray or RGB")
    array = np.array(image)
    return array.astype(np.uint8) if array.dtype == bool else array
