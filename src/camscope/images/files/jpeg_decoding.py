"""Decode JPEG data with libjpeg-turbo, whose warnings about damage Pillow and OpenCV do not pass on.

A JPEG has no checksum. libjpeg-turbo fills missing pixels with gray and warns: data that ends early, codes that do not
exist, restart markers out of order, more data than pixels. Here such a warning is an error. Damage that decodes to the right
number of pixels gives no warning: a changed bit in most cases, and a few lost or changed bytes in some.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
MAX_PADDING_BYTES = 16  # which a camera may write before the end marker
DAMAGE_PATTERN = re.compile(r"Corrupt JPEG data|Premature end of JPEG file")
END_PADDING_PATTERN = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


class DamagedJPEGError(ValueError):
    """JPEG data that libjpeg-turbo decodes only with a warning about damage. The message is the warning."""


def decode_jpeg(data: bytes, *, is_gray: bool = False, reduced_size: tuple[int, int] | None = None) -> Pixels:
    """Decode JPEG data to pixels (H,W,3) in RGB or (H,W,1) in gray, or at a half, a quarter or an eighth to the size (h,w).

    Raises:
        DamagedJPEGError: The data is damaged.
        ValueError: This is not a JPEG that libjpeg-turbo can decode to 8 bits.

    """
    height, width = reduced_size or (0, 0)
    return _decode_strictly(data, colorspace="GRAY" if is_gray else "RGB", min_height=height, min_width=width)


def find_jpeg_damage(data: bytes) -> str:
    """Return what is damaged in JPEG data, or an empty string. The cost is about a third of that of the pixels.

    Data that libjpeg-turbo cannot decode at all, such as one with 12 bits or lossless, gives an empty string.
    """
    try:
        _decode_strictly(data, colorspace="GRAY", min_height=1, min_width=1)  # an eighth of the size
    except DamagedJPEGError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return the size (H,W) that JPEG data declares, or None if this is not JPEG data."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # of an unknown color space
        return None
    return height, width


def _decode_strictly(data: bytes, **options: Any) -> Pixels:
    import simplejpeg

    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, strict=True, **options)
    except ValueError as error:
        reason, padding = str(error), END_PADDING_PATTERN.match(str(error))
        if DAMAGE_PATTERN.match(reason) and not (padding and int(padding[1]) <= MAX_PADDING_BYTES):
            raise DamagedJPEGError(reason) from None
        pixels = simplejpeg.decode_jpeg(data, strict=False, **options)  # the warning is about something else
    return pixels
