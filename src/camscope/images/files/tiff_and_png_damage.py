"""Detect damaged TIFF and PNG pixel data that Pillow reads without an error.

Pillow does not compare the checksums of a PNG's pixel data. libtiff fills missing data of a JPEG strip with gray. Therefore
libjpeg-turbo decodes JPEG strips, since it warns of damage. Their size is compared with that of the TIFF. Deflate strips
are checked by their checksum. For an invalid code of CCITT fax, libtiff only prints an error on the standard error stream,
which is read here. PackBits, LZW, Zstandard and old-style JPEG have no checksum. libtiff notices only if such a strip is
too short, not if its values are changed.
"""

import io
import math
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from camscope.errors import ImageError
from camscope.images.files.strict_jpeg_decoding import describe_jpeg_damage, read_jpeg_height_and_width

if TYPE_CHECKING:
    from PIL.Image import Image

COMPRESSION_TAG, ROWS_PER_STRIP_TAG, TILE_WIDTH_TAG, TILE_LENGTH_TAG, JPEG_TABLES_TAG = 259, 278, 322, 323, 347
OFFSET_AND_COUNT_TAGS = ((273, 279), (324, 325))  # tags of offsets and byte counts: of strips, of tiles
JPEG_COMPRESSION, DEFLATE_COMPRESSIONS = 7, (8, 32946)
FAX_COMPRESSIONS, GROUP_4_COMPRESSION = (2, 3, 4), 4
FAX_DAMAGE_PATTERN = re.compile(rb"^Fax\w+: .*\n?", re.MULTILINE)
GROUP_4_GAP = b"\0\0"  # more zero bits than any sequence of its codes has
STANDARD_ERROR = 2  # the file descriptor to which libtiff prints
EXTRA_TILE_PIXELS = 2**20  # pixels by which a strip may be larger than the TIFF declares
PNG_SIGNATURE_BYTES, PNG_PIXEL_CHUNKS, READ_BYTES = 8, (b"IDAT", b"fdAT"), 2**20
JPEG_START_MARKER, JPEG_END_MARKER = b"\xff\xd8", b"\xff\xd9"  # of a JPEG stream


def check_pixel_data(image: "Image", name: str) -> None:
    """Raise ImageError if the pixel data of an open PNG are damaged. For a TIFF, check only the current page."""
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


def load_pixels(image: "Image", name: str) -> None:
    """Decode the pixels of an open image. Raise ImageError for damaged pixels."""
    check_pixel_data(image, name)
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None and tags.get(COMPRESSION_TAG) in FAX_COMPRESSIONS:
        if FAX_DAMAGE_PATTERN.search(_capture_standard_error(image.load)):
            raise ImageError(f"{name}: it is damaged: a strip of the TIFF has codes that do not exist")
    else:
        image.load()


_standard_error_lock = threading.Lock()


def _capture_standard_error(action: Callable[[], object]) -> bytes:
    """Call a function. Return what C libraries print to the standard error stream during the call.

    The stream belongs to the whole process. Text that has nothing to do with fax damage is printed again afterwards.
    """
    with _standard_error_lock, tempfile.TemporaryFile() as captured:
        try:
            original = os.dup(STANDARD_ERROR)
        except OSError:  # the process has no such stream
            action()
            return b""
        try:
            os.dup2(captured.fileno(), STANDARD_ERROR)
            try:
                action()
            finally:
                os.dup2(original, STANDARD_ERROR)
                captured.seek(0)
                text = captured.read()
                if other := FAX_DAMAGE_PATTERN.sub(b"", text):
                    os.write(STANDARD_ERROR, other)
        finally:
            os.close(original)
    return text


def _are_png_checksums_right(file: Any) -> bool:
    """Return whether the checksums of all pixel chunks of a PNG are right."""
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
    """Raise an ImageError if a compressed strip of a TIFF is truncated or corrupt."""
    tags, file = getattr(image, "tag_v2", None), image.fp if hasattr(image, "fp") else None
    if tags is None or file is None:
        return
    compression = tags.get(COMPRESSION_TAG)
    if compression not in (JPEG_COMPRESSION, GROUP_4_COMPRESSION, *DEFLATE_COMPRESSIONS):
        return
    tables = tags.get(JPEG_TABLES_TAG, b"")
    position = file.tell()
    try:
        is_complete = all(
            _is_complete_strip(compression, data, tables, size)
            for data, size in _iter_tiff_strips_and_sizes(file, tags, image.size)
        )
    finally:
        file.seek(position)
    if not is_complete:
        raise ImageError(f"{name}: it is damaged: a strip of the TIFF is truncated or corrupt")


def _iter_tiff_strips_and_sizes(
    file: Any, tags: Any, image_size: tuple[int, int]
) -> Iterator[tuple[bytes, tuple[int, int] | None]]:
    """Yield each strip or tile with its size (H,W). If colors are stored separately, only the first has a size."""
    width, height = image_size
    strip, tile = (tags.get(ROWS_PER_STRIP_TAG) or height, width), (tags.get(TILE_LENGTH_TAG), tags.get(TILE_WIDTH_TAG))
    for (offsets, counts), (n_rows, n_columns) in zip(OFFSET_AND_COUNT_TAGS, (strip, tile), strict=True):
        if offsets not in tags:
            continue
        n_per_plane = math.ceil(height / n_rows) * math.ceil(width / n_columns)
        for index, (offset, count) in enumerate(zip(tags[offsets], tags.get(counts, ()), strict=False)):
            n_own_rows = n_rows if (n_rows, n_columns) == tile else min(n_rows, height - index * n_rows)
            if count > 0:  # a strip of 0 bytes was never written
                file.seek(offset)
                yield file.read(count), (n_own_rows, n_columns) if index < n_per_plane else None


def _is_complete_strip(compression: int, strip_bytes: bytes, jpeg_tables: bytes, size: tuple[int, int] | None) -> bool:
    """Return whether a compressed strip can be decoded to its end."""
    if compression == JPEG_COMPRESSION:
        return _is_complete_jpeg(strip_bytes, jpeg_tables, size)
    return (
        GROUP_4_GAP not in strip_bytes.rstrip(b"\0")
        if compression == GROUP_4_COMPRESSION
        else _is_complete_deflate(strip_bytes)
    )


def _is_complete_jpeg(strip_bytes: bytes, tables: bytes, size: tuple[int, int] | None) -> bool:
    """Return whether a JPEG strip of a TIFF is complete and at least as large as the size (H,W)."""
    if tables.startswith(JPEG_START_MARKER):
        strip_bytes = tables.removesuffix(JPEG_END_MARKER) + strip_bytes.removeprefix(JPEG_START_MARKER)
    if (declared := read_jpeg_height_and_width(strip_bytes)) is None:
        return strip_bytes.startswith(JPEG_START_MARKER)  # a variant of JPEG that libtiff may support
    if math.prod(declared) > EXTRA_TILE_PIXELS + math.prod(size or declared):
        return False
    if size is not None and (declared[0] < size[0] or declared[1] < size[1]):  # libtiff rejects a larger one
        return False
    return not describe_jpeg_damage(strip_bytes)


def _is_complete_deflate(strip_bytes: bytes) -> bool:
    """Return whether a Deflate stream can be decoded to its end."""
    inflater = zlib.decompressobj()
    try:
        while not inflater.eof and strip_bytes:
            inflater.decompress(strip_bytes, 1 << 22)
            strip_bytes = inflater.unconsumed_tail
    except zlib.error:
        return False
    return inflater.eof
