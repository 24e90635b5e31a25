"""DICOM objects go into the patient's study: the source's headers, the leave to copy them, and what all objects say."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from camscope.errors import CamscopeError, ImageError, InputError, MissingExtraError, OutputError
from camscope.explanation import Explanation
from camscope.images.dicom_file import load, pydicom_there
from camscope.images.itk import SUFFIXES as ITK
from camscope.images.listing import PICTURES
from camscope.images.private import told
from camscope.images.scan import Scan
from camscope.images.scans import read_scan
from camscope.images.silence import silent
from camscope.medical.equipment import MAKER, device_uid, serial
from camscope.medical.facts import plain, title
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PROFILES = ("research", "clinical")
PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData", "OverlayData", "IconImageSequence")
IDENTITY = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
# of a patient and a study, all of which may be empty, but have to be there
EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate"),
    *("StudyTime", "ReferringPhysicianName"),
)
SERIES = 9000  # numbers of series that a scanner seldom gives


def expect_clinical(profile: str, what: str) -> None:
    """Refused unless it is allowed: an object for a PACS holds what the patient's study is found by."""
    if profile not in PROFILES:
        raise InputError(f"profile={profile!r}; expected one of {', '.join(PROFILES)}")
    if profile != "clinical":
        raise OutputError(
            f"{what} belongs into the patient's study: it would copy the patient's name, IDs, birth date, sex and history, the "
            f"study's UID, date, accession number and physicians, the scanner and its institution, and refer to the source by "
            f'its UIDs. Allow that with profile="clinical"; to_nifti and Explanation.save write nothing of the patient'
        )


@dataclass(frozen=True, eq=False)
class Source:
    """A scan with the headers of its DICOM files, without pixels: one for each slice, or one of all frames."""

    scan: Scan
    headers: "list[Dataset]"

    @property
    def many(self) -> bool:
        """Whether one file has all frames."""
        return len(self.headers) == 1 and (
            len(self.scan.frames) > 1 or int(self.headers[0].get("NumberOfFrames") or 1) > 1
        )

    def of_slice(self, index: int) -> "tuple[Dataset, int]":
        """The header of a slice and which of its frames it is, counted from 0."""
        return self.headers[0 if len(self.headers) == 1 else index], self.scan.frames[index]


def highdicom_there() -> None:
    """MissingExtraError where it is not, before anything is read."""
    pydicom_there()
    try:
        import highdicom  # noqa: F401 - before a library is silenced
    except ImportError:
        raise MissingExtraError("highdicom", "medical") from None


def source_of(source: Any) -> Source:
    """The DICOM files that were explained: what `explain` was given, or the `Scan` that was made of it."""
    highdicom_there()
    scan = read_scan(source)
    files = [source] if isinstance(source, bytes) else scan.sources
    others = (*PICTURES, *ITK)
    if not files or scan.header is not None or any(str(file).lower().endswith(others) for file in scan.sources):
        raise ImageError(f"{scan.name} does not come from DICOM files: it names no patient and no study; use to_nifti")
    return Source(scan, [_header(file, scan.name) for file in files])


def _header(file: Any, name: str) -> "Dataset":
    with told(name):
        dataset, _ = load(file, name)
        for keyword in PIXELS:
            if keyword in dataset:
                del dataset[keyword]
        if missing := [keyword for keyword in IDENTITY if not dataset.get(keyword)]:
            raise ImageError(f"{name}: the header has no {', '.join(missing)}: nothing can refer to it")
        for keyword in EMPTY:
            if keyword not in dataset:
                setattr(dataset, keyword, "")
        for keyword in (*EMPTY, "PatientBirthTime"):
            if keyword in dataset and not _is_valid(dataset, keyword):
                setattr(dataset, keyword, "")
        return dataset


def _is_valid(dataset: "Dataset", keyword: str) -> bool:
    """Whether an object may hold it: dates of 00000000, as some who de-identify leave them, it may not."""
    from pydicom.valuerep import DA, TM

    value = dataset[keyword].value
    if keyword == "PatientSex":
        return value in ("M", "F", "O")
    kind: Any = {"DA": DA, "TM": TM}.get(dataset[keyword].VR)
    try:
        return kind is None or not value or bool(kind(value))
    except ValueError:
        return False


def described(image: "Dataset", explanation: Explanation, derivation: str, source: Source) -> None:
    """What every object says of itself: a derived picture of research, by which device, of which part of the body."""
    image.DerivationDescription = derivation
    image.ContentQualification = "RESEARCH"
    image.ManufacturerModelName, image.SoftwareVersions = MAKER, __version__
    image.DeviceSerialNumber = plain(serial(explanation), 64)
    if explanation.model:
        image.DeviceUID = device_uid(explanation.model)
    image.SeriesDescription = plain(f"Model attribution: {title(explanation)}", 64)
    for keyword in ("BodyPartExamined", "Laterality"):
        if value := source.headers[0].get(keyword):
            setattr(image, keyword, value)


@contextmanager
def making(what: str, name: str) -> Iterator[None]:
    """What highdicom raises, as one error; its own words may quote a header."""
    try:
        with silent():
            yield
    except (CamscopeError, MemoryError, OSError):
        raise
    except Exception as error:
        raise OutputError(
            f"{name}: {what} cannot be made of it ({type(error).__name__} in highdicom): its header lacks what the object "
            f"needs, or has values that are not valid; to_nifti needs none of them"
        ) from None


def file_bytes(image: "Dataset") -> bytes:
    """A DICOM file."""
    buffer = io.BytesIO()
    image.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()
