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

from camscope.batch.manifest import RESERVED_COLUMNS
from camscope.batch.path_resolver import PathResolver
from camscope.batch.result_rows import hash_parameters
from camscope.data_readers import MAX_ERROR_CHARACTERS, read_errors_converted, read_json
from camscope.errors import CamscopeError, CategoryError, ImageError, InputError, UndefinedError
from camscope.images.files.source_files import list_image_paths
from camscope.images.mask_files import read_label_image
from camscope.mask_labels import ALL_LABELS, LabelChoice, choose_categories, parse_categories
from camscope.plurals import inflect, plural
from camscope.safe_files import describe_file_problem

IndexedValue = TypeVar("IndexedValue")
PathParts = tuple[str, ...]


class FilenameIndex(Generic[IndexedValue]):
    """`per_baseline`: a file's path, and what is known of it. `ignore_suffix`: names count without what is behind their last point."""

    def __init__(self, items: Iterable[tuple[str, IndexedValue]], *, ignore_suffix: bool = False) -> None:
        self._ignore_suffix = ignore_suffix
        self._values_by_name: dict[str, dict[PathParts, IndexedValue]] = {}
        for path, known in items:
            parts = self._split_path(path)
            self._values_by_name.setdefault(parts[-1], {})[parts] = known

    def find(self, path: str) -> IndexedValue | None:
        """What is known of an image: of several of its name that whose folders are most its own, from the last one up.

        UndefinedError where no folder tells them apart: it is not known which of them is meant.
        """
        parts = self._split_path(path)
        some = self._values_by_name.get(parts[-1], {})
        common = {other: _count_common_folders(parts, other) for other in some}
        best = [other for other, length in common.items() if length == max(common.values())]
        if len(best) > 1:
            raise UndefinedError(f"there are {len(best)} of its name, and no folder tells which is meant")
        return some[best[0]] if best else None

    def _split_path(self, path: str) -> PathParts:
        plain = PurePosixPath(path.replace("\\", "/"))
        return (*plain.parent.parts, plain.stem if self._ignore_suffix else plain.name)


def _count_common_folders(first: PathParts, second: PathParts) -> int:
    """How many parts are the same, from the last one up."""
    different = (n for n, (a, b) in enumerate(zip(reversed(first), reversed(second), strict=False)) if a != b)
    return next(different, min(len(first), len(second)))


MAX_OUTLINE_PX = 2**20  # pixels from the corner that an outline may reach
UNFIT_MASK_REASON = (
    "its mask cannot be read, or is of another size than its image"  # whose file may bear a patient's name
)
Mask = npt.NDArray[np.bool_]
Row = Mapping[str, Any]
ImageSize = tuple[int, ...]


class GroundTruth(ABC):
    """What says of an image which of its pixels are the evidence.

    `source`: what it is, without the name of a file. `categories`: which of the categories of a file count, `excluded_categories`: which
    do not; both are empty where it has no categories.
    """

    source: str = "masks"
    categories: tuple[str, ...] = ()
    excluded_categories: tuple[str, ...] = ()

    def __str__(self) -> str:
        counted = f"{', '.join(self.categories)} of {self.source}" if self.categories else self.source
        return (
            f"{counted} (not counted: {', '.join(self.excluded_categories)})" if self.excluded_categories else counted
        )

    @abstractmethod
    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """(H,W) bool of the image of a row; UndefinedError where nothing is known of it."""

    @property
    def digest(self) -> str:
        """8 hex digits that change with what is known, so that no values of two states of it come together."""
        return ""


