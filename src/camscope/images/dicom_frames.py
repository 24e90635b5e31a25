"""Frames of a DICOM image as they are stored, decoded one by one; one named error where a codec is missing."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.dicom_codecs import check_streams, is_twelve_bit, without_codec
from camscope.images.dicom_layout import PIXELS, Layout
from camscope.images.tags import known_uid
from camscope.wording import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

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
