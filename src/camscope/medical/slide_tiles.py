"""Read the tiles of a whole-slide image that show tissue, with their coordinates."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CamscopeError, ImageError, InputError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
from camscope.optional_packages import require

EXTRA = "pathology"
MAX_THUMBNAIL_SIDE = 2048  # pixels
MAX_TILES = 1_000_000
MIN_SATURATION = 12  # of 255: below, a pixel is background even if Otsu's threshold is lower
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SlideTiles:
    """The tiles of a whole-slide image. They are read from the file when they are needed.

    Attributes:
        path: The file.
        name: A name that may be displayed, without the name of the file.
        size: (width, height) of the slide in pixels of level 0.
        tile_size: Side of a tile in pixels of `level`.
        level: The level of the pyramid from which tiles are read. Level 0 has the full resolution.
        downsample: Pixels of level 0 per pixel of `level`.
        corners: (T,2) the top left corner (x, y) of each tile, in pixels of level 0.
        thumbnail: (h,w,3) the whole slide.
        microns_per_pixel: Of level 0, or None if the file does not say it.

    >>> tiles = SlideTiles(Path("a.tif"), "slide", (512, 256), 256, 0, 1.0, np.array([[0, 0], [256, 0]]), np.zeros((2, 4, 3)))
    >>> len(tiles), tiles.extent
    (2, 256.0)

    """

    path: Path
    name: str
    size: tuple[int, int]
    tile_size: int
    level: int
    downsample: float
    corners: NDArray[np.int64]
    thumbnail: Pixels
    microns_per_pixel: float | None = None

    def __len__(self) -> int:
        return len(self.corners)

    @property
    def extent(self) -> float:
        """The side of a tile in pixels of level 0."""
        return self.tile_size * self.downsample

    def iter_tiles(self, indices: Any = None) -> Iterator[Pixels]:
        """Yield the pixels (size,size,3) of all tiles, or of those with the given indices.

        Args:
            indices: The indices, or None for all.

        Yields:
            RGB pixels. Transparent parts of the slide are white.

        Raises:
            ImageError: If the file is damaged.

        """
        with _open_slide(self.path, self.name) as slide:
            for index in range(len(self)) if indices is None else indices:
                corner = tuple(int(number) for number in self.corners[index])
                yield _to_rgb(slide.read_region(corner, self.level, (self.tile_size, self.tile_size)))


def read_slide_tiles(
    path: str | os.PathLike[str],
    *,
    tile_size: int = 256,
    level: int = 0,
    overlap: float = 0.0,
    min_tissue: float = 0.1,
) -> SlideTiles:
    """Find the tiles of a whole-slide image that show tissue. OpenSlide reads the file.

    Tissue is where the saturation of the thumbnail is above Otsu's threshold. Tiles lie on a grid that begins at the top left
    corner. Parts at the right and the bottom that are smaller than a tile are left out.

    Args:
        path: A slide: SVS, NDPI, MRXS, a pyramidal TIFF, DICOM, or another format of OpenSlide.
        tile_size: Side of a tile in pixels of `level`.
        level: The level of the pyramid.
        overlap: The share of a tile that the next tile overlaps. At least 0 and less than 1.
        min_tissue: The share of a tile that must be tissue. 0 keeps all tiles.

    Returns:
        The tiles.

    Raises:
        ImageError: If OpenSlide cannot read the file, or no tile shows tissue.
        InputError: If a setting is out of range.
        MissingExtraError: If OpenSlide is not installed.

    >>> read_slide_tiles("missing.svs")
    Traceback (most recent call last):
    camscope.errors.ImageError: there is no file missing.svs

    """
    check_positive_integer(tile_size=tile_size)
    if not 0 <= overlap < 1 or not 0 <= min_tissue <= 1:
        raise InputError(
            f"overlap={overlap}, min_tissue={min_tissue}; expected shares from 0 to 1, overlap less than 1"
        )
    file = Path(path)
    if not file.is_file():
        raise ImageError(f"there is no file {file}")
    name = pseudonymize_source(file)
    with _open_slide(file, name) as slide:
        if not 0 <= level < slide.level_count:
            raise InputError(f"level={level}; the slide has the levels 0 to {slide.level_count - 1}")
        downsample = float(slide.level_downsamples[level])
        thumbnail = _to_rgb(slide.get_thumbnail((MAX_THUMBNAIL_SIDE, MAX_THUMBNAIL_SIDE)))
        (width, height), resolution = slide.dimensions, slide.properties.get("openslide.mpp-x")
    extent, step = tile_size * downsample, max(1.0, tile_size * downsample * (1 - overlap))
    columns, rows = (max(0, math.floor((side - extent) / step) + 1) for side in (width, height))
    if columns * rows > MAX_TILES:
        raise InputError(
            f"{name}: {columns} x {rows} tiles are more than the limit of {MAX_TILES}; use a coarser level"
        )
    corners = np.array(
        [(round(x * step), round(y * step)) for y in range(rows) for x in range(columns)], np.int64
    ).reshape(-1, 2)
    if min_tissue > 0 and len(corners):
        corners = corners[_measure_tissue(thumbnail, corners, extent, (width, height)) >= min_tissue]
    if not len(corners):
        raise ImageError(f"{name}: no tile of {extent:g} pixels shows tissue; use smaller tiles or min_tissue=0")
    microns = float(resolution) if resolution else None
    return SlideTiles(file, name, (width, height), tile_size, level, downsample, corners, thumbnail, microns)


@contextmanager
def _open_slide(path: Path, name: str) -> Iterator[Any]:
    """Open a slide. Errors of OpenSlide inside the `with` become an ImageError without the name of the file."""
    openslide = require("openslide", extra=EXTRA)
    try:
        with openslide.OpenSlide(str(path)) as slide:
            yield slide
    except CamscopeError:
        raise
    except openslide.OpenSlideError as error:
        raise ImageError(f"{name} is no slide that OpenSlide can read ({type(error).__name__})") from None


def _to_rgb(image: Any) -> Pixels:
    """Convert a PIL image, which may be transparent, to RGB pixels on white."""
    pixels = np.asarray(image.convert("RGBA"), np.float32)
    alpha = pixels[..., 3:] / 255
    return np.rint(pixels[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def _measure_tissue(
    thumbnail: Pixels, corners: NDArray[np.int64], extent: float, size: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the share (T,) of each tile that is tissue."""
    import cv2

    saturation = thumbnail.max(2) - thumbnail.min(2)
    threshold, _ = cv2.threshold(saturation, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    tissue = saturation > max(threshold, MIN_SATURATION)
    shares = np.zeros(len(corners))
    for i, corner in enumerate(corners):
        rows, columns = locate_on_grid(corner, extent, size, (thumbnail.shape[0], thumbnail.shape[1]))
        shares[i] = tissue[rows, columns].mean()
    return shares


def locate_on_grid(
    corner: NDArray[np.int64], extent: float, size: tuple[int, int], grid: tuple[int, int]
) -> tuple[slice, slice]:
    """Return the rows and columns that a tile covers on a grid (h,w) over the whole slide. At least one cell is covered.

    >>> locate_on_grid(np.array([256, 0]), 256, (512, 256), (2, 4))
    (slice(0, 2, None), slice(2, 4, None))
    """
    slices = []
    for first, side, cells in ((corner[1], size[1], grid[0]), (corner[0], size[0], grid[1])):
        start = min(round(float(first) * cells / side), cells - 1)
        stop = min(max(round(float(first + extent) * cells / side), start + 1), cells)
        slices.append(slice(start, stop))
    return slices[0], slices[1]
