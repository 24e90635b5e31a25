"""DICOM objects go into the patient's study: the source's headers, the leave to copy them, and what all objects say.

Who made a DICOM object: camscope with this model; other weights are another device.
Where a picture of a slice lies: the elements of the source's header that say so, as they stand there.
"""

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.errors import CamscopeError, ImageError, InputError, OutputError
from camscope.explanation import Explanation
from camscope.images.files.redaction import redact_errors, suppress_library_output
from camscope.images.files.source_files import PHOTO_SUFFIXES
from camscope.images.scans.dicom_file import load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_geometry import LPS_TO_RAS
from camscope.images.scans.dicom_tags import iter_macro_items, read_first_numbers, read_functional_groups
from camscope.images.scans.itk import ITK_SUFFIXES as ITK
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import read_scan
from camscope.medical.export_metadata import format_title, to_dicom_ascii
from camscope.optional import require
from camscope.version import __version__

if TYPE_CHECKING:
    from highdicom import ContributingEquipment
    from pydicom.dataset import Dataset


PROFILES = ("research", "clinical")
PIXEL_KEYWORDS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData", "OverlayData", "IconImageSequence")
REQUIRED_UID_KEYWORDS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
# of a patient and a study, all of which may be empty, but have to be there
OPTIONAL_VALUE_KEYWORDS = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate"),
    *("StudyTime", "ReferringPhysicianName"),
)
FIRST_SERIES_NUMBER = 9000  # numbers of series that a scanner seldom gives


def check_clinical_profile(profile: str, object_name: str) -> None:
    """Refused unless it is allowed: an object for a PACS holds what the patient's study is found by."""
    if profile not in PROFILES:
        raise InputError(f"profile={profile!r}; expected one of {', '.join(PROFILES)}")
    if profile != "clinical":
        raise OutputError(
            f"{object_name} belongs into the patient's study: it would copy the patient's name, IDs, birth date, sex and history, the "
            f"study's UID, date, accession number and physicians, the scanner and its institution, and refer to the source by "
            f'its UIDs. Allow that with profile="clinical"; to_nifti and Explanation.save write nothing of the patient'
        )


@dataclass(frozen=True, eq=False)
class DicomSource:
    """A scan with the headers of its DICOM files, without pixels: one for each slice, or one of all frames."""

    scan: Scan
    headers: "list[Dataset]"

    @property
    def is_multiframe(self) -> bool:
        """Whether one file has all frames."""
        return len(self.headers) == 1 and (
            len(self.scan.frame_indices) > 1 or int(self.headers[0].get("NumberOfFrames") or 1) > 1
        )

    def get_slice_header(self, index: int) -> "tuple[Dataset, int]":
        """The header of a slice and which of its frames it is, counted from 0."""
        return self.headers[0 if len(self.headers) == 1 else index], self.scan.frame_indices[index]


def require_highdicom() -> None:
    """MissingExtraError where it is not, before anything is read."""
    require_pydicom()
    require("highdicom", extra="medical")  # before a library is silenced


def read_dicom_source(source: Any) -> DicomSource:
    """The DICOM files that were explained: what `explain_images` was given, or the `Scan` that was made of it."""
    require_highdicom()
    scan = read_scan(source)
    files = [source] if isinstance(source, bytes) else scan.sources
    other_suffixes = (*PHOTO_SUFFIXES, *ITK)
    if (
        not files
        or scan.format_codes is not None
        or any(str(file).lower().endswith(other_suffixes) for file in scan.sources)
    ):
        raise ImageError(f"{scan.name} does not come from DICOM files: it names no patient and no study; use to_nifti")
    return DicomSource(scan, [_read_header(file, scan.name) for file in files])


def _read_header(file: Any, name: str) -> "Dataset":
    with redact_errors(name):
        dataset, _ = load_dicom_dataset(file, name)
        for keyword in PIXEL_KEYWORDS:
            if keyword in dataset:
                del dataset[keyword]
        if missing := [keyword for keyword in REQUIRED_UID_KEYWORDS if not dataset.get(keyword)]:
            raise ImageError(f"{name}: the header has no {', '.join(missing)}: nothing can refer to it")
        for keyword in OPTIONAL_VALUE_KEYWORDS:
            if keyword not in dataset:
                setattr(dataset, keyword, "")
        for keyword in (*OPTIONAL_VALUE_KEYWORDS, "PatientBirthTime"):
            if keyword in dataset and not _has_valid_value(dataset, keyword):
                setattr(dataset, keyword, "")
        return dataset


def _has_valid_value(dataset: "Dataset", keyword: str) -> bool:
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


def set_common_attributes(image: "Dataset", explanation: Explanation, derivation: str, source: DicomSource) -> None:
    """What every object says of itself: a derived picture of research, by which device, of which part of the body."""
    image.DerivationDescription = derivation
    image.ContentQualification = "RESEARCH"
    image.ManufacturerModelName, image.SoftwareVersions = MANUFACTURER, __version__
    image.DeviceSerialNumber = to_dicom_ascii(get_device_serial_number(explanation), 64)
    if explanation.model:
        image.DeviceUID = compute_device_uid(explanation.model)
    image.SeriesDescription = to_dicom_ascii(f"Model attribution: {format_title(explanation)}", 64)
    for keyword in ("BodyPartExamined", "Laterality"):
        if value := source.headers[0].get(keyword):
            setattr(image, keyword, value)


