"""Heatmaps of a folder, stopped and resumed
=========================================

Heatmaps of a folder that survive being killed: `python examples/batch_heatmaps.py [FOLDER]` works there.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from camscope import GradCAM, LayerCAM, load_model
from camscope.batch import BatchRun, run_batch
from camscope.phantom import draw_radiograph

FINDINGS = (None, "nodule", "effusion", "pneumothorax")


def main(folder: Path, count: int = 24) -> None:
    """Draw a folder of images, explain them all by two methods, and read what came of it."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        Image.fromarray(draw_radiograph(seed=n, finding=FINDINGS[n % 4]).image).save(images / f"scan-{n:03d}.png")
    (images / "broken.png").write_bytes(b"not an image")

    # One row for each image and method; both methods share a forward and a backward pass.
    model = load_model("phantom")  # or any nn.Module of yours, with preprocess=weights.transforms()
    tools = [GradCAM(model), LayerCAM(model)]
    outcome = run_batch(tools, images, folder / "heatmaps", overlays="jpg", batch_size=8)
    print(f"{outcome.n_processed} images, {outcome.n_failures} without a map")
    for reason, times in outcome.failure_counts.items():
        print(f"  {times} x {reason}")

    # Killed at any instant, or just started again: what is done is not done twice.
    again = run_batch(tools, images, folder / "heatmaps", overlays="jpg", batch_size=8)
    print(f"started again: {again.n_done_before} were there, {again.n_processed} to do")

    # The rows are a Parquet dataset, an Arrow table, or explanations one by one.
    run = BatchRun(folder / "heatmaps")
    table = run.table(["label", "method", "probability", "status"])
    labels = table.group_by(["method", "label"]).aggregate([("probability", "mean")]).sort_by("label")
    for row in labels.drop_null().to_pylist():
        print(f"{row['method']:>9} {row['label']:<14} mean probability {row['probability_mean']:.2f}")
    for one in run:
        row, column = np.unravel_index(int(one.attribution.argmax()), one.grid)
        if one.label == "nodule" and one.method == "gradcam":
            print(f"{Path(one.name).name}: {one.label_and_score}, hottest cell ({row}, {column}) of {one.grid}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("camscope-batch-example"))
