"""Ground-truth masks of images, from mask files, boxes, points or a COCO file."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.batch.image_manifest import RESERVED_COLUMNS
from camscope.batch.path_resolver import PathResolver
from camscope.batch.result_rows import hash_parameters
from camscope.errors import CamscopeError, CategoryError, ImageError, InputError, UndefinedError
from camscope.images.files.find_and_open_image_files import list_image_paths
from camscope.images.mask_file_reader import read_label_image
from camscope.mask_labels import ALL_LABELS, LabelChoice, choose_categories, parse_categories
from camscope.plurals import inflect, join_first, plural
from camscope.read_untrusted_files import MAX_ERROR_CHARACTERS, read_errors_converted, read_json

IndexedValue = TypeVar("IndexedValue")
PathParts = tuple[str, ...]


class FilenameIndex(Generic[IndexedValue]):
    """A lookup of values by image file name, with or without suffix. Folders may share file names."""

    def __init__(self, items: Iterable[tuple[str, IndexedValue]], *, ignore_suffix: bool = False) -> None:
        self._ignore_suffix = ignore_suffix
        self._values_by_name: dict[str, dict[PathParts, IndexedValue]] = {}
        for path, value in items:
            parts = self._split_path(path)
            self._values_by_name.setdefault(parts[-1], {})[parts] = value

    def find_value_of_file(self, path: str) -> IndexedValue | None:
        """Find the files with the same name as `path`. Return the value of the file that shares most parent folders with it."""
        parts = self._split_path(path)
        candidates = self._values_by_name.get(parts[-1], {})
        common = dict.fromkeys(candidates, 0)  # the number of equal parts at the end
        for other in candidates:
            pairs = zip(reversed(parts), reversed(other), strict=False)
            common[other] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        best = [other for other, length in common.items() if length == max(common.values())]
        if len(best) > 1:
            raise UndefinedError(
                f"{plural(len(best), 'file')} have the name of the image, in different folders; expected one"
            )
        return candidates[best[0]] if best else None

    def _split_path(self, path: str) -> PathParts:
        posix_path = PurePosixPath(path.replace("\\", "/"))
        return (*posix_path.parent.parts, posix_path.stem if self._ignore_suffix else posix_path.name)


MAX_COCO_BYTES = 2**30  # the largest file of the COCO challenge has half of that
MAX_OUTLINE_PX = 2**20  # largest coordinate of an outline
EVIDENCE_FORMATS = (
    "the path of a mask (PNG, TIFF, JPEG, NIfTI, DICOM and other images, of the size of its image, 0 outside), boxes "
    "[x, y, width, height] or points [x, y] in pixels, as a list or as JSON text such as [[10, 20, 30, 40]]"
)
UNFIT_MASK_REASON = "its mask cannot be read, or differs from its image in size"  # no name: it may be a patient's
Mask = npt.NDArray[np.bool_]
Row = Mapping[str, Any]
ImageSize = tuple[int, ...]


class GroundTruth(ABC):
    """A source of ground-truth masks for images.

    Attributes:
        source: A description of the annotations, without file names.
        label_choice: The labels that count as inside a mask.
        excluded_categories: The categories that do not count.

    >>> from camscope.evaluation import load_ground_truth
    >>> load_ground_truth("mask", ["id", "mask"], Path()).source
    "the column 'mask'"

    """

    source: str = "masks"
    label_choice = LabelChoice()
    excluded_categories: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories whose annotations count. The tuple is empty if annotations have no categories."""
        return self.label_choice.categories

    def __str__(self) -> str:
        counted = f"{_join_names(self.categories)} of {self.source}" if self.categories else self.source
        excluded = f" (not counted: {_join_names(self.excluded_categories)})" if self.excluded_categories else ""
        return counted + excluded

    @abstractmethod
    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """Load the boolean mask (H,W) for the image of a row. Raise an UndefinedError if the image has no annotation."""

    @property
    def digest(self) -> str:
        """A digest of 8 hex digits. It changes whenever the annotations change."""
        return ""


