"""The pointing game of a trained DeiT-tiny: whether the hottest pixel lies on the object. A Markdown table.

python -m benchmarks.pointing

The input is the photograph stretched to 224 x 224, the target its label. Off-center: the middle of the photograph lies
in none of its boxes, so that whoever guesses the center fails.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import trained
from camscope import METHODS, Explanation, GradCAM, Preprocess
from camscope.errors import CamscopeWarning

METHODS_SHOWN = (
    *("gradcam", "gradcam-elementwise", "legrad", "chefer", "gradeclip", "gradrollout", "rollout", "vitcx"),
    *("center", "randomcam"),
)
AT_ONCE = 20
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Photograph:
    """An image with the boxes (x, y, width, height) of its object."""

    path: Path
    label: int
    boxes: tuple[Box, ...]
    off_center: bool

    def inside(self, height: int, width: int) -> np.ndarray[Any, Any]:
        """(H,W) bool: the pixels whose middle lies in a box."""
        rows, columns = np.mgrid[:height, :width] + 0.5
        mask = np.zeros((height, width), bool)
        for x, y, w, h in self.boxes:
            mask |= (x <= columns) & (columns <= x + w) & (y <= rows) & (rows <= y + h)
        return mask


def photographs() -> list[Photograph]:
    """Those with boxes."""
    folder = trained.DATA / "imagenet_boxes"
    table = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    boxes: dict[int, list[Box]] = {}
    for one in table["annotations"]:
        boxes.setdefault(one["image_id"], []).append(tuple(one["bbox"]))
    return [
        Photograph(
            folder / "images" / one["file_name"],
            one["imagenet_label"],
            tuple(boxes[one["id"]]),
            not one["centre_in_box"],
        )
        for one in table["images"]
    ]


def explained(method: str, images: Sequence[Photograph]) -> list[Explanation]:
    """One map an image, of its label."""
    way = Preprocess(resize=(224, 224), mean=trained.MEAN, std=trained.STD)
    tool = GradCAM(*trained.model_and_layer("deit_tiny"), preprocess=way).with_method(method)
    found: list[Explanation] = []
    for start in range(0, len(images), AT_ONCE):
        part = images[start : start + AT_ONCE]
        found += tool.explain_batch([one.path for one in part], [one.label for one in part])
    return found


def scored(answer: Explanation, image: Photograph) -> tuple[bool, float]:
    """Whether the hottest pixel lies in a box, and how much of the map does; 0 of an empty one."""
    heat = np.clip(answer.heatmap(), 0, None)
    mask = image.inside(*heat.shape)
    return bool(mask.flat[int(heat.argmax())]), float(heat[mask].sum() / heat.sum()) if heat.sum() else 0.0


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's, in which the rate lies with 95 %."""
    z, p = 1.96, hits / count
    middle, half = p + z * z / 2 / count, z * math.sqrt(p * (1 - p) / count + z * z / 4 / count**2)
    scale = 1 + z * z / count
    return (middle - half) / scale, (middle + half) / scale


def table(images: Sequence[Photograph]) -> str:
    """Markdown: a row a method."""
    off = [i for i, one in enumerate(images) if one.off_center]
    lines = [
        f"| method | class-specific | off-center, n = {len(off)} | 95 % | all, n = {len(images)} | map in the boxes |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS_SHOWN:
        rows = [scored(*pair) for pair in zip(explained(method, images), images, strict=True)]
        hits, every = sum(rows[i][0] for i in off), sum(hit for hit, _ in rows)
        low, high = interval(hits, len(off))
        kind = METHODS[method]
        asks = "control" if kind.control else "yes" if kind.class_specific else "no: one map for all classes"
        shares = np.mean([share for _, share in rows])
        cells = [
            f"`{method}`",
            asks,
            f"{hits / len(off):.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{every / len(images):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} | {shares:.2f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    if not trained.here():
        parser.error(f"no trained weights in {trained.DATA.name}")
    warnings.simplefilter("ignore", CamscopeWarning)
    print(table(photographs()))


if __name__ == "__main__":
    main()
