"""Medical files that tests write: DICOM of any pixels, series of slices, enhanced multi-frame objects."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

PACKAGED = Path(str(pydicom.__file__)).parent / "data" / "test_files"
CT, MR_ENHANCED = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.4.1"
AXIAL = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def dicom(pixels: np.ndarray, photometric: str = "MONOCHROME2", bits: int | None = None, **tags: Any) -> Dataset:
    """A data set of stored pixels (H,W), (F,H,W) or (…,3); `tags` by keyword, None to leave one out."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = CT
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    color = photometric not in ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR")
    shape = pixels.shape[:-1] if color else pixels.shape
    if len(shape) == 3:
        made.NumberOfFrames = shape[0]
    made.Rows, made.Columns = shape[-2:]
    made.SamplesPerPixel = 3 if color else 1
    made.PhotometricInterpretation = photometric
    made.BitsAllocated = 8 * pixels.itemsize
    if color:
        made.PlanarConfiguration = 0
    if pixels.dtype.kind == "f":
        keyword = "FloatPixelData" if pixels.itemsize == 4 else "DoubleFloatPixelData"
        setattr(made, keyword, pixels.tobytes())
    else:
        made.BitsStored = bits or made.BitsAllocated
        made.HighBit = made.BitsStored - 1
        made.PixelRepresentation = int(pixels.dtype.kind == "i")
        made.PixelData = pixels.tobytes() + b"\0" * (pixels.nbytes % 2)
        made["PixelData"].VR = "OB" if pixels.itemsize == 1 else "OW"
    for keyword, value in tags.items():
        setattr(made, keyword, value)
    return made


def written(dataset: Dataset) -> bytes:
    """Its file's bytes."""
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, dataset, enforce_file_format=True)
    return buffer.getvalue()


def item(**tags: Any) -> Dataset:
    """A sequence's item."""
    made = Dataset()
    for keyword, value in tags.items():
        setattr(made, keyword, value)
    return made


def slices(volume: np.ndarray, positions: Sequence[Sequence[float]], directions: Sequence[float] = AXIAL, **tags: Any):
    """Data sets of the slices of a (D,H,W) volume, of one series, each at its position."""
    series = tags.pop("SeriesInstanceUID", generate_uid())
    place = {"ImageOrientationPatient": list(directions), "PixelSpacing": [0.8, 0.5], "Modality": "CT"} | tags
    return [
        dicom(plane, SeriesInstanceUID=series, ImagePositionPatient=list(position), InstanceNumber=at, **place)
        for at, (plane, position) in enumerate(zip(volume, positions, strict=True), 1)
    ]


def folder(path: Path, datasets: Sequence[Dataset], names: Sequence[str] | None = None) -> Path:
    """A folder of their files."""
    path.mkdir(parents=True, exist_ok=True)
    for name, dataset in zip(names or [f"{at:03}.dcm" for at in range(len(datasets))], datasets, strict=True):
        (path / name).write_bytes(written(dataset))
    return path


def enhanced(
    volume: np.ndarray, positions: Sequence[Sequence[float]], rescale: Sequence[tuple[float, float]]
) -> Dataset:
    """A multi-frame object whose places and rescales are in functional groups."""
    made = dicom(volume, Modality="MR", SOPClassUID=MR_ENHANCED)
    made.SharedFunctionalGroupsSequence = [
        item(
            PlaneOrientationSequence=[item(ImageOrientationPatient=AXIAL)],
            PixelMeasuresSequence=[item(PixelSpacing=[0.8, 0.5], SliceThickness=2.0)],
        )
    ]
    made.PerFrameFunctionalGroupsSequence = [
        item(
            PlanePositionSequence=[item(ImagePositionPatient=list(position))],
            PixelValueTransformationSequence=[item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="US")],
        )
        for position, (slope, intercept) in zip(positions, rescale, strict=True)
    ]
    return made
