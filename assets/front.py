"""Draw front.png, the first picture of the README: two classes of a photograph, a flagged map, and a marker that a map misses."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from torch import nn

from benchmarks.train_phantom import train_phantom_model
from camscope import GradCAM, load_model
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.phantom import CATEGORIES, draw_radiograph, to_model_input
from camscope.render import CaptionedImage, RGBImage, draw_image_grid, encode_image

HERE = Path(__file__).parent
PHOTO = HERE / "astronaut.jpg"  # Eileen Collins, NASA, public domain
HEIGHT = 320
MARKER_SEED = 5_000_000


def main(
    weights: Annotated[Path | None, typer.Option(help="A checkpoint of ResNet-18, where none can be fetched.")] = None,
) -> None:
    """Draw front.png: about two minutes, in which a small model is trained on a shortcut."""
    panels = [*_draw_photo_panels(weights), _draw_marker_panel()]
    figure = draw_image_grid(
        [panel.image for panel in panels],
        [panel.caption for panel in panels],
        columns=len(panels),
        height=HEIGHT,
        flags=[panel.flag for panel in panels],
    )
    write_bytes(HERE / "front.png", encode_image(figure, ".png"))


def _draw_photo_panels(weights: Path | None) -> list[CaptionedImage]:
    """Return the photograph, the maps of two classes, and a map without positive evidence."""
    cam = GradCAM(load_model("resnet18", weights=weights), "layer4")
    answer, shuttle, zebra = cam.explain_classes(PHOTO, [None, "space shuttle", "zebra"])
    return [
        CaptionedImage(np.asarray(Image.open(PHOTO).convert("RGB")), "photograph"),
        CaptionedImage(shuttle.overlay(), "Where is the space shuttle?"),
        CaptionedImage(answer.overlay(), f"Why does ResNet-18 answer “{answer.label}”?"),
        CaptionedImage(zebra.overlay(), "And a zebra? The map is flagged.", zebra.warning_text),
    ]


def _draw_marker_panel() -> CaptionedImage:
    """Return the map of a model that reads a marker, and what the model answers without the marker."""
    model = train_phantom_model(0, n_steps=250, n_images=1500, marker_class="nodule", marker_correlation=1.0).model
    marked = draw_radiograph(MARKER_SEED, "nodule", marker_corner="top left")
    plain = draw_radiograph(MARKER_SEED, "nodule")
    nodule = CATEGORIES.index("nodule")
    before, after = (_compute_probability(model, phantom.image, nodule) for phantom in (marked, plain))
    explanation = GradCAM(model, "layer4").explain(to_model_input(marked.image[None])[0], nodule)
    picture = explanation.overlay(mask={"marker": marked.marker_mask}, height=HEIGHT)
    caption = f"Grad-CAM peaks beside the marker. Without the marker, p(nodule) falls from {before:.2f} to {after:.2f}."
    return CaptionedImage(picture, caption)


@torch.no_grad()
def _compute_probability(model: nn.Module, image: RGBImage, index: int) -> float:
    return float(model(to_model_input(image[None])).softmax(1)[0, index])


if __name__ == "__main__":
    typer.run(main)