@dataclass(frozen=True)
class MaskFolder(GroundTruth):
    """A folder of mask images. Each mask has the file name of its image. Black pixels lie outside the region."""

    files: Sequence[str]
    label_choice: LabelChoice = field(default_factory=LabelChoice)

    source = "a folder of masks"

    @property
    def digest(self) -> str:
        """A digest of the mask files (name, size, time) and the chosen labels.
        Any change of a file or label changes the digest.
        """
        states = [(file, Path(file).stat()) for file in sorted(self.files)]
        parameters: dict[str, Any] = {file: (status.st_size, status.st_mtime_ns) for file, status in states}
        return hash_parameters(parameters | ({"categories": self.categories} if self.categories else {}))

    @cached_property
    def _files_by_name(self) -> FilenameIndex[str]:
        return FilenameIndex(((file, file) for file in self.files), ignore_suffix=True)

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """Load the boolean mask (H,W) for the image of a row."""
        file = self._files_by_name.find_value_of_file(str(row["path"]))
        if file is None:
            raise UndefinedError("no mask has the name of the image")
        return read_mask(file, size, self.label_choice)


@dataclass(frozen=True)
class AnnotationColumn(GroundTruth):
    """A column of the manifest that holds mask paths, boxes [x, y, width, height] or points [x, y].

    Boxes and points are lists or JSON text.
    """

    name: str
    locations: PathResolver
    label_choice: LabelChoice = field(default_factory=LabelChoice)

    @property
    def source(self) -> str:  # type: ignore[override] # a property in place of a field
        """A text that describes the column. It contains the name of the column."""
        return f"the column {self.name!r}"

    @property
    def digest(self) -> str:
        """A digest of the chosen labels. The text is empty if all labels are chosen."""
        return hash_parameters({"categories": self.categories}) if self.categories else ""

    def check_mask_paths_inside_root(self, values: Iterable[object]) -> None:
        """Raise an InputError if a mask path leads out of the root folder."""
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
                "URL: move all masks there, pass their folder as the root, or pass --anywhere"
            )

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """Load the boolean mask (H,W) for the image of a row."""
        value = row[self.name]
        if value is None or value in ("", []):
            raise UndefinedError("the row of the image has no annotation")
        if is_mask_path(value):
            return read_mask(open_mask_source(self.locations, value), size, self.label_choice, name=value)
        if self.categories not in ((), (ALL_LABELS,)):
            received = f"category {self.categories[0]!r} was chosen for {self.source}"
            raise CategoryError(f"{received}, but boxes and points have no categories")
        row_name, cell = f"row {row['row']}", f"{str(value)[:MAX_ERROR_CHARACTERS]!r} in {self.name}"
        with read_errors_converted(f"{row_name}: {cell} is not a list of boxes or points"):
            coordinates = np.asarray(json.loads(value) if isinstance(value, str) else value, np.float64)
        coordinates = coordinates[None] if coordinates.ndim == 1 else coordinates
        if coordinates.ndim != 2 or coordinates.shape[1] not in (2, 4):
            raise InputError(f"{row_name}: {cell}; expected boxes [x, y, width, height] or points [x, y]")
        return mask_from_boxes(coordinates, size) if coordinates.shape[1] == 4 else mask_from_points(coordinates, size)


