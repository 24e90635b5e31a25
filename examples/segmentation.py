"""One region of a segmentation
============================

Why does a segmentation model mark this region? A small model is trained here on synthetic radiographs with two findings and
explained region by region.

`python examples/segmentation.py [STEPS] [IMAGES]` runs the same code as a script, in about a minute, and writes
segmentation.png.
"""

# %%
# The model
# ---------
# The layers of the bundled model, and a head that scores every class at every position.

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from camscope import GradCAM, HiResCAM
from camscope.errors import TargetError
from camscope.phantom import CATEGORIES, draw_findings, load_phantom_model, to_model_input
from camscope.render import CaptionedImage, draw_contact_sheet, draw_contours, encode_image
from camscope.targets import Region

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 400
IMAGES = int(sys.argv[2]) if len(sys.argv) > 2 else 600
BATCH = 8
ENLARGED = 3  # times, before the outline is drawn, so that it is thin


class Segmenter(nn.Module):
    """The bundled model without its head, and a head for every position: (N,1,H,W) -> (N,4,H,W)."""

    def __init__(self) -> None:
        super().__init__()
        bundled = load_phantom_model()
        self.early = nn.Sequential(
            bundled.conv1, bundled.bn1, bundled.relu, bundled.maxpool, bundled.layer1, bundled.layer2
        )
        self.encoder = nn.Sequential(bundled.layer3, bundled.layer4)
        self.head = nn.Sequential(nn.Conv2d(32 + 96, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, len(CATEGORIES), 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """As torchvision's segmentation models return it."""
        fine = self.early(x)
        coarse = F.interpolate(self.encoder(fine), fine.shape[2:], mode="bilinear", align_corners=False)
        scores = self.head(torch.cat([fine, coarse], 1))
        return {"out": F.interpolate(scores, x.shape[2:], mode="bilinear", align_corners=False)}


# %%
# Training
# --------
# Each radiograph has two findings, and a mask of each. All weights are trained. Batch norms keep their statistics.


def radiograph(seed: int) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """Draw a radiograph with two findings, and the mask of each."""
    return draw_findings(seed, [1 + seed % 3, 1 + (seed + 1) % 3])


def train(model: Segmenter, steps: int = STEPS, seed: int = 0) -> None:
    """Train all weights; batch norms keep the bundled statistics."""
    torch.manual_seed(seed)
    drawn = [radiograph(10_000 + seed + i) for i in range(IMAGES)]
    images = to_model_input(np.stack([image for image, _ in drawn]))
    truth = torch.zeros(IMAGES, *images.shape[2:], dtype=torch.long)
    for labels, (_, masks) in zip(truth, drawn, strict=True):
        for name, mask in masks.items():
            labels[torch.from_numpy(mask)] = CATEGORIES.index(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps + 1)
    for step in range(steps):
        rows = torch.randint(IMAGES, (BATCH,))
        loss = F.cross_entropy(model(images[rows])["out"], truth[rows], weight=torch.tensor([0.2, 1.0, 1.0, 1.0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {float(loss.detach()):.3f}")


model = Segmenter().eval()
train(model)

# %%
# Three targets
# -------------
# Each finding is explained by its class, by one of its pixels, and by its mask.


def build_targets(name: str, mask: NDArray[np.bool_]) -> list[tuple[type[GradCAM | HiResCAM], Region]]:
    """Return methods and targets for a finding."""
    down, across = np.nonzero(mask)
    middle = len(down) // 2
    point = (float(across[middle]) + 0.5, float(down[middle]) + 0.5)
    return [
        (GradCAM, Region(label=name)),
        (GradCAM, Region(label=name, point=point)),
        (HiResCAM, Region(label=name, mask=mask)),
    ]


def draw_prediction(image: NDArray[np.uint8], x: Tensor) -> CaptionedImage:
    """Draw the outline of what the model finds."""
    with torch.no_grad():
        classes = model(x[None])["out"][0].argmax(0).numpy()
    large = image.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)[..., None].repeat(3, axis=2)
    outline = (classes > 0).repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1).astype(float)
    return CaptionedImage(draw_contours(large, outline, 0.5), "predicted findings")


rows = []
for seed in (3, 4, 5):
    image, masks = radiograph(seed)
    x = to_model_input(image[None])[0]
    row: list[CaptionedImage | None] = [draw_prediction(image, x)]
    for name, mask in masks.items():
        for method, region in build_targets(name, mask):
            try:
                explanation = method(model, class_names=CATEGORIES).explain(x, region)
            except TargetError as error:  # the model predicts no such region: nothing to explain
                print(f"{seed}  {name}: {error}")
                row.append(None)
                continue
            values = explanation.heatmap(scale=None).clip(min=0)
            share = values[mask].sum() / values.sum()
            print(f"{seed}  {explanation.caption}: {share:.0%} in the finding, {mask.mean():.1%} of the image")
            text = explanation.label.removesuffix(" of the input")
            row.append(CaptionedImage(explanation.overlay(), f"{method.name}: {text} · {share:.0%} inside"))
    rows.append(row)

# %%
# Grad-CAM's channel weights for one pixel apply to the whole image, so its map lights up other places too. HiResCAM weighs each
# cell. In each case its map of the mask has the largest share in the finding. The picture shows the first finding of each
# radiograph; segmentation.png has both.

Path("segmentation.png").write_bytes(encode_image(draw_contact_sheet(rows, columns=7, height=240), ".png"))
Image.fromarray(draw_contact_sheet([row[:4] for row in rows], columns=4, height=240))
