"""COCO: the maps of a run as boxes and outlines on their images, in the JSON that annotation tools read."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.errors import GeometryError
from camscope.explanation import Explanation
from camscope.safe_files import open_atomic

SCORE_DESCRIPTION = "score: the model's probability of the category; peak: a box's largest value, of the map's"


def map_annotations(explanation: Explanation, threshold: float) -> list[dict[str, Any]]:
    """What reaches `threshold` times the maximum, on the original's pixels: a box, an outline and an area for each piece.

    An outline's holes are filled, as COCO's polygons have none. GeometryError where the place on the image is unknown.
    """
    if explanation.placement is None:
        raise GeometryError("where the map lies on the image is unknown")
    explanation._check_two_axes()
    values = explanation.heatmap("image")
    outlines = {_bounding_box(points): points for points in render.find_contours(values, threshold)}
    found = []
    for box in render.find_boxes(values, threshold):
        points = outlines[box.left, box.top, box.width, box.height]
        found.append(
            {
                "bbox": [box.left, box.top, box.width, box.height],
                "segmentation": [points[:, ::-1].ravel().tolist()],
                "area": _polygon_area(points),
                "iscrowd": 0,
                "score": explanation.probability,
                "peak": round(box.peak, 6),
            }
        )
    return found


class CocoWriter:
    """A COCO file that is written as it goes: of its images and annotations none is kept."""

    def __init__(self, file: BinaryIO, image_buffer: BinaryIO, class_names: Sequence[str]) -> None:
        self._file, self._image_buffer = file, image_buffer
        self._class_names = list(class_names)
        self._extra_category_ids: dict[str, int] = {}  # what is no class of the model, such as words, after its classes
        self._n_annotations = self._n_images = 0

    def add_image(self, row: Mapping[str, Any], size: tuple[int, ...]) -> None:
        """The image of a row, once; its number is that of the manifest's row."""
        height, width = size
        told = {"id": row["row"], "file_name": row["path"], "height": height, "width": width, "name": row["id"]}
        self._image_buffer.write(_json_item(told, first=not self._n_images))
        self._n_images += 1

    def add_annotations(
        self, row: Mapping[str, Any], target: int | None, annotations: Sequence[Mapping[str, Any]]
    ) -> None:
        """What was found in the map of a row, for the class of an index, or for none."""
        for one in annotations:
            category = self._category_id(row["label"], target)
            told = {"id": self._n_annotations + 1, "image_id": row["row"], "category_id": category, **one}
            told |= {"method": row["method"], "layer": row["layer"]}
            self._file.write(_json_item(told, first=not self._n_annotations))
            self._n_annotations += 1

    def _category_id(self, label: str, target: int | None) -> int:
        if target is None or target >= len(self._class_names):
            return self._extra_category_ids.setdefault(
                label, len(self._class_names) + len(self._extra_category_ids) + 1
            )
        return target + 1

    def write_footer(self, info: Mapping[str, Any]) -> None:
        """What goes behind the annotations."""
        self._file.write(b'\n],\n"images": [')
        self._image_buffer.seek(0)
        shutil.copyfileobj(self._image_buffer, self._file)
        named = [
            {"id": number, "name": name}
            for number, name in enumerate([*self._class_names, *self._extra_category_ids], start=1)
        ]
        self._file.write(f'\n],\n"categories": {json.dumps(named)},\n"info": {json.dumps(info)}\n}}\n'.encode())


@contextmanager
def open_coco_writer(
    path: Path, class_names: Sequence[str], info: Mapping[str, Any], *, overwrite: bool
) -> Iterator[CocoWriter]:
    """A COCO file, which is there when all is well at the end. `class_names`: their numbers are 1, 2 … in this order."""
    with open_atomic(path, overwrite=overwrite) as file, tempfile.TemporaryFile() as images:
        file.write(b'{\n"annotations": [')
        made = CocoWriter(file, images, class_names)
        yield made
        made.write_footer({"description": SCORE_DESCRIPTION, **info})


def _json_item(value: Mapping[str, Any], *, first: bool) -> bytes:
    return (b"\n" if first else b",\n") + json.dumps(value).encode()


def _bounding_box(points: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """Left, top, width and height of an outline: no two of one map's pieces or holes share all four."""
    (top, left), (bottom, right) = points.min(0).tolist(), points.max(0).tolist()
    return int(left), int(top), int(right - left), int(bottom - top)


def _polygon_area(points: NDArray[np.float64]) -> float:
    """Of a closed outline, in pixels."""
    rows, columns = points.T
    return float(abs(rows @ np.roll(columns, -1) - columns @ np.roll(rows, -1)) / 2)
