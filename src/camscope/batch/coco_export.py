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
from camscope.safe_files import writing

SCORE = "score: the model's probability of the category; peak: a box's largest value, of the map's"


def annotations(one: Explanation, threshold: float) -> list[dict[str, Any]]:
    """What reaches `threshold` times the maximum, on the original's pixels: a box, an outline and an area for each piece.

    An outline's holes are filled, as COCO's polygons have none. GeometryError where the place on the image is unknown.
    """
    if one.placement is None:
        raise GeometryError("where the map lies on the image is unknown")
    one._expect_flat()
    values = one.heatmap("image")
    outlines = {_bounds(points): points for points in render.contours(values, threshold)}
    found = []
    for box in render.boxes(values, threshold):
        points = outlines[box.left, box.top, box.width, box.height]
        found.append(
            {
                "bbox": [box.left, box.top, box.width, box.height],
                "segmentation": [points[:, ::-1].ravel().tolist()],
                "area": _area(points),
                "iscrowd": 0,
                "score": one.probability,
                "peak": round(box.peak, 6),
            }
        )
    return found


class Coco:
    """A COCO file that is written as it goes: of its images and annotations none is kept."""

    def __init__(self, file: BinaryIO, images: BinaryIO, categories: Sequence[str]) -> None:
        self._file, self._images = file, images
        self._names = list(categories)
        self._others: dict[str, int] = {}  # what is no class of the model, such as words, after its classes
        self._written = self._seen = 0

    def image(self, row: Mapping[str, Any], size: tuple[int, ...]) -> None:
        """The image of a row, once; its number is that of the manifest's row."""
        height, width = size
        told = {"id": row["row"], "file_name": row["path"], "height": height, "width": width, "name": row["id"]}
        self._images.write(_item(told, first=not self._seen))
        self._seen += 1

    def map(self, row: Mapping[str, Any], target: int | None, found: Sequence[Mapping[str, Any]]) -> None:
        """What was found in the map of a row, for the class of an index, or for none."""
        for one in found:
            category = self._category(row["label"], target)
            told = {"id": self._written + 1, "image_id": row["row"], "category_id": category, **one}
            told |= {"method": row["method"], "layer": row["layer"]}
            self._file.write(_item(told, first=not self._written))
            self._written += 1

    def _category(self, label: str, target: int | None) -> int:
        if target is None or target >= len(self._names):
            return self._others.setdefault(label, len(self._names) + len(self._others) + 1)
        return target + 1

    def end(self, info: Mapping[str, Any]) -> None:
        """What goes behind the annotations."""
        self._file.write(b'\n],\n"images": [')
        self._images.seek(0)
        shutil.copyfileobj(self._images, self._file)
        named = [{"id": number, "name": name} for number, name in enumerate([*self._names, *self._others], start=1)]
        self._file.write(f'\n],\n"categories": {json.dumps(named)},\n"info": {json.dumps(info)}\n}}\n'.encode())


@contextmanager
def coco(path: Path, categories: Sequence[str], info: Mapping[str, Any], *, overwrite: bool) -> Iterator[Coco]:
    """A COCO file, which is there when all is well at the end. `categories`: their numbers are 1, 2 … in this order."""
    with writing(path, overwrite=overwrite) as file, tempfile.TemporaryFile() as images:
        file.write(b'{\n"annotations": [')
        made = Coco(file, images, categories)
        yield made
        made.end({"description": SCORE, **info})


def _item(value: Mapping[str, Any], *, first: bool) -> bytes:
    return (b"\n" if first else b",\n") + json.dumps(value).encode()


def _bounds(points: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """Left, top, width and height of an outline: no two of one map's pieces or holes share all four."""
    (top, left), (bottom, right) = points.min(0).tolist(), points.max(0).tolist()
    return int(left), int(top), int(right - left), int(bottom - top)


def _area(points: NDArray[np.float64]) -> float:
    """Of a closed outline, in pixels."""
    rows, columns = points.T
    return float(abs(rows @ np.roll(columns, -1) - columns @ np.roll(rows, -1)) / 2)
