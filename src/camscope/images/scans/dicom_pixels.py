"""Decode DICOM pixels frame by frame. Check the header first, as it may be damaged or malicious."""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.files.strict_jpeg_decoding import describe_jpeg_damage
from camscope.images.scans.dicom_header_values import (
    PHOTOMETRIC_INTERPRETATIONS,
    decode_uint16_table,
    get_uid_name,
    read_allowed_code_word,
    read_integer,
    read_numbers,
)
from camscope.images.scans.scan import MAX_VOXELS, check_voxel_count
from camscope.plurals import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


PIXEL_KEYWORDS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
REQUIRED_KEYWORDS = ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")


@dataclass(frozen=True)
class PixelLayout:
    """How the pixels of an image are stored, from its header."""

    rows: int
    columns: int
    n_frames: int
    samples_per_pixel: int
    bits_allocated: int
    bits_stored: int
    is_signed: bool
    photometric_interpretation: str
    is_floating: bool

    @property
    def is_color(self) -> bool:
        """Whether the image is a color image."""
        return not self.photometric_interpretation.startswith("MONOCHROME")

    @property
    def storable_range(self) -> tuple[int, int]:
        """The smallest and the largest number that one pixel can store."""
        half = 1 << (self.bits_stored - 1)
        return (-half, half - 1) if self.is_signed else (0, 2 * half - 1)


def read_pixel_layout(
    dataset: "Dataset", name: str, max_voxels: int = MAX_VOXELS, n_requested_frames: int | None = None
) -> PixelLayout:
    """Read the pixel layout of a data set: size, frames, bits and colors. Raise ImageError for an invalid or too large layout.

    If `n_requested_frames` is passed, only that number of frames counts for the size.
    """
    pixel_keywords = [keyword for keyword in PIXEL_KEYWORDS if keyword in dataset]
    if not pixel_keywords:
        stored_uids = dataset.get("SOPClassUID", ""), dataset.file_meta.get("MediaStorageSOPClassUID", "")
        object_type = next(filter(None, map(get_uid_name, stored_uids)), "")
        raise ImageError(f"{name}: the file has no pixels{f' ({object_type})' if object_type else ''}")
    header_values = {keyword: read_integer(dataset, keyword) for keyword in REQUIRED_KEYWORDS}
    if missing := [keyword for keyword, value in header_values.items() if value is None]:
        raise ImageError(f"{name}: the header has no {', '.join(missing)}")
    rows, columns, allocated, samples = (header_values[keyword] or 0 for keyword in REQUIRED_KEYWORDS)
    floating = pixel_keywords[0] != "PixelData"
    has_frame_count = "NumberOfFrames" in dataset and not dataset["NumberOfFrames"].is_empty
    frames = read_integer(dataset, "NumberOfFrames") if has_frame_count else 1
    stored = allocated if floating else (read_integer(dataset, "BitsStored") or allocated)
    photometric = read_allowed_code_word(dataset, "PhotometricInterpretation", PHOTOMETRIC_INTERPRETATIONS)
    if not photometric:
        expected = ", ".join(sorted(PHOTOMETRIC_INTERPRETATIONS))
        raise ImageError(f"{name}: the PhotometricInterpretation is unknown; expected one of {expected}")
    if frames is None:
        raise ImageError(f"{name}: the header's NumberOfFrames is not a whole number")
    if allocated not in (1, 8, 16, 32, 64) or not 1 <= stored <= allocated or samples not in (1, 3):
        pixel_layout = f"{stored} of {plural(allocated, 'bit')}, {plural(samples, 'sample')} a pixel"
        raise ImageError(f"{name}: {pixel_layout}: this layout is not supported")
    is_signed = read_integer(dataset, "PixelRepresentation") == 1
    layout = PixelLayout(rows, columns, frames, samples, allocated, stored, is_signed, photometric, floating)
    if layout.is_color != (samples == 3) and photometric != "PALETTE COLOR":
        raise ImageError(f"{name}: {photometric} does not allow {plural(samples, 'sample')} a pixel")
    n_read_frames = frames if n_requested_frames is None else n_requested_frames
    check_voxel_count((n_read_frames, rows, columns, samples), name, max_voxels)
    if frames < 1:
        raise ImageError(f"{name}: the header says {plural(frames, 'frame')}; expected at least 1")
    return layout


