"""Chest radiographs as DICOM
==========================

Explain DICOM files, compare the map with a known nodule, and write objects that a workstation opens.

The radiographs are drawn here and written as DICOM. One of them is MONOCHROME1, in which white is black. The files name a
patient. Nothing of this reaches the overlays, the numbers or the run.

Needs `pip install ".[medical,batch]"`. `python examples/chest_xray.py [FOLDER]` runs the same code as a script.
"""

# %%
# Two files
# ---------
# This function writes a computed radiograph with 12 bits of gray, as a device would.

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


def write_radiograph(path: Path, phantom: Phantom, *, inverted: bool) -> None:
    """Write a radiograph, as MONOCHROME1 if it is `inverted`."""
    gray = phantom.image.astype(np.uint16) * 16
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


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "camscope-xray-example")
folder.mkdir(parents=True, exist_ok=True)
phantoms = [draw_radiograph(seed, "nodule") for seed in (11, 12)]
files = [folder / "Doe_Jane.dcm", folder / "Doe_John.dcm"]
for file, phantom, inverted in zip(files, phantoms, (False, True), strict=True):
    write_radiograph(file, phantom, inverted=inverted)

# %%
# What is read
# ------------
# A scan reports its modality, its value range and what was done to its stored values. It has a pseudonym instead of its name.

for file in files:
    print(read_scan(file))

# %%
# The map
# -------
# The map lies on the pixels of the file, so it can be compared with a mask of the same size.

model = load_model("phantom")
cam = GradCAM(model)
for file, phantom in zip(files, phantoms, strict=True):
    explanation = cam.explain(file, "nodule")
    values = explanation.heatmap(scale=None)
    share, area = values[phantom.mask].sum() / values.sum(), phantom.mask.mean()
    print(f"{explanation.name}: {explanation.label_and_score}")
    print(f"  {share:.0%} of the map in the nodule, which is {area:.1%} of the image")
    picture = explanation.overlay(mask={"nodule": phantom.mask}, colorbar=True, height=512)
    Image.fromarray(picture).save(folder / f"{explanation.name}.png")
Image.fromarray(picture)

# %%
# For the archive
# ---------------
# An export into the study of the patient needs an explicit request, `profile="clinical"`. Here it is a secondary capture, whose
# text says that it is not a diagnosis.

explanation = cam.explain(files[0], "nodule")
capture = export(explanation, folder / "capture.dcm", "sc", source=files[0], profile="clinical", overwrite=True)
print(f"{capture.name}: {pydicom.dcmread(capture).DerivationDescription}")

# %%
# A whole folder
# --------------
# A batch run has the profile "research" by default: its rows name no file and no patient.

run_batch(cam, files, folder / "run", ["nodule"], overlays="png", overwrite=True)
for row in BatchRun(folder / "run").table(["id", "path", "label", "probability"]).to_pylist():
    print(row)
