"""Scans and explanations that the medical tests share."""

from pathlib import Path

import numpy as np

from camscope.explanation import Explanation
from camscope.geometry import Placement

TURN = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0]  # the directions of an oblique volume


def explained(scan, heat=None, placement=None, **fields):
    """As an explainer would give it, of a model that sees the scan as it is."""
    heat = (
        np.random.default_rng(0).random(scan.shape).astype(np.float32) if heat is None else np.asarray(heat, np.float32)
    )
    placement = Placement.identity(scan.shape) if placement is None else placement
    facts = {
        "method": "gradcam", "target": 1, "label": "effusion", "score": 0.25, "layer": "layer4", "model": "0123456789abcdef",
        "input_size": placement.input_size, "name": scan.name, "affine": scan.affine, "scan_steps": scan.steps,
    }  # fmt: skip
    return Explanation(heat, placement=placement, **{**facts, **fields})


def series(folder, count=5, **changes):
    """An oblique volume of slices, in files whose names and numbers say nothing of the order."""
    import pydicom

    folder.mkdir()
    dataset = pydicom.dcmread(Path(pydicom.__file__).parent / "data" / "test_files" / "MR_small.dcm")
    across, down = TURN[:, 0], TURN[:, 1]
    normal = np.cross(across, down)
    for slice_ in range(count):
        dataset.ImageOrientationPatient = [f"{value:.9f}" for value in (*across, *down)]
        dataset.ImagePositionPatient = [f"{value:.6f}" for value in np.array([10, -20, 30]) + 2.5 * slice_ * normal]
        dataset.SpacingBetweenSlices = dataset.SliceThickness = 2.5
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = f"1.2.3.{slice_ + 1}"
        dataset.InstanceNumber = (7 * slice_) % count
        for keyword, value in changes.items():
            setattr(dataset, keyword, value)
        dataset.save_as(folder / f"{(3 * slice_) % count}.dcm")
    return folder


def enhanced(path, folder):
    """The same volume as one file of many frames."""
    import highdicom
    import pydicom
    from highdicom.legacy import LegacyConvertedEnhancedMRImage

    headers = [pydicom.dcmread(file) for file in sorted(folder.iterdir())]
    made = LegacyConvertedEnhancedMRImage(headers, highdicom.UID(), 5, highdicom.UID(), 1)
    made.save_as(path)
    return path
