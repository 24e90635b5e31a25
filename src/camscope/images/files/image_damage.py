"""Detect damaged TIFF and PNG pixel data that Pillow reads without an error.

Pillow does not compare the checksums of a PNG's pixel data. libtiff fills missing data of a TIFF with gray. JPEG strips
are decoded by Pillow, which rejects truncated data. Deflate strips are checked by their checksum. The other codecs of a
TIFF report damage themselves or have no checksum: CCITT fax, PackBits, LZW, Zstandard and old-style JPEG.
"""

import io
import re
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
PNG_SIGNATURE_BYTES, PNG_PIXEL_CHUNKS, READ_BYTES = 8, (b"IDAT", b"fdAT"), 2**20
JPEG_START_MARKER, JPEG_END_MARKER = b"\xff\xd8", b"\xff\xd9"  # of a JPEG stream
JPEG_SCAN_CODE, JPEG_END_CODE = 0xDA, 0xD9
# a marker that ends entropy-coded data; 00 belongs to the data, and D0 to D7 restart the decoder within it
JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
MAX_JPEG_PADDING_BYTES = 16  # bytes other than 0 behind the end marker


def check_pixel_data(image: "Image", name: str) -> None:
    """Raise ImageError if the pixel data of an open PNG, or of an open TIFF's current page, is damaged."""
    if image.format == "TIFF":
        _check_tiff_strips(image, name)
    elif image.format == "PNG" and (file := getattr(image, "fp", None)) is not None:
        position = file.tell()
        try:
            is_sound = _are_png_checksums_right(file)
        finally:
            file.seek(position)
        if not is_sound:
            raise ImageError(f"{name}: it is damaged: a checksum of the PNG's pixel data is wrong")


def _are_png_checksums_right(file: Any) -> bool:
    file.seek(PNG_SIGNATURE_BYTES)
    while len(header := file.read(8)) == 8:
        n_bytes, checksum = int.from_bytes(header[:4], "big"), zlib.crc32(header[4:])
        if header[4:] not in PNG_PIXEL_CHUNKS:
            file.seek(n_bytes + 4, io.SEEK_CUR)
            continue
        while n_bytes and (data := file.read(min(n_bytes, READ_BYTES))):
            checksum, n_bytes = zlib.crc32(data, checksum), n_bytes - len(data)
        stored = file.read(4)
        if n_bytes or len(stored) < 4:  # cut off, which Pillow reports
            return True
        if int.from_bytes(stored, "big") != checksum:
            return False
    return True


def _check_tiff_strips(image: "Image", name: str) -> None:
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
            for data in _read_tiff_strips(file, tags)
        )
    finally:
        file.seek(position)
    if not is_complete:
        raise ImageError(f"{name}: it is damaged: a strip of the TIFF is truncated or corrupt")


def _read_tiff_strips(file: Any, tags: Any) -> Iterator[bytes]:
    for offsets, counts in OFFSET_AND_COUNT_TAGS:
        for offset, count in zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False):
            if count > 0:  # a strip of 0 bytes was never written
                file.seek(offset)
                yield file.read(count)


def _is_complete_jpeg(data: bytes, tables: bytes, max_pixels: int) -> bool:
    """Return whether a JPEG strip of a TIFF is complete and has at most `max_pixels` pixels."""
    from PIL import Image, UnidentifiedImageError

    strip_data = data
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
    return _are_jpeg_scans_complete(strip_data)


def _are_jpeg_scans_complete(data: bytes) -> bool:
    """Return whether all scans of a JPEG stream are complete.

    The decoder would fill an incomplete scan with gray and report no error.
    """
    position, n_scans, is_in_scan = len(JPEG_START_MARKER), 0, False
    while (marker := JPEG_MARKER.search(data, position)) is not None:
        code, start = marker[1][0], marker.end()
        if n_scans and not is_in_scan and marker.start() != position:  # the segment before it was pixels
            return False
        if code == JPEG_END_CODE:
            remainder = data[start:]
            return JPEG_END_MARKER not in remainder and len(remainder.strip(b"\0")) <= MAX_JPEG_PADDING_BYTES
        is_in_scan = code == JPEG_SCAN_CODE
        n_scans += is_in_scan
        position = start + int.from_bytes(data[start : start + 2], "big")
    return is_in_scan


def _is_complete_deflate(data: bytes) -> bool:
    inflater = zlib.decompressobj()
    try:
        while not inflater.eof and data:
            inflater.decompress(data, 1 << 22)
            data = inflater.unconsumed_tail
    except zlib.error:
        return False
    return inflater.eof
