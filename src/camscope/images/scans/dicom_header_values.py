"""Read numbers and code words from DICOM headers. Free text is not read, as it may name a patient."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MODALITIES = {
    *("CR", "CT", "DX", "MR", "US", "PT", "NM", "MG", "XA", "RF", "SC", "OT", "ES", "GM", "OP", "OPT", "OCT"),
    *("SM", "XC", "IO", "PX", "IVUS", "IVOCT", "BMD", "SEG", "RTDOSE", "RTIMAGE", "BI", "DG", "EPS", "LS"),
    *("OPV", "TG"),
}
VALUE_UNITS = {"HU", "OD", "MGML", "Z_EFF", "ED", "EDW", "HU_MOD", "PCT"}
VALUE_UNITS |= {"BQML", "CNTS", "GML", "SUV", "PROPCNTS", "CM2ML", "GY"}
PHOTOMETRIC_INTERPRETATIONS = {"MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422"}
PHOTOMETRIC_INTERPRETATIONS |= {"YBR_RCT", "YBR_ICT"}
# modalities whose images often contain burned-in text
BURNED_IN_MODALITIES = {"US", "SC", "XC", "ES", "IVUS", "GM"}
SECONDARY_CAPTURE_UID = "1.2.840.10008.5.1.4.1.1.7"


def read_numbers(dataset: "Dataset", keyword: str, count: int | None = None) -> tuple[float, ...] | None:
    """Read the numbers of an element: `count` numbers, or by default one or more.
    Return None if the count is wrong or a number is not finite.
    """
    try:
        value = dataset.get(keyword)
    except Exception:  # not numeric: the caller reports what it expected
        return None
    if value is None or value == "" or isinstance(value, bytes):
        return None
    values = [value] if isinstance(value, str | int | float) or not isinstance(value, Iterable) else list(value)
    try:
        numbers = tuple(float(item) for item in values)
    except (TypeError, ValueError):
        return None
    if not numbers or not all(map(math.isfinite, numbers)) or (count is not None and len(numbers) != count):
        return None
    return numbers


def read_number(dataset: "Dataset", keyword: str) -> float | None:
    """Read the first number of an element. Return None if there is no finite number."""
    numbers = read_numbers(dataset, keyword)
    return numbers[0] if numbers else None


def read_integer(dataset: "Dataset", keyword: str) -> int | None:
    """Read the first number of an element. Return None for a number that is not whole."""
    number = read_number(dataset, keyword)
    return int(number) if number is not None and number == int(number) else None


def read_allowed_code_word(dataset: "Dataset", keyword: str, allowed: set[str]) -> str:
    """Read the code word of an element. Return "" if the word is not in `allowed`."""
    value = str(dataset.get(keyword, "")).strip().upper()
    return value if value in allowed else ""


def read_sequence_items(dataset: "Dataset", keyword: str) -> "list[Dataset]":
    """Read the items of a sequence element. Return an empty list if the sequence is missing."""
    import pydicom

    value = dataset.get(keyword)
    return list(value) if isinstance(value, pydicom.Sequence) else []


def read_functional_groups(dataset: "Dataset", frame_indices: Sequence[int]) -> "list[list[Dataset]]":
    """For each frame, return the data sets that may hold the frame's attributes, in the order of the search.

    They are the functional group of the frame, the shared functional group, and the header.
    """
    per_frame = read_sequence_items(dataset, "PerFrameFunctionalGroupsSequence")
    shared = [*read_sequence_items(dataset, "SharedFunctionalGroupsSequence")[:1], dataset]
    return [[*per_frame[frame : frame + 1], *shared] for frame in frame_indices]


def iter_macro_items(functional_groups: "list[Dataset]", sequence_keyword: str) -> "Iterator[Dataset]":
    """Yield the data sets that may hold an attribute. For each group, yield an item of a sequence, then the group."""
    for group in functional_groups:
        yield from read_sequence_items(group, sequence_keyword)[:1]
        yield group


def read_first_numbers(
    functional_groups: "list[Dataset]", sequence_keyword: str, keyword: str, count: int
) -> tuple[float, ...] | None:
    """Read the numbers of an element. Take them from the first functional group that contains the element."""
    places = iter_macro_items(functional_groups, sequence_keyword)
    return next((values for place in places if (values := read_numbers(place, keyword, count))), None)


def decode_uint16_table(dataset: "Dataset", data: bytes) -> NDArray[np.uint16]:
    """Decode the bytes of a lookup table as 16-bit numbers, in the byte order of the file."""
    little = dataset.original_encoding[1] is not False
    return np.frombuffer(data[: len(data) // 2 * 2], "<u2" if little else ">u2").astype(np.uint16)


def has_burned_in_text(dataset: "Dataset") -> bool | None:
    """Return whether the header states that the pixels contain text.

    Without a declaration, return None if text is likely, else False.
    """
    if declared := read_allowed_code_word(dataset, "BurnedInAnnotation", {"YES", "NO"}):
        return declared == "YES"
    is_secondary_capture = str(dataset.get("SOPClassUID", "")).startswith(SECONDARY_CAPTURE_UID)
    is_screen_save = "SCREEN SAVE" in str(dataset.get("ImageType", "")).upper()
    has_typical_modality = bool(read_allowed_code_word(dataset, "Modality", BURNED_IN_MODALITIES))
    return None if has_typical_modality or is_secondary_capture or is_screen_save else False


def get_uid_name(value: Any) -> str:
    """Return the name of a UID of the DICOM standard. Return "" for a private UID."""
    from pydicom.uid import UID

    uid = UID(str(value))
    return uid.name if uid.name != str(uid) else ""