MAX_FRAMES_BY_INDEX = 256


def decode_frames(
    dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str
) -> "Iterator[tuple[NDArray[Any], str]]":
    """Decode the selected frames. Yield the pixels (H,W) or (H,W,3) of each frame, and its photometric interpretation.

    The frames hold the stored numbers. YBR colors are already converted to RGB.
    """
    from pydicom.pixels.decoders.base import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    syntax_name = get_uid_name(syntax) or "an unknown transfer syntax"
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ImageError(f"{name}: the pixel encoding is not supported ({syntax_name}); convert the file") from None
    if decoder.is_native:
        _check_pixel_byte_count(dataset, layout, name)
    else:
        check_compressed_frame_sizes_and_damage(dataset, layout, frame_indices, name)
        # Pillow does not support JPEG Extended streams of more than 8 bits
        is_deep = str(syntax) == JPEG_EXTENDED_UID and layout.bits_stored > 8
        if not decoder.is_available or (is_deep and not set(decoder.available_plugins) - {"pillow"}):
            raise _build_missing_codec_error(str(syntax), syntax_name, name)
    # Many frames are decoded sequentially: access by index starts from the first frame each time. A few are decoded by
    # index: only then does pydicom correct the sign of JPEG 2000 samples that contradict the header.
    is_sequential = len(frame_indices) == layout.n_frames > MAX_FRAMES_BY_INDEX
    try:
        decoded = decoder.iter_array(dataset, indices=None if is_sequential else list(frame_indices))
        # frames beyond the declared number are ignored
        for _, (array, properties) in zip(frame_indices, decoded, strict=False):
            yield array, str(properties.get("photometric_interpretation", layout.photometric_interpretation))
    except Exception as error:
        if isinstance(error, MemoryError | ImageError):
            raise
        raise ImageError(f"{name}: the pixels ({syntax_name}) cannot be decoded ({type(error).__name__})") from None


