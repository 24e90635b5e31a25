"""A map as a DICOM Parametric Map: float32 numbers with a meaning and a place, beside the images in a PACS."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import OutputError
from camscope.explanation import Explanation
from camscope.images.scans.dicom_tags import first_numbers, functional_groups
from camscope.medical.dicom_export import (
    MAKER,
    SERIES,
    Source,
    described,
    equipment,
    expect_clinical,
    file_bytes,
    making,
    serial,
    source_of,
)
from camscope.medical.export_metadata import derivation, plain, title
from camscope.medical.scan_space import Native, native
from camscope.safe_files import write_bytes
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

WHAT = "a DICOM Parametric Map"
LABEL = "CLASS_ACTIVATION"


def to_parametric_map(
    explanation: Explanation,
    source: Any,
    path: str | os.PathLike[str],
    *,
    profile: str = "research",
    overwrite: bool = False,
) -> Path:
    """Write the map as one DICOM file: float32 frames, one for each slice, of the quantity 130402 "Class activation" (DCM).

    `source`: the DICOM file, folder or list of files that was explained, or its `Scan`. Spacing, orientation, positions and the
        frame of reference are its own, and it is referred to. `profile="clinical"` allows the patient's and the study's data
        to be copied, without which a PACS could not file it.
    Values are in units of the score, 0 where the model was not shown the image; the window is their range.
    """
    expect_clinical(profile, WHAT)
    files = source_of(source)
    found = native(explanation, files.scan)
    _expect_place(files)
    with making(WHAT, files.scan.name):
        data = file_bytes(_made(explanation, found, files))
    return write_bytes(path, data, overwrite=overwrite)


def _expect_place(source: Source) -> None:
    header = source.headers[0]
    name, instead = source.scan.name, "use to_secondary_capture or to_nifti"
    if not header.get("FrameOfReferenceUID") or source.scan.world is None:
        raise OutputError(f"{name} does not say where it lies in the patient, which {WHAT} has to: {instead}")
    if source.many and "SharedFunctionalGroupsSequence" not in header:
        raise OutputError(f"{name} has frames without functional groups, which {WHAT} cannot refer to: {instead}")


def _made(explanation: Explanation, found: Native, source: Source) -> "Dataset":
    from highdicom import UID
    from highdicom.pm import ParametricMap
    from pydicom.uid import ExplicitVRLittleEndian

    told = derivation(explanation, found)
    values, positions = _frames(found, source)
    image = ParametricMap(
        source_images=_alike(source.headers),
        pixel_array=values,
        series_instance_uid=UID(),
        series_number=SERIES,
        sop_instance_uid=UID(),
        instance_number=1,
        manufacturer=MAKER,
        manufacturer_model_name=MAKER,
        software_versions=__version__,
        device_serial_number=plain(serial(explanation), 64),
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[_meaning(explanation, found)],
        voi_lut_transformations=[_window(found)],
        plane_positions=positions,
        transfer_syntax_uid=ExplicitVRLittleEndian,
        content_label=LABEL,
        content_description=title(explanation),
        contributing_equipment=[equipment(explanation)],
    )
    described(image, explanation, told, source)
    for group in image.PerFrameFunctionalGroupsSequence:
        for item in group.get("DerivationImageSequence", ()):
            item.DerivationDescription = told
    return image


def _frames(found: Native, source: Source) -> tuple[NDArray[np.float32], Any]:
    """The slices in the order of the source's headers or frames; positions where they are not all of them."""
    values = np.ascontiguousarray(found.slices)
    if not source.many:
        return values, None
    frames = source.scan.frames
    if len(frames) == int(source.headers[0].NumberOfFrames):
        return values[np.argsort(frames)], None
    from highdicom import PlanePositionSequence

    groups = functional_groups(source.headers[0], frames)
    places = [first_numbers(group, "PlanePositionSequence", "ImagePositionPatient", 3) for group in groups]
    return values, [PlanePositionSequence("PATIENT", place) for place in places if place]


def _alike(headers: "list[Dataset]") -> "list[Dataset]":
    """Headers of one orientation: the last digits in which those of a series differ would be taken for another."""
    for header in headers[1:]:
        header.ImageOrientationPatient = headers[0].ImageOrientationPatient
    return headers


def _meaning(explanation: Explanation, found: Native) -> Any:
    from highdicom.pm import RealWorldValueMapping
    from highdicom.sr import CodedConcept
    from pydicom.sr.codedict import codes

    return RealWorldValueMapping(
        lut_label=LABEL,
        lut_explanation=title(explanation),
        unit=codes.UCUM.NoUnits,
        value_range=found.ends,
        slope=1.0,
        intercept=0.0,
        quantity_definition=CodedConcept("130402", "DCM", "Class activation"),
    )


def _window(found: Native) -> Any:
    from highdicom import VOILUTTransformation

    low, high = found.ends
    # LINEAR would take a width of 1 at least
    return VOILUTTransformation([(low + high) / 2], [(high - low) or 1.0], ["range of the map"], "LINEAR_EXACT")
