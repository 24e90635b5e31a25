"""Check the strips and tiles of a TIFF one by one: libtiff fills missing data with gray without an error.

JPEG strips are decoded by Pillow, which rejects truncated data. Deflate strips are checked by their checksum. The
other codecs report damage themselves or have no checksum: CCITT fax, PackBits, LZW, Zstandard and old-style JPEG.
"""

import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from camscope.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

COMPRESSION_TAG, JPEG_TABLES_TAG = 259, 347  # TIFF tags
OFFSET_AND_COUNT_TAGS = ((273, 279), (324, 325))  # tags of offsets and byte counts: of strips, of tiles
JPEG_COMPRESSION, DEFLATE_COMPRESSIONS = 7, (8, 32946)
EXTRA_TILE_PIXELS = 2**20  # pixels by which a tile may be larger than the image
JPEG_START_MARKER, JPEG_END_MARKER = b"\xff\xd8", b"\xff\xd9"  # of a JPEG stream


def check_tiff_strips(image: "Image", name: str) -> None:
    """Raise ImageError if a strip or tile of an open TIFF's current page is damaged. Other formats pass."""
    tags, file = getattr(image, "tag_v2", None), image.fp if hasattr(image, "fp") else None
    if tags is None or file is None:
        return
    compression = tags.get(COMPRESSION_TAG)
    if compression != JPEG_COMPRESSION and compression not in DEFLATE_COMPRESSIONS:
        return
    position = file.tell()
    try:
        is_complete = all(
            _is_complete_jpeg(data, tags.get(JPEG_TABLES_TAG, b""), EXTRA_TILE_PIXELS + image.width * image.height)
            if compression == JPEG_COMPRESSION
            else _is_complete_deflate(data)
            for data in _read_strips(file, tags)
        )
    finally:
        file.seek(position)
    if not is_complete:
        raise ImageError(f"{name}: it is damaged: a strip of the TIFF is cut off or corrupt")


def _read_strips(file: Any, tags: Any) -> Iterator[bytes]:
    for offsets, counts in OFFSET_AND_COUNT_TAGS:
        for offset, count in zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False):
            if count > 0:  # a strip of 0 bytes was never written
                file.seek(offset)
                yield file.read(count)


def _is_complete_jpeg(data: bytes, tables: bytes, max_pixels: int) -> bool:
    """Return whether a JPEG strip can be decoded to its end, to at most `max_pixels` pixels."""
    from PIL import Image, UnidentifiedImageError

    if tables.startswith(JPEG_START_MARKER):
        data = tables.removesuffix(JPEG_END_MARKER) + data.removeprefix(JPEG_START_MARKER)
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as strip:
            if strip.width * strip.height > max_pixels:
                return False
            strip.load()
    except UnidentifiedImageError:
        return data.startswith(JPEG_START_MARKER)  # a variant of JPEG that libtiff may support
    except OSError:
        return False
    return True


def _is_complete_deflate(data: bytes) -> bool:
    inflater = zlib.decompressobj()
    try:
        while not inflater.eof and data:
            inflater.decompress(data, 1 << 22)
            data = inflater.unconsumed_tail
    except zlib.error:
        return False
    return inflater.eof
