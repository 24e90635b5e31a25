"""DICOM pixels decoded: frames, codecs, color spaces and layouts.

- Frames of a DICOM image as they are stored, decoded one by one; one named error where a codec is missing.
- Compressed DICOM pixels: which package has the codec, and what size a stream says it has, before it is decoded.
- Colours of DICOM images: (H,W,3) uint8 RGB of whatever space and depth they are stored in.
- How the pixels of a DICOM image are stored, by its header: checked before any of them is touched.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.scans.dicom_tags import (
    PHOTOMETRIC_INTERPRETATIONS,
    decode_uint16_table,
    get_uid_name,
    read_code,
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
    """How the pixels of an image are stored: checked numbers of its header."""

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
        """Whether its values are colours, not amounts."""
        return not self.photometric_interpretation.startswith("MONOCHROME")

    @property
    def stored_range(self) -> tuple[int, int]:
        """The least and the largest number that can be stored."""
        half = 1 << (self.bits_stored - 1)
        return (-half, half - 1) if self.is_signed else (0, 2 * half - 1)


def read_pixel_layout(
    dataset: "Dataset", name: str, max_voxels: int = MAX_VOXELS, n_requested_frames: int | None = None
) -> PixelLayout:
    """Of a data set with pixels; `n_requested_frames`: how many of its frames will be read."""
    pixel_keywords = [keyword for keyword in PIXEL_KEYWORDS if keyword in dataset]
    if not pixel_keywords:
        kind = get_uid_name(dataset.get("SOPClassUID", "")) or get_uid_name(
            dataset.file_meta.get("MediaStorageSOPClassUID", "")
        )
        raise ImageError(f"{name}: the file has no pixels{f' ({kind})' if kind else ''}")
    header_values = {keyword: read_integer(dataset, keyword) for keyword in REQUIRED_KEYWORDS}
    if missing := [keyword for keyword, value in header_values.items() if value is None]:
        raise ImageError(f"{name}: the header has no {', '.join(missing)}")
    rows, columns, allocated, samples = (
        header_values[key] or 0 for key in ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")
    )
    floating = pixel_keywords[0] != "PixelData"
    frames = _read_frame_count(dataset)
    stored = allocated if floating else (read_integer(dataset, "BitsStored") or allocated)
    photometric = read_code(dataset, "PhotometricInterpretation", PHOTOMETRIC_INTERPRETATIONS)
    if not photometric:
        raise ImageError(
            f"{name}: the PhotometricInterpretation is none of {', '.join(sorted(PHOTOMETRIC_INTERPRETATIONS))}"
        )
    if frames is None:
        raise ImageError(f"{name}: the header's NumberOfFrames is not a whole number")
    if allocated not in (1, 8, 16, 32, 64) or not 1 <= stored <= allocated or samples not in (1, 3):
        raise ImageError(
            f"{name}: {stored} of {plural(allocated, 'bit')}, {plural(samples, 'sample')} a pixel: no such pixels are known"
        )
    layout = PixelLayout(
        rows,
        columns,
        frames,
        samples,
        allocated,
        stored,
        read_integer(dataset, "PixelRepresentation") == 1,
        photometric,
        floating,
    )
    if layout.is_color != (samples == 3) and photometric != "PALETTE COLOR":
        raise ImageError(f"{name}: {photometric} with {plural(samples, 'sample')} a pixel")
    check_voxel_count(
        (frames if n_requested_frames is None else n_requested_frames, rows, columns, samples), name, max_voxels
    )
    if frames < 1:
        raise ImageError(f"{name}: an image of {plural(frames, 'frame')}")
    return layout


def _read_frame_count(dataset: "Dataset") -> int | None:
    if "NumberOfFrames" not in dataset or dataset["NumberOfFrames"].is_empty:
        return 1
    return read_integer(dataset, "NumberOfFrames")


MAX_FRAMES_BY_INDEX = 256


def decode_frames(
    dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str
) -> "Iterator[tuple[NDArray[Any], str]]":
    """(H,W) or (H,W,3) as stored, colours already RGB where YBR was; with the photometric interpretation it then has."""
    from pydicom.pixels.decoders.base import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    syntax_name = get_uid_name(syntax) or "an unknown transfer syntax"
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ImageError(f"{name}: its pixels are {syntax_name}, which is not read; convert the file first") from None
    if decoder.is_native:
        _check_pixel_bytes(dataset, layout, name)
    else:
        check_stream_sizes(dataset, layout, frame_indices, name)
        if not decoder.is_available or is_beyond_pillow_depth(str(syntax), layout, decoder.available_plugins):
            raise build_missing_codec_error(str(syntax), syntax_name, name)
    # Of many frames one after the other: each by its number would walk from the first again. Of few each by itself:
    # there pydicom corrects the sign of wavelets that contradict the header, and the other way it fails to.
    is_sequential = len(frame_indices) == layout.n_frames > MAX_FRAMES_BY_INDEX
    try:
        decoded = decoder.iter_array(dataset, indices=None if is_sequential else list(frame_indices))
        for _, (array, properties) in zip(
            frame_indices, decoded, strict=False
        ):  # more than the header says are left alone
            yield array, str(properties.get("photometric_interpretation", layout.photometric_interpretation))
    except Exception as error:
        if isinstance(error, MemoryError | ImageError):
            raise
        raise ImageError(f"{name}: its pixels ({syntax_name}) cannot be decoded ({type(error).__name__})") from None


def _check_pixel_bytes(dataset: "Dataset", layout: PixelLayout, name: str) -> None:
    n_bytes = next(len(dataset[keyword].value or b"") for keyword in PIXEL_KEYWORDS if keyword in dataset)
    bits = layout.rows * layout.columns * layout.n_frames * layout.samples_per_pixel * layout.bits_allocated
    if layout.photometric_interpretation == "YBR_FULL_422":
        bits = bits // 3 * 2
    if n_bytes < (n_expected := (bits + 7) // 8):
        raise ImageError(
            f"{name}: {plural(n_bytes, 'byte')} of pixels; the header says {n_expected}: the file is cut off or its header lies"
        )


# of a transfer syntax: the packages that decode it and the extra that has them
_JPEG_CODEC, _JPEG_LS_CODEC = ("pylibjpeg and pylibjpeg-libjpeg", "codecs-gpl"), ("pyjpegls", "medical")
_JPEG_2000_CODEC = ("pylibjpeg and pylibjpeg-openjpeg", "medical")
CODECS_BY_SYNTAX = {
    **dict.fromkeys(["1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70"], _JPEG_CODEC),
    **dict.fromkeys(["1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81"], _JPEG_LS_CODEC),
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{last}" for last in (90, 91, 201, 202, 203)], _JPEG_2000_CODEC),
}
JPEG_EXTENDED_UID = "1.2.840.10008.1.2.4.51"
JPEG_FRAME_MARKERS = {0xC0, 0xC1, 0xC2, 0xC3, 0xF7}  # JPEG's and JPEG-LS's markers of a frame, which hold its size


def check_stream_sizes(dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str) -> None:
    """Each frame's own size against the header's: a decoder would make room for what the stream says."""
    from pydicom.encaps import generate_frames, get_frame

    count = layout.n_frames
    if len(frame_indices) == count:
        streams = generate_frames(dataset.PixelData, number_of_frames=count)
    else:
        streams = (get_frame(dataset.PixelData, index, number_of_frames=count) for index in frame_indices)
    is_jpeg_2000 = CODECS_BY_SYNTAX.get(str(dataset.file_meta.TransferSyntaxUID)) == _JPEG_2000_CODEC
    for index, stream in zip(frame_indices, streams, strict=False):
        size = _read_jpeg_2000_size(stream) if is_jpeg_2000 else _read_jpeg_size(stream)
        if size is not None and size != (layout.rows, layout.columns):
            raise ImageError(
                f"{name}: frame {index} is compressed as {size[0]} x {size[1]} pixels; "
                f"the header says {layout.rows} x {layout.columns}"
            )


def _read_jpeg_2000_size(stream: bytes) -> tuple[int, int]:
    """(H,W) that a JPEG 2000 stream says it has, bare or wrapped in a file's boxes; (0,0) where it says none."""
    start = stream[:4096].find(b"\xff\x4f\xff\x51")
    if start < 0 or len(stream) < start + 24:
        return 0, 0
    across, down, left, top = struct.unpack(">4I", stream[start + 8 : start + 24])
    return down - top, across - left


