"""What is read of a DICOM header: numbers, and words from lists of known ones. Free text is never taken."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MODALITIES = {
    "CR",
    "CT",
    "DX",
    "MR",
    "US",
    "PT",
    "NM",
    "MG",
    "XA",
    "RF",
    "SC",
    "OT",
    "ES",
    "GM",
    "OP",
    "OPT",
    "OCT",
    "SM",
}
MODALITIES |= {
    "XC",
    "IO",
    "PX",
    "IVUS",
    "IVOCT",
    "BMD",
    "SEG",
    "RTDOSE",
    "RTIMAGE",
    "BI",
    "DG",
    "EPS",
    "LS",
    "OPV",
    "TG",
}
VALUE_UNITS = {
    "HU",
    "OD",
    "MGML",
    "Z_EFF",
    "ED",
    "EDW",
    "HU_MOD",
    "PCT",
    "BQML",
    "CNTS",
    "GML",
    "SUV",
    "PROPCNTS",
    "CM2ML",
}
VALUE_UNITS |= {"GY"}
PHOTOMETRIC_INTERPRETATIONS = {
    "MONOCHROME1",
    "MONOCHROME2",
    "PALETTE COLOR",
    "RGB",
    "YBR_FULL",
    "YBR_FULL_422",
    "YBR_RCT",
    "YBR_ICT",
}
# kinds of images that often have a name written into their pixels
BURNED_IN_MODALITIES = {"US", "SC", "XC", "ES", "IVUS", "GM"}
SECONDARY_CAPTURE_UID = "1.2.840.10008.5.1.4.1.1.7"


def read_numbers(dataset: "Dataset", keyword: str, count: int | None = None) -> tuple[float, ...] | None:
    """The finite numbers of an element; None where it is not there, is empty, or has another count of them."""
    try:
        value = dataset.get(keyword)
    except Exception:  # what stands there is no number: whoever asks says what was wanted
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
    """The one finite number of an element, the first of several."""
    numbers = read_numbers(dataset, keyword)
    return numbers[0] if numbers else None


def read_integer(dataset: "Dataset", keyword: str) -> int | None:
    """The one whole number of an element."""
    number = read_number(dataset, keyword)
    return int(number) if number is not None and number == int(number) else None


def read_code(dataset: "Dataset", keyword: str, allowed: set[str]) -> str:
    """The element's word where it is one of those known, else ''."""
    value = str(dataset.get(keyword, "")).strip().upper()
    return value if value in allowed else ""


def read_sequence_items(dataset: "Dataset", keyword: str) -> "list[Dataset]":
    """The items of a sequence; none where it is not there, or is none."""
    import pydicom

    value = dataset.get(keyword)
    return list(value) if isinstance(value, pydicom.Sequence) else []


def read_functional_groups(dataset: "Dataset", frame_indices: Sequence[int]) -> "list[list[Dataset]]":
    """Where facts of each frame stand: its own group, the one that all frames share, the header itself."""
    per_frame = read_sequence_items(dataset, "PerFrameFunctionalGroupsSequence")
    shared = [*read_sequence_items(dataset, "SharedFunctionalGroupsSequence")[:1], dataset]
    return [[*per_frame[frame : frame + 1], *shared] for frame in frame_indices]


def iter_macro_items(functional_groups: "list[Dataset]", sequence_keyword: str) -> "Iterator[Dataset]":
    """The items that may hold a fact: those of its macro, then the headers themselves."""
    for group in functional_groups:
        yield from read_sequence_items(group, sequence_keyword)[:1]
        yield group


def read_first_numbers(
    functional_groups: "list[Dataset]", sequence_keyword: str, keyword: str, count: int
) -> tuple[float, ...] | None:
    """Numbers of a macro, from the first place that has them."""
    candidates = (
        read_numbers(place, keyword, count) for place in iter_macro_items(functional_groups, sequence_keyword)
    )
    return next((values for values in candidates if values), None)


def decode_uint16_table(dataset: "Dataset", data: bytes) -> NDArray[np.uint16]:
    """Bytes of a table as 16-bit numbers, in the byte order of the file."""
    little = dataset.original_encoding[1] is not False
    return np.frombuffer(data[: len(data) // 2 * 2], "<u2" if little else ">u2").astype(np.uint16)


def has_burned_in_text(dataset: "Dataset") -> bool | None:
    """Whether text is part of the pixels; None where the file does not say and such images often have it."""
    if declared := read_code(dataset, "BurnedInAnnotation", {"YES", "NO"}):
        return declared == "YES"
    sop_class_uid = str(dataset.get("SOPClassUID", ""))
    is_screen_save = "SCREEN SAVE" in str(dataset.get("ImageType", "")).upper()
    suspicious = (
        read_code(dataset, "Modality", BURNED_IN_MODALITIES)
        or sop_class_uid.startswith(SECONDARY_CAPTURE_UID)
        or is_screen_save
    )
    return None if suspicious else False


def get_uid_name(value: Any) -> str:
    """The standard's name of a UID; '' for one that it does not know, which may name a patient's files."""
    from pydicom.uid import UID

    uid = UID(str(value))
    return uid.name if uid.name != str(uid) else ""
