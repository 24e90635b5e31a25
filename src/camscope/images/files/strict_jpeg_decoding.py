"""Decode JPEG data strictly: warnings of libjpeg-turbo about damage, which Pillow and OpenCV drop, become errors.

A JPEG has no checksum. If data ends early or codes do not exist, libjpeg-turbo fills pixels with gray and warns. It also
warns of restart markers out of order and of more data than pixels. It does not warn of a progressive JPEG that lacks a
scan, so the headers of its scans are read. Damage that decodes to the right number of pixels is not noticed. This is
so for most changed bits, and for some lost or changed bytes.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
MAX_PADDING_BYTES = 16  # which a camera may write before the end marker
START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = b"\xff\xd8", 0xD9, 0xDA
FRAME_MARKERS, PROGRESSIVE_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}, {0xC2, 0xC6, 0xCA, 0xCE}
MARKERS_WITHOUT_LENGTH = {0x01, 0xD8}
MARKER_PATTERN = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]", re.DOTALL)  # neither a stuffed byte nor a restart
N_COEFFICIENTS, UNSEEN = 64, 16  # coefficients of a block; bits that a coefficient of no scan lacks
DAMAGE_PATTERN = re.compile(r"Corrupt JPEG data|Premature end of JPEG file")
END_PADDING_PATTERN = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


class DamagedJPEGError(ValueError):
    """Raised for JPEG data that libjpeg-turbo decodes with a warning about damage. The message is the warning."""


def decode_jpeg(data: bytes, *, is_gray: bool = False, reduced_size: tuple[int, int] | None = None) -> Pixels:
    """Decode JPEG data to pixels: (H,W,3) for RGB, (H,W,1) for gray.

    If `reduced_size` (h,w) is passed, the image is decoded at a half, a quarter or an eighth, but not below that size.

    Raises:
        DamagedJPEGError: The data is damaged.
        ValueError: This is not a JPEG that libjpeg-turbo can decode to 8 bits.

    """
    height, width = reduced_size or (0, 0)
    return _decode_strictly(data, colorspace="GRAY" if is_gray else "RGB", min_height=height, min_width=width)


def describe_jpeg_damage(data: bytes) -> str:
    """Return a text about damage in JPEG data, or "" if no damage is found. This takes a third of the decoding time.

    Data that libjpeg-turbo cannot decode at all, such as 12-bit or lossless JPEG, gives "".
    """
    try:
        _decode_strictly(data, colorspace="GRAY", min_height=1, min_width=1)  # an eighth of the size
    except DamagedJPEGError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def lacks_progressive_scan(data: bytes) -> bool:
    """Return whether a progressive JPEG is incomplete: a scan is missing, and with it some bits of the coefficients."""
    missing_bits: dict[int, list[int]] = {}  # of each coefficient, by component
    position = len(START_OF_IMAGE)
    while (match := MARKER_PATTERN.search(data, position)) is not None:
        marker, start = match[0][-1], match.end()
        if marker == END_OF_IMAGE:
            break
        if marker in MARKERS_WITHOUT_LENGTH:
            position = start
            continue
        length = int.from_bytes(data[start : start + 2], "big")
        segment = data[start + 2 : start + length]
        position = start + max(2, length)
        if marker in FRAME_MARKERS:
            if marker not in PROGRESSIVE_MARKERS:
                return False
            missing_bits = {component: [UNSEEN] * N_COEFFICIENTS for component in segment[6::3]}
        elif marker == START_OF_SCAN and segment and len(segment) >= 4 + 2 * segment[0]:
            first, last, bits = segment[1 + 2 * segment[0] :][:3]
            for component in segment[1 : 1 + 2 * segment[0] : 2]:
                if component in missing_bits and first <= last < N_COEFFICIENTS:
                    missing_bits[component][first : last + 1] = [bits & 15] * (last + 1 - first)
    return any(map(any, missing_bits.values()))


def read_jpeg_height_and_width(data: bytes) -> tuple[int, int] | None:
    """Return the size (H,W) that the header of JPEG data declares. Return None for data of another format."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # of an unknown color space
        return None
    return height, width


def _decode_strictly(jpeg_bytes: bytes, **options: Any) -> Pixels:
    """Decode a JPEG. Raise a DamagedJPEGError if it is truncated or corrupt, but tolerate other warnings."""
    import simplejpeg

    try:
        pixels: Pixels = simplejpeg.decode_jpeg(jpeg_bytes, strict=True, **options)
    except ValueError as error:
        reason, padding = str(error), END_PADDING_PATTERN.match(str(error))
        if DAMAGE_PATTERN.match(reason) and not (padding and int(padding[1]) <= MAX_PADDING_BYTES):
            raise DamagedJPEGError(reason) from None
        pixels = simplejpeg.decode_jpeg(jpeg_bytes, strict=False, **options)  # the warning is about something else
    if lacks_progressive_scan(jpeg_bytes):
        raise DamagedJPEGError("a scan of the progressive JPEG is missing")
    return pixels
