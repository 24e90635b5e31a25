"""A batch on a Ray cluster
========================

Maps of a folder by several processes or machines, with Ray.

**This page is not executed** when the documentation is built, since it starts processes. Needs `pip install ".[ray]"`.
`python examples/batch_ray.py [FOLDER]` prints:

.. code-block:: text

    0 of 32 images
    8 of 32 images
    16 of 32 images
    24 of 32 images
    32 of 32 images
    32 images by Ray, 0 without a map
    32 were there, 0 to do

:doc:`/how-to/batch` describes clusters, shards and Slurm.
"""

# %%
# The run
# -------
# Each worker has its own copy of the explainer and computes one part of eight images after the other. Both engines write the same
# parts, so the local engine finds nothing left to do.

import sys
from pathlib import Path

from PIL import Image

from camscope import GradCAM, load_model
from camscope.batch import BatchOptions, BatchOutcome, BatchRun, run_batch
from camscope.phantom import draw_radiograph

FINDINGS = (None, "nodule", "effusion", "pneumothorax")


def told(so_far: BatchOutcome) -> None:
    """Called in this process whenever a worker has finished a part."""
    print(f"{so_far.n_done_before + so_far.n_processed} of {so_far.n_images} images")


def main(folder: Path, count: int = 32) -> None:
    """Draw a folder of images, explain them by two workers, and go on with the other engine."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        Image.fromarray(draw_radiograph(seed=n, finding=FINDINGS[n % 4]).image).save(images / f"scan-{n:03d}.png")

    # Each worker gets a copy of the explainer, and works off one part of eight images after the other.
    # address="HOST:PORT" is a cluster's; without it Ray starts on this machine, and ends with the run.
    tool, output = GradCAM(load_model("phantom")), folder / "heatmaps"
    outcome = run_batch(
        tool, images, output, options=BatchOptions(chunk_size=8, engine="ray", num_workers=2), on_progress=told
    )
    print(f"{outcome.n_processed} images by Ray, {outcome.n_failures} without a map")

    # The parts are the ledger, whoever wrote them: the local engine finds nothing left to do.
    again = run_batch(tool, images, output, options=BatchOptions(chunk_size=8))
    print(f"{again.n_done_before} were there, {again.n_processed} to do")
    print(f"{len(BatchRun(output))} rows in {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("camscope-ray-example"))
