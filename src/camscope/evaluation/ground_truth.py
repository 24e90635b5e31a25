"""Evidence: where the answer is known to be, for each image of a run: masks, boxes, points, or a COCO file of them.

Namesakes: what is known of images by the names of their files, of which several may be the same in several folders.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from camscope.batch.manifest import KNOWN
from camscope.batch.path_resolver import Locations
from camscope.batch.result_rows import digest_of
from camscope.data_readers import WORDS, one_error, read_json
from camscope.errors import CamscopeError, CategoryError, ImageError, InputError, UndefinedError
from camscope.images.files.source_files import images_of
from camscope.images.mask_files import read_labels
from camscope.mask_labels import ALL, LabelChoice, choose_categories, chosen_names
from camscope.plurals import inflect, plural
from camscope.safe_files import no_file

Known = TypeVar("Known")
Parts = tuple[str, ...]


class Namesakes(Generic[Known]):
    """`each`: a file's path, and what is known of it. `stems`: names count without what is behind their last point."""

    def __init__(self, each: Iterable[tuple[str, Known]], *, stems: bool = False) -> None:
        self._stems = stems
        self._known: dict[str, dict[Parts, Known]] = {}
        for path, known in each:
            parts = self._parts(path)
            self._known.setdefault(parts[-1], {})[parts] = known

    def of(self, path: str) -> Known | None:
        """What is known of an image: of several of its name that whose folders are most its own, from the last one up.

        UndefinedError where no folder tells them apart: it is not known which of them is meant.
        """
        parts = self._parts(path)
        some = self._known.get(parts[-1], {})
        common = {other: _common(parts, other) for other in some}
        best = [other for other, length in common.items() if length == max(common.values())]
        if len(best) > 1:
            raise UndefinedError(f"there are {len(best)} of its name, and no folder tells which is meant")
        return some[best[0]] if best else None

    def _parts(self, path: str) -> Parts:
        plain = PurePosixPath(path.replace("\\", "/"))
        return (*plain.parent.parts, plain.stem if self._stems else plain.name)


def _common(one: Parts, other: Parts) -> int:
    """How many parts are the same, from the last one up."""
    different = (n for n, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


FAR = 2**20  # pixels from the corner that an outline may reach
UNFIT = "its mask cannot be read, or is of another size than its image"  # whose file may bear a patient's name
Mask = npt.NDArray[np.bool_]
Row = Mapping[str, Any]
Size = tuple[int, ...]


class Evidence(ABC):
    """What says of an image which of its pixels are the evidence.

    `source`: what it is, without the name of a file. `categories`: which of the categories of a file count, `left_out`: which
    do not; both are empty where it has no categories.
    """

    source: str = "masks"
    categories: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        counted = f"{', '.join(self.categories)} of {self.source}" if self.categories else self.source
        return f"{counted} (not counted: {', '.join(self.left_out)})" if self.left_out else counted

    @abstractmethod
    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W) bool of the image of a row; UndefinedError where nothing is known of it."""

    @property
    def digest(self) -> str:
        """8 hex digits that change with what is known, so that no values of two states of it come together."""
        return ""


@dataclass(frozen=True)
class Files(Evidence):
    """Mask images named as their images, whatever the suffix. Black, or 0, is outside; `choice`: which labels count."""

    files: Sequence[str]
    choice: LabelChoice = field(default_factory=LabelChoice)

    source = "a folder of masks"

    @property
    def categories(self) -> tuple[str, ...]:  # type: ignore[override]
        """The labels that count, if they were chosen."""
        return self.choice.categories

    @property
    def digest(self) -> str:
        """Of names, sizes and times of the files, and of the labels that count."""
        known = [(file, Path(file).stat()) for file in sorted(self.files)]
        found: dict[str, Any] = {file: (status.st_size, status.st_mtime_ns) for file, status in known}
        return digest_of(found | ({"categories": self.categories} if self.categories else {}))

    @cached_property
    def _named(self) -> Namesakes[str]:
        return Namesakes(((file, file) for file in self.files), stems=True)

    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W)"""
        file = self._named.of(str(row["path"]))
        if file is None:
            raise UndefinedError("there is no mask of its name")
        return picture(file, size, self.choice)


