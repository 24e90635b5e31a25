"""A volume with a map over it: what all its pictures need to know, found once.

One plane of a volume as it is drawn: in true proportions, with its part of the map and of the masks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render import anatomical_axes
from camscope.render.anatomical_axes import AnatomicalView
from camscope.render.colormap import DIVERGING, Scale, compute_display_range, normalize_between
from camscope.render.legend import MaskOutlines, Masks, draw_outlines, prepare_outlines
from camscope.render.overlay import fade_to_gray, overlay
from camscope.render.rgb_image import RGBImage, Values, check_image_height

VoxelIndex = tuple[int, int, int]
CONTRAST_PERCENTILES = (0.5, 99.5)  # per cent: greys between these are told apart, unless a window says which
MAX_CONTRAST_SAMPLES = 2_000_000  # voxels that they are found on
MIN_SIDE_PIXELS, MAX_SIDE_PIXELS = 320, 512  # pixels of the longest side, unless asked for


@dataclass(frozen=True, eq=False)
class Volume:
    """A picture (D,H,W) or (D,H,W,3), and a map (D,H,W) of any scale over it.

    `image`: uint8 as it is; numbers of another kind as greys, black to white over `window` (low, high), by default what
    lies between their 0.5th and 99.5th percentile. `spacing`: millimetres a voxel along each axis; `axis_letters`: the letters
    at the low and the high end of each axis, such as `(("I", "S"), ("A", "P"), ("R", "L"))`; `affine`: (4,4), array index ->
    millimetres RAS+, which says both. Without any, voxels are drawn as cubes. `covered`: False where the map says nothing.
    `masks`: one (D,H,W), or names of several: their outlines are drawn. `scale`, `colormap`, `alpha`: as in `overlay`, one
    scale for all slices. `flag`: a warning to be seen; None finds an empty or a flat map by itself, "" says nothing.
    """

    image: NDArray[Any]
    values: Values
    spacing: tuple[float, float, float] | None = None
    axis_letters: tuple[anatomical_axes.AxisLetters, ...] | None = None
    affine: ArrayLike | None = None
    covered: NDArray[np.bool_] | None = None
    masks: Masks | None = None
    scale: Scale | None = None
    colormap: str = "inferno"
    alpha: float = 0.85
    window: tuple[float, float] | None = None
    flag: str | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or not self.values.size or self.image.shape not in (self.shape, (*self.shape, 3)):
            raise InputError(
                f"the volume is {self.image.shape} and its map {self.values.shape}; expected (D,H,W) or (D,H,W,3), and (D,H,W)"
            )
        if not (finite := np.isfinite(self.values)).all():
            raise NonFiniteError(f"not finite: {(~finite).sum()} of {plural(finite.size, 'value')}")
        if self.covered is not None and self.covered.shape != self.shape:
            raise GeometryError(f"covered is {self.covered.shape} and the map {self.shape}; expected one size")
        if self.spacing is not None and (
            len(self.spacing) != 3 or not all(0 < length < np.inf for length in self.spacing)
        ):
            raise InputError(f"spacing={self.spacing}: expected three positive numbers, millimetres a voxel")
        if self.axis_letters is not None and [len(pair) for pair in self.axis_letters] != [2, 2, 2]:
            raise InputError(f"axis_letters={self.axis_letters}: expected a pair of letters for each of three axes")

    @property
    def shape(self) -> VoxelIndex:
        """(D,H,W)."""
        depth, height, width = self.values.shape
        return depth, height, width

    @cached_property
    def affine_matrix(self) -> NDArray[np.float64] | None:
        """The world, if it is known."""
        return None if self.affine is None else anatomical_axes.check_affine(self.affine)

    @cached_property
    def voxel_size(self) -> tuple[float, float, float]:
        """Millimetres a voxel; 1 each where nothing is known."""
        affine_spacing = (
            anatomical_axes.compute_spacing(self.affine_matrix) if self.affine_matrix is not None else (1.0, 1.0, 1.0)
        )
        return self.spacing or affine_spacing

    @property
    def has_physical_size(self) -> bool:
        """Whether lengths are millimetres."""
        return self.spacing is not None or self.affine is not None

    @cached_property
    def axis_end_letters(self) -> tuple[anatomical_axes.AxisLetters, ...] | None:
        """At the ends of each axis, if they are known."""
        return self.axis_letters or (
            None if self.affine_matrix is None else anatomical_axes.get_axis_letters(self.affine_matrix)
        )

    @cached_property
    def views(
        self,
    ) -> tuple[anatomical_axes.AnatomicalView, anatomical_axes.AnatomicalView, anatomical_axes.AnatomicalView]:
        """Axial, coronal and sagittal, or along axis 0, 1 and 2."""
        return anatomical_axes.choose_views(self.axis_end_letters)

    def get_view(self, axis: int | str | None) -> anatomical_axes.AnatomicalView:
        """Along an axis of the array, or by its name: "axial", "coronal", "sagittal"; None: the first of the views."""
        for view in self.views:
            if axis is None or axis in (view.name, view.normal_axis):
                return view
        raise InputError(f"axis={axis!r}: expected 0, 1, 2 or {', '.join(view.name for view in self.views)}")

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """The raw values at the ends of the one scale."""
        return compute_display_range(self.values, self.scale, self.colormap)

    @cached_property
    def magnitudes(self) -> Values:
        """(D,H,W): how strong each value is, whatever its sign, if the colours have two."""
        return np.abs(self.values) if self.colormap == DIVERGING else self.values

    @cached_property
    def peak(self) -> VoxelIndex:
        """The strongest voxel, the first of several; the middle of a volume whose map has none."""
        covered_magnitudes = (
            self.magnitudes if self.covered is None else np.where(self.covered, self.magnitudes, -np.inf)
        )
        if covered_magnitudes.max() <= 0 or covered_magnitudes.max() == covered_magnitudes.min():
            return self.shape[0] // 2, self.shape[1] // 2, self.shape[2] // 2
        d, r, c = np.unravel_index(int(covered_magnitudes.argmax()), self.shape)
        return int(d), int(r), int(c)

    @cached_property
    def warning(self) -> str | None:
        """What has to be seen of the map: its flag, or that nothing in it stands out."""
        if self.flag is not None:
            return self.flag or None
        covered_values = self.values if self.covered is None else self.values[self.covered]
        if not covered_values.size:
            return "the map covers nothing of this volume"
        if not covered_values.any():
            return "the map is 0 everywhere"
        if covered_values.min() == covered_values.max():
            return "flat: the map has one value everywhere"
        return "nothing in the map is positive" if self.colormap != DIVERGING and covered_values.max() <= 0 else None

    @cached_property
    def outlines(self) -> MaskOutlines:
        """The masks with their names and colours."""
        return prepare_outlines(self.masks, self.shape)

    @cached_property
    def gray_image(self) -> RGBImage:
        """The picture in uint8, of one channel or of three."""
        if self.image.dtype == np.uint8 and self.window is None:
            return self.image
        numbers = np.nan_to_num(self.image.astype(np.float32), posinf=0.0, neginf=0.0)
        sample = numbers.reshape(-1)[:: max(1, numbers.size // MAX_CONTRAST_SAMPLES)]
        low, high = self.window or np.percentile(sample, CONTRAST_PERCENTILES).tolist()
        if not low < high:
            return np.full(numbers.shape, 128, np.uint8)
        numbers -= low
        numbers *= 255 / (high - low)
        return np.asarray(np.rint(numbers.clip(0, 255)), np.uint8)

    def resolve_voxel(self, voxel_index: tuple[int, ...] | None) -> VoxelIndex:
        """A voxel that the volume has; None: the peak."""
        if voxel_index is None:
            return self.peak
        if len(voxel_index) != 3 or not all(
            0 <= index < length for index, length in zip(voxel_index, self.shape, strict=True)
        ):
            raise InputError(
                f"voxel_index={voxel_index}: expected a voxel (d, row, column) of a volume {self.shape}, numbered from 0"
            )
        return int(voxel_index[0]), int(voxel_index[1]), int(voxel_index[2])

    def get_slice_size_mm(self, view: anatomical_axes.AnatomicalView) -> tuple[float, float]:
        """Height and width of a slice."""
        return self.extent_mm[view.row_axis], self.extent_mm[view.column_axis]

    @property
    def extent_mm(self) -> tuple[float, float, float]:
        """Millimetres of each axis."""
        depth, height, width = (
            length * voxel_length for length, voxel_length in zip(self.shape, self.voxel_size, strict=True)
        )
        return depth, height, width

    def max_resolution(self, size: int | None) -> float:
        """Pixels a millimetre, one number for every picture of the volume. `size`: of its longest side."""
        if size is not None:
            check_image_height("size", size)
        longest = max(self.extent_mm)
        native_side = round(longest / min(self.voxel_size))
        return (min(MAX_SIDE_PIXELS, max(MIN_SIDE_PIXELS, native_side)) if size is None else size) / longest


def draw_slice(volume: Volume, view: AnatomicalView, slice_index: int, pixels_per_mm: float) -> RGBImage:
    """(h,w,3): one slice with its part of the map, at `pixels_per_mm` pixels a millimetre."""
    covered = None if volume.covered is None else view.extract_slices(volume.covered)[slice_index]
    masks = [(name, color, view.extract_slices(inside)[slice_index]) for name, color, inside in volume.outlines]
    return draw_slice_overlay(
        volume,
        view,
        view.extract_slices(volume.gray_image)[slice_index],
        view.extract_slices(volume.values)[slice_index],
        covered,
        masks,
        pixels_per_mm,
    )


def draw_slice_overlay(
    volume: Volume,
    view: AnatomicalView,
    gray_image: RGBImage,
    values: Values,
    covered: NDArray[np.bool_] | None,
    outlines: MaskOutlines,
    pixels_per_mm: float,
) -> RGBImage:
    """(h,w) each -> (h,w,3): a picture and a map as `view` shows them, one over the other, as the volume is looked at.

    Numbers are brought to the pixels before they are coloured: between two voxels lies what lies between their values.
    """
    size = tuple(max(1, round(length * pixels_per_mm)) for length in volume.get_slice_size_mm(view))
    rgb = resize_plane(gray_image, size)
    rgb = np.repeat(rgb[..., None], 3, axis=2) if rgb.ndim == 2 else rgb
    numbers = resize_plane(
        normalize_between(np.asarray(values, np.float32), *volume.value_range, volume.colormap), size
    )
    covered_pixels = None if covered is None else resize_plane(covered.astype(np.uint8), size, nearest=True) > 0
    if volume.colormap == DIVERGING and volume.alpha > 0:
        rgb = fade_to_gray(rgb)
    blended = overlay(rgb, numbers, alpha=volume.alpha, colormap=volume.colormap, covered=covered_pixels)
    return draw_outlines(blended, outlines)


def resize_plane(plane: NDArray[Any], size: tuple[int, ...], *, nearest: bool = False) -> NDArray[Any]:
    """(h,w) or (h,w,3) at another size: means of pixels where it shrinks, linear where it grows; `nearest`: nothing between."""
    import cv2

    rows, columns = plane.shape[:2]
    is_reduced = size[0] <= rows and size[1] <= columns
    method = cv2.INTER_NEAREST if nearest else cv2.INTER_AREA if is_reduced else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(plane), (size[1], size[0]), interpolation=method), plane.dtype)
