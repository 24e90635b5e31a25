"""A batch on a Ray cluster
========================

Maps of a folder by several processes or machines, with Ray.

Needs `pip install ".[ray]"`. `python examples/batch_ray.py [FOLDER] [COUNT]` runs the same code as a script.
"""

# %%
# The images
# ----------
# 32 synthetic radiographs.

import sys
from pathlib import Path

from PIL import Image

from camscope import GradCAM, load_model
from camscope.batch import BatchOptions, BatchOutcome, BatchRun, run_batch
from camscope.phantom import draw_radiograph

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "camscope-ray-example")
count = int(sys.argv[2]) if len(sys.argv) > 2 else 32
images = folder / "images"
images.mkdir(parents=True, exist_ok=True)
for seed in range(count):
    finding = (None, "nodule", "effusion", "pneumothorax")[seed % 4]
    Image.fromarray(draw_radiograph(seed=seed, finding=finding).image).save(images / f"scan-{seed:03d}.png")

# %%
# The run
# -------
# Two workers have a copy of the explainer each. They compute parts of eight images, until none is left. Ray starts on this
# machine and ends with the run. With `address="HOST:PORT"` the workers are on a cluster.


def print_progress(progress: BatchOutcome) -> None:
    """Print the number of finished images. It is called in this process whenever a worker has finished a part."""
    print(f"{progress.n_done_before + progress.n_processed} of {progress.n_images} images")


cam = GradCAM(load_model("phantom"))
options = BatchOptions(chunk_size=8, engine="ray", num_workers=2)
outcome = run_batch(cam, images, folder / "heatmaps", options=options, overwrite=True, on_progress=print_progress)
print(f"{outcome.n_processed} images by Ray, {outcome.n_failures} without a map")

# %%
# The other engine
# ----------------
# Both engines write the same parts, and the parts that exist are the record of what is done. The local engine finds nothing left
# to do.

again = run_batch(cam, images, folder / "heatmaps", options=BatchOptions(chunk_size=8))
print(f"{again.n_done_before} were there, {again.n_processed} to do")

# %%
# The map
# -------
# A map that a worker has computed is read as any other.

nodule = next(explanation for explanation in BatchRun(folder / "heatmaps") if explanation.label == "nodule")
print(nodule.label_and_score)
nodule

# %%
# :doc:`/how-to/batch` describes clusters, shards and Slurm.
