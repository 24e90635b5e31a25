"""Draw the pictures of docs/how-to/figures.md: `python assets/figures.py`. Everything in them is made here, from phantoms."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from camscope import GradCAM, compare, load_model
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.map_interpolation import INTERPOLATIONS
from camscope.phantom import draw_radiograph
from camscope.render import draw_image_grid, encode_image

DOCS = Path(__file__).parents[1] / "docs/how-to"


def interpolations() -> bytes:
    """figures-interpolation.webp: one map as cells, bilinear and smooth, above the same without the image."""
    scan = draw_radiograph(0, "nodule").image
    explanation = GradCAM(load_model("phantom"), "layer4").explain(scan, "nodule")
    row, column = (
        int(np.clip(index, 28, size - 28)) for index, size in zip(explanation.peak, scan.shape, strict=False)
    )
    region = np.s_[row - 28 : row + 28, column - 28 : column + 28]
    overlays = [explanation.overlay(interpolation=name, height=8 * len(scan)) for name in reversed(INTERPOLATIONS)]
    large = np.s_[8 * region[0].start : 8 * region[0].stop, 8 * region[1].start : 8 * region[1].stop]
    names = [f"interpolation: {name}" for name in reversed(INTERPOLATIONS)]
    return encode_image(draw_image_grid([image[large] for image in overlays], names, columns=3, height=320), ".webp")


def article() -> bytes:
    """figures.webp: a PDF of `compare`, drawn by pdftoppm."""
    scan = draw_radiograph(0, "nodule").image
    comparison = compare(load_model("phantom"), scan, ["gradcam", "layercam"], targets=["nodule"])
    with TemporaryDirectory() as folder:
        path = comparison.save(f"{folder}/figure.pdf", width_mm=174)
        command = ["pdftoppm", "-r", "150", "-png", "-singlefile", str(path), f"{folder}/page"]
        subprocess.run(command, check=True)  # noqa: S603 - of this file
        from PIL import Image

        return encode_image(np.asarray(Image.open(f"{folder}/page.png").convert("RGB")), ".webp")


if __name__ == "__main__":
    write_bytes(DOCS / "figures-interpolation.webp", interpolations())
    write_bytes(DOCS / "figures.webp", article())