@dataclass(frozen=True)
class MaskFolder(GroundTruth):
    """Mask images named as their images, whatever the suffix. Black, or 0, is outside; `label_choice`: which labels count."""

    files: Sequence[str]
    label_choice: LabelChoice = field(default_factory=LabelChoice)

    source = "a folder of masks"

    @property
    def categories(self) -> tuple[str, ...]:  # type: ignore[override]
        """The labels that count, if they were chosen."""
        return self.label_choice.categories

    @property
    def digest(self) -> str:
        """Of names, sizes and times of the files, and of the labels that count."""
        known = [(file, Path(file).stat()) for file in sorted(self.files)]
        found: dict[str, Any] = {file: (status.st_size, status.st_mtime_ns) for file, status in known}
        return hash_parameters(found | ({"categories": self.categories} if self.categories else {}))

    @cached_property
    def _files_by_name(self) -> FilenameIndex[str]:
        return FilenameIndex(((file, file) for file in self.files), ignore_suffix=True)

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """(H,W)"""
        file = self._files_by_name.find(str(row["path"]))
        if file is None:
            raise UndefinedError("there is no mask of its name")
        return read_mask(file, size, self.label_choice)


@dataclass(frozen=True)
class AnnotationColumn(GroundTruth):
    """A column of the manifest: a mask's path, or boxes [[x, y, width, height], …] or points [[x, y], …] as lists or JSON."""

    name: str
    locations: PathResolver
    label_choice: LabelChoice = field(default_factory=LabelChoice)

    @property
    def source(self) -> str:  # type: ignore[override]
        """With the column's name."""
        return f"the column {self.name!r}"

    @property
    def categories(self) -> tuple[str, ...]:  # type: ignore[override]
        """The labels that count, if they were chosen."""
        return self.label_choice.categories

    @property
    def digest(self) -> str:
        """Of the labels that count."""
        return hash_parameters({"categories": self.categories}) if self.categories else ""

    def check_inside_root(self, values: Iterable[object]) -> None:
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

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """(H,W)"""
        value = row[self.name]
        if value is None or value in ("", []):
            raise UndefinedError("there is no evidence in its row")
        if is_mask_path(value):
            return read_mask(open_mask_source(self.locations, value), size, self.label_choice, name=value)
        if self.label_choice.categories not in ((), (ALL_LABELS,)):
            raise CategoryError(
                f"the category {self.label_choice.categories[0]!r} of {self.source}, which holds boxes or points: these have none"
            )
        with read_errors_converted(
            f"row {row['row']}: {str(value)[:MAX_ERROR_CHARACTERS]!r} in {self.name} is no list of boxes or points"
        ):
            known = np.asarray(json.loads(value) if isinstance(value, str) else value, np.float64)
        if known.ndim == 1:
            known = known[None]
        if known.ndim != 2 or known.shape[1] not in (2, 4):
            raise InputError(
                f"row {row['row']}: {value!r} in {self.name}; expected boxes [x, y, width, height] or points [x, y]"
            )
        return mask_from_boxes(known, size) if known.shape[1] == 4 else mask_from_points(known, size)


