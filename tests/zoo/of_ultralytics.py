"""Models of Ultralytics, which the tests of an environment of their own ask: tests/models/test_ultralytics.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UltralyticsRow:
    """One architecture: the size (H,W) of the input, the layer that is chosen, and the grid of its map."""

    name: str
    size: tuple[int, int]
    layer: str
    grid: tuple[int, int]
    reasons: str = "1, 2, 3, 4"


NECK = ("neck", (8, 12))
SIZE = (64, 96)
ROWS = [
    *(UltralyticsRow(name, SIZE, *NECK) for name in ("yolov5n", "yolov8n", "yolov9t", "yolov10n")),
    *(UltralyticsRow(name, SIZE, *NECK, "1, 3, 4") for name in ("yolo11n", "yolo12n", "yolo26n")),
    *(UltralyticsRow(f"yolov8n-{task}", SIZE, *NECK) for task in ("seg", "pose", "obb")),
    UltralyticsRow("yolov8n-rtdetr", SIZE, *NECK, "1, 5, 3, 4"),
    UltralyticsRow("yolo11n-cls", SIZE, "model.model.10.conv", (2, 3), "6"),
]
