"""Export maps as boxes and outlines in COCO JSON, which annotation tools read."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from camscope import render
from camscope.errors import GeometryError
from camscope.explanation import Explanation
from camscope.safe_files import open_atomic

SCORE_DESCRIPTION = (
    "score: the model's probability of the category; peak: largest value in the box, divided by the maximum of the map"
)


def map_annotations(explanation: Explanation, threshold: float) -> list[dict[str, Any]]:
    """Return a box, an outline and an area in image pixels for each region above `threshold` times the maximum.

    Holes of an outline are filled, since COCO polygons have none. Raises a GeometryError if the placement is unknown.
    """
    if explanation.placement is None:
        raise GeometryError("where the map lies on the image is unknown")
    explanation._check_two_axes()
    values = explanation.heatmap("image")
    outlines = {}
    for points in render.find_contours(values, threshold):
        (top, left), (bottom, right) = points.min(0).tolist(), points.max(0).tolist()
        outlines[left, top, right - left, bottom - top] = points  # the box identifies an outline of a map
    annotations = []
    for box in render.find_boxes(values, threshold):
        rows, columns = outlines[box.left, box.top, box.width, box.height].T
        annotations.append(
            {
                "bbox": [box.left, box.top, box.width, box.height],
                "segmentation": [np.stack([columns, rows], axis=1).ravel().tolist()],
                "area": float(abs(rows @ np.roll(columns, -1) - columns @ np.roll(rows, -1)) / 2),
                "iscrowd": 0,
                "score": explanation.probability,
                "peak": round(box.peak, 6),
            }
        )
    return annotations


class CocoWriter:
    """Writes a COCO file incrementally, without keeping images and annotations in memory."""

    def __init__(self, file: BinaryIO, image_buffer: BinaryIO, class_names: Sequence[str]) -> None:
        self._file, self._image_buffer = file, image_buffer
        self._class_names = list(class_names)
        self._extra_category_ids: dict[str, int] = {}  # labels that are not classes of the model
        self._n_annotations = self._n_images = 0

    def add_image(self, row: Mapping[str, Any], size: tuple[int, ...]) -> None:
        """Add the image of a row. Call it once per image; its id is the row number."""
        height, width = size
        entry = {"id": row["row"], "file_name": row["path"], "height": height, "width": width, "name": row["id"]}
        self._image_buffer.write(_json_item(entry, first=not self._n_images))
        self._n_images += 1

    def add_annotations(
        self, row: Mapping[str, Any], target: int | None, annotations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add the annotations of a row. `target` is a class index, or None if the target is not a class."""
        for annotation in annotations:
            category_id = (target or 0) + 1
            if target is None or target >= len(self._class_names):
                new_id = len(self._class_names) + len(self._extra_category_ids) + 1
                category_id = self._extra_category_ids.setdefault(row["label"], new_id)
            entry = {"id": self._n_annotations + 1, "image_id": row["row"], "category_id": category_id, **annotation}
            entry |= {"method": row["method"], "layer": row["layer"]}
            self._file.write(_json_item(entry, first=not self._n_annotations))
            self._n_annotations += 1

    def write_footer(self, info: Mapping[str, Any]) -> None:
        """Write what follows the annotations: images, categories and info."""
        self._file.write(b'\n],\n"images": [')
        self._image_buffer.seek(0)
        shutil.copyfileobj(self._image_buffer, self._file)
        names = [*self._class_names, *self._extra_category_ids]
        categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
        self._file.write(f'\n],\n"categories": {json.dumps(categories)},\n"info": {json.dumps(info)}\n}}\n'.encode())


@contextmanager
def open_coco_writer(
    path: Path, class_names: Sequence[str], info: Mapping[str, Any], *, overwrite: bool
) -> Iterator[CocoWriter]:
    """Open a COCO file, which appears only if the `with` block succeeds. The ids of `class_names` are 1, 2 …"""
    with open_atomic(path, overwrite=overwrite) as file, tempfile.TemporaryFile() as image_buffer:
        file.write(b'{\n"annotations": [')
        writer = CocoWriter(file, image_buffer, class_names)
        yield writer
        writer.write_footer({"description": SCORE_DESCRIPTION, **info})


def _json_item(value: Mapping[str, Any], *, first: bool) -> bytes:
    return (b"\n" if first else b",\n") + json.dumps(value).encode()