@dataclass(frozen=True)
class CocoAnnotations(GroundTruth):
    """Annotations of images by file name: boxes, outlines (polygons), or `mask_file`, beside the COCO file.

    `annotated_images`: of each image its `file_name`, its size (H,W), and its annotations that count.
    """

    annotated_images: Sequence[tuple[str, ImageSize, Sequence[Mapping[str, Any]]]]
    locations: PathResolver
    categories: tuple[str, ...] = ()
    excluded_categories: tuple[str, ...] = ()

    source = "a COCO file"

    @property
    def digest(self) -> str:
        """Of the annotations that count."""
        return hash_parameters({"images": self.annotated_images})

    @classmethod
    def read(
        cls, path: Path, categories: Iterable[str] = (), *, allow_outside_root: bool = False, fetch: bool = True
    ) -> "CocoAnnotations":
        """A COCO file; `categories`: only annotations of these names; needed where there are annotations of several.

        `allow_outside_root`: its masks may lie outside its folder. `fetch`: they may be fetched from other machines.
        """
        message = f"{path}: this is no COCO file of annotations"
        with read_errors_converted(message):
            plain = read_json(path, message)
            labels = {one["id"]: str(one["name"]) for one in plain.get("categories", ())}
            of: dict[Any, list[Mapping[str, Any]]] = {one["id"]: [] for one in plain["images"]}
            for one in plain["annotations"]:
                of[one["image_id"]].append(one)
            names = {id(one): _get_category_name(one, labels) for one in plain["annotations"]}
            used = set(names.values())
            ordered = [*(name for name in labels.values() if name in used), *sorted(used - set(labels.values()))]
            counted = choose_categories(ordered, parse_categories(categories), str(path), tuple(labels.values()))
            known = [
                (
                    str(one["file_name"]),
                    (one["height"], one["width"]),
                    [a for a in of[one["id"]] if names[id(a)] in counted],
                )
                for one in plain["images"]
            ]
        left_out = tuple(name for name in dict.fromkeys(ordered) if name not in counted)
        return cls(known, PathResolver(path.parent, confined=not allow_outside_root, fetch=fetch), counted, left_out)

    @cached_property
    def _annotations_by_name(self) -> FilenameIndex[tuple[ImageSize, Sequence[Mapping[str, Any]]]]:
        return FilenameIndex((name, (size, annotated)) for name, size, annotated in self.annotated_images)

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """(H,W): all annotations of the image together."""
        there, annotated = self._annotations_by_name.find(str(row["path"])) or (size, ())
        if not annotated:
            raise UndefinedError("there is no annotation of its name")
        if there != tuple(size):
            raise InputError(f"{row['path']} is {tuple(size)} and annotated at {there}; expected the same size")
        made = np.zeros(size, np.bool_)
        with read_errors_converted(f"{row['path']}: its annotation cannot be read"):
            for one in annotated:
                made |= self._build_annotation_mask(one, size)
        return made

    def _build_annotation_mask(self, annotation: Mapping[str, Any], size: ImageSize) -> Mask:
        if "mask_file" in annotation:
            file = str(annotation["mask_file"])
            return read_mask(open_mask_source(self.locations, file), size, name=file)
        if isinstance(annotation.get("segmentation"), list) and annotation["segmentation"]:
            return mask_from_polygons(annotation["segmentation"], size)
        if isinstance(annotation.get("segmentation"), Mapping):
            return mask_from_run_lengths(annotation["segmentation"], size)
        return mask_from_boxes(np.asarray([annotation["bbox"]], np.float64), size)


def load_ground_truth(
    source: str | Path,
    columns: Sequence[str],
    root: Path | PathResolver,
    categories: str | int | Iterable[str | int] = (),
    *,
    allow_outside_root: bool = False,
) -> GroundTruth:
    """What `--masks` means: a COCO file, one of the `columns` that a run carries, or a folder of mask pictures.

    A column's name is the column where a folder has it too, which `./name` means, and a Path. `categories`: those that
    count: of a COCO file by name, of masks that hold several labels by label; "all": every one. CategoryError where there are
    several and none is chosen; of masks it is raised by the first mask that shows it.

    `root`: the folder that the masks in a column are in; those that a COCO file names are in its own. `allow_outside_root`: whether
    masks may lie outside these folders.
    """
    path, categories = Path(source), parse_categories(categories)
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise InputError(f"{path}: {describe_file_problem(path)}")
        fetch = not isinstance(root, PathResolver) or root.fetch
        return CocoAnnotations.read(path, categories, allow_outside_root=allow_outside_root, fetch=fetch)
    if isinstance(source, str) and source in columns:
        places = root if isinstance(root, PathResolver) else PathResolver(root)
        places = replace(places, confined=False) if allow_outside_root else places
        return AnnotationColumn(source, places, LabelChoice(categories))
    if path.is_dir():
        return MaskFolder(list(list_image_paths(str(path), recursive=True)), LabelChoice(categories))
    carried = ", ".join(name for name in columns if name not in RESERVED_COLUMNS) or "none"
    raise InputError(f"{source}: no COCO file (.json), no folder of masks, and no column of the manifest ({carried})")


def _get_category_name(annotation: Mapping[str, Any], labels: Mapping[Any, str]) -> str:
    """The name of an annotation's category; of one that the file does not name, its number."""
    number = annotation.get("category_id")
    return labels.get(number, "without a category" if number is None else str(number))