def _read_jpeg_size(stream: bytes) -> tuple[int, int] | None:
    """(H,W) that a JPEG or JPEG-LS stream says it has; None of anything else."""
    position = 2
    while stream[:2] == b"\xff\xd8" and position + 9 <= len(stream) and stream[position] == 0xFF:
        marker, length = stream[position + 1], int.from_bytes(stream[position + 2 : position + 4], "big")
        if marker in JPEG_FRAME_MARKERS:
            height, width = struct.unpack(">2H", stream[position + 5 : position + 9])
            return height, width
        position += 1 if marker == 0xFF else 2 + length
    return None


def is_beyond_pillow_depth(syntax_uid: str, layout: PixelLayout, plugins: Sequence[str]) -> bool:
    """Pillow takes JPEG Extended, but not of more than 8 bits."""
    return syntax_uid == JPEG_EXTENDED_UID and layout.bits_stored > 8 and not set(plugins) - {"pillow"}


def build_missing_codec_error(syntax_uid: str, syntax_name: str, name: str) -> ImageError:
    """The error that names the transfer syntax, the codec and the extra that has it."""
    if syntax_uid not in CODECS_BY_SYNTAX:
        return ImageError(f"{name}: its pixels are {syntax_name}, for which there is no codec; convert the file first")
    packages, extra = CODECS_BY_SYNTAX[syntax_uid]
    license_note = " (its licence is the GPL)" if extra == "codecs-gpl" else ""
    return ImageError(
        f"{name}: its pixels are {syntax_name}; the codec for it is not installed ({packages}); "
        f'run: pip install "camscope[{extra}]"{license_note}'
    )


