"""Draw the pictures of the README again: `make assets`. Everything in them is made here, from phantoms."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from typer.testing import CliRunner

from camscope import GradCAM, load_model
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.cli import app
from camscope.hooks import extract_features
from camscope.images.preprocess import Preprocess
from camscope.phantom import PREPROCESSING, draw_radiograph
from camscope.render import RGBImage, draw_channel_grid, draw_image_grid, encode_image

HERE = Path(__file__).parent


def demo() -> None:
    """phantoms.png: what `camscope demo` shows."""
    with TemporaryDirectory() as folder:
        result = CliRunner().invoke(app, ["demo", "--output", folder], catch_exceptions=False)
        if result.exit_code:
            raise SystemExit(result.output)
        write_bytes(HERE / "phantoms.png", (Path(folder) / "demo.png").read_bytes())


def views() -> RGBImage:
    """views.png: the same explanation as colors, outlines, boxes, and where a crop hides a part of the image."""
    model, scan = load_model("phantom"), draw_radiograph(seed=5, finding="effusion", size=256)
    size, mean, std = PREPROCESSING
    cropping = Preprocess(resize=(size + 32, size + 32), crop=size, mean=(mean,), std=(std,), channels=1)
    whole = GradCAM(model, "layer4").explain(scan.image, "effusion")
    cropped = GradCAM(model, "layer4", preprocess=cropping).explain(scan.image, "effusion")
    pictures = [
        whole.overlay(colorbar=True),
        whole.overlay(contour=[0.3, 0.6, 0.9]),
        whole.overlay(box_threshold=0.5),
        cropped.overlay(),
    ]
    captions = ["overlay(bar=True)", "overlay(contour=[0.3, 0.6, 0.9])", "overlay(boxes=0.5)", "cropped: not covered"]
    return draw_image_grid(pictures, captions, columns=4, height=288)


def channels() -> RGBImage:
    """channels.png: the feature maps of `layer1`."""
    model, scan = load_model("phantom"), draw_radiograph(seed=5, finding="effusion")
    size, mean, std = PREPROCESSING
    way = Preprocess(resize=(size, size), mean=(mean,), std=(std,), channels=1)
    x, _ = way(np.repeat(scan.image[..., None], 3, axis=2))
    return draw_channel_grid(
        extract_features(model, "layer1", x[None])["layer1"][0].numpy(), max_channels=16, columns=8
    )


if __name__ == "__main__":
    demo()
    write_bytes(HERE / "views.png", encode_image(views(), ".png"))
    write_bytes(HERE / "channels.png", encode_image(channels(), ".png"))
