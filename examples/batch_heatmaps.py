"""Heatmaps of a folder, stopped and resumed
=========================================

A batch run writes the maps of a folder of images into one Parquet dataset. It can be killed at any moment and started again.

Needs `pip install ".[batch]"`. `python examples/batch_heatmaps.py [FOLDER] [COUNT]` runs the same code as a script.
"""

# %%
# The images
# ----------
# 24 synthetic radiographs, and one file that is not an image.

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from camscope import GradCAM, LayerCAM, load_model
from camscope.batch import BatchRun, run_batch
from camscope.phantom import draw_radiograph

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "camscope-batch-example")
count = int(sys.argv[2]) if len(sys.argv) > 2 else 24
images = folder / "images"
images.mkdir(parents=True, exist_ok=True)
(images / "broken.png").write_bytes(b"not an image")
for seed in range(count):
    finding = (None, "nodule", "effusion", "pneumothorax")[seed % 4]
    Image.fromarray(draw_radiograph(seed=seed, finding=finding).image).save(images / f"scan-{seed:03d}.png")

# %%
# The run
# -------
# There is one row for each image and method. Both methods share a forward and a backward pass. A file that cannot be read becomes
# a row with its reason, and the run continues.

model = load_model("phantom")  # or your own nn.Module, with preprocess=weights.transforms()
explainers = [GradCAM(model), LayerCAM(model)]
outcome = run_batch(explainers, images, folder / "heatmaps", overlays="jpg", batch_size=8)
print(f"{outcome.n_processed} images, {outcome.n_failures} without a map")
for reason, times in outcome.failure_counts.items():
    print(f"  {times} x {reason}")

# %%
# Start again
# -----------
# Each part file is complete or missing, so the parts that exist are the record of what is done. The same call after a crash
# computes only what is missing. Here nothing is.

again = run_batch(explainers, images, folder / "heatmaps", overlays="jpg", batch_size=8)
print(f"started again: {again.n_done_before} were there, {again.n_processed} to do")

# %%
# Read the rows
# -------------
# The rows are a Parquet dataset: an Arrow table, or explanations one by one.

run = BatchRun(folder / "heatmaps")
table = run.table(["label", "method", "probability", "status"])
labels = table.group_by(["method", "label"]).aggregate([("probability", "mean")]).sort_by("label")
for row in labels.drop_null().to_pylist():
    print(f"{row['method']:>9} {row['label']:<14} mean probability {row['probability_mean']:.2f}")

# %%
# An explanation from a run has the raw map, as if it had been computed just now.

nodules = [explanation for explanation in run if explanation.label == "nodule" and explanation.method == "gradcam"]
for explanation in nodules:
    row, column = np.unravel_index(int(explanation.attribution.argmax()), explanation.grid)
    name = Path(explanation.name).name
    print(f"{name}: {explanation.label_and_score}, peak in cell ({row}, {column}) of {explanation.grid}")
nodules[0]

# %%
# `camscope show` draws a contact sheet of a run, and `camscope evaluate` compares its maps with masks. See
# :doc:`/how-to/batch` for shards, Slurm and Ray.
