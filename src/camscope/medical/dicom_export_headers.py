"""Read the DICOM headers of the explained scan, and set the header attributes of exported DICOM objects.

The device that makes an object is camscope with one model. A model with other weights counts as another device.
"""

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CamscopeError, ImageError, InputError, OutputError
from camscope.explanation import Explanation
from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES
from camscope.images.files.redacted_errors_and_file_pseudonyms import redact_errors, suppress_library_output
from camscope.images.scans.dicom_file_reader import load_dicom_dataset, require_pydicom
from camscope.images.scans.dicom_header_values import iter_macro_items, read_first_numbers, read_functional_groups
from camscope.images.scans.dicom_slice_positions import LPS_TO_RAS
from camscope.images.scans.nrrd_metaimage_reader import ITK_SUFFIXES
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import read_scan
from camscope.medical.scan_space_map import ScanSpaceMap, format_map_title, resample_map_to_scan, to_dicom_ascii
from camscope.optional_packages import require
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MANUFACTURER = "camscope"
DEVICE_UID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "camscope.model.digest")
PROFILES = ("research", "clinical")
PIXEL_KEYWORDS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData", "OverlayData", "IconImageSequence")
REQUIRED_UID_KEYWORDS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
# required elements of patient and study whose value may be empty
OPTIONAL_VALUE_KEYWORDS = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate"),
    *("StudyTime", "ReferringPhysicianName"),
)
FIRST_SERIES_NUMBER = 9000  # scanners rarely use such numbers
ORIENTATION_SEQUENCE = "PlaneOrientationSequence"
# the sequence of an enhanced file that holds each element; other files hold it at the root
SEQUENCE_BY_KEYWORD = {
    **dict.fromkeys(("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"), "PixelMeasuresSequence"),
    **dict.fromkeys(("ImagerPixelSpacing", "NominalScannedPixelSpacing"), "PixelMeasuresSequence"),
    "ImageOrientationPatient": ORIENTATION_SEQUENCE,
    "ImagePositionPatient": "PlanePositionSequence",
    **dict.fromkeys(("FrameOfReferenceUID", "PositionReferenceIndicator"), "FrameOfReferenceMacro"),
}
DIRECTION_LETTERS = ("LR", "PA", "HF")  # high and low end of each LPS axis


def check_profile_is_clinical(profile: str, object_name: str) -> None:
    """Check that `profile` is "clinical", which allows patient data in the output. Otherwise raise an OutputError."""
    if profile not in PROFILES:
        raise InputError(f"profile={profile!r}; expected one of {', '.join(PROFILES)}")
    if profile != "clinical":
        raise OutputError(
            f'{object_name} needs profile="clinical", because it copies patient data from the source: name, IDs, birth date, '
            f"sex and history, the study's UID, date, accession number and physicians, the scanner, its institution, and the "
            f"UIDs of the source. To write no patient data, use to_nifti or Explanation.save"
        )


@dataclass(frozen=True, eq=False)
class DicomSource:
    """A scan with its DICOM headers: one header for each slice, or one for all frames. The headers hold no pixels."""

    scan: Scan
    headers: "list[Dataset]"

    @property
    def is_multiframe(self) -> bool:
        """Whether a single DICOM file contains all slices as frames."""
        return len(self.headers) == 1 and (
            len(self.scan.frame_indices) > 1 or int(self.headers[0].get("NumberOfFrames") or 1) > 1
        )

    def get_slice_header_and_frame(self, index: int) -> "tuple[Dataset, int]":
        """Return the DICOM header of a slice and the index of its frame in the file."""
        return self.headers[0 if len(self.headers) == 1 else index], self.scan.frame_indices[index]


def require_highdicom() -> None:
    """Raise MissingExtraError if pydicom or highdicom is not installed."""
    require_pydicom()
    require("highdicom", extra="medical")  # before a library is silenced


def read_dicom_source(source: Any) -> DicomSource:
    """Read a DICOM scan with its headers. The source is a path, a folder, a list of files, bytes or a `Scan`."""
    require_highdicom()
    scan = read_scan(source)
    files = [source] if isinstance(source, bytes) else scan.sources
    has_other_format = any(str(file).lower().endswith((*PHOTO_SUFFIXES, *ITK_SUFFIXES)) for file in scan.sources)
    if not files or scan.format_codes is not None or has_other_format:
        raise ImageError(f"{scan.name} does not come from DICOM files, which this export needs; use to_nifti")
    return DicomSource(scan, [_read_header(file, scan.name) for file in files])


def read_source_and_resample_map(
    explanation: Explanation, source: Any, profile: str, object_name: str
) -> tuple[DicomSource, ScanSpaceMap]:
    """Check the profile, read the scan with its DICOM headers, and resample the map to the scan."""
    check_profile_is_clinical(profile, object_name)
    dicom_source = read_dicom_source(source)
    return dicom_source, resample_map_to_scan(explanation, dicom_source.scan)


def _read_header(file: Any, name: str) -> "Dataset":
    """Read a DICOM header without pixels. Optional values that are missing or invalid become empty."""
    with redact_errors(name):
        dataset, _ = load_dicom_dataset(file, name)
        for keyword in PIXEL_KEYWORDS:
            if keyword in dataset:
                del dataset[keyword]
        if missing := [keyword for keyword in REQUIRED_UID_KEYWORDS if not dataset.get(keyword)]:
            raise ImageError(
                f"{name}: the header has no {', '.join(missing)}, which the export needs to refer to the source"
            )
        for keyword in OPTIONAL_VALUE_KEYWORDS:
            if keyword not in dataset or not _has_valid_value(dataset, keyword):
                setattr(dataset, keyword, "")
        if "PatientBirthTime" in dataset and not _has_valid_value(dataset, "PatientBirthTime"):
            dataset.PatientBirthTime = ""
        return dataset


