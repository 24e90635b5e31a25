"""Evidence: where the answer is known to be, for each image of a run: masks, boxes, points, or a COCO file of them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.batch.manifest import KNOWN
from camscope.batch.rows import digest_of
from camscope.data_files import WORDS, one_error, read_json
from camscope.errors import ImageError, InputError, UndefinedError
from camscope.images.listing import images_of
from camscope.images.photo import read_photo
from camscope.images.scans import is_scan, read_scan
from camscope.measure.namesakes import Namesakes

FAR = 2**20  # pixels from the corner that an outline may reach
UNFIT = "its mask cannot be read, or is of another size than its image"  # whose file may bear a patient's name
Mask = npt.NDArray[np.bool_]
Row = Mapping[str, Any]
Size = tuple[int, ...]


class Evidence(ABC):
    """What says of an image which of its pixels are the evidence."""

    @abstractmethod
    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W) bool of the image of a row; UndefinedError where nothing is known of it."""

    @property
    def digest(self) -> str:
        """8 hex digits that change with what is known, so that no values of two states of it come together."""
        return ""


@dataclass(frozen=True)
class Files(Evidence):
    """Mask pictures named as their images, whatever the suffix: every pixel that is not black is evidence."""

    files: Sequence[str]

    @property
    def digest(self) -> str:
        """Of names, sizes and times of the files."""
        known = [(file, Path(file).stat()) for file in sorted(self.files)]
        return digest_of({file: (status.st_size, status.st_mtime_ns) for file, status in known})

    @cached_property
    def _named(self) -> Namesakes[str]:
        return Namesakes(((file, file) for file in self.files), stems=True)

    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W)"""
        file = self._named.of(str(row["path"]))
        if file is None:
            raise UndefinedError("there is no mask of its name")
        return picture(file, size)


@dataclass(frozen=True)
class Column(Evidence):
    """A column of the manifest: a mask's path, or boxes [[x, y, width, height], …] or points [[x, y], …] as lists or JSON."""

    name: str
    root: Path

    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W)"""
        value = row[self.name]
        if value is None or value in ("", []):
            raise UndefinedError("there is no evidence in its row")
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return picture(str(self.root / value), size)
        with one_error(f"row {row['row']}: {str(value)[:WORDS]!r} in {self.name} is no list of boxes or points"):
            known = np.asarray(json.loads(value) if isinstance(value, str) else value, np.float64)
        if known.ndim == 1:
            known = known[None]
        if known.ndim != 2 or known.shape[1] not in (2, 4):
            raise InputError(
                f"row {row['row']}: {value!r} in {self.name}; expected boxes [x, y, width, height] or points [x, y]"
            )
        return of_boxes(known, size) if known.shape[1] == 4 else of_points(known, size)


@dataclass(frozen=True)
class Coco(Evidence):
    """Annotations of images by file name: boxes, outlines (polygons), or `mask_file`, beside the COCO file.

    `known`: of each image its `file_name`, its size (H,W), and its annotations.
    """

    known: Sequence[tuple[str, Size, Sequence[Mapping[str, Any]]]]
    folder: Path

    @property
    def digest(self) -> str:
        """Of the annotations that count."""
        return digest_of({"images": self.known})

    @classmethod
    def read(cls, path: Path, categories: Iterable[str] = ()) -> "Coco":
        """A COCO file; `categories`: only annotations of these names."""
        message = f"{path}: this is no COCO file of annotations"
        with one_error(message):
            plain = read_json(path, message)
            labels = {one["id"]: one["name"] for one in plain.get("categories", ())}
            wanted = set(categories)
            if unknown := wanted - set(labels.values()):
                raise InputError(
                    f"{path} has no category {sorted(unknown)[0]!r}; there are {', '.join(labels.values())}"
                )
            of: dict[Any, list[Mapping[str, Any]]] = {one["id"]: [] for one in plain["images"]}
            for one in plain["annotations"]:
                if not wanted or labels.get(one["category_id"]) in wanted:
                    of[one["image_id"]].append(one)
            known = [(str(one["file_name"]), (one["height"], one["width"]), of[one["id"]]) for one in plain["images"]]
        return cls(known, path.parent)

    @cached_property
    def _named(self) -> Namesakes[tuple[Size, Sequence[Mapping[str, Any]]]]:
        return Namesakes((name, (size, annotated)) for name, size, annotated in self.known)

    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W): all annotations of the image together."""
        there, annotated = self._named.of(str(row["path"])) or (size, ())
        if not annotated:
            raise UndefinedError("there is no annotation of its name")
        if there != tuple(size):
            raise InputError(f"{row['path']} is {tuple(size)} and annotated at {there}; expected the same size")
        made = np.zeros(size, np.bool_)
        with one_error(f"{row['path']}: its annotation cannot be read"):
            for one in annotated:
                made |= self._annotated(one, size)
        return made

    def _annotated(self, one: Mapping[str, Any], size: Size) -> Mask:
        if "mask_file" in one:
            return picture(str(self.folder / one["mask_file"]), size)
        if isinstance(one.get("segmentation"), list) and one["segmentation"]:
            return of_polygons(one["segmentation"], size)
        if isinstance(one.get("segmentation"), Mapping):
            return of_runs(one["segmentation"], size)
        return of_boxes(np.asarray([one["bbox"]], np.float64), size)


