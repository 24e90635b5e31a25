"""One box of a detector
=====================

Why does a detector see a nodule here? A small RetinaNet is trained on synthetic radiographs with two findings and explained box
by box.

**This page is not executed** when the documentation is built, since the training takes about three minutes on two cores.
`python examples/detection.py` runs it and writes this picture:

.. image:: ../explanation/targets/detection.webp
   :alt: Detections, and for each of the two boxes LayerCAM, Grad-CAM and D-RISE

LayerCAM has a map for each box. Grad-CAM weighs a channel as a whole, so its map shows the class wherever such features are.
"""

# %%
# The detector
# ------------
# Torchvision's RetinaNet on the layers of the bundled model. Images come as the model's own input.

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from camscope import DRISE, Explanation, GradCAM, LayerCAM
from camscope.errors import TargetError
from camscope.phantom import draw_findings, load_phantom_model, to_model_input
from camscope.render import Box as Rectangle
from camscope.render import CaptionedImage, draw_boxes, draw_contact_sheet, encode_image
from camscope.targets import Box

NAMES = ("background", "nodule", "effusion", "pneumothorax")
STEPS, BATCH, DRAWN = 1200, 8, 800
MASKS = 1000  # of D-RISE, for each box
ENLARGED = 3  # times, before the boxes are drawn, so that they are thin


class Trunk(nn.Module):
    """The bundled net without its head: (N,1,128,128) -> (N,96,16,16)."""

    out_channels = 96

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(OrderedDict(list(load_phantom_model().named_children())[:-2]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """One level of features."""
        return {"0": self.body(x)}


def detector() -> RetinaNet:
    """Torchvision's RetinaNet on the frozen trunk; images come as the trunk's own input."""
    anchors = AnchorGenerator(sizes=((10, 18, 32, 56),), aspect_ratios=((0.5, 1.0, 2.0),))
    model = RetinaNet(
        Trunk(), len(NAMES), min_size=128, max_size=128, image_mean=[0.0], image_std=[1.0], anchor_generator=anchors
    )
    return model.eval()


# %%
# Training
# --------
# Each radiograph has two findings, and a box for each. Only the heads are trained.


def radiograph(seed: int) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """A drawing with two findings, and the mask of each."""
    return draw_findings(seed, [1 + seed % 3, 1 + (seed + 1) % 3])


def box(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a mask."""
    rows, columns = np.nonzero(mask)
    return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)


def train(model: RetinaNet, steps: int = STEPS, seed: int = 0) -> None:
    """The heads; the trunk stays as it is."""
    torch.manual_seed(seed)
    drawn = [radiograph(10_000 + seed + i) for i in range(DRAWN)]
    images = to_model_input(np.stack([image for image, _ in drawn]))
    boxes = [
        {
            "boxes": torch.tensor([box(mask) for mask in found.values()]),
            "labels": torch.tensor([NAMES.index(name) for name in found]),
        }
        for _, found in drawn
    ]
    model.backbone.requires_grad_(False)
    model.training = True  # losses are asked for; every part stays in eval mode
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, steps + 1)
    for step in range(steps):
        rows = torch.randint(len(images), (BATCH,))
        losses = model(list(images[rows]), [boxes[i] for i in rows.tolist()])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {float(loss.detach()):.3f}")
    model.eval()


# %%
# Three methods for one box
# -------------------------
# LayerCAM and Grad-CAM read a layer. D-RISE only uses the detections of 1000 masked images. A target `Box` is matched in every
# forward pass, so each box has its own map.


def asked(model: RetinaNet, x: Tensor, question: Box) -> Iterator[Callable[[], Explanation]]:
    """Three methods of one box: two of a layer, and D-RISE, which only looks at what the detector says."""
    for method in (LayerCAM, GradCAM):
        yield partial(method(model, "backbone.body.layer4", class_names=NAMES).explain, x, question)
    yield partial(DRISE(model, n_samples=MASKS, class_names=NAMES).explain, x, question)


# %%
# Two boxes of one image
# ----------------------
# The figure has a row for each radiograph: the detections, then three maps for each of the two boxes.


def main(folder: Path = Path(), steps: int = STEPS) -> None:
    """Two boxes of one image, each with a map of its own."""
    model = detector()
    train(model, steps)
    rows = []
    for seed in (3, 4, 5):
        image, found = radiograph(seed)
        x = to_model_input(image[None])[0]
        with torch.no_grad():
            (said,) = model(x[None])
        sure = [
            corners
            for corners, score in zip(said["boxes"].tolist(), said["scores"].tolist(), strict=True)
            if score > 0.5
        ]
        edges = [[round(ENLARGED * edge) for edge in corners] for corners in sure]
        rectangles = [Rectangle(left, top, right - left, bottom - top, 1.0) for left, top, right, bottom in edges]
        large = image.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)[..., None].repeat(3, axis=2)
        row: list[CaptionedImage | None] = [CaptionedImage(draw_boxes(large, rectangles), "detections over 0.5")]
        rows.append(row)
        for name, mask in found.items():
            for explain in asked(model, x, Box(*box(mask), label=name)):
                try:
                    one = explain()
                except TargetError as missed:  # no detection there: nothing to explain
                    print(f"{seed}  {name}: {missed}")
                    row.append(None)
                    continue
                inside = one.heatmap(scale=None).clip(min=0)
                share = inside[mask].sum() / inside.sum()
                print(
                    f"{seed}  {one.caption}: {share:.2f} of its energy in the finding ({mask.mean():.3f} of the image)"
                )
                row.append(CaptionedImage(one.overlay(), f"{one.method}: {name} · {share:.2f} inside"))
    (folder / "detection.png").write_bytes(encode_image(draw_contact_sheet(rows, columns=7, height=288), ".png"))
    print("detection.png")


if __name__ == "__main__":
    main()
