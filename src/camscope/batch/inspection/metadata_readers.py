"""Facts of single images: photographs, medical images, and their masks.

- The facts of photographs: what the file says, and its pixels as they are seen, or as stored where they are finer.
- The facts of medical images: headers by numbers and known words, pixels as any model would get them.
- Whether the mask of an image fits it: there, readable, of the same size, at the same place, and not empty.
"""

import hashlib
import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from camscope.batch.inspection.image_metadata import Array, Facts
from camscope.batch.inspection.issues import codes_of
from camscope.errors import CamscopeError, ImageError
from camscope.images.files.redaction import scan_name, silent, told
from camscope.images.files.source_files import selected
from camscope.images.mask_files import SegmentationObjectError, read_labels, read_mask_scan
from camscope.images.photo import ORIENTATION, read_photo, remarks
from camscope.images.scans.dicom import scan_of
from camscope.images.scans.dicom_file import load, pydicom_there
from camscope.images.scans.dicom_geometry import plane_of
from camscope.images.scans.dicom_tags import (
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
from camscope.images.scans.nifti import is_nifti
from camscope.images.scans.raster import read_raster
from camscope.images.scans.scan import Scan, World
from camscope.images.scans.scan_preprocess import letters
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.mask_labels import MAX_NAMED, LabelImage

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


FINE = ("I", "F")  # Pillow's modes of more than 8 bits, and those that begin so
BITS = {"1": "1 bit", "P": "8 bits, of a palette", "I": "32 bits", "F": "32 bits, floating point"}


def read_photo_facts(source: Any, path: str, facts: Facts, key: bytes) -> None:
    """Fill in what a photograph says of itself: a file's bytes, or an image of a dataset as it comes."""
    if not isinstance(source, bytes):
        facts.format, values = "decoded", _values(source)
        facts.stored = str(values.dtype)
        facts.measure(values, colour=values.dtype == np.uint8 and values.ndim == 3 and values.shape[-1] == 3, key=key)
        return
    fine = _photo_header(source, facts)
    values = read_raster(source, frame=0).values if fine else read_photo(source).pixels
    facts.measure(values, colour=values.ndim == 3, key=key)
    facts.flags = remarks(source, path)
    facts.findings += codes_of(facts.flags)


def _photo_header(data: bytes, facts: Facts) -> bool:
    """Whether its pixels are finer than those of a photograph; what is no image is left to the reader to refuse."""
    from PIL import Image

    try:
        with silent(), Image.open(io.BytesIO(data)) as image:
            mode = image.mode
            facts.format = "JPEG" if image.format == "MPO" else image.format
            facts.photometric = mode.partition(";")[0]
            sixteen = mode.startswith("I;16") or (mode == "I" and image.format == "PNG")
            facts.stored = "16 bits" if sixteen else BITS.get(mode, "8 bits")
            facts.exif = int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return False
    if facts.exif not in (0, 1):
        facts.findings.append("exif")
    fine = mode.startswith(FINE) and facts.format in ("PNG", "TIFF")
    if fine and not sixteen:
        facts.findings.append("no-range")
    return fine


def _values(source: Any) -> Array:
    """(H,W), (H,W,3) or, of a tensor for a model, (C,H,W) as it is."""
    if isinstance(source, Tensor) and source.is_floating_point():
        values = source.detach().cpu().numpy()
        if not values.size:
            raise ImageError(f"a tensor of shape {tuple(values.shape)}")
        return np.asarray(values)
    return read_photo(source).pixels


ENDINGS = {".nii": "NIfTI", ".nii.gz": "NIfTI", ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage"}
ENDINGS |= {".tif": "TIFF", ".tiff": "TIFF", ".png": "PNG"}  # of numbers, not of colours
SAID = {True: "yes", False: "no", None: "not said"}


def read_scan_facts(source: Path | bytes, facts: Facts, key: bytes) -> Scan:
    """Fill in what a scan says of itself, as far as it can be read; an ImageError where that is not far enough."""
    facts.format = _format(source)
    if facts.format == "DICOM":
        scan = _dicom(source, facts, key)
    else:
        scan = read_scan(source)
        if facts.format == "DICOM series" and scan.sources:
            with told(scan.name):
                _dicom_header(load(scan.sources[0], scan.name, pixels=False)[0], facts, key)
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
        _dicom_header(dataset, facts, key)
        return scan_of(dataset, part, name, (), odd)


def _dicom_header(dataset: "Dataset", facts: Facts, key: bytes) -> None:
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


MARKED_OTHERWISE = ("[", "{")  # boxes, points, outlines


def judged(source: bytes | Path, size: Sequence[int] | None, world: World | None) -> tuple[str, tuple[str, ...]]:
    """`ok`, or what is wrong with the mask of an image of this size (H,W) or (D,H,W): a word of `codes`; and its labels.

    At most one label more than a message lists is named.
    """
    try:
        labels, place = _read(source)
    except FileNotFoundError:
        return "mask-missing", ()
    except SegmentationObjectError:
        return "mask-segmentation", ()
    except (CamscopeError, OSError) as error:
        return "mask-missing" if "no such file" in str(error) else "mask-unreadable", ()
    shape, names = labels.values.shape, labels.names(MAX_NAMED + 1)
    if size is not None and _sides(shape) != _sides(size):
        return "mask-size", names
    if world is not None and place is not None and _apart(world, place, shape) > 1:
        return "mask-place", names
    return "ok" if names else "mask-empty", names


def _read(source: bytes | Path) -> tuple[LabelImage, World | None]:
    """Labels as a mask of `camscope measure` has them, and where a medical image lies."""
    if isinstance(source, Path) or is_scan(source):
        scan = read_mask_scan(source)
        return LabelImage.from_colors(scan.values) if scan.colour else LabelImage(scan.values), scan.world
    return read_labels(source), None


def _sides(shape: Sequence[int]) -> list[int]:
    """Axes of one voxel do not count."""
    return [side for side in shape if side != 1]


def _apart(mine: World, others: World, shape: Sequence[int]) -> float:
    """How far two places of one array are apart at most at its corners, in voxels of the image."""
    sides = (1,) * (3 - len(shape)) + tuple(shape)
    corners = np.array([[*corner, 1.0] for corner in product(*((0, side - 1) for side in sides))]).T
    moved = (np.asarray(others) - np.asarray(mine)) @ corners
    step = np.linalg.norm(np.asarray(mine)[:3, :3], axis=0)[-len(shape) :].min()
    return float(np.linalg.norm(moved[:3], axis=0).max() / step)