def evidence_of(source: str | Path, columns: Sequence[str], root: Path, categories: Iterable[str] = ()) -> Evidence:
    """What `--masks` means: a COCO file, one of the `columns` that a run carries, or a folder of mask pictures.

    A column's name is the column where a folder has it too, which `./name` means, and a Path.
    """
    path = Path(source)
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        return Coco.read(path, categories)
    if isinstance(source, str) and source in columns:
        return Column(source, root)
    if path.is_dir():
        return Files(list(images_of(str(path), deep=True)))
    carried = ", ".join(name for name in columns if name not in KNOWN) or "none"
    raise InputError(f"{source}: no COCO file (.json), no folder of masks, and no column of the manifest ({carried})")


def picture(file: str, size: Size) -> Mask:
    """(H,W), (D,H,W): the pixels of a mask's file that are not black, or 0; it has the image's own size."""
    try:
        volume = is_scan(file) or len(size) == 3  # which a photograph never is: TIFF pages are slices
        known = read_scan(file).values != 0 if volume else read_photo(file).pixels.any(2)
    except ImageError as error:
        raise InputError(f"the mask {error}") from error
    if known.shape != tuple(size):
        raise InputError(f"{file} is {known.shape} and its image {tuple(size)}; expected the same size")
    return np.asarray(known)


def of_boxes(boxes: npt.NDArray[np.float64], size: Size) -> Mask:
    """(M,4) x, y, width, height in pixels -> (H,W): the pixels whose middle a box covers."""
    rows, columns = np.arange(size[0])[:, None] + 0.5, np.arange(size[1]) + 0.5
    made = np.zeros(size, np.bool_)
    for x, y, width, height in boxes:
        made |= (rows >= y) & (rows < y + height) & (columns >= x) & (columns < x + width)
    return made


def of_points(points: npt.NDArray[np.float64], size: Size) -> Mask:
    """(M,2) x, y in pixels -> (H,W): the pixels that hold a point."""
    made = np.zeros(size, np.bool_)
    inside = [(int(y), int(x)) for x, y in points if 0 <= x < size[1] and 0 <= y < size[0]]
    for row, column in inside:
        made[row, column] = True
    return made


def of_runs(runs: Mapping[str, Any], size: Size) -> Mask:
    """COCO's run lengths, of cells outside and inside in turns, column by column -> (H,W)"""
    counts = runs["counts"]
    if not isinstance(counts, list) or list(runs["size"]) != list(size) or sum(counts) != size[0] * size[1]:
        raise InputError("an outline of run lengths; expected counts as a list of numbers that fill its image")
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return np.asarray(inside.reshape(size[1], size[0]).T)


def of_polygons(polygons: Sequence[Sequence[float]], size: Size) -> Mask:
    """Each x, y, x, y … -> (H,W)"""
    import cv2

    made = np.zeros(size, np.uint8)
    for one in polygons:
        points = np.asarray(one, np.float64).reshape(-1, 2)
        if not (np.abs(points) < FAR).all():  # OpenCV goes from row to row, also outside of the image
            raise InputError(f"an outline reaches to {np.abs(points).max()}; expected pixels of its image")
        cv2.fillPoly(made, [np.rint(points).astype(np.int32)], 1)
    return made.astype(np.bool_)
