"""Where a picture of a slice lies: the elements of the source's header that say so, as they stand there."""

from typing import TYPE_CHECKING

import numpy as np

from camscope.images.dicom_place import TO_RAS
from camscope.images.tags import first_numbers, functional_groups, places
from camscope.medical.clinical import Source

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MEASURES, ORIENTATION, POSITION = "PixelMeasuresSequence", "PlaneOrientationSequence", "PlanePositionSequence"
# where an enhanced file has each element, and any other at its root
HELD = {
    **dict.fromkeys(("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"), MEASURES),
    **dict.fromkeys(("ImagerPixelSpacing", "NominalScannedPixelSpacing"), MEASURES),
    "ImageOrientationPatient": ORIENTATION,
    "ImagePositionPatient": POSITION,
    **dict.fromkeys(("FrameOfReferenceUID", "PositionReferenceIndicator"), "FrameOfReferenceMacro"),
}
SIDES = ("LR", "PA", "HF")  # of millimetres that grow to the left, to the back and up: more, less


def copy_place(image: "Dataset", source: Source, index: int) -> None:
    """Spacing, orientation, position and frame of reference of a slice, where its file says them."""
    header, frame = source.of_slice(index)
    groups = functional_groups(header, [frame])[0]
    for keyword, sequence in HELD.items():
        holder = next((one for one in places(groups, sequence) if keyword in one), None)
        if holder is not None:
            setattr(image, keyword, holder[keyword].value)
    if int(header.get("NumberOfFrames") or 1) > 1 and "PerFrameFunctionalGroupsSequence" not in header:
        _set_position(image, source, index)


def _set_position(image: "Dataset", source: Source, index: int) -> None:
    """Of frames that have one position among them, what the world says of each."""
    from pydicom.valuerep import DS

    if "ImagePositionPatient" in image:
        del image.ImagePositionPatient
    if source.scan.world is not None:
        there = TO_RAS @ source.scan.world @ [index, 0, 0, 1]
        image.ImagePositionPatient = [DS(value, auto_format=True) for value in there[:3].tolist()]


def patient_orientation(header: "Dataset", frame: int) -> list[str] | None:
    """To which sides of the body rows and columns lead: what the header says, or what follows from its directions."""
    said = header.get("PatientOrientation")
    if said and len(said) == 2:
        return list(said)
    directions = first_numbers(functional_groups(header, [frame])[0], ORIENTATION, "ImageOrientationPatient", 6)
    return None if directions is None else [_letter(np.array(directions[:3])), _letter(np.array(directions[3:]))]


def _letter(direction: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    axis = int(abs(direction).argmax())
    return SIDES[axis][int(direction[axis] < 0)]
