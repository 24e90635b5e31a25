"""Export a map as a DICOM Parametric Map: float32 values with their meaning and position, for a PACS."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import OutputError
from camscope.explanation import Explanation
from camscope.images.scans.dicom_tags import read_first_numbers, read_functional_groups
from camscope.medical.dicom_export import (
    FIRST_SERIES_NUMBER,
    MANUFACTURER,
    DicomSource,
    build_common_arguments,
    check_clinical_profile,
    encode_dicom,
    highdicom_errors_converted,
    read_dicom_source,
    set_common_attributes,
)
from camscope.medical.scan_map import (
    ScanSpaceMap,
    describe_derivation,
    format_title,
    resample_to_scan,
    to_dicom_ascii,
)
from camscope.safe_files import write_bytes
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PARAMETRIC_MAP_NAME = "a DICOM Parametric Map"
CONTENT_LABEL = "CLASS_ACTIVATION"


def to_parametric_map(
    explanation: Explanation,
    source: Any,
    path: str | os.PathLike[str],
    *,
    profile: str = "research",
    overwrite: bool = False,
) -> Path:
    """Write a map as one DICOM file: float32 frames, one per slice, of the quantity 130402 "Class activation" (DCM).

    Values are in score units, and 0 where the model did not see the image. The display window is their range. Spacing,
    orientation, positions and frame of reference are copied from the source, which the object references.

    Args:
        explanation: The explanation of the scan.
        source: The DICOM file, folder or list of files that was explained, or its `Scan`.
        path: The file to write.
        profile: "clinical" allows patient and study data to be copied, which a PACS needs for filing.
        overwrite: Whether an existing file is replaced.

    Returns:
        The path that was written.

    Raises:
        OutputError: If the profile is not "clinical", the source has no position, or the file exists.
        ImageError: If the source does not consist of DICOM files.
        GeometryError: If the map belongs to another scan.

    """
    check_clinical_profile(profile, PARAMETRIC_MAP_NAME)
    dicom_source = read_dicom_source(source)
    scan_map = resample_to_scan(explanation, dicom_source.scan)
    _check_geometry(dicom_source)
    with highdicom_errors_converted(PARAMETRIC_MAP_NAME, dicom_source.scan.name):
        data = encode_dicom(_build_parametric_map(explanation, scan_map, dicom_source))
    return write_bytes(path, data, overwrite=overwrite)


def _check_geometry(source: DicomSource) -> None:
    header = source.headers[0]
    name, advice = source.scan.name, "use to_secondary_capture or to_nifti"
    if not header.get("FrameOfReferenceUID") or source.scan.affine is None:
        raise OutputError(f"{name} has no position in the patient, which {PARAMETRIC_MAP_NAME} needs: {advice}")
    if source.is_multiframe and "SharedFunctionalGroupsSequence" not in header:
        raise OutputError(
            f"{name} has frames without functional groups, which {PARAMETRIC_MAP_NAME} cannot refer to: {advice}"
        )


def _build_parametric_map(explanation: Explanation, scan_map: ScanSpaceMap, source: DicomSource) -> "Dataset":
    from highdicom import VOILUTTransformation
    from highdicom.pm import ParametricMap, RealWorldValueMapping
    from highdicom.sr import CodedConcept
    from pydicom.sr.codedict import codes

    derivation, title = describe_derivation(explanation, scan_map), format_title(explanation)
    low, high = scan_map.value_range
    for header in source.headers[1:]:  # rounding differences would count as different orientations
        header.ImageOrientationPatient = source.headers[0].ImageOrientationPatient
    values, positions = _order_frames(scan_map, source)
    mapping = RealWorldValueMapping(
        lut_label=CONTENT_LABEL,
        lut_explanation=title,
        unit=codes.UCUM.NoUnits,
        value_range=scan_map.value_range,
        slope=1.0,
        intercept=0.0,
        quantity_definition=CodedConcept("130402", "DCM", "Class activation"),
    )
    # LINEAR would need a width of at least 1
    window = VOILUTTransformation([(low + high) / 2], [(high - low) or 1.0], ["range of the map"], "LINEAR_EXACT")
    image = ParametricMap(
        source_images=source.headers,
        pixel_array=values,
        series_number=FIRST_SERIES_NUMBER,
        instance_number=1,
        manufacturer_model_name=MANUFACTURER,
        software_versions=__version__,
        device_serial_number=to_dicom_ascii(explanation.model or "unknown", 64),
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[mapping],
        voi_lut_transformations=[window],
        plane_positions=positions,
        content_label=CONTENT_LABEL,
        content_description=title,
        **build_common_arguments(explanation),
    )
    set_common_attributes(image, explanation, derivation, source)
    for group in image.PerFrameFunctionalGroupsSequence:
        for item in group.get("DerivationImageSequence", ()):
            item.DerivationDescription = derivation
    return image


def _order_frames(scan_map: ScanSpaceMap, source: DicomSource) -> tuple[NDArray[np.float32], Any]:
    """Return the slices in the order of the source's headers or frames, and positions if frames are missing."""
    values = np.ascontiguousarray(scan_map.slices)
    if not source.is_multiframe:
        return values, None
    frames = source.scan.frame_indices
    if len(frames) == int(source.headers[0].NumberOfFrames):
        return values[np.argsort(frames)], None
    from highdicom import PlanePositionSequence

    groups = read_functional_groups(source.headers[0], frames)
    positions = [read_first_numbers(group, "PlanePositionSequence", "ImagePositionPatient", 3) for group in groups]
    return values, [PlanePositionSequence("PATIENT", position) for position in positions if position]
