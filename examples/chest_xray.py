"""Chest radiographs as DICOM
==========================

Chest X-rays as DICOM: `python examples/chest_xray.py [FOLDER]` explains them and writes what a workstation opens.

The radiographs are drawn here, with a nodule whose outline is known, and written as DICOM; one is MONOCHROME1, in which white is
black. Nothing of the patient that the files name reaches the overlays, the numbers or the run.
"""

import sys
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian, generate_uid

from camscope import BatchRun, GradCAM, load_model, read_scan, run_batch
from camscope.medical import export
from camscope.phantom import Phantom, draw_radiograph


def main(folder: Path) -> None:
    """Write radiographs, read them, explain them one by one and all together, and export."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [draw_radiograph(seed, "nodule") for seed in (11, 12)]
    files = [folder / "Doe_Jane.dcm", folder / "Doe_John.dcm"]
    for file, truth, inverted in zip(files, drawn, (False, True), strict=True):
        write_radiograph(file, truth, inverted=inverted)

    # What a file says, and what was done to its numbers; its name and the patient's are not there.
    for file in files:
        print(read_scan(file))

    model = load_model("phantom")
    tool = GradCAM(model)
    for file, truth in zip(files, drawn, strict=True):
        one = tool.explain(file, "nodule")
        inside = one.heatmap(scale=None)[truth.mask].sum() / one.heatmap(scale=None).sum()
        area = truth.mask.mean()
        print(
            f"{one.name}: {one.label_and_score}, {inside:.0%} of the map in the nodule, which is {area:.1%} of the image"
        )
        picture = one.overlay(mask={"nodule": truth.mask}, colorbar=True, height=512)
        Image.fromarray(picture).save(folder / f"{one.name}.png")

    # For the archive, and only on request: objects in the patient's own study.
    one = tool.explain(files[0], "nodule")
    capture = export(one, folder / "capture.dcm", "sc", source=files[0], profile="clinical", overwrite=True)
    print(f"{capture.name}: {pydicom.dcmread(capture).DerivationDescription}")

    # All of a folder: the run names no file.
    run_batch(tool, files, folder / "run", ["nodule"], overlays="png", overwrite=True)
    for row in BatchRun(folder / "run").table(["id", "path", "label", "probability"]).to_pylist():
        print(row)


def write_radiograph(path: Path, one: Phantom, *, inverted: bool) -> None:
    """A computed radiograph with 12 bits of gray, MONOCHROME1 where it is `inverted`."""
    gray = one.image.astype(np.uint16) * 16
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = ComputedRadiographyImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    data.StudyInstanceUID, data.SeriesInstanceUID = generate_uid(), generate_uid()
    data.PatientName, data.PatientID, data.PatientBirthDate = path.stem.replace("_", "^"), "12345", "19700101"
    data.PatientSex = data.StudyDate = data.StudyTime = data.AccessionNumber = data.StudyID = ""
    data.ReferringPhysicianName, data.Modality, data.BurnedInAnnotation = "", "CR", "NO"
    data.Rows, data.Columns = gray.shape
    data.ImagerPixelSpacing = data.PixelSpacing = [0.2, 0.2]
    data.SamplesPerPixel, data.PixelRepresentation = 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    data.PixelData = (4095 - gray if inverted else gray).tobytes()
    data.save_as(path, enforce_file_format=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("camscope-xray-example"))