def _check_pixel_byte_count(dataset: "Dataset", layout: PixelLayout, name: str) -> None:
    """Raise an ImageError if the file has fewer bytes of pixels than its header declares."""
    n_bytes = next(len(dataset[keyword].value or b"") for keyword in PIXEL_KEYWORDS if keyword in dataset)
    bits = layout.rows * layout.columns * layout.n_frames * layout.samples_per_pixel * layout.bits_allocated
    if layout.photometric_interpretation == "YBR_FULL_422":
        bits = bits // 3 * 2
    if n_bytes < (n_expected := (bits + 7) // 8):
        problem = "the file is truncated or its header is wrong"
        raise ImageError(
            f"{name}: the file has {plural(n_bytes, 'byte')} of pixels; the header says {n_expected}: {problem}"
        )


# packages that decode a transfer syntax, and the extra that installs them
_JPEG_CODEC, _JPEG_LS_CODEC = ("pylibjpeg and pylibjpeg-libjpeg", "codecs-gpl"), ("pyjpegls", "medical")
_JPEG_2000_CODEC = ("pylibjpeg and pylibjpeg-openjpeg", "medical")
CODECS_BY_SYNTAX = {
    **dict.fromkeys(["1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70"], _JPEG_CODEC),
    **dict.fromkeys(["1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81"], _JPEG_LS_CODEC),
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{last}" for last in (90, 91, 201, 202, 203)], _JPEG_2000_CODEC),
}
JPEG_BASELINE_UID, JPEG_EXTENDED_UID = "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51"
JPEG_FRAME_MARKERS = {0xC0, 0xC1, 0xC2, 0xC3, 0xF7}  # frame header markers of JPEG and JPEG-LS, which hold the size


def check_compressed_frame_sizes_and_damage(
    dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str
) -> None:
    """Check the compressed frames. Raise ImageError for a damaged JPEG, and for a size that differs from the header.

    A decoder allocates memory for the size that the frame declares, and fills the missing part of a JPEG with gray.
    """
    from pydicom.encaps import generate_frames, get_frame

    count = layout.n_frames
    if len(frame_indices) == count:
        streams = generate_frames(dataset.PixelData, number_of_frames=count)
    else:
        streams = (get_frame(dataset.PixelData, index, number_of_frames=count) for index in frame_indices)
    is_lossy_jpeg = str(dataset.file_meta.TransferSyntaxUID) in (JPEG_BASELINE_UID, JPEG_EXTENDED_UID)
    is_jpeg_2000 = CODECS_BY_SYNTAX.get(str(dataset.file_meta.TransferSyntaxUID)) == _JPEG_2000_CODEC
    for index, stream in zip(frame_indices, streams, strict=False):
        size = _read_jpeg_2000_size(stream) if is_jpeg_2000 else _read_jpeg_size(stream)
        if size is not None and size != (layout.rows, layout.columns):
            received = f"compressed frame {index} has {size[0]} x {size[1]} pixels"
            raise ImageError(f"{name}: {received}; the header says {layout.rows} x {layout.columns}")
        if is_lossy_jpeg and (damage := describe_jpeg_damage(stream)):
            raise ImageError(f"{name}: compressed frame {index} is damaged: {damage}")


def _read_jpeg_2000_size(stream: bytes) -> tuple[int, int]:
    """Read the image size (H,W) from a JPEG 2000 stream. Return (0,0) if there is no size in it."""
    start = stream[:4096].find(b"\xff\x4f\xff\x51")
    if start < 0 or len(stream) < start + 24:
        return 0, 0
    across, down, left, top = struct.unpack(">4I", stream[start + 8 : start + 24])
    return down - top, across - left


def _read_jpeg_size(stream: bytes) -> tuple[int, int] | None:
    """Read the image size (H,W) from a JPEG or JPEG-LS stream. Return None for any other data."""
    position = 2
    while stream[:2] == b"\xff\xd8" and position + 9 <= len(stream) and stream[position] == 0xFF:
        marker, length = stream[position + 1], int.from_bytes(stream[position + 2 : position + 4], "big")
        if marker in JPEG_FRAME_MARKERS:
            height, width = struct.unpack(">2H", stream[position + 5 : position + 9])
            return height, width
        position += 1 if marker == 0xFF else 2 + length
    return None


def _build_missing_codec_error(syntax_uid: str, syntax_name: str, name: str) -> ImageError:
    """Build the error for compressed pixels whose codec is not installed."""
    if syntax_uid not in CODECS_BY_SYNTAX:
        return ImageError(f"{name}: its pixels are {syntax_name}, for which there is no codec; convert the file first")
    packages, extra = CODECS_BY_SYNTAX[syntax_uid]
    license_note = " (licensed under the GPL)" if extra == "codecs-gpl" else ""
    return ImageError(
        f"{name}: its pixels are {syntax_name}; the codec for it is not installed ({packages}); "
        f'run: pip install "camscope[{extra}]"{license_note}'
    )


Array = NDArray[Any]
COLOR_CHANNELS = ("Red", "Green", "Blue")


class ColorConverter(NamedTuple):
    """A function that converts a decoded color frame to RGB (H,W,3) uint8, and descriptions of its steps."""

    convert: Callable[[Array, str], Array]
    steps: tuple[str, ...]


def get_color_converter(dataset: "Dataset", layout: PixelLayout, name: str) -> ColorConverter:
    """Return the function that converts the frames of a file to RGB, by the file's palette or from its color space."""
    icc = ("ICC profile: not applied",) if "ICCProfile" in dataset else ()
    if layout.photometric_interpretation == "PALETTE COLOR":
        table, first, bits = _read_color_palette(dataset, name)
        step = f"palette: {plural(len(table), 'color')} of {plural(bits, 'bit')} to 8"

        def look_up_palette(stored: Array, color_space: str) -> Array:
            return table[np.clip(stored.astype(np.int64) - first, 0, len(table) - 1)]

        return ColorConverter(look_up_palette, (step, *icc))
    changed = layout.photometric_interpretation != "RGB"
    steps: tuple[str, ...] = (f"colors: {layout.photometric_interpretation} to RGB",) if changed else ()
    if layout.bits_stored > 8:
        steps += (f"colors: {plural(layout.bits_stored, 'bit')} to 8",)

    def require_rgb_as_uint8(decoded: Array, color_space: str) -> Array:
        if color_space != "RGB" and not color_space.startswith(("YBR_RCT", "YBR_ICT")):
            raise ImageError(f"{name}: the decoder did not convert {layout.photometric_interpretation} to RGB")
        return decoded.astype(np.uint8) if layout.bits_stored == 8 else _rescale_to_8_bits(decoded, layout.bits_stored)

    return ColorConverter(require_rgb_as_uint8, steps + icc)


def _rescale_to_8_bits(values: Array, bits: int) -> Array:
    """Rescale numbers of `bits` bits to the range 0..255, and round to integers."""
    return np.clip(np.rint(values * (255 / ((1 << bits) - 1))), 0, 255).astype(np.uint8)


class ColorPalette(NamedTuple):
    """The colors (M,3) uint8 of a palette, the stored number of its first color, and how many bits an entry has in the file."""

    colors: Array
    first_stored_value: int
    bits: int


def _read_color_palette(dataset: "Dataset", name: str) -> ColorPalette:
    """Read the color palette of a file. Raise ImageError for a missing or damaged palette."""
    if "RedPaletteColorLookupTableData" not in dataset:
        raise ImageError(f"{name}: the color palette is missing or segmented; segmented palettes are not supported")
    columns = []
    for color in COLOR_CHANNELS:
        descriptor = read_numbers(dataset, f"{color}PaletteColorLookupTableDescriptor", 3)
        data = dataset.get(f"{color}PaletteColorLookupTableData")
        if descriptor is None or not isinstance(data, bytes):
            raise ImageError(f"{name}: the color palette has no column for {color.lower()}")
        entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
        columns.append((_read_palette_column(dataset, data, entries, bits, name), first, bits))
    first, bits = columns[0][1:]
    if len({(len(column), start, depth) for column, start, depth in columns}) > 1:
        raise ImageError(
            f"{name}: the red, green and blue columns of the color palette differ in length, first entry or bits"
        )
    return ColorPalette(np.stack([column for column, _, _ in columns], axis=-1), first, bits)


def _read_palette_column(dataset: "Dataset", palette_bytes: bytes, n_entries: int, bits: int, name: str) -> Array:
    """Read one color of a palette as 8-bit values."""
    if bits not in (8, 16) or len(palette_bytes) < n_entries:
        expected = f"{plural(n_entries, 'entry')} of {plural(bits, 'bit')}"
        raise ImageError(f"{name}: the color palette has {plural(len(palette_bytes), 'byte')}; expected {expected}")
    is_16_bit = len(palette_bytes) >= 2 * n_entries
    table = (decode_uint16_table(dataset, palette_bytes) if is_16_bit else np.frombuffer(palette_bytes, np.uint8))[
        :n_entries
    ]
    # 8 bits in 16: the high byte may be a copy and is ignored
    return (table & 0xFF).astype(np.uint8) if bits == 8 else _rescale_to_8_bits(table, 16 if is_16_bit else 8)
