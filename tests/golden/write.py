"""Write an explanation, a run and an audit for a new minor version: `python -m tests.golden.write`.

Files of older versions stay as they are. They prove that this version still reads them.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from camscope import GradCAM, __version__, audit, load_model
from camscope.audit.core.config import Config
from camscope.audit.demo_dataset_and_model import write_demo_study
from camscope.batch import run_batch
from camscope.phantom import draw_radiograph

MINOR = ".".join(__version__.split(".")[:2])
FOLDER = Path(__file__).parent / f"v{MINOR}"


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    model = load_model("phantom")
    scan = draw_radiograph(seed=11, finding="nodule")
    small = Image.fromarray(scan.image).resize((32, 32))
    explanation = GradCAM(model, "layer4").explain(small, "nodule")
    explanation.save(FOLDER / "explanation.npz")
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)  # the folder of the run's paths
        photos = Path(temporary) / "photos"
        photos.mkdir()
        for seed in range(3):
            Image.fromarray(draw_radiograph(seed=seed, finding="nodule").image).resize((32, 32)).save(
                photos / f"{seed}.png"
            )
        (photos / "damaged.png").write_bytes(b"\x89PNG")
        run_batch([GradCAM(model, "layer4")], photos, FOLDER / "run", "nodule")
        plain = write_demo_study(Path(temporary) / "study", n_images=24).model_dump()
        plain["skip"] = ("faithfulness", "robustness", "sanity")
        plain["sample_sizes"]["gallery"] = 4
        audit.run_audit(Config.from_source(plain), FOLDER / "audit")
    run = audit.AuditRun(FOLDER / "audit")
    run.report_path.unlink()  # large, and never read back
    expected = {
        "version": __version__,
        "target": explanation.target,
        "score": explanation.score,
        "attribution_sum": float(np.sum(explanation.attribution)),
        "verdicts": [[verdict.question, verdict.conclusion, verdict.direction] for verdict in run.verdicts],
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