Array = NDArray[Any]
COLOR_CHANNELS = ("Red", "Green", "Blue")


def get_color_converter(
    dataset: "Dataset", layout: PixelLayout, name: str
) -> tuple[Callable[[Array, str], Array], tuple[str, ...]]:
    """What makes (H,W,3) uint8 of a decoded frame and its colour space, and the steps that it takes."""
    icc = ("ICC profile: not applied",) if "ICCProfile" in dataset else ()
    if layout.photometric_interpretation == "PALETTE COLOR":
        table, first, bits = _read_palette(dataset, name)
        step = f"palette: {plural(len(table), 'colour')} of {plural(bits, 'bit')} to 8"

        def look_up_palette(stored: Array, space: str) -> Array:
            return table[np.clip(stored.astype(np.int64) - first, 0, len(table) - 1)]

        return look_up_palette, (step, *icc)
    changed = layout.photometric_interpretation != "RGB"
    steps: tuple[str, ...] = (f"colours: {layout.photometric_interpretation} to RGB",) if changed else ()
    if layout.bits_stored > 8:
        steps += (f"colours: {plural(layout.bits_stored, 'bit')} to 8",)

    def convert_to_rgb(decoded: Array, space: str) -> Array:
        if space != "RGB" and not space.startswith("YBR_RCT") and not space.startswith("YBR_ICT"):
            raise ImageError(f"{name}: colours of {layout.photometric_interpretation} did not become RGB")
        return decoded.astype(np.uint8) if layout.bits_stored == 8 else rescale_to_8_bits(decoded, layout.bits_stored)

    return convert_to_rgb, steps + icc


def rescale_to_8_bits(values: Array, bits: int) -> Array:
    """From 0..2^bits - 1 to 0..255, rounded."""
    return np.clip(np.rint(values * (255 / ((1 << bits) - 1))), 0, 255).astype(np.uint8)


def _read_palette(dataset: "Dataset", name: str) -> tuple[Array, int, int]:
    """(M,3) uint8, the stored number of its first entry, and the bits that its entries had."""
    if "RedPaletteColorLookupTableData" not in dataset:
        raise ImageError(f"{name}: its palette is segmented, or not there; only plain palettes are read")
    columns = []
    for color in COLOR_CHANNELS:
        descriptor = read_numbers(dataset, f"{color}PaletteColorLookupTableDescriptor", 3)
        data = dataset.get(f"{color}PaletteColorLookupTableData")
        if descriptor is None or not isinstance(data, bytes):
            raise ImageError(f"{name}: its palette has no {color.lower()}")
        entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
        columns.append((_read_palette_column(dataset, data, entries, bits, name), first, bits))
    first, bits = columns[0][1:]
    if len({(len(column), start, depth) for column, start, depth in columns}) > 1:
        raise ImageError(f"{name}: the three columns of its palette differ in length, start or depth")
    return np.stack([column for column, _, _ in columns], axis=-1), first, bits


def _read_palette_column(dataset: "Dataset", data: bytes, n_entries: int, bits: int, name: str) -> Array:
    if bits not in (8, 16) or len(data) < n_entries:
        raise ImageError(
            f"{name}: a palette of {plural(len(data), 'byte')} for {plural(n_entries, 'entry')} of {plural(bits, 'bit')}"
        )
    is_16_bit = len(data) >= 2 * n_entries
    table = (decode_uint16_table(dataset, data) if is_16_bit else np.frombuffer(data, np.uint8))[:n_entries]
    # 8 bits in 16: the high byte may be a copy, and is left alone
    return (table & 0xFF).astype(np.uint8) if bits == 8 else rescale_to_8_bits(table, 16 if is_16_bit else 8)
