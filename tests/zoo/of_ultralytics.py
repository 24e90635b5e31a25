"""Models of Ultralytics, which an environment of their own asks: tests/models/test_ultralytics.py, `make test-yolo`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UltralyticsRow:
    """One architecture: the size (H,W) of the input, the layer that is chosen, and the grid of its map."""

    name: str
    size: tuple[int, int]
    layer: str
    grid: tuple[int, int]


SIZE, NECK = (64, 96), ("neck", (8, 12))
ROWS = [
    *(UltralyticsRow(name, SIZE, *NECK) for name in ("yolov5n", "yolov8n", "yolov9t", "yolov10n")),
    *(UltralyticsRow(name, SIZE, *NECK) for name in ("yolo11n", "yolo12n", "yolo26n")),
    *(UltralyticsRow(f"yolov8n-{task}", SIZE, *NECK) for task in ("seg", "pose", "obb")),
    UltralyticsRow("yolov8n-rtdetr", SIZE, *NECK),
    UltralyticsRow("yolo11n-cls", SIZE, "model.model.10.conv", (2, 3)),
]
HEAD = """
## Ultralytics

`make test-yolo` measures these in a separate environment. On four of the detectors, Grad-CAM and LayerCAM of a box at each level
are compared with plain `torch.autograd.grad`. Boxes and scores of all detectors are compared with `predict`. The
[recipe](../recipes/yolo.md#methods-without-a-map) lists the methods without a map.

| architecture | input | layer chosen | map |
|---|---|---|---|
"""


def section() -> str:
    """The section of the page of models."""
    return HEAD + "".join(
        f"| {row.name} | 3×{row.size[0]}×{row.size[1]} | `{row.layer}` | {row.grid[0]}×{row.grid[1]} |\n"
        for row in ROWS
    )
