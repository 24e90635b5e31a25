"""What the gallery shows: four photographs that scikit-image brings along (CC0 and public domain), and four phantoms."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camscope import METHODS, Explainer
from camscope.explainers.attention.token_attention_explainer import TokenAttentionExplainer
from camscope.phantom import draw_radiograph

PIXELS = ("gradients", "paths", "perturbations", "adapters")  # the folders of the methods whose maps are of pixels
LEFT_OUT = ("drise",)  # of a Box, which takes a detector: docs/explanation/targets.md has its picture


@dataclass(frozen=True)
class Subject:
    """A picture and the question about it; `mask` (H,W): where the thing is, if it is known."""

    name: str
    image: Any
    label: str | None
    mask: "np.ndarray[Any, Any] | None" = None
    phantom: bool = False


def photographs() -> list[Subject]:
    """Of two of them a box says where the thing is; the cat fills its picture, and the astronaut is no bobsled."""
    return [
        Subject("chelsea", photograph("chelsea.png"), "Egyptian cat"),
        Subject("coffee", *_boxed("coffee.png", "espresso", (15, 250, 172, 425))),  # the cup
        Subject("rocket", *_boxed("rocket.jpg", "missile", (125, 410, 303, 342))),
        Subject("astronaut", photograph("astronaut.png"), None),
    ]


def phantoms() -> list[Subject]:
    """One of each finding, and one without."""
    found = {3: "nodule", 5: "effusion", 8: "pneumothorax", 13: "no finding"}
    scans = [draw_radiograph(seed=seed, finding=finding) for seed, finding in found.items()]
    return [
        Subject(finding, scan.image, finding, scan.mask if scan.mask.any() else None, phantom=True)
        for finding, scan in zip(found.values(), scans, strict=True)
    ]


def photograph(name: str) -> "np.ndarray[Any, Any]":
    """(H,W,3): one of scikit-image's."""
    import skimage.data
    import skimage.io

    pixels: np.ndarray[Any, Any] = skimage.io.imread(Path(skimage.data.__file__).parent / name)
    return pixels[..., :3]


def _boxed(file: str, label: str, box: tuple[int, int, int, int]) -> tuple[Any, str, Any]:
    image, (top, bottom, left, right) = photograph(file), box
    mask = np.zeros(image.shape[:2], bool)
    mask[top:bottom, left:right] = True
    return image, label, mask


def of_sheet(sheet: str) -> list[str]:
    """The methods of one of the two sheets, "cams" or "pixels"; those of attention have docs/explanation/attention.md."""
    pixels = [name for name, kind in METHODS.items() if _room(kind) in PIXELS and name not in LEFT_OUT]
    if sheet == "pixels":
        return pixels
    return [
        name
        for name, kind in METHODS.items()
        if name not in (*pixels, *LEFT_OUT) and not issubclass(kind, TokenAttentionExplainer)
    ]


def _room(kind: type[Explainer]) -> str:
    return kind.__module__.split(".")[-2]
