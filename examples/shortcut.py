"""A shortcut that a map gives away
================================

In the training images every nodule comes with a small marker in a corner, and nothing else does. The model learns the marker.
Do the maps show it?

It takes about two minutes of processor time. `python examples/shortcut.py` runs it in a clone and writes this picture:

.. image:: ../explanation/saliency/shortcut.webp
   :alt: Maps of four methods on radiographs with a nodule and a marker

The cells of `layer4` see the marker from a distance, so the maps of Grad-CAM and LayerCAM peak several pixels away from it. The
maps of the other two peak on it in most images.
"""

# %%
# What is compared
# ----------------
# Two methods that read a layer, and two at the resolution of the input.

import importlib
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from camscope import Explainer, Explanation, GradCAM, IntegratedGradients, LayerCAM, Occlusion
from camscope.phantom import CATEGORIES, Phantom, draw_radiograph, to_model_input
from camscope.plurals import plural
from camscope.render import CaptionedImage, draw_contact_sheet, encode_image

if "__file__" in globals():
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
training = importlib.import_module("benchmarks.train_phantom")

STEPS, DRAWN, JUDGED, SHOWN = 250, 1500, 20, 2
ENLARGED = 3  # times, in the figure
NODULE = CATEGORIES.index("nodule")


def tools(net: nn.Module) -> dict[str, Explainer]:
    """What is compared, by the words of the figure."""
    return {
        "Grad-CAM": GradCAM(net, "layer4", class_names=CATEGORIES),
        "LayerCAM": LayerCAM(net, "layer4", class_names=CATEGORIES),
        "integrated gradients": IntegratedGradients(net, channel_reduction="abs", class_names=CATEGORIES),
        "occlusion, 8 pixels": Occlusion(net, window=8, stride=4, class_names=CATEGORIES),
    }


# %%
# Two measures
# ------------
# How far does the peak lie from the marker, and how dense is the map there?


def distance(heat: NDArray[np.floating], marker: NDArray[np.bool_]) -> float:
    """Pixels from the map's peak to the nearest pixel of the marker."""
    peak = np.unravel_index(heat.argmax(), heat.shape)
    return float(np.sqrt(((np.argwhere(marker) - peak) ** 2).sum(1).min()))


def enrichment(heat: NDArray[np.floating], marker: NDArray[np.bool_]) -> float:
    """The share of what is positive in the map that lies on the marker, over the marker's share of the image."""
    positive = heat.clip(min=0)
    return float(positive[marker].sum() / max(positive.sum(), np.finfo(float).tiny) / marker.mean())


# %%
# The figure
# ----------


def cells(found: list[tuple[Phantom, dict[str, Explanation]]]) -> list[list[CaptionedImage | None]]:
    """A row an image: what the net saw, and its maps."""
    rows: list[list[CaptionedImage | None]] = []
    for phantom, maps in found[:SHOWN]:
        large = phantom.image.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)[..., None].repeat(3, axis=2)
        row: list[CaptionedImage | None] = [CaptionedImage(large, "a nodule, and the marker HB")]
        for name, one in maps.items():
            far = distance(one.heatmap("input", None), phantom.marker_mask)
            row.append(CaptionedImage(one.overlay(), f"{name}: peak off by {plural(round(far), 'pixel')}"))
        rows.append(row)
    return rows


# %%
# Train, verify, explain
# ----------------------
# The model must fail without the marker: only then is the shortcut real. Then each method explains images that have both a
# nodule and the marker.


def main(folder: Path = Path(), steps: int = STEPS, images: int = DRAWN, judged: int = JUDGED) -> None:
    """Train on the shortcut, show that it is one, and ask each method about images that have both nodule and marker."""
    net = training.train_phantom_model(
        0, n_steps=steps, n_images=images, marker_class="nodule", marker_correlation=1.0
    ).model
    plain, marked = (
        training.draw_dataset(10 * judged, 1),
        training.draw_dataset(10 * judged, 1, marker_class="nodule", marker_correlation=1.0),
    )
    print(f"nodules found with the marker: {training.compute_accuracy_by_class(net, marked)['nodule']:.0%}")
    print(f"nodules found without it:      {training.compute_accuracy_by_class(net, plain)['nodule']:.0%}")
    phantoms = [draw_radiograph(5_000_000 + seed, "nodule", marker_corner="top left") for seed in range(judged)]
    found = [
        (one, {name: tool.explain(to_model_input(one.image[None])[0], NODULE) for name, tool in tools(net).items()})
        for one in phantoms
    ]
    print(f"\n{'':22}peak on the marker  pixels from it (median)   enrichment (median)")
    for name in tools(net):
        maps = [(maps[name].heatmap("input", None), one.marker_mask) for one, maps in found]
        far, dense = np.array([distance(*one) for one in maps]), np.array([enrichment(*one) for one in maps])
        print(f"{name:22}{(far < 2).sum():>10} of {judged}{np.median(far):>18.1f}{np.median(dense):>24.1f}")
    (folder / "shortcut.png").write_bytes(encode_image(draw_contact_sheet(cells(found), columns=5, height=300), ".png"))
    print("\nshortcut.png")


if __name__ == "__main__":
    main()