def read_mask(source: str | bytes, size: ImageSize, label_choice: LabelChoice | None = None, name: str = "") -> Mask:
    """(H,W), (D,H,W): the pixels of a mask's file that count; it has the image's own size.

    `source`: a file's path or bytes; `name`: what errors call it, default the path.
    """
    try:
        labels = read_label_image(
            source, is_volume=len(size) == 3
        )  # a photograph is no volume: pages of a TIFF are slices
    except ImageError as error:
        raise InputError(f"the mask {error}") from error
    known = (label_choice or LabelChoice()).select_mask(labels)
    if known.shape != tuple(size):
        raise InputError(f"{name or source!s} is {known.shape} and its image {tuple(size)}; expected the same size")
    return known


def is_mask_path(value: object) -> TypeGuard[str]:
    """Whether a cell names a mask's file; else it is empty, or lists boxes or points."""
    return isinstance(value, str) and bool(value) and not value.lstrip().startswith("[")


def open_mask_source(locations: PathResolver, path: str) -> str | bytes:
    """A mask's file, or its bytes if it is behind a URL; InputError where it may not or cannot be opened."""
    try:
        return locations.resolve_or_fetch(path)
    except CamscopeError:
        raise
    except Exception as error:  # a store's own package may raise anything
        raise InputError(f"the mask {path}: it cannot be read: {type(error).__name__}") from error


def mask_from_boxes(boxes: npt.NDArray[np.float64], size: ImageSize) -> Mask:
    """(M,4) x, y, width, height in pixels -> (H,W): the pixels whose middle a box covers."""
    rows, columns = np.arange(size[0])[:, None] + 0.5, np.arange(size[1]) + 0.5
    made = np.zeros(size, np.bool_)
    for x, y, width, height in boxes:
        made |= (rows >= y) & (rows < y + height) & (columns >= x) & (columns < x + width)
    return made


def mask_from_points(points: npt.NDArray[np.float64], size: ImageSize) -> Mask:
    """(M,2) x, y in pixels -> (H,W): the pixels that hold a point."""
    made = np.zeros(size, np.bool_)
    inside = [(int(y), int(x)) for x, y in points if 0 <= x < size[1] and 0 <= y < size[0]]
    for row, column in inside:
        made[row, column] = True
    return made


def mask_from_run_lengths(run_lengths: Mapping[str, Any], size: ImageSize) -> Mask:
    """Decode COCO run lengths, plain or compressed, into a mask (H,W).

    Runs outside and inside the object alternate, column by column.
    """
    counts = run_lengths["counts"]
    if isinstance(counts, str):
        counts = _decompress_run_lengths(counts)
    if not isinstance(counts, list) or list(run_lengths["size"]) != list(size) or sum(counts) != size[0] * size[1]:
        raise InputError("an outline of run lengths; expected counts as a list of numbers that fill its image")
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return np.asarray(inside.reshape(size[1], size[0]).T)


def _decompress_run_lengths(text: str) -> list[int]:
    """Decode the compressed counts of a COCO mask.

    Each character holds 5 bits and a continuation bit; from the fourth number on, differences to the number before the
    previous one are stored. pycocotools is not used: its decoder writes past its buffer when the counts are malformed.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 30:
            raise InputError("an outline of compressed run lengths holds a character or number that COCO never writes")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            value -= (1 << shift) if code & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    if shift or any(count < 0 for count in counts):
        raise InputError("an outline of compressed run lengths is cut off or holds a negative length")
    return counts


def mask_from_polygons(polygons: Sequence[Sequence[float]], size: ImageSize) -> Mask:
    """Each x, y, x, y … -> (H,W)"""
    import cv2

    made = np.zeros(size, np.uint8)
    for one in polygons:
        points = np.asarray(one, np.float64).reshape(-1, 2)
        if not (np.abs(points) < MAX_OUTLINE_PX).all():  # OpenCV goes from row to row, also outside of the image
            raise InputError(f"an outline reaches to {np.abs(points).max()}; expected pixels of its image")
        cv2.fillPoly(made, [np.rint(points).astype(np.int32)], 1)
    return made.astype(np.bool_)
