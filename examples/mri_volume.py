"""A volume and a 3-D network
==========================

A 3-D net explained in its own geometry: `python examples/mri_volume.py [FOLDER]` writes NIfTI that any viewer opens.

The net is trained here, in about a minute, on volumes whose lesion is known to the voxel; one of them is written as a scan with
voxels of 0.8 x 0.8 x 1.2 mm in an orientation of its own, explained from the file, exported, and opened again.
"""

import importlib
import sys
from pathlib import Path

import nibabel
import numpy as np

from camscope import GradCAM, ScanPreprocess, to_nifti
from camscope.metrics import METRICS

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
volume_study = importlib.import_module("benchmarks.volume_study")


def main(folder: Path, steps: int = volume_study.DEFAULT_VOLUME_STEPS, seed: int = 7) -> None:
    """Train, write a scan, explain it, and read what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    net = volume_study.train_volume_model(n_steps=steps)
    truth = volume_study.draw_volume(seed, lesion=True)

    # A scan as it may come: axes lead to the front, up and left, voxels are no cubes, millimeters begin somewhere.
    world = np.array([[0, 0, -0.8, 20], [0.8, 0, 0, -15], [0, 1.2, 0, 40], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(truth.values, world), folder / "brain.nii.gz")

    tool = GradCAM(net, "layer2", preprocess=ScanPreprocess(), class_names=volume_study.VOLUME_CLASSES)
    one = tool.explain(folder / "brain.nii.gz", "lesion")
    print(one)
    for step in one.scan_steps:
        print(f"  {step}")
    x, y, z = one.peak_mm or (0.0, 0.0, 0.0)
    print(f"the peak is at voxel {one.peak}, {x:.1f} mm right, {y:.1f} front, {z:.1f} up")
    values = one.heatmap(scale=None)
    print(f"enrichment in the lesion: {METRICS['enrichment'](values, truth.mask):.1f} (1 is chance)")

    # Float32 numbers in the scan's own voxels, its affine and its codes; opened again, the place is the same.
    file = to_nifti(one, folder / "map.nii.gz", source=folder / "brain.nii.gz", overwrite=True)
    source, again = map(nibabel.Nifti1Image.from_filename, (folder / "brain.nii.gz", file))
    axes, same = "".join(nibabel.aff2axcodes(again.affine)), np.array_equal(again.affine, source.affine)
    print(f"{file.name}: {again.shape}, axes {axes}, affine equal: {same}")
    print(f"values equal: {np.array_equal(again.get_fdata(dtype=np.float32), values)}")

    one.save(folder / "planes.png")
    one.animate(folder / "slices.gif", overwrite=True)
    print(f"pictures: {folder / 'planes.png'}, {folder / 'slices.gif'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("camscope-mri-example"))
