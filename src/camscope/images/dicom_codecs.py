"""Compressed DICOM pixels: which package has the codec, and what size a stream says it has, before it is decoded."""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from camscope.errors import ImageError
from camscope.images.dicom_layout import Layout

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

# of a transfer syntax: the packages that decode it and the extra that has them
_JPEG, _LS = ("pylibjpeg and pylibjpeg-libjpeg", "codecs-gpl"), ("pyjpegls", "medical")
_J2K = ("pylibjpeg and pylibjpeg-openjpeg", "medical")
CODECS = {
    **dict.fromkeys(["1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70"], _JPEG),
    **dict.fromkeys(["1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81"], _LS),
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{last}" for last in (90, 91, 201, 202, 203)], _J2K),
}
JPEG_EXTENDED = "1.2.840.10008.1.2.4.51"
SIZED = {0xC0, 0xC1, 0xC2, 0xC3, 0xF7}  # JPEG's and JPEG-LS's markers of a frame, which hold its size


def check_streams(dataset: "Dataset", layout: Layout, indices: Sequence[int], name: str) -> None:
    """Each frame's own size against the header's: a decoder would make room for what the stream says."""
    from pydicom.encaps import generate_frames, get_frame

    count = layout.frames
    if len(indices) == count:
        streams = generate_frames(dataset.PixelData, number_of_frames=count)
    else:
        streams = (get_frame(dataset.PixelData, index, number_of_frames=count) for index in indices)
    wavelets = CODECS.get(str(dataset.file_meta.TransferSyntaxUID)) == _J2K
    for index, stream in zip(indices, streams, strict=False):
        size = _wavelet_size(stream) if wavelets else _jpeg_size(stream)
        if size is not None and size != (layout.rows, layout.columns):
            raise ImageError(
                f"{name}: frame {index} is compressed as {size[0]} x {size[1]} pixels; "
                f"the header says {layout.rows} x {layout.columns}"
            )


def _wavelet_size(stream: bytes) -> tuple[int, int]:
    """(H,W) that a JPEG 2000 stream says it has, bare or wrapped in a file's boxes; (0,0) where it says none."""
    start = stream[:4096].find(b"\xff\x4f\xff\x51")
    if start < 0 or len(stream) < start + 24:
        return 0, 0
    across, down, left, top = struct.unpack(">4I", stream[start + 8 : start + 24])
    return down - top, across - left


def _jpeg_size(stream: bytes) -> tuple[int, int] | None:
    """(H,W) that a JPEG or JPEG-LS stream says it has; None of anything else."""
    at = 2
    while stream[:2] == b"\xff\xd8" and at + 9 <= len(stream) and stream[at] == 0xFF:
        marker, length = stream[at + 1], int.from_bytes(stream[at + 2 : at + 4], "big")
        if marker in SIZED:
            height, width = struct.unpack(">2H", stream[at + 5 : at + 9])
            return height, width
        at += 1 if marker == 0xFF else 2 + length
    return None


def is_twelve_bit(syntax: str, layout: Layout, plugins: Sequence[str]) -> bool:
    """Pillow takes JPEG Extended, but not of more than 8 bits."""
    return syntax == JPEG_EXTENDED and layout.stored > 8 and not set(plugins) - {"pillow"}


def without_codec(syntax: str, called: str, name: str) -> ImageError:
    """The error that names the transfer syntax, the codec and the extra that has it."""
    if syntax not in CODECS:
        return ImageError(f"{name}: its pixels are {called}, for which there is no codec; convert the file first")
    packages, extra = CODECS[syntax]
    licence = " (its licence is the GPL)" if extra == "codecs-gpl" else ""
    return ImageError(
        f"{name}: its pixels are {called}; the codec for it is not installed ({packages}); "
        f'run: pip install "camscope[{extra}]"{licence}'
    )