@dataclass(frozen=True)
class Column(Evidence):
    """A column of the manifest: a mask's path, or boxes [[x, y, width, height], …] or points [[x, y], …] as lists or JSON."""

    name: str
    locations: Locations
    choice: LabelChoice = field(default_factory=LabelChoice)

    @property
    def source(self) -> str:  # type: ignore[override]
        """With the column's name."""
        return f"the column {self.name!r}"

    @property
    def categories(self) -> tuple[str, ...]:  # type: ignore[override]
        """The labels that count, if they were chosen."""
        return self.choice.categories

    @property
    def digest(self) -> str:
        """Of the labels that count."""
        return digest_of({"categories": self.categories}) if self.categories else ""

    def expect_inside(self, values: Iterable[object]) -> None:
        """InputError where masks that the column names lie outside the folder that they may be in."""
        outside = 0
        for value in {value for value in values if is_mask_path(value)}:
            try:
                self.locations.resolve(value)
            except InputError:
                outside += 1
        if outside:
            leads = inflect(outside, "leads out of", "lead out of")
            raise InputError(
                f"{plural(outside, 'mask')} in the column {self.name!r} {leads} {self.locations.root or Path.cwd()}, or to a "
                "URL; move all masks there, name a folder that holds them as the root, or pass --anywhere"
            )

    def mask(self, row: Row, size: Size) -> Mask:
        """(H,W)"""
        value = row[self.name]
        if value is None or value in ("", []):
            raise UndefinedError("there is no evidence in its row")
        if is_mask_path(value):
            return picture(mask_source(self.locations, value), size, self.choice, name=value)
        if self.choice.categories not in ((), (ALL,)):
            raise CategoryError(
                f"the category {self.choice.categories[0]!r} of {self.source}, which holds boxes or points: these have none"
            )
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

    `known`: of each image its `file_name`, its size (H,W), and its annotations that count.
    """

    known: Sequence[tuple[str, Size, Sequence[Mapping[str, Any]]]]
    locations: Locations
    categories: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    source = "a COCO file"

    @property
    def digest(self) -> str:
        """Of the annotations that count."""
        return digest_of({"images": self.known})

    @classmethod
    def read(cls, path: Path, categories: Iterable[str] = (), *, anywhere: bool = False, fetch: bool = True) -> "Coco":
        """A COCO file; `categories`: only annotations of these names; needed where there are annotations of several.

        `anywhere`: its masks may lie outside its folder. `fetch`: they may be fetched from other machines.
        """
        message = f"{path}: this is no COCO file of annotations"
        with one_error(message):
            plain = read_json(path, message)
            labels = {one["id"]: str(one["name"]) for one in plain.get("categories", ())}
            of: dict[Any, list[Mapping[str, Any]]] = {one["id"]: [] for one in plain["images"]}
            for one in plain["annotations"]:
                of[one["image_id"]].append(one)
            names = {id(one): _category(one, labels) for one in plain["annotations"]}
            used = set(names.values())
            ordered = [*(name for name in labels.values() if name in used), *sorted(used - set(labels.values()))]
            counted = choose_categories(ordered, chosen_names(categories), str(path), tuple(labels.values()))
            known = [
                (
                    str(one["file_name"]),
                    (one["height"], one["width"]),
                    [a for a in of[one["id"]] if names[id(a)] in counted],
                )
                for one in plain["images"]
            ]
        left_out = tuple(name for name in dict.fromkeys(ordered) if name not in counted)
        return cls(known, Locations(path.parent, confined=not anywhere, fetch=fetch), counted, left_out)

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
            file = str(one["mask_file"])
            return picture(mask_source(self.locations, file), size, name=file)
        if isinstance(one.get("segmentation"), list) and one["segmentation"]:
            return of_polygons(one["segmentation"], size)
        if isinstance(one.get("segmentation"), Mapping):
            return of_runs(one["segmentation"], size)
        return of_boxes(np.asarray([one["bbox"]], np.float64), size)


def evidence_of(
    source: str | Path,
    columns: Sequence[str],
    root: Path | Locations,
    categories: str | int | Iterable[str | int] = (),
    *,
    anywhere: bool = False,
) -> Evidence:
    """What `--masks` means: a COCO file, one of the `columns` that a run carries, or a folder of mask pictures.

    A column's name is the column where a folder has it too, which `./name` means, and a Path. `categories`: those that
    count: of a COCO file by name, of masks that hold several labels by label; "all": every one. CategoryError where there are
    several and none is chosen; of masks it is raised by the first mask that shows it.

    `root`: the folder that the masks in a column are in; those that a COCO file names are in its own. `anywhere`: whether
    masks may lie outside these folders.
    """
    path, categories = Path(source), chosen_names(categories)
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise InputError(f"{path}: {no_file(path)}")
        fetch = not isinstance(root, Locations) or root.fetch
        return Coco.read(path, categories, anywhere=anywhere, fetch=fetch)
    if isinstance(source, str) and source in columns:
        places = root if isinstance(root, Locations) else Locations(root)
        places = replace(places, confined=False) if anywhere else places
        return Column(source, places, LabelChoice(categories))
    if path.is_dir():
        return Files(list(images_of(str(path), deep=True)), LabelChoice(categories))
    carried = ", ".join(name for name in columns if name not in KNOWN) or "none"
    raise InputError(f"{source}: no COCO file (.json), no folder of masks, and no column of the manifest ({carried})")


def _category(annotation: Mapping[str, Any], labels: Mapping[Any, str]) -> str:
    """The name of an annotation's category; of one that the file does not name, its number."""
    number = annotation.get("category_id")
    return labels.get(number, "without a category" if number is None else str(number))


def picture(source: str | bytes, size: Size, choice: LabelChoice | None = None, name: str = "") -> Mask:
    """(H,W), (D,H,W): the pixels of a mask's file that count; it has the image's own size.

    `source`: a file's path or bytes; `name`: what errors call it, default the path.
    """
    try:
        labels = read_labels(source, is_volume=len(size) == 3)  # a photograph is no volume: pages of a TIFF are slices
    except ImageError as error:
        raise InputError(f"the mask {error}") from error
    known = (choice or LabelChoice()).mask(labels)
    if known.shape != tuple(size):
        raise InputError(f"{name or source!s} is {known.shape} and its image {tuple(size)}; expected the same size")
    return known


def is_mask_path(value: object) -> TypeGuard[str]:
    """Whether a cell names a mask's file; else it is empty, or lists boxes or points."""
    return isinstance(value, str) and bool(value) and not value.lstrip().startswith("[")


def mask_source(places: Locations, path: str) -> str | bytes:
    """A mask's file, or its bytes if it is behind a URL; InputError where it may not or cannot be opened."""
    try:
        return places.source(path)
    except CamscopeError:
        raise
    except Exception as error:  # a store's own package may raise anything
        raise InputError(f"the mask {path}: it cannot be read: {type(error).__name__}") from error


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