@dataclass(frozen=True)
class CocoAnnotations(GroundTruth):
    """The annotations of a COCO file: boxes, polygons, run lengths or mask files."""

    annotated_images: Sequence[
        tuple[str, ImageSize, Sequence[Mapping[str, Any]]]
    ]  # file name, size, annotations that count
    locations: PathResolver
    categories: tuple[str, ...] = ()
    excluded_categories: tuple[str, ...] = ()

    source = "a COCO file"

    @property
    def digest(self) -> str:
        """A digest of all annotations that count."""
        return hash_parameters({"images": self.annotated_images})

    @classmethod
    def read(
        cls, path: Path, categories: Iterable[str] = (), *, allow_outside_root: bool = False, fetch: bool = True
    ) -> "CocoAnnotations":
        """Read the annotations of a COCO file. With `fetch`, masks that are given as URLs may be downloaded."""
        message = f"{path}: this is not a COCO file of annotations"
        with read_errors_converted(message):
            coco = read_json(path, message, max_bytes=MAX_COCO_BYTES)
            labels = {category["id"]: str(category["name"]) for category in coco.get("categories", ())}
            by_image: dict[Any, list[Mapping[str, Any]]] = {image["id"]: [] for image in coco["images"]}
            names = {}
            for annotation in coco["annotations"]:
                by_image[annotation["image_id"]].append(annotation)
                number = annotation.get("category_id")
                names[id(annotation)] = labels.get(number, "without a category" if number is None else str(number))
            used = set(names.values())
            ordered = [*(name for name in labels.values() if name in used), *sorted(used - set(labels.values()))]
            counted = choose_categories(ordered, parse_categories(categories), str(path), tuple(labels.values()))
            annotated_images = []
            for image in coco["images"]:
                annotations = [each for each in by_image[image["id"]] if names[id(each)] in counted]
                annotated_images.append((str(image["file_name"]), (image["height"], image["width"]), annotations))
        excluded = tuple(name for name in dict.fromkeys(ordered) if name not in counted)
        locations = PathResolver(path.parent, confined=not allow_outside_root, fetch=fetch)
        return cls(annotated_images, locations, counted, excluded)

    @cached_property
    def _annotations_by_name(self) -> FilenameIndex[tuple[ImageSize, Sequence[Mapping[str, Any]]]]:
        return FilenameIndex((name, (size, annotated)) for name, size, annotated in self.annotated_images)

    def load_mask(self, row: Row, size: ImageSize) -> Mask:
        """Load the mask (H,W) for the image of a row. It is the union of all annotations of that image."""
        annotated_image = self._annotations_by_name.find_value_of_file(str(row["path"]))
        if annotated_image is None:
            raise UndefinedError("no annotation has the name of the image")
        annotated_size, annotations = annotated_image
        if not annotations:
            chosen = " of the chosen categories" if self.excluded_categories else ""
            raise UndefinedError(f"the image has no annotation{chosen}")
        if annotated_size != tuple(size):
            sizes = f"has size {tuple(size)} and is annotated at size {annotated_size}"
            raise InputError(f"{row['path']} {sizes}; expected the same size")
        mask = np.zeros(size, np.bool_)
        with read_errors_converted(f"{row['path']}: its annotation cannot be read"):
            for annotation in annotations:
                mask |= self._build_annotation_mask(annotation, size)
        return mask

    def _build_annotation_mask(self, annotation: Mapping[str, Any], size: ImageSize) -> Mask:
        """Build the mask of an annotation from its mask file, polygons, run lengths or box."""
        if "mask_file" in annotation:
            file = str(annotation["mask_file"])
            return read_mask(open_mask_source(self.locations, file), size, name=file)
        outline = annotation.get("segmentation")
        if isinstance(outline, list) and outline:
            return mask_from_polygons(outline, size)
        if isinstance(outline, Mapping):
            return mask_from_run_lengths(outline, size)
        return mask_from_boxes(np.asarray([annotation["bbox"]], np.float64), size)


def load_ground_truth(
    source: str | Path,
    columns: Sequence[str],
    root: Path | PathResolver,
    categories: str | int | Iterable[str | int] = (),
    *,
    allow_outside_root: bool = False,
) -> GroundTruth:
    """Load ground truth from a COCO file, from a column of the run, or from a folder of mask images.

    If a name is both a column and a folder, the column is used. Pass `./name` or a Path for the folder.

    Args:
        source: The file, column or folder.
        columns: The columns of the run.
        root: The folder of the mask paths in a column. Mask paths of a COCO file start at the folder of that file.
        categories: The COCO categories or mask labels that count, or "all".
        allow_outside_root: Whether masks may lie outside these folders.

    Returns:
        The ground truth.

    Raises:
        InputError: There is no such file, column or folder.
        CategoryError: There are several categories and none is chosen. For masks, reading the first such mask raises it.

    >>> load_ground_truth("boxes", ["id", "boxes"], Path()).excluded_categories
    ()

    """
    path, categories = Path(source), parse_categories(categories)
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise InputError(f"{path}: {describe_file_problem(path)}")
        fetch = not isinstance(root, PathResolver) or root.fetch
        return CocoAnnotations.read(path, categories, allow_outside_root=allow_outside_root, fetch=fetch)
    if isinstance(source, str) and source in columns:
        locations = root if isinstance(root, PathResolver) else PathResolver(root)
        locations = replace(locations, confined=False) if allow_outside_root else locations
        return AnnotationColumn(source, locations, LabelChoice(categories))
    if path.is_dir():
        return MaskFolder(list(list_image_paths(str(path), recursive=True)), LabelChoice(categories))
    column_names = ", ".join(name for name in columns if name not in RESERVED_COLUMNS) or "none"
    raise InputError(
        f"{source} is not a COCO file (.json), a folder of masks, or a column of the manifest ({column_names})"
    )


def _join_names(names: Iterable[str]) -> str:
    """Join category names with commas. A name that contains a comma is quoted."""
    return join_first([f'"{name}"' if "," in name else name for name in names])


