"""`Volume`: an image volume and its map, with voxel sizes and patient directions. `AnatomicalView`: one view of it.

Millimeters are in RAS+: x, y and z point to the patient's right, front and top.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError, InputError, NonFiniteError
from camscope.plurals import plural
from camscope.render.colors import DIVERGING, Scale, compute_display_range
from camscope.render.draw_regions_and_outlines import MaskOutline, Masks, prepare_outlines
from camscope.render.image_encoding import RGBImage, Values, check_image_height

AxisLetters: TypeAlias = tuple[str, str]  # at the low and at the high end of an axis
WORLD_AXIS_LETTERS: tuple[AxisLetters, AxisLetters, AxisLetters] = (("L", "R"), ("P", "A"), ("I", "S"))
# View direction, then what is at the top and at the left: as seen from the feet, and facing the patient.
VIEW_DEFINITIONS = {"axial": ("IS", "A", "R"), "coronal": ("AP", "S", "R"), "sagittal": ("LR", "S", "A")}
VoxelIndex = tuple[int, int, int]
CONTRAST_PERCENTILES = (0.5, 99.5)  # default window in percent
MAX_CONTRAST_SAMPLES = 2_000_000  # voxels from which percentiles are computed
MIN_SIDE_PIXELS, MAX_SIDE_PIXELS = 320, 512  # default range of the longest side


class EdgeLetters(NamedTuple):
    """The patient directions at the four edges of a slice, such as "A" for anterior.

    Args:
        top: The direction at the upper edge.
        bottom: The direction at the lower edge.
        left: The direction at the left edge.
        right: The direction at the right edge.

    >>> EdgeLetters("A", "P", "R", "L").top
    'A'

    """

    top: str
    bottom: str
    left: str
    right: str


@dataclass(frozen=True)
class AnatomicalView:
    """A view of a volume along its array axis `normal_axis`, such as the axial view.

    It says which array axes are the rows and columns of a slice, and whether they are flipped.
    """

    normal_axis: int
    row_axis: int
    column_axis: int
    is_row_flipped: bool = False
    is_column_flipped: bool = False
    name: str = ""

    def extract_slices(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the slices (n,h,w,…) of an array (D,H,W,…) in the orientation of this view, without copying values."""
        transposed = array.transpose(self.normal_axis, self.row_axis, self.column_axis, *range(3, array.ndim))
        return transposed[:, :: -1 if self.is_row_flipped else 1, :: -1 if self.is_column_flipped else 1]

    def get_row_and_column_of_voxel(self, voxel: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[float, float]:
        """Return where the center of a voxel is in its slice, as row and column. Pixel i covers [i, i+1]."""
        row, column = voxel[self.row_axis] + 0.5, voxel[self.column_axis] + 0.5
        row = shape[self.row_axis] - row if self.is_row_flipped else row
        return row, shape[self.column_axis] - column if self.is_column_flipped else column

    def get_edge_letters(self, axis_letters: tuple[AxisLetters, ...] | None) -> EdgeLetters:
        """Return the patient direction at each edge of a slice, such as "A" at the top. An unknown direction gives ""."""
        if axis_letters is None:
            return EdgeLetters("", "", "", "")
        top, bottom = axis_letters[self.row_axis][:: -1 if self.is_row_flipped else 1]
        left, right = axis_letters[self.column_axis][:: -1 if self.is_column_flipped else 1]
        return EdgeLetters(top, bottom, left, right)


@dataclass(frozen=True, eq=False)
class Volume:
    """An image volume (D,H,W) or (D,H,W,3), and a map (D,H,W) of the same size.

    Args:
        image: The volume. uint8 is drawn unchanged. Other numbers become grays: `window` spans black to white.
        values: The map, of any scale.
        spacing: Millimeters per voxel along each axis. Without it and `affine`, voxels are drawn as cubes.
        axis_letters: Letters at the low and high end of each axis, such as `(("I", "S"), ("A", "P"), ("R", "L"))`.
        affine: (4,4) from array index to millimeters in RAS+. It determines `spacing` and `axis_letters`.
        covered: False where the map has no values.
        masks: One mask (D,H,W), or a mapping of named masks, drawn as outlines.
        scale: As in `apply_scale`. All slices share one scale.
        colormap: One of COLORMAPS.
        alpha: Opacity of the strongest value, 0..1.
        window: (low, high). Default: the 0.5th and 99.5th percentile.
        flag: A warning to display. Default: a warning if the map is empty or flat. "": no warning.
        drawn_values: The map (D,H,W) that gets the colors, if its interpolation differs from that of `values`. Numbers and
            the peak are those of `values`.
        has_cells: Whether the map is drawn in blocks, without interpolation between voxels.

    Raises:
        InputError: The arrays are no volume, or a setting has an invalid value.
        NonFiniteError: The map has NaN or infinity.
        GeometryError: `covered` or `drawn_values` has another shape.

    >>> Volume(np.zeros((2, 4, 4), np.uint8), np.ones((2, 4, 4))).shape
    (2, 4, 4)

    """

    image: NDArray[Any]
    values: Values
    spacing: tuple[float, float, float] | None = None
    axis_letters: tuple[AxisLetters, ...] | None = None
    affine: ArrayLike | None = None
    covered: NDArray[np.bool_] | None = None
    masks: Masks | None = None
    scale: Scale | None = None
    colormap: str = "inferno"
    alpha: float = 0.85
    window: tuple[float, float] | None = None
    flag: str | None = None
    drawn_values: Values | None = None
    has_cells: bool = False

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or not self.values.size or self.image.shape not in (self.shape, (*self.shape, 3)):
            received = f"the volume is {self.image.shape} and its map is {self.values.shape}"
            raise InputError(f"{received}; expected (D,H,W) or (D,H,W,3) for the volume, and (D,H,W) for the map")
        if not (finite := np.isfinite(self.values)).all():
            raise NonFiniteError(
                f"the map has values that are not finite: {(~finite).sum()} of {plural(finite.size, 'value')}"
            )
        if self.drawn_values is not None and self.drawn_values.shape != self.shape:
            raise GeometryError(
                f"the map drawn_values is {self.drawn_values.shape} and the map is {self.shape}; expected the same size"
            )
        if self.covered is not None and self.covered.shape != self.shape:
            raise GeometryError(
                f"the mask covered is {self.covered.shape} and the map is {self.shape}; expected the same size"
            )
        spacing = self.spacing
        if spacing is not None and (len(spacing) != 3 or not all(0 < length < np.inf for length in spacing)):
            raise InputError(f"spacing={self.spacing}: expected three positive numbers, millimeters per voxel")
        if self.axis_letters is not None and [len(pair) for pair in self.axis_letters] != [2, 2, 2]:
            raise InputError(f"axis_letters={self.axis_letters}: expected two letters for each of the three axes")

    @property
    def shape(self) -> VoxelIndex:
        """The shape (D,H,W) of the volume."""
        depth, height, width = self.values.shape
        return depth, height, width

    @property
    def colored_values(self) -> Values:
        """The map (D,H,W) that gets the colors."""
        return self.values if self.drawn_values is None else self.drawn_values

    @cached_property
    def affine_matrix(self) -> NDArray[np.float64] | None:
        """The affine as a float64 array, after a check. The value is `None` if there is no affine."""
        return None if self.affine is None else require_valid_affine(self.affine)

    @cached_property
    def voxel_size(self) -> tuple[float, float, float]:
        """The millimeters per voxel along each axis. An unknown voxel size counts as 1."""
        if self.spacing is not None:
            return self.spacing
        return (1.0, 1.0, 1.0) if self.affine_matrix is None else compute_spacing(self.affine_matrix)

    @property
    def has_physical_size(self) -> bool:
        """Whether the voxel size in millimeters is known."""
        return self.spacing is not None or self.affine is not None

    @cached_property
    def axis_end_letters(self) -> tuple[AxisLetters, ...] | None:
        """The patient directions at the low and high end of each axis, such as ("L", "R").
        The value is `None` if the directions are unknown.
        """
        if self.axis_letters is not None:
            return self.axis_letters
        return None if self.affine_matrix is None else get_axis_letters(self.affine_matrix)

    @cached_property
    def views(self) -> tuple[AnatomicalView, AnatomicalView, AnatomicalView]:
        """The axial, coronal and sagittal view. If the directions are unknown, the views along axis 0, 1 and 2."""
        return choose_views(self.axis_end_letters)

    def get_view(self, axis: int | str | None) -> AnatomicalView:
        """Return a view by array axis or by name: "axial", "coronal" or "sagittal". For None, return the first view."""
        for view in self.views:
            if axis is None or axis in (view.name, view.normal_axis):
                return view
        raise InputError(f"axis={axis!r}: expected 0, 1, 2 or {', '.join(view.name for view in self.views)}")

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """The lowest and highest raw value of the color scale that all slices share."""
        return compute_display_range(self.values, self.scale, self.colormap)

    @cached_property
    def peak(self) -> VoxelIndex:
        """The voxel with the strongest map value. If the map is empty or flat, the middle voxel of the volume."""
        strengths = np.abs(self.values) if self.colormap == DIVERGING else self.values
        if self.covered is not None:
            strengths = np.where(self.covered, strengths, -np.inf)
        if strengths.max() <= 0 or strengths.max() == strengths.min():
            return self.shape[0] // 2, self.shape[1] // 2, self.shape[2] // 2
        d, r, c = np.unravel_index(int(strengths.argmax()), self.shape)
        return int(d), int(r), int(c)

    @cached_property
    def map_warning(self) -> str | None:
        """The warning to display: `flag`, or a text that the map is empty or flat. The value is `None` if no warning applies."""
        if self.flag is not None:
            return self.flag or None
        covered_values = self.values if self.covered is None else self.values[self.covered]
        if not covered_values.size:
            return "the map covers no part of this volume"
        if not covered_values.any():
            return "the map is 0 everywhere"
        if covered_values.min() == covered_values.max():
            return "flat: the map has one value everywhere"
        return "nothing in the map is positive" if self.colormap != DIVERGING and covered_values.max() <= 0 else None

    @cached_property
    def outlines(self) -> list[MaskOutline]:
        """The outline of each mask: its name, color and boolean mask."""
        return prepare_outlines(self.masks, self.shape)

    @cached_property
    def image_as_uint8(self) -> RGBImage:
        """The image as uint8, (D,H,W) or (D,H,W,3)."""
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
        """Return the index of a voxel. For None, return the peak. Raise InputError if the index is outside of the volume."""
        if voxel_index is None:
            return self.peak
        in_range = (0 <= index < length for index, length in zip(voxel_index, self.shape, strict=False))
        if len(voxel_index) != 3 or not all(in_range):
            expected = f"a voxel (d, row, column) of a volume {self.shape}, numbered from 0"
            raise InputError(f"voxel_index={voxel_index}: expected {expected}")
        return int(voxel_index[0]), int(voxel_index[1]), int(voxel_index[2])

    def get_slice_height_and_width_mm(self, view: AnatomicalView) -> tuple[float, float]:
        """Return the height and width of the slices of a view, in millimeters."""
        return self.extent_mm[view.row_axis], self.extent_mm[view.column_axis]

    @property
    def extent_mm(self) -> tuple[float, float, float]:
        """The size of the volume in millimeters along each axis."""
        depth, height, width = np.multiply(self.shape, self.voxel_size).tolist()
        return depth, height, width

    def choose_pixels_per_mm(self, size: int | None) -> float:
        """Return the scale of drawings in pixels per millimeter. The longest side has `size` pixels. For None, choose a size."""
        if size is not None:
            check_image_height("size", size)
        longest = max(self.extent_mm)
        if size is None:
            size = min(MAX_SIDE_PIXELS, max(MIN_SIDE_PIXELS, round(longest / min(self.voxel_size))))
        return size / longest


def choose_views(axis_letters: tuple[AxisLetters, ...] | None) -> tuple[AnatomicalView, AnatomicalView, AnatomicalView]:
    """Return the axial, coronal and sagittal view, with the orientation that is usual in radiology.

    If a direction is unknown, return the views along axis 0, 1 and 2.
    """
    axis_names = ["".join(sorted(pair)) for pair in axis_letters or ()]
    if axis_letters is None or sorted(axis_names) != ["AP", "IS", "LR"]:
        first, second, third = (
            AnatomicalView(normal, row, column, name=f"axis {normal}")
            for normal, row, column in ((0, 1, 2), (1, 0, 2), (2, 0, 1))
        )
        return first, second, third
    axis_and_end = {letter: (axis, end) for axis, pair in enumerate(axis_letters) for end, letter in enumerate(pair)}
    views = []
    for name, (normal, top, left) in VIEW_DEFINITIONS.items():
        (row_axis, row_end), (column_axis, column_end) = axis_and_end[top], axis_and_end[left]
        normal_axis = axis_names.index(normal)
        views.append(AnatomicalView(normal_axis, row_axis, column_axis, bool(row_end), bool(column_end), name))
    axial, coronal, sagittal = views
    return axial, coronal, sagittal


def require_valid_affine(affine: ArrayLike) -> NDArray[np.float64]:
    """Return an affine (4,4) as float64. Raise InputError for an affine that is not finite or not invertible."""
    matrix = np.asarray(affine, np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:3, :3]) < 3:
        raise InputError(
            f"the affine is {matrix.tolist()}; expected a finite, invertible (4,4) matrix from array index to mm"
        )
    return matrix


