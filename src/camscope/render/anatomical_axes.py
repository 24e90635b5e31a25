"""How a volume's axes lie: the letters at their ends, and three ways to look at it as a radiologist does.

World coordinates are millimetres, RAS+: x grows to the patient's right, y to the front, z upwards.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import InputError

AxisLetters: TypeAlias = tuple[str, str]  # at the low and at the high end of an axis
WORLD_AXIS_LETTERS: tuple[AxisLetters, AxisLetters, AxisLetters] = (("L", "R"), ("P", "A"), ("I", "S"))
# What is looked along, then what is at the top and at the left: the patient is seen from the feet, and face to face.
VIEW_DEFINITIONS = {"axial": ("IS", "A", "R"), "coronal": ("AP", "S", "R"), "sagittal": ("LR", "S", "A")}


@dataclass(frozen=True)
class AnatomicalView:
    """A way to look at a volume: along the axis `normal_axis`, its axes `row_axis` and `column_axis` on the picture, backwards or not."""

    normal_axis: int
    row_axis: int
    column_axis: int
    is_row_flipped: bool = False
    is_column_flipped: bool = False
    name: str = ""

    def extract_slices(self, array: NDArray[Any]) -> NDArray[Any]:
        """(D,H,W,…) -> (n,h,w,…): slice after slice, each as it is looked at; shares its memory."""
        transposed = array.transpose(self.normal_axis, self.row_axis, self.column_axis, *range(3, array.ndim))
        return transposed[:, :: -1 if self.is_row_flipped else 1, :: -1 if self.is_column_flipped else 1]

    def project_voxel(self, voxel: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[float, float]:
        """(row, column) of a voxel's centre, on the edges of the slice's pixels."""
        row, column = voxel[self.row_axis] + 0.5, voxel[self.column_axis] + 0.5
        return shape[self.row_axis] - row if self.is_row_flipped else row, shape[
            self.column_axis
        ] - column if self.is_column_flipped else column

    def get_edge_letters(self, axis_letters: tuple[AxisLetters, ...] | None) -> tuple[str, str, str, str]:
        """The letters at the top, the bottom, the left and the right; empty ones where nothing is known."""
        if axis_letters is None:
            return "", "", "", ""
        top, bottom = axis_letters[self.row_axis][:: -1 if self.is_row_flipped else 1]
        left, right = axis_letters[self.column_axis][:: -1 if self.is_column_flipped else 1]
        return top, bottom, left, right


def choose_views(axis_letters: tuple[AxisLetters, ...] | None) -> tuple[AnatomicalView, AnatomicalView, AnatomicalView]:
    """Axial, coronal and sagittal, turned as radiologists turn them, if the letters tell which is which; else axis 0, 1, 2."""
    axis_names = None if axis_letters is None else ["".join(sorted(pair)) for pair in axis_letters]
    if axis_letters is None or axis_names is None or sorted(axis_names) != ["AP", "IS", "LR"]:
        return (
            AnatomicalView(0, 1, 2, name="axis 0"),
            AnatomicalView(1, 0, 2, name="axis 1"),
            AnatomicalView(2, 0, 1, name="axis 2"),
        )
    axis_and_end = {letter: (axis, end) for axis, pair in enumerate(axis_letters) for end, letter in enumerate(pair)}
    axial, coronal, sagittal = (
        AnatomicalView(
            axis_names.index(normal),
            axis_and_end[top][0],
            axis_and_end[left][0],
            bool(axis_and_end[top][1]),
            bool(axis_and_end[left][1]),
            name,
        )
        for name, (normal, top, left) in VIEW_DEFINITIONS.items()
    )
    return axial, coronal, sagittal


def check_affine(affine: ArrayLike) -> NDArray[np.float64]:
    """(4,4): array index, whole numbers at the voxels' centres -> millimetres, RAS+; InputError for what is none."""
    matrix = np.asarray(affine, np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:3, :3]) < 3:
        raise InputError(
            f"the world is {matrix.tolist()}; expected a finite, invertible (4,4) from index to millimetres"
        )
    return matrix


def compute_spacing(affine: NDArray[np.float64]) -> tuple[float, float, float]:
    """Millimetres a voxel, along each array axis."""
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(0))
    return float(lengths[0]), float(lengths[1]), float(lengths[2])


def compute_cell_affine(affine: ArrayLike | None, cells_to_voxels: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """(4,4) of an image's voxels and (3,4) from the edges of a map's cells to those of the voxels -> (4,4) of the cells.

    The world counts from a voxel's centre, which is 0.5 on its edges.
    """
    if affine is None:
        return None
    cell_matrix, shift = np.eye(4), np.eye(4)
    cell_matrix[:3], shift[:3, 3] = cells_to_voxels, 0.5
    return np.asarray(check_affine(affine) @ np.linalg.inv(shift) @ cell_matrix @ shift)


def get_axis_letters(affine: NDArray[np.float64]) -> tuple[AxisLetters, AxisLetters, AxisLetters]:
    """The letters at the low and the high end of each array axis; of an oblique volume the nearest.

    >>> letters(np.diag([-1.0, 1, 2, 1]))
    (('R', 'L'), ('P', 'A'), ('I', 'S'))
    """
    first, second, third = (
        _order_letters(axis, affine[axis, k] > 0) for k, axis in enumerate(_match_world_axes(affine))
    )
    return first, second, third


def find_world_axis(affine: NDArray[np.float64], axis: int) -> int:
    """Which of x, y and z an array axis runs along, or nearest to."""
    return _match_world_axes(affine)[axis]


def _match_world_axes(affine: NDArray[np.float64]) -> tuple[int, ...]:
    """Each array axis' own axis of the world, so that together they are nearest."""
    cosines = np.abs(affine[:3, :3] / compute_spacing(affine))
    return max(permutations(range(3)), key=lambda axes: sum(cosines[axis, k] for k, axis in enumerate(axes)))


def _order_letters(world_axis: int, is_forward: bool) -> AxisLetters:
    low, high = WORLD_AXIS_LETTERS[world_axis]
    return (low, high) if is_forward else (high, low)


def format_location(affine: NDArray[np.float64], voxel: ArrayLike) -> tuple[str, str, str]:
    """Where a voxel's centre lies, as a viewer says it: `R 12.0`, `P 3.5`, `S 40.0`, in millimetres from the origin."""
    point = affine[:3, :3] @ np.asarray(voxel, np.float64) + affine[:3, 3]
    x, y, z = (
        f"{pair[int(value > 0)]} {abs(round(value, 1)):.1f}"
        for pair, value in zip(WORLD_AXIS_LETTERS, point.tolist(), strict=True)
    )
    return x, y, z