def read_mask(source: str | bytes, size: ImageSize, label_choice: LabelChoice | None = None, name: str = "") -> Mask:
    """Read the chosen labels of a mask file as a boolean mask, (H,W) or (D,H,W). Errors call the file `name`."""
    try:
        labels = read_label_image(source, is_volume=len(size) == 3)  # pages of a TIFF are slices of a volume
    except ImageError as error:
        raise InputError(f"the mask {error}") from error
    mask = (label_choice or LabelChoice()).select_mask(labels)
    if mask.shape != tuple(size):
        mask_name = name or str(source)
        raise InputError(
            f"{mask_name} has size {mask.shape}, but the image has size {tuple(size)}; expected the same size"
        )
    return mask


def is_mask_path(value: object) -> TypeGuard[str]:
    """Return whether a table cell holds the path of a mask. Other cells hold a list of boxes or points."""
    return isinstance(value, str) and bool(value) and not value.lstrip().startswith("[")


def open_mask_source(locations: PathResolver, path: str) -> str | bytes:
    """Return the path of a mask file, or the downloaded bytes of a mask URL. Raise an InputError on failure."""
    try:
        return locations.resolve_or_download(path)
    except CamscopeError:
        raise
    except Exception as error:  # a store's own package may raise anything
        raise InputError(f"the mask {path} cannot be read: {type(error).__name__}") from error


def mask_from_boxes(boxes: npt.NDArray[np.float64], size: ImageSize) -> Mask:
    """Return a mask (H,W) of the pixels whose center lies in a box. Each box is x, y, width, height in pixels."""
    rows, columns = np.arange(size[0])[:, None] + 0.5, np.arange(size[1]) + 0.5
    mask = np.zeros(size, np.bool_)
    for x, y, width, height in boxes:
        is_inside = x < size[1] and y < size[0] and x + width > 0 and y + height > 0  # not for NaN
        if not is_inside or not np.isfinite((x, y, width, height)).all():
            box_text = ", ".join(f"{number:g}" for number in (x, y, width, height))
            raise InputError(
                f"a box is {box_text} (x, y, width, height); expected pixels of its image of {size[1]} x {size[0]}"
            )
        mask |= (rows >= y) & (rows < y + height) & (columns >= x) & (columns < x + width)
    return mask


def mask_from_points(points: npt.NDArray[np.float64], size: ImageSize) -> Mask:
    """Return a mask (H,W) of the pixels that contain a point. Each point is x, y in pixels."""
    mask = np.zeros(size, np.bool_)
    if not np.isfinite(points).all():
        raise InputError("a point has a coordinate that is NaN or infinite; expected pixel coordinates")
    for x, y in points:
        if 0 <= x < size[1] and 0 <= y < size[0]:
            mask[int(y), int(x)] = True
    return mask


def mask_from_run_lengths(run_lengths: Mapping[str, Any], size: ImageSize) -> Mask:
    """Decode the run lengths of a COCO mask to a mask (H,W). The run lengths may be compressed."""
    counts = run_lengths["counts"]
    if isinstance(counts, str):
        counts = _decompress_run_lengths(counts)
    if not isinstance(counts, list) or list(run_lengths["size"]) != list(size) or sum(counts) != size[0] * size[1]:
        raise InputError(
            "the run lengths do not fit the image; expected counts as a list whose sum is the number of pixels"
        )
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return np.asarray(inside.reshape(size[1], size[0]).T)


def _decompress_run_lengths(text: str) -> list[int]:
    """Decompress the text form of COCO run lengths. Return a list of counts."""
    counts: list[int] = []  # not by pycocotools, which writes past its buffer when the counts are malformed
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 30:
            raise InputError("the compressed run lengths contain a character or number that COCO never writes")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            value -= (1 << shift) if code & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    if shift or any(count < 0 for count in counts):
        raise InputError("the compressed run lengths are cut off or contain a negative length")
    return counts


def mask_from_polygons(polygons: Sequence[Sequence[float]], size: ImageSize) -> Mask:
    """Return a mask (H,W) of the pixels inside polygons. Each polygon is a list x, y, x, y … in pixels."""
    import cv2

    mask = np.zeros(size, np.uint8)
    for polygon in polygons:
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
        if not (np.abs(points) < MAX_OUTLINE_PX).all():  # OpenCV also iterates over rows outside the image
            raise InputError(
                f"a polygon has the coordinate {np.abs(points).max()}; expected pixel coordinates of its image"
            )
        cv2.fillPoly(mask, [np.rint(points).astype(np.int32)], 1)
    return mask.astype(np.bool_)
