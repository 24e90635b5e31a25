"""How far the estimate of each stage is from its processor time, on six small audits.

    python -m benchmarks.audit_estimates DATA [-o FOLDER] [--only NAME ...] [--write]

DATA holds `models.py`, `chest_xray`, `blood_cells` and `hippocampus`. The operations are timed in processor seconds, which
other processes change less than seconds of the clock; so run it with OMP_NUM_THREADS=1. A ratio is that of the foreseen
to the taken seconds. Only those of stages of a second or more say something. --write saves them in
benchmarks/results/audit_estimates.json.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import audit_minutes
from benchmarks.audit_minutes import Counts
from benchmarks.audit_real import blood, write_table
from benchmarks.machine import machine
from camscope import audit
from camscope.audit import stage_duration_estimates
from camscope.audit.core import fewest_steps_with_same_ranks
from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study

RESULTS = Path(__file__).parent / "results" / "audit_estimates.json"
METHODS = ["gradcam", "integratedgradients"]
NET = '''"""Two convolutions and the mean of each of their channels."""

from torch import nn
from camscope.images.scans.scan_preprocess import ScanPreprocess


def net():
    conv = nn.Conv{n}d
    return nn.Sequential(
        conv(1, 8, 3, 2, 1), nn.ReLU(), conv(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool{n}d(1), nn.Flatten(),
        nn.Linear(16, {n_classes}),
    ).eval()


PREPROCESSING = {{"net": ScanPreprocess(resize={size}, normalize="zscore")}}
CATEGORIES = {{"net": {categories!r}}}
TARGET_LAYER = {{"net": "2"}}
'''


def demo(probability: float) -> Callable[[Path, Path], dict[str, Any]]:
    """A function that writes radiographs with a marker, and returns the config of their audit."""

    def write(data: Path, folder: Path) -> dict[str, Any]:
        return write_demo_study(folder, probability, n_images=100).model_dump()

    return write


def chest(data: Path, folder: Path) -> dict[str, Any]:
    """40 chest X-rays, two findings."""
    config = audit_minutes.settings(data, folder, METHODS, 64)
    config["explain"] |= {"findings": ["COVID-19", "other pneumonia"]}
    config["data"] |= {"ground_truth": {"COVID-19": "opacity"}}
    return config


def smears(data: Path, folder: Path) -> dict[str, Any]:
    """40 blood smears."""
    config = blood(data, folder)
    config["data"] |= {"max_images": 40}
    config["explain"] |= {"methods": METHODS}
    return config


def scans(data: Path, folder: Path) -> dict[str, Any]:
    """30 files of DICOM with a bright square, drawn here, and an untrained network."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    random, rows = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(30):
        values = random.normal(300, 60, (64, 64)).clip(0)
        values[20:32, 20:32] += 400 * (n % 2)
        meta = FileMetaDataset()
        meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(n)])
        scan = FileDataset(str(folder / f"{n:02d}.dcm"), {}, file_meta=meta, preamble=b"\0" * 128)
        scan.SOPClassUID, scan.SOPInstanceUID, scan.Modality = CTImageStorage, meta.MediaStorageSOPInstanceUID, "CT"
        scan.Rows, scan.Columns, scan.SamplesPerPixel, scan.PhotometricInterpretation = 64, 64, 1, "MONOCHROME2"
        scan.BitsAllocated, scan.BitsStored, scan.HighBit, scan.PixelRepresentation = 16, 16, 15, 0
        scan.RescaleIntercept, scan.RescaleSlope, scan.PixelSpacing = -300, 1, [1, 1]
        scan.PixelData = values.astype(np.uint16).tobytes()
        scan.save_as(folder / f"{n:02d}.dcm")
        rows.append({"path": f"{n:02d}.dcm", "label": ("clear", "lesion")[n % 2]})
    return _untrained(folder, rows, (64, 64), ("clear", "lesion"), "ct")


def brains(data: Path, folder: Path) -> dict[str, Any]:
    """10 volumes of MRI, each twice with patients of their own, and an untrained network."""
    files = sorted((data / "hippocampus" / "images").iterdir())
    rows = [
        {"path": f"hippocampus/images/{file.name}", "id": f"{n}-{file.name}", "label": ("small", "large")[n % 2]}
        for n, file in enumerate(2 * files)
    ]
    config = _untrained(folder, rows, (32, 48, 32), ("small", "large"), "mri")
    config["data"]["root"] = str(data)
    return config


def _untrained(
    folder: Path, rows: Sequence[Mapping[str, str]], size: tuple[int, ...], categories: Sequence[str], modality: str
) -> dict[str, Any]:
    manifest = write_table(rows, folder / "manifest.csv")
    text = NET.format(n=len(size), n_classes=len(categories), size=size, categories=tuple(categories))
    (folder / "net.py").write_text(text)
    return {
        "data": {"manifest": str(manifest), "label": "label"},
        "model": {"source": f"{folder / 'net.py'}:net"},
        "explain": {"findings": [categories[1]], "methods": METHODS},
        "regions": {"modality": modality},
    }


ALL: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "confounded": demo(CONFOUNDED_PROBABILITY), "unbiased": demo(UNBIASED_PROBABILITY), "X-rays": chest,
    "blood cells": smears, "DICOM": scans, "volumes": brains,
}  # fmt: skip


def estimate_and_run(config: Mapping[str, Any], folder: Path) -> Counts:
    """Run an audit whose operations are timed in processor seconds."""
    timed: tuple[Any, ...] = stage_duration_estimates, fewest_steps_with_same_ranks
    counts = Counts()
    try:
        for module in timed:
            module.time = SimpleNamespace(perf_counter=time.process_time)
        audit.run_audit(config, folder, overwrite=True, on_progress=counts.enter, on_estimate=counts.foresee)
    finally:
        for module in timed:
            module.time = time
    counts.enter("end")
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_estimates", description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of models and images")
    parser.add_argument("-o", "--output", type=Path, default=Path("audit-estimates"), help="where the audits go")
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--set", type=json.loads, default={}, help="further settings of the configs, as JSON")
    parser.add_argument("--write", action="store_true", help=f"write them into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    audits = {}
    for name in chosen.only:
        folder = chosen.output.resolve() / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        config = ALL[name](chosen.data.resolve(), folder) | chosen.set
        counts = estimate_and_run(config, folder / "audit")
        print(f"\n{name}\n{audit_minutes.table(counts)}", flush=True)
        audits[name] = {
            stage: {"foreseen": round(seconds, 2), "taken": round(counts.cpu[stage], 2)}
            for stage, seconds in counts.foreseen.items()
        }
    if chosen.write:
        RESULTS.write_text(json.dumps({"machine": machine("cpu"), "audits": audits}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
