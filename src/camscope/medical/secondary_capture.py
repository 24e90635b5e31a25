"""A map as DICOM Secondary Captures: the overlay as any viewer shows it, with the words on it that it needs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope import render
from camscope.errors import CamscopeError
from camscope.explanation import AUTO, Explanation, Pixels, Scale
from camscope.images.files.redaction import told
from camscope.images.scans.dicom_file import load
from camscope.images.scans.dicom_tags import SECONDARY_CAPTURE
from camscope.images.scans.scan import grey
from camscope.medical.dicom_export import (
    MAKER,
    SERIES,
    Source,
    copy_place,
    described,
    equipment,
    expect_clinical,
    file_bytes,
    making,
    patient_orientation,
    source_of,
)
from camscope.medical.export_metadata import derivation
from camscope.medical.scan_space import Native, native
from camscope.safe_files import new_folder, path_in, write_bytes
from camscope.version import __version__

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

WHAT = "a DICOM Secondary Capture"
WARNING = "model attribution, not a diagnosis"
NARROWEST, LOWEST = 320, 64  # pixels that the words need, and that a colour bar needs


def to_secondary_capture(
    explanation: Explanation,
    source: Any,
    path: str | os.PathLike[str],
    *,
    profile: str = "research",
    scale: Scale = AUTO,
    overwrite: bool = False,
) -> Path:
    """Write the overlay as an RGB picture of the scan's own size, with "model attribution, not a diagnosis" burned in below it.

    `source`: the DICOM file, folder or list of files that was explained, or its `Scan`; it is referred to.
        `profile="clinical"` allows the patient's and the study's data to be copied, without which a PACS could not file it.
    `scale`: as of `Explanation.overlay`, one for all slices. Of a volume `path` is a new folder: `0001.dcm` and on, in the
        order of the slices; `overwrite` replaces one that holds nothing but such. Words and the colour bar stand below and to
        the right: each pixel of the scan stays where it is.
    """
    expect_clinical(profile, WHAT)
    files = source_of(source)
    found = native(explanation, files.scan)
    if found.values.ndim == 2:
        with making(WHAT, files.scan.name):
            data = next(_files(explanation, found, files, scale))
        return write_bytes(path, data, overwrite=overwrite)
    with new_folder(path, _is_own if overwrite else None) as folder, making(WHAT, files.scan.name):
        for number, data in enumerate(_files(explanation, found, files, scale), 1):
            write_bytes(path_in(folder, f"{number:04d}.dcm"), data, sync=False)
    return Path(path)


def _is_own(file: Path) -> bool:
    """Whether a file is such a picture."""
    try:
        with told(file.name):
            header, _ = load(file, file.name, pixels=False)
    except CamscopeError:
        return False
    return (header.get("ManufacturerModelName"), header.get("SOPClassUID")) == (MAKER, SECONDARY_CAPTURE)


def _files(explanation: Explanation, found: Native, source: Source, scale: Scale) -> Iterator[bytes]:
    from highdicom import UID

    series, told = UID(), derivation(explanation, found)
    for index, picture in enumerate(pictures(explanation, found, source, scale)):
        image = _made(explanation, picture, source, index, series)
        described(image, explanation, told, source)
        yield file_bytes(image)


def pictures(explanation: Explanation, found: Native, source: Source, scale: Scale = AUTO) -> Iterator[Pixels]:
    """(H,W,3) of each slice: the overlay, a colour bar, and below them what it is."""
    if scale == AUTO:
        scale = "robust" if explanation.grid == explanation.input_size else "max"
    colormap = explanation.colormap
    shown, ends = render.shown(found.slices, scale, colormap)
    behind = _behind(explanation, source)
    covered = found.covered.reshape(found.slices.shape)
    flag = "" if explanation.flag is None else f" · flagged: {explanation.flag}"
    caption = f"{explanation.caption}{flag} · camscope {__version__}"
    for values, picture, known in zip(shown, behind, covered, strict=True):
        if colormap == render.DIVERGING:
            picture = render.pale(picture)
        picture = render.overlay(picture, values, colormap=colormap, covered=known)
        yield _worded(picture, caption, ends, colormap)


def _behind(explanation: Explanation, source: Source) -> Pixels:
    """(D,H,W,3): the scan as it was looked at."""
    image = grey(source.scan) if explanation.image is None else explanation.image
    if image.shape == source.scan.shape:
        image = np.stack([image] * 3, axis=-1)
    return image[None] if image.ndim == 3 else image


def _worded(picture: Pixels, caption: str, ends: tuple[float, float], colormap: str) -> Pixels:
    if picture.shape[0] >= LOWEST:
        picture = render.beside(picture, render.colour_bar(picture.shape[0], *ends, colormap))
    picture = render.padded(picture, right=max(0, NARROWEST - picture.shape[1]))
    size = min(28, max(12, min(picture.shape[:2]) // 26))
    return render.captioned(picture, caption, flag=WARNING, size=size)


def _made(explanation: Explanation, picture: Pixels, source: Source, index: int, series: str) -> "Dataset":
    from highdicom import UID
    from highdicom.sc import SCImage
    from pydicom.uid import ExplicitVRLittleEndian

    header, frame = source.of_slice(index)
    image = SCImage.from_ref_dataset(
        header,
        np.ascontiguousarray(picture),
        "RGB",
        8,
        "PATIENT",
        series_instance_uid=series,
        series_number=SERIES + 1,
        sop_instance_uid=UID(),
        instance_number=index + 1,
        manufacturer=MAKER,
        patient_orientation=("L", "P"),  # it asks for one; what the source says takes its place
        transfer_syntax_uid=ExplicitVRLittleEndian,
        contributing_equipment=[equipment(explanation)],
    )
    image.copy_patient_and_study_information(header)
    image["PatientOrientation"].value = patient_orientation(header, frame)
    image.BurnedInAnnotation = "YES"
    image.SourceImageSequence = [_reference(header, frame)]
    copy_place(image, source, index)
    return image


def _reference(header: "Dataset", frame: int) -> "Dataset":
    from highdicom.sr import CodedConcept
    from pydicom.dataset import Dataset

    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    if int(header.get("NumberOfFrames") or 1) > 1:
        item.ReferencedFrameNumber = frame + 1
    item.PurposeOfReferenceCodeSequence = [CodedConcept("121322", "DCM", "Source image for image processing operation")]
    return item
