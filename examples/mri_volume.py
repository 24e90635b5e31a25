"""A volume and a 3-D network
==========================

Train a small 3-D network, explain a scan in its own geometry, and export the map as NIfTI that any viewer opens.

The lesion of each volume is known to the voxel. The scan has voxels of 0.8 x 0.8 x 1.2 mm and an orientation of its own.

Needs `pip install ".[medical]"` and a clone, for `benchmarks/`. `python examples/mri_volume.py [FOLDER] [STEPS]` runs the same
code as a script, in about half a minute.
"""

# %%
# The network
# -----------
# It learns in a few hundred steps whether a volume of 32 x 32 x 32 voxels has a lesion.

import importlib
import sys
from pathlib import Path

import nibabel
import numpy as np

from camscope import GradCAM, ScanPreprocess, to_nifti
from camscope.metrics import METRICS

if "__file__" in globals():
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
volume_study = importlib.import_module("benchmarks.volume_study")

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "camscope-mri-example")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else volume_study.DEFAULT_VOLUME_STEPS
folder.mkdir(parents=True, exist_ok=True)
model = volume_study.train_volume_model(n_steps=steps)
truth = volume_study.draw_volume(7, lesion=True)

# %%
# A scan
# ------
# The affine maps array indices to millimeters. Here the axes point to the front, up and left, and voxels are not cubes.

affine = np.array([[0, 0, -0.8, 20], [0.8, 0, 0, -15], [0, 1.2, 0, 40], [0, 0, 0, 1]])
scan = folder / "brain.nii.gz"
nibabel.save(nibabel.Nifti1Image(truth.values, affine), scan)

# %%
# The map
# -------
# The planes are axial, coronal and sagittal, in the proportions of the patient.

cam = GradCAM(model, "layer2", preprocess=ScanPreprocess(), class_names=volume_study.VOLUME_CLASSES)
explanation = cam.explain(scan, "lesion")
explanation.save(folder / "planes.png")
explanation

# %%
# Each step from the stored values to the tensor is recorded. The peak has a position in the scanner.

print(explanation.caption)
for step in explanation.scan_steps:
    print(f"  {step}")
x, y, z = explanation.peak_mm or (0.0, 0.0, 0.0)
print(f"the peak is at voxel {explanation.peak}, {x:.1f} mm right, {y:.1f} front, {z:.1f} up")

# %%
# Is it the lesion?
# -----------------
# Enrichment is the density of the map inside the mask, divided by its density in the whole volume. Chance is 1.

values = explanation.heatmap(scale=None)
print(f"enrichment in the lesion: {METRICS['enrichment'](values, truth.mask):.1f}")

# %%
# Export
# ------
# The file holds float32 values in the scan's own voxels, with its affine and its codes. Opened again, it is the same.

file = to_nifti(explanation, folder / "map.nii.gz", source=scan, overwrite=True)
source, again = map(nibabel.Nifti1Image.from_filename, (scan, file))
axes, same = "".join(nibabel.aff2axcodes(again.affine)), np.array_equal(again.affine, source.affine)
print(f"{file.name}: {again.shape}, axes {axes}, affine equal: {same}")
print(f"values equal: {np.array_equal(again.get_fdata(dtype=np.float32), values)}")

# %%
# An animation shows all slices.

explanation.animate(folder / "slices.gif", overwrite=True)
print("slices.gif")