def compute_spacing(affine: NDArray[np.float64]) -> tuple[float, float, float]:
    """Compute the voxel size in millimeters along each array axis."""
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(0))
    return float(lengths[0]), float(lengths[1]), float(lengths[2])


def compute_cell_affine(affine: ArrayLike | None, cells_to_voxels: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Compute the affine (4,4) of the cells of a map from the affine of the voxels. In both, index i is a center.

    Args:
        affine: (4,4) of the voxels, from index to millimeters, or None if it is unknown.
        cells_to_voxels: (3,4) from cell to voxel coordinates in which i is the edge of cell or voxel i, and i + 0.5 its
            center.

    Returns:
        (4,4) from the index of a cell to millimeters, or None if the affine is unknown.

    >>> twice = np.hstack([2 * np.eye(3), np.zeros((3, 1))])  # a cell is two voxels long
    >>> compute_cell_affine(np.eye(4), twice).tolist()
    [[2.0, 0.0, 0.0, 0.5], [0.0, 2.0, 0.0, 0.5], [0.0, 0.0, 2.0, 0.5], [0.0, 0.0, 0.0, 1.0]]

    """
    if affine is None:
        return None
    cell_matrix, shift = np.eye(4), np.eye(4)
    cell_matrix[:3], shift[:3, 3] = cells_to_voxels, 0.5
    return np.asarray(require_valid_affine(affine) @ np.linalg.inv(shift) @ cell_matrix @ shift)


def get_axis_letters(affine: NDArray[np.float64]) -> tuple[AxisLetters, AxisLetters, AxisLetters]:
    """Return the patient directions at the low and high end of each array axis, such as ("L", "R").

    An oblique axis gets the directions that are nearest to it.

    >>> get_axis_letters(np.diag([-1.0, 1, 2, 1]))
    (('R', 'L'), ('P', 'A'), ('I', 'S'))
    """
    letters: list[AxisLetters] = []
    for k, axis in enumerate(find_xyz_of_array_axes(affine)):
        low, high = WORLD_AXIS_LETTERS[axis]
        letters.append((low, high) if affine[axis, k] > 0 else (high, low))
    first, second, third = letters
    return first, second, third


def find_xyz_of_array_axes(affine: NDArray[np.float64]) -> tuple[int, ...]:
    """Return for each array axis the nearest of x, y and z, as 0, 1 or 2. No two axes get the same number."""
    cosines = np.abs(affine[:3, :3] / compute_spacing(affine))
    return max(permutations(range(3)), key=lambda axes: sum(cosines[axis, k] for k, axis in enumerate(axes)))


def format_xyz_location(affine: NDArray[np.float64], voxel: ArrayLike) -> tuple[str, str, str]:
    """Format the x, y and z of a voxel in millimeters, as medical viewers do: `R 12.0`, `P 3.5` and `S 40.0`."""
    point = affine[:3, :3] @ np.asarray(voxel, np.float64) + affine[:3, 3]
    x, y, z = (
        f"{pair[int(value > 0)]} {abs(round(value, 1)):.1f}"
        for pair, value in zip(WORLD_AXIS_LETTERS, point.tolist(), strict=True)
    )
    return x, y, z
