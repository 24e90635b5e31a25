"""The facts of medical images: headers by numbers and known words, pixels as any model would get them."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.batch.inspection.codes import codes_of
from camscope.batch.inspection.facts import Facts
from camscope.images.dicom import scan_of
from camscope.images.dicom_file import load, pydicom_there
from camscope.images.dicom_place import plane_of
from camscope.images.nifti import is_nifti
from camscope.images.orientation import letters
from camscope.images.private import scan_name, told
from camscope.images.scan import Scan
from camscope.images.scans import read_scan
from camscope.images.sources import selected
from camscope.images.tags import (
    MODALITIES,
    PHOTOMETRIC,
    burned_in,
    functional_groups,
    known_uid,
    numbers,
    places,
    whole,
    word,
)

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

ENDINGS = {".nii": "NIfTI", ".nii.gz": "NIfTI", ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage"}
ENDINGS |= {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG"}  # of numbers, not of colours
SAID = {True: "yes", False: "no", None: "not said"}


def read_facts(source: Path | bytes, facts: Facts, key: bytes) -> Scan:
    """Fill in what a scan says of itself, as far as it can be read; an ImageError where that is not far enough."""
    facts.format = _format(source)
    if facts.format == "DICOM":
        scan = _dicom(source, facts, key)
    else:
        scan = read_scan(source)
        if facts.format == "DICOM series" and scan.sources:
            with told(scan.name):
                _header(load(scan.sources[0], scan.name, pixels=False)[0], facts, key)
            facts.series = facts.plane = None  # the row has all of it
            facts.burned_in = SAID[scan.burned_in]
    _fill(scan, facts)
    facts.measure(scan.values, colour=scan.colour, key=key)
    return scan


def _format(source: Path | bytes) -> str:
    if isinstance(source, bytes):
        return "NIfTI" if is_nifti(source[:4096]) else "DICOM"
    path, _ = selected(source)
    if path.is_dir():
        return "DICOM series"
    return next((kind for ending, kind in ENDINGS.items() if path.name.lower().endswith(ending)), "DICOM")


def _dicom(source: Path | bytes, facts: Facts, key: bytes) -> Scan:
    """The file is read and parsed once, for its header and for its pixels."""
    path, part = selected(source)
    name = scan_name(path)
    pydicom_there()
    with told(name):
        dataset, odd = load(path, name)
        _header(dataset, facts, key)
        return scan_of(dataset, part, name, (), odd)


def _header(dataset: "Dataset", facts: Facts, key: bytes) -> None:
    facts.codec = known_uid(dataset.file_meta.TransferSyntaxUID) or "an unknown transfer syntax"
    facts.modality = word(dataset, "Modality", MODALITIES) or None
    facts.photometric = word(dataset, "PhotometricInterpretation", PHOTOMETRIC) or None
    facts.burned_in = SAID[burned_in(dataset)]
    facts.lossy = word(dataset, "LossyImageCompression", {"00", "01"}) == "01"
    groups = functional_groups(dataset, [0])
    _window(groups[0], facts)
    facts.study, facts.series = (_digest(dataset, uid, key) for uid in ("StudyInstanceUID", "SeriesInstanceUID"))
    plane, _ = plane_of(groups[0])
    if plane is not None and (whole(dataset, "NumberOfFrames") or 1) == 1:
        facts.plane = (*plane.position, *plane.across, *plane.down, *plane.spacing)


def _window(groups: "list[Dataset]", facts: Facts) -> None:
    for place in places(groups, "FrameVOILUTSequence"):
        centres, widths = numbers(place, "WindowCenter"), numbers(place, "WindowWidth")
        if centres and widths:
            facts.window, facts.windows = (centres[0], widths[0]), min(len(centres), len(widths))
            return
    facts.windows = 0


def _digest(dataset: "Dataset", uid: str, key: bytes) -> str | None:
    value = str(dataset.get(uid, "") or "")
    return hashlib.blake2b(value.encode(), digest_size=8, key=key).hexdigest() if value else None


def _fill(scan: Scan, facts: Facts) -> None:
    facts.stored = next((step[8:] for step in scan.steps if step.startswith("stored: ")), None)
    facts.modality = scan.modality or facts.modality
    facts.unit, facts.spacing = scan.unit or None, scan.spacing
    facts.orientation = None if scan.world is None else letters(scan.world)
    facts.flags = scan.flags
    facts.findings += codes_of(scan.flags)