def _has_valid_value(dataset: "Dataset", keyword: str) -> bool:
    """Return whether an element has a valid value. De-identification can leave invalid dates such as 00000000."""
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
    """Set the attributes that are the same in all exported DICOM objects, such as description, device and body part."""
    image.DerivationDescription = derivation
    image.ContentQualification = "RESEARCH"
    image.ManufacturerModelName, image.SoftwareVersions = MANUFACTURER, __version__
    image.DeviceSerialNumber = to_dicom_ascii(explanation.model or "unknown", 64)
    if explanation.model:
        image.DeviceUID = compute_device_uid(explanation.model)
    image.SeriesDescription = to_dicom_ascii(f"Model attribution: {format_map_title(explanation)}", 64)
    for keyword in ("BodyPartExamined", "Laterality"):
        if value := source.headers[0].get(keyword):
            setattr(image, keyword, value)


@contextmanager
def convert_highdicom_errors(object_name: str, name: str) -> Iterator[None]:
    """Convert errors of highdicom in the `with` block to an OutputError. Their text is dropped, because it may quote a header."""
    try:
        with suppress_library_output():
            yield
    except (CamscopeError, MemoryError, OSError):
        raise
    except Exception as error:
        raise OutputError(
            f"{name}: {object_name} cannot be built from it ({type(error).__name__} in highdicom): required values of the header "
            f"are missing or invalid; use to_nifti, which does not need them"
        ) from None


def encode_dicom(image: "Dataset") -> bytes:
    """Encode a data set as the bytes of a DICOM file."""
    buffer = io.BytesIO()
    image.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def compute_device_uid(digest: str) -> str:
    """Compute a DICOM device UID from the digest of a model's weights. Different weights give a different UID.

    Args:
        digest: The digest of the model's weights.

    Returns:
        A UID that begins with `2.25.`.

    >>> compute_device_uid("0123456789abcdef").startswith("2.25.")
    True

    """
    return f"2.25.{uuid.uuid5(DEVICE_UID_NAMESPACE, digest).int}"


def build_common_highdicom_arguments(explanation: Explanation) -> dict[str, Any]:
    """Build the highdicom arguments that are the same for all exported objects, such as new UIDs and the device."""
    from highdicom import UID, ContributingEquipment
    from pydicom.sr.codedict import codes
    from pydicom.uid import ExplicitVRLittleEndian

    digest = explanation.model or "unknown"
    equipment = ContributingEquipment(
        manufacturer=MANUFACTURER,
        purpose_of_reference=codes.DCM.ProcessingEquipment,
        manufacturer_model_name=to_dicom_ascii(explanation.method, 64),
        software_versions=__version__,
        device_serial_number=digest,
        contribution_description=to_dicom_ascii(f"{format_map_title(explanation)}; model digest {digest}", 1024),
    )
    if explanation.model:
        equipment.DeviceUID = compute_device_uid(explanation.model)
    return {
        "series_instance_uid": UID(),
        "sop_instance_uid": UID(),
        "manufacturer": MANUFACTURER,
        "transfer_syntax_uid": ExplicitVRLittleEndian,
        "contributing_equipment": [equipment],
    }


def copy_slice_geometry(image: "Dataset", source: DicomSource, index: int) -> None:
    """Copy the geometry of a slice to an image: spacing, orientation, position and frame of reference."""
    from pydicom.valuerep import DS

    header, frame = source.get_slice_header_and_frame(index)
    groups = read_functional_groups(header, [frame])[0]
    for keyword, sequence in SEQUENCE_BY_KEYWORD.items():
        holder = next((item for item in iter_macro_items(groups, sequence) if keyword in item), None)
        if holder is not None:
            setattr(image, keyword, holder[keyword].value)
    if int(header.get("NumberOfFrames") or 1) > 1 and "PerFrameFunctionalGroupsSequence" not in header:
        # all frames share one position in the header, so that of this frame is computed
        if "ImagePositionPatient" in image:
            del image.ImagePositionPatient
        if source.scan.affine is not None:
            position = LPS_TO_RAS @ source.scan.affine @ [index, 0, 0, 1]
            image.ImagePositionPatient = [DS(value, auto_format=True) for value in position[:3].tolist()]


def get_patient_orientation(header: "Dataset", frame: int) -> list[str] | None:
    """Return the body directions of rows and columns, such as ["L", "P"]. Return None if the header has no directions."""
    declared = header.get("PatientOrientation")
    if declared and len(declared) == 2:
        return list(declared)
    groups = read_functional_groups(header, [frame])[0]
    directions = read_first_numbers(groups, ORIENTATION_SEQUENCE, "ImageOrientationPatient", 6)
    if directions is None:
        return None
    return [_get_direction_letter(np.array(part)) for part in (directions[:3], directions[3:])]


def _get_direction_letter(direction: NDArray[np.float64]) -> str:
    axis = int(abs(direction).argmax())
    return DIRECTION_LETTERS[axis][int(direction[axis] < 0)]