@contextmanager
def highdicom_errors_converted(object_name: str, name: str) -> Iterator[None]:
    """What highdicom raises, as one error; its own words may quote a header."""
    try:
        with suppress_library_output():
            yield
    except (CamscopeError, MemoryError, OSError):
        raise
    except Exception as error:
        raise OutputError(
            f"{name}: {object_name} cannot be made of it ({type(error).__name__} in highdicom): its header lacks what the object "
            f"needs, or has values that are not valid; to_nifti needs none of them"
        ) from None


def encode_dicom(image: "Dataset") -> bytes:
    """A DICOM file."""
    buffer = io.BytesIO()
    image.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


MANUFACTURER = "camscope"
DEVICE_UID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "camscope.model.digest")


def compute_device_uid(digest: str) -> str:
    """`2.25.` and a number that follows from the model's digest: the same weights have the same, others another."""
    return f"2.25.{uuid.uuid5(DEVICE_UID_NAMESPACE, digest).int}"


def create_equipment_item(explanation: Explanation) -> "ContributingEquipment":
    """The item of ContributingEquipmentSequence that names method, version and model."""
    from highdicom import ContributingEquipment
    from pydicom.sr.codedict import codes

    item = ContributingEquipment(
        manufacturer=MANUFACTURER,
        purpose_of_reference=codes.DCM.ProcessingEquipment,
        manufacturer_model_name=to_dicom_ascii(explanation.method, 64),
        software_versions=__version__,
        device_serial_number=get_device_serial_number(explanation),
        contribution_description=to_dicom_ascii(
            f"{format_title(explanation)}; model digest {get_device_serial_number(explanation)}", 1024
        ),
    )
    if explanation.model:
        item.DeviceUID = compute_device_uid(explanation.model)
    return item


def get_device_serial_number(explanation: Explanation) -> str:
    """The model's digest."""
    return explanation.model or "unknown"


MEASURES_SEQUENCE, ORIENTATION_SEQUENCE, POSITION_SEQUENCE = (
    "PixelMeasuresSequence",
    "PlaneOrientationSequence",
    "PlanePositionSequence",
)
# where an enhanced file has each element, and any other at its root
SEQUENCE_BY_KEYWORD = {
    **dict.fromkeys(("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"), MEASURES_SEQUENCE),
    **dict.fromkeys(("ImagerPixelSpacing", "NominalScannedPixelSpacing"), MEASURES_SEQUENCE),
    "ImageOrientationPatient": ORIENTATION_SEQUENCE,
    "ImagePositionPatient": POSITION_SEQUENCE,
    **dict.fromkeys(("FrameOfReferenceUID", "PositionReferenceIndicator"), "FrameOfReferenceMacro"),
}
DIRECTION_LETTERS = ("LR", "PA", "HF")  # of millimetres that grow to the left, to the back and up: more, less


def copy_slice_geometry(image: "Dataset", source: DicomSource, index: int) -> None:
    """Spacing, orientation, position and frame of reference of a slice, where its file says them."""
    header, frame = source.get_slice_header(index)
    groups = read_functional_groups(header, [frame])[0]
    for keyword, sequence in SEQUENCE_BY_KEYWORD.items():
        holder = next((item for item in iter_macro_items(groups, sequence) if keyword in item), None)
        if holder is not None:
            setattr(image, keyword, holder[keyword].value)
    if int(header.get("NumberOfFrames") or 1) > 1 and "PerFrameFunctionalGroupsSequence" not in header:
        _set_frame_position(image, source, index)


def _set_frame_position(image: "Dataset", source: DicomSource, index: int) -> None:
    """Of frames that have one position among them, what the world says of each."""
    from pydicom.valuerep import DS

    if "ImagePositionPatient" in image:
        del image.ImagePositionPatient
    if source.scan.affine is not None:
        position = LPS_TO_RAS @ source.scan.affine @ [index, 0, 0, 1]
        image.ImagePositionPatient = [DS(value, auto_format=True) for value in position[:3].tolist()]


def get_patient_orientation(header: "Dataset", frame: int) -> list[str] | None:
    """To which sides of the body rows and columns lead: what the header says, or what follows from its directions."""
    declared = header.get("PatientOrientation")
    if declared and len(declared) == 2:
        return list(declared)
    directions = read_first_numbers(
        read_functional_groups(header, [frame])[0], ORIENTATION_SEQUENCE, "ImageOrientationPatient", 6
    )
    return (
        None
        if directions is None
        else [_get_direction_letter(np.array(directions[:3])), _get_direction_letter(np.array(directions[3:]))]
    )


def _get_direction_letter(direction: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    axis = int(abs(direction).argmax())
    return DIRECTION_LETTERS[axis][int(direction[axis] < 0)]
