"""Where the maps of a state-space model lie: EfficientViM, trained to name a drawn shape at a random place.

    python -m benchmarks.state_space [--steps 500] [--write]

The images are 128 pixels wide: smooth noise, and a square, a disk or a cross of 28 to 40 pixels. A map is right where its
peak lies in the box of the shape. The chance is the mean share of the image that the box covers. The class score of
EfficientViM is the mean of four heads. Three of them read the hidden states of the stages, and the last reads the layer
`norm.3`, so a CAM there explains one part of the score. --write saves the figures in benchmarks/results/state_space.json.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from camscope import GradCAM, HiResCAM, IntegratedGradients, Occlusion
from camscope.optional_packages import require

RESULTS = Path(__file__).parent / "results" / "state_space.json"
SIDE, SHAPES, N_TEST = 128, ("square", "disk", "cross"), 100
MARGIN = 4  # pixels between a shape and the border


class ShapeImages(NamedTuple):
    """Images (N,3,128,128), the class (N,) of the shape in each, and its box (N,4) as left, top, right, bottom."""

    images: Tensor
    classes: Tensor
    boxes: Tensor


def draw_images(n_images: int, random: np.random.Generator) -> ShapeImages:
    """Draw shapes in random colors at random places, on smooth noise."""
    import cv2

    images = np.empty((n_images, SIDE, SIDE, 3), np.float32)
    classes, boxes = random.integers(len(SHAPES), size=n_images), np.empty((n_images, 4), np.int64)
    for n in range(n_images):
        noise = random.normal(0, 1, (8, 8, 3)).astype(np.float32)
        images[n] = 0.4 * cv2.resize(noise, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
        width = int(random.integers(28, 41))
        left, top = random.integers(MARGIN, SIDE - width - MARGIN, size=2).tolist()
        boxes[n] = left, top, left + width, top + width
        images[n, top : top + width, left : left + width][draw_shape(int(classes[n]), width)] = random.uniform(1, 2, 3)
    return ShapeImages(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(classes), torch.from_numpy(boxes))


def draw_shape(shape: int, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the mask (width,width) of a square, a disk or a cross."""
    y, x = np.abs(np.mgrid[:width, :width] - (width - 1) / 2) / (width / 2)
    mask: np.ndarray[Any, np.dtype[np.bool_]] = ((y <= 1) & (x <= 1), y**2 + x**2 <= 1, np.minimum(y, x) <= 1 / 3)[
        shape
    ]
    return mask


def train(steps: int, seed: int = 0) -> nn.Module:
    """Train EfficientViM-M1 from random weights."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model: nn.Module = require("timm", extra="hub").create_model("efficientvim_m1", num_classes=len(SHAPES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        images, classes, _ = draw_images(32, random)
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def compute_peak_share(explainer: Any, data: ShapeImages) -> float:
    """Return the share of images where the peak of the map for the shown class lies in the shape's box."""
    n_right = 0
    for image, label, (left, top, right, bottom) in zip(*data, strict=True):
        heatmap = explainer.explain(image, int(label)).heatmap("input")
        y, x = np.unravel_index(int(np.nanargmax(heatmap)), heatmap.shape)
        n_right += int(left <= x < right and top <= y < bottom)
    return n_right / len(data.images)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, explain, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_space", description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="steps of the training, of 32 images each")
    parser.add_argument("--write", action="store_true", help=f"write the figures into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    model = train(chosen.steps)
    data = draw_images(N_TEST, np.random.default_rng(10_000))
    with torch.no_grad():
        accuracy = float((model(data.images).argmax(1) == data.classes).float().mean())
    sizes = (data.boxes[:, 2] - data.boxes[:, 0]).double()
    explainers = {
        "Grad-CAM, default layer": GradCAM(model),
        "Grad-CAM, patch_embed": GradCAM(model, "patch_embed"),
        "HiResCAM, patch_embed": HiResCAM(model, "patch_embed"),
        "Integrated Gradients": IntegratedGradients(model, n_steps=16),
        "Occlusion": Occlusion(model, window=32, stride=16),
    }
    shares = {name: compute_peak_share(explainer, data) for name, explainer in explainers.items()}
    default_layer = GradCAM(model).explain(data.images[0], 0).layer
    figures = {
        "machine": machine("cpu"), "steps": chosen.steps, "n_images": N_TEST, "accuracy": round(accuracy, 3),
        "chance": round(float((sizes / SIDE).square().mean()), 3), "default_layer": default_layer,
        "peak_in_box": {name: round(share, 3) for name, share in shares.items()},
    }  # fmt: skip
    print(json.dumps(figures, indent=1), f"\n{time.perf_counter() - start:.0f} s")
    if chosen.write:
        RESULTS.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
