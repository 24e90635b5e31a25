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
from camscope.images.scans.dicom_tags import PHOTOMETRIC, known_uid, numbers, whole, word, words_of
from camscope.images.scans.scan import MAX_VOXELS, check_size
from camscope.plurals import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
NEEDED = ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")


@dataclass(frozen=True)
class Layout:
    """How the pixels of an image are stored: checked numbers of its header."""

    rows: int
    columns: int
    frames: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    photometric: str
    floating: bool

    @property
    def colour(self) -> bool:
        """Whether its values are colours, not amounts."""
        return not self.photometric.startswith("MONOCHROME")

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest number that can be stored."""
        half = 1 << (self.stored - 1)
        return (-half, half - 1) if self.signed else (0, 2 * half - 1)


def layout_of(dataset: "Dataset", name: str, limit: int = MAX_VOXELS, wanted: int | None = None) -> Layout:
    """Of a data set with pixels; `wanted`: how many of its frames will be read."""
    held = [keyword for keyword in PIXELS if keyword in dataset]
    if not held:
        kind = known_uid(dataset.get("SOPClassUID", "")) or known_uid(
            dataset.file_meta.get("MediaStorageSOPClassUID", "")
        )
        raise ImageError(f"{name}: the file has no pixels{f' ({kind})' if kind else ''}")
    found = {keyword: whole(dataset, keyword) for keyword in NEEDED}
    if missing := [keyword for keyword, value in found.items() if value is None]:
        raise ImageError(f"{name}: the header has no {', '.join(missing)}")
    rows, columns, allocated, samples = (
        found[key] or 0 for key in ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")
    )
    floating = held[0] != "PixelData"
    frames = _frames(dataset)
    stored = allocated if floating else (whole(dataset, "BitsStored") or allocated)
    photometric = word(dataset, "PhotometricInterpretation", PHOTOMETRIC)
    if not photometric:
        raise ImageError(f"{name}: the PhotometricInterpretation is none of {', '.join(sorted(PHOTOMETRIC))}")
    if frames is None:
        raise ImageError(f"{name}: the header's NumberOfFrames is not a whole number")
    if allocated not in (1, 8, 16, 32, 64) or not 1 <= stored <= allocated or samples not in (1, 3):
        raise ImageError(
            f"{name}: {stored} of {plural(allocated, 'bit')}, {plural(samples, 'sample')} a pixel: no such pixels are known"
        )
    layout = Layout(
        rows,
        columns,
        frames,
        samples,
        allocated,
        stored,
        whole(dataset, "PixelRepresentation") == 1,
        photometric,
        floating,
    )
    if layout.colour != (samples == 3) and photometric != "PALETTE COLOR":
        raise ImageError(f"{name}: {photometric} with {plural(samples, 'sample')} a pixel")
    check_size((frames if wanted is None else wanted, rows, columns, samples), name, limit)
    if frames < 1:
        raise ImageError(f"{name}: an image of {plural(frames, 'frame')}")
    return layout


def _frames(dataset: "Dataset") -> int | None:
    if "NumberOfFrames" not in dataset or dataset["NumberOfFrames"].is_empty:
        return 1
    return whole(dataset, "NumberOfFrames")


FEW = 256


def frames_of(
    dataset: "Dataset", layout: Layout, indices: Sequence[int], name: str
) -> "Iterator[tuple[NDArray[Any], str]]":
    """(H,W) or (H,W,3) as stored, colours already RGB where YBR was; with the photometric interpretation it then has."""
    from pydicom.pixels.decoders.base import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    called = known_uid(syntax) or "an unknown transfer syntax"
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ImageError(f"{name}: its pixels are {called}, which is not read; convert the file first") from None
    if decoder.is_native:
        _check_length(dataset, layout, name)
    else:
        check_streams(dataset, layout, indices, name)
        if not decoder.is_available or is_twelve_bit(str(syntax), layout, decoder.available_plugins):
            raise without_codec(str(syntax), called, name)
    # Of many frames one after the other: each by its number would walk from the first again. Of few each by itself:
    # there pydicom corrects the sign of wavelets that contradict the header, and the other way it fails to.
    every = len(indices) == layout.frames > FEW
    try:
        decoded = decoder.iter_array(dataset, indices=None if every else list(indices))
        for _, (array, facts) in zip(indices, decoded, strict=False):  # more than the header says are left alone
            yield array, str(facts.get("photometric_interpretation", layout.photometric))
    except Exception as error:
        if isinstance(error, MemoryError | ImageError):
            raise
        raise ImageError(f"{name}: its pixels ({called}) cannot be decoded ({type(error).__name__})") from None


def _check_length(dataset: "Dataset", layout: Layout, name: str) -> None:
    held = next(len(dataset[keyword].value or b"") for keyword in PIXELS if keyword in dataset)
    bits = layout.rows * layout.columns * layout.frames * layout.samples * layout.allocated
    if layout.photometric == "YBR_FULL_422":
        bits = bits // 3 * 2
    if held < (needed := (bits + 7) // 8):
        raise ImageError(
            f"{name}: {plural(held, 'byte')} of pixels; the header says {needed}: the file is cut off or its header lies"
        )


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


Array = NDArray[Any]
COLOURS = ("Red", "Green", "Blue")


def colours_of(dataset: "Dataset", layout: Layout, name: str) -> tuple[Callable[[Array, str], Array], tuple[str, ...]]:
    """What makes (H,W,3) uint8 of a decoded frame and its colour space, and the steps that it takes."""
    icc = ("ICC profile: not applied",) if "ICCProfile" in dataset else ()
    if layout.photometric == "PALETTE COLOR":
        table, first, bits = _palette(dataset, name)
        step = f"palette: {plural(len(table), 'colour')} of {plural(bits, 'bit')} to 8"

        def looked_up(stored: Array, space: str) -> Array:
            return table[np.clip(stored.astype(np.int64) - first, 0, len(table) - 1)]

        return looked_up, (step, *icc)
    changed = layout.photometric != "RGB"
    steps: tuple[str, ...] = (f"colours: {layout.photometric} to RGB",) if changed else ()
    if layout.stored > 8:
        steps += (f"colours: {plural(layout.stored, 'bit')} to 8",)

    def as_rgb(decoded: Array, space: str) -> Array:
        if space != "RGB" and not space.startswith("YBR_RCT") and not space.startswith("YBR_ICT"):
            raise ImageError(f"{name}: colours of {layout.photometric} did not become RGB")
        return decoded.astype(np.uint8) if layout.stored == 8 else eight_bits(decoded, layout.stored)

    return as_rgb, steps + icc


def eight_bits(values: Array, bits: int) -> Array:
    """From 0..2^bits - 1 to 0..255, rounded."""
    return np.clip(np.rint(values * (255 / ((1 << bits) - 1))), 0, 255).astype(np.uint8)


def _palette(dataset: "Dataset", name: str) -> tuple[Array, int, int]:
    """(M,3) uint8, the stored number of its first entry, and the bits that its entries had."""
    if "RedPaletteColorLookupTableData" not in dataset:
        raise ImageError(f"{name}: its palette is segmented, or not there; only plain palettes are read")
    columns = []
    for colour in COLOURS:
        descriptor = numbers(dataset, f"{colour}PaletteColorLookupTableDescriptor", 3)
        data = dataset.get(f"{colour}PaletteColorLookupTableData")
        if descriptor is None or not isinstance(data, bytes):
            raise ImageError(f"{name}: its palette has no {colour.lower()}")
        entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
        columns.append((_column(dataset, data, entries, bits, name), first, bits))
    first, bits = columns[0][1:]
    if len({(len(column), start, depth) for column, start, depth in columns}) > 1:
        raise ImageError(f"{name}: the three columns of its palette differ in length, start or depth")
    return np.stack([column for column, _, _ in columns], axis=-1), first, bits


def _column(dataset: "Dataset", data: bytes, entries: int, bits: int, name: str) -> Array:
    if bits not in (8, 16) or len(data) < entries:
        raise ImageError(
            f"{name}: a palette of {plural(len(data), 'byte')} for {plural(entries, 'entry')} of {plural(bits, 'bit')}"
        )
    wide = len(data) >= 2 * entries
    table = (words_of(dataset, data) if wide else np.frombuffer(data, np.uint8))[:entries]
    # 8 bits in 16: the high byte may be a copy, and is left alone
    return (table & 0xFF).astype(np.uint8) if bits == 8 else eight_bits(table, 16 if wide else 8)
