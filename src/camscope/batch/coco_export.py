"""Write a COCO file: the boxes and outlines of the regions where the maps of a run are strong."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import open_atomic
from camscope.errors import GeometryError
from camscope.explanation import Explanation

ResultRow = Mapping[str, Any]
SCORE_DESCRIPTION = (
    "score: the model's probability of the category; peak: largest value in the box, divided by the maximum of the map"
)


@dataclass(frozen=True)
class RowExport:
    """What the export of one row produced: the number of files, COCO annotations, and an error if there was one.

    `target` is the class index of the row's target, or None if the target is not a class.
    """

    row: ResultRow
    n_files: int = 0
    annotations: Sequence[Mapping[str, Any]] | None = None
    target: int | None = None
    error: str | None = None


def build_coco_annotations(explanation: Explanation, threshold: float) -> list[dict[str, Any]]:
    """Return one COCO annotation for each region in which the map exceeds `threshold` x its maximum. Units are image pixels."""
    if explanation.placement is None:
        raise GeometryError("the position of the map on the image is unknown")
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
    """Writes a COCO file image by image. Written images and annotations are not kept in memory."""

    def __init__(self, file: BinaryIO, image_buffer: BinaryIO, class_names: Sequence[str]) -> None:
        self._file, self._image_buffer = file, image_buffer
        self._n_classes = len(class_names)
        self.extra_category_ids: dict[str, int] = {}  # labels that are not classes of the model
        self._n_annotations = self._n_images = 0

    def add_image_with_annotations(self, row_exports: Sequence[RowExport]) -> None:
        """Write one image to the COCO file, with the annotations of all its rows."""
        row = row_exports[0].row
        height, width = row["image_size"]
        entry = {"id": row["row"], "file_name": row["path"], "height": height, "width": width, "name": row["id"]}
        self._image_buffer.write(_encode_json_list_item(entry, first=not self._n_images))
        self._n_images += 1
        for row_export in row_exports:
            self.add_annotations(row_export.row, row_export.target, row_export.annotations or ())

    def add_annotations(
        self, row: Mapping[str, Any], target: int | None, annotations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the annotations of one row. `target` is a class index, or None if the target is not a class."""
        for annotation in annotations:
            category_id = (target or 0) + 1
            if target is None or target >= self._n_classes:
                new_id = self._n_classes + len(self.extra_category_ids) + 1
                category_id = self.extra_category_ids.setdefault(row["label"], new_id)
            entry = {"id": self._n_annotations + 1, "image_id": row["row"], "category_id": category_id, **annotation}
            entry |= {"method": row["method"], "layer": row["layer"]}
            self._file.write(_encode_json_list_item(entry, first=not self._n_annotations))
            self._n_annotations += 1


@contextmanager
def open_coco_writer(
    path: Path, class_names: Sequence[str], info: Mapping[str, Any], *, overwrite: bool
) -> Iterator[CocoWriter]:
    """Open a COCO file for writing. It only appears on disk if the `with` block succeeds."""
    with open_atomic(path, overwrite=overwrite) as file, tempfile.TemporaryFile() as image_buffer:
        file.write(b'{\n"annotations": [')
        writer = CocoWriter(file, image_buffer, class_names)
        yield writer
        file.write(b'\n],\n"images": [')
        image_buffer.seek(0)
        shutil.copyfileobj(image_buffer, file)
        names = enumerate([*class_names, *writer.extra_category_ids], start=1)
        categories = json.dumps([{"id": number, "name": name} for number, name in names])
        description = json.dumps({"description": SCORE_DESCRIPTION, **info})
        file.write(f'\n],\n"categories": {categories},\n"info": {description}\n}}\n'.encode())


def _encode_json_list_item(value: Mapping[str, Any], *, first: bool) -> bytes:
    return (b"\n" if first else b",\n") + json.dumps(value).encode()
