"""The strips and tiles of a TIFF, checked one by one: libtiff fills what is missing from one with gray, without an error.

JPEG strips are decoded by Pillow, which accepts no JPEG that is cut off; of deflated strips the checksum is compared. The
other codecs either report damage themselves or have no checksum: CCITT fax, PackBits, LZW, Zstandard and old-style JPEG.
"""

import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from camscope.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

COMPRESSION_TAG, JPEG_TABLES_TAG = 259, 347  # numbers of TIFF's fields
OFFSET_AND_COUNT_TAGS = ((273, 279), (324, 325))  # offsets and byte counts of strips, and of tiles
JPEG_COMPRESSION, DEFLATE_COMPRESSIONS = 7, (8, 32946)
EXTRA_TILE_PIXELS = 2**20  # pixels by which a tile may be larger than the image
JPEG_START_MARKER, JPEG_END_MARKER = b"\xff\xd8", b"\xff\xd9"  # of a JPEG stream


def check_tiff_strips(image: "Image", name: str) -> None:
    """ImageError where a strip or tile of an open TIFF's current page is damaged; other formats pass."""
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
        raise ImageError(f"{name}: it is damaged: a strip of the TIFF is cut off or was changed")


def _read_strips(file: Any, tags: Any) -> Iterator[bytes]:
    for offsets, counts in OFFSET_AND_COUNT_TAGS:
        for offset, count in zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False):
            if count > 0:  # a strip without bytes is one that was never written
                file.seek(offset)
                yield file.read(count)


def _is_complete_jpeg(data: bytes, tables: bytes, max_pixels: int) -> bool:
    """Whether it can be decoded to the end, to no more than `max_pixels` pixels."""
    from PIL import Image, UnidentifiedImageError

    if tables.startswith(JPEG_START_MARKER):
        data = tables.removesuffix(JPEG_END_MARKER) + data.removeprefix(JPEG_START_MARKER)
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as strip:
            if strip.width * strip.height > max_pixels:
                return False
            strip.load()
    except UnidentifiedImageError:
        return data.startswith(JPEG_START_MARKER)  # a kind of JPEG that libtiff may know
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
