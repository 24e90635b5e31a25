"""Load the header and pixel bytes of a DICOM file with pydicom. The file is not trusted."""

import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from camscope.errors import ImageError
from camscope.images.files.image_file_access import MAX_FILE_BYTES, open_source
from camscope.optional import require

if TYPE_CHECKING:
    from pydicom.dataset import Dataset
    from pydicom.tag import BaseTag

MAX_HEADER_ELEMENT_BYTES = 4096  # longer elements are skipped when only the header is read
MAX_INFLATED_BYTES = 2**31  # of a deflated file
DEFLATED_SYNTAX_UID = "1.2.840.10008.1.2.1.99"
# group of the first element, in little or big endian, of a file without the standard's 132-byte prefix
BARE_FILE_PREFIXES = {b"\x02\x00", b"\x08\x00", b"\x00\x02", b"\x00\x08"}


def require_pydicom() -> None:
    """Import pydicom before its output is suppressed: the import sets pydicom's own log level."""
    require("pydicom", extra="medical")


def has_dicom_signature(head: bytes) -> bool:
    """Return whether the first 132 bytes are those of a DICOM file."""
    return head[128:132] == b"DICM"


def load_dicom_dataset(
    source: Path | bytes, name: str, *, with_pixels: bool = True
) -> "tuple[Dataset, tuple[str, ...]]":
    """Load the data set and flags about it. Without `with_pixels`, long elements are left in the file.

    Call it inside `redact_errors`.
    """
    with open_source(source, name) as file:
        head = file.read(132)
        file.seek(0)
        if has_dicom_signature(head):
            return _parse_dataset(file, name, with_pixels), ()
        if head[:2] not in BARE_FILE_PREFIXES:
            raise ImageError(f"{name}: this is not a DICOM file: 'DICM' is not at byte 128")
        dataset, flag = _parse_dataset(file, name, with_pixels), "no DICOM preamble: the transfer syntax is a guess"
        if not len(dataset):
            raise ImageError(f"{name}: this is not a DICOM file: no 'DICM' at byte 128, and no element could be read")
        return dataset, (flag,)


def _parse_dataset(file: BinaryIO, name: str, with_pixels: bool) -> "Dataset":
    from pydicom import dcmread

    if with_pixels:  # from memory: a file would allocate the declared bytes first
        file = io.BytesIO(file.read(MAX_FILE_BYTES))
    dataset = _read_deflated_dataset(file, name)
    if dataset is None:
        file.seek(0)
        dataset = dcmread(file, force=True, defer_size=None if with_pixels else MAX_HEADER_ELEMENT_BYTES)
    _set_missing_syntax(dataset)
    return dataset


def _read_deflated_dataset(file: BinaryIO, name: str) -> "Dataset | None":
    """Read the data set of a deflated file, or None for any other: pydicom itself would inflate without a limit."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.filereader import read_dataset, read_preamble

    read_preamble(file, force=True)
    meta = read_dataset(file, False, True, stop_when=_is_after_meta_group)
    if str(meta.get("TransferSyntaxUID", "")) != DEFLATED_SYNTAX_UID:
        return None
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    data = inflater.decompress(file.read(MAX_FILE_BYTES), MAX_INFLATED_BYTES)
    if inflater.unconsumed_tail:
        raise ImageError(f"{name}: it inflates to more than {MAX_INFLATED_BYTES} bytes")
    dataset = read_dataset(io.BytesIO(data), False, True)
    dataset.file_meta = FileMetaDataset(meta)
    return dataset


def _is_after_meta_group(tag: "BaseTag", vr: str | None, length: int) -> bool:
    return tag >> 16 != 2


def _set_missing_syntax(dataset: "Dataset") -> None:
    """Set the transfer syntax of a file that lacks one to the encoding with which it was read."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    if getattr(dataset, "file_meta", None) is None:
        dataset.file_meta = FileMetaDataset()
    if not dataset.file_meta.get("TransferSyntaxUID"):
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit
