"""Anatomical axes of a volume: the letters at their ends, and the three standard views of radiology.

World coordinates are millimeters in RAS+: x grows to the patient's right, y to the front, z upward.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import InputError

AxisLetters: TypeAlias = tuple[str, str]  # at the low and at the high end of an axis
WORLD_AXIS_LETTERS: tuple[AxisLetters, AxisLetters, AxisLetters] = (("L", "R"), ("P", "A"), ("I", "S"))
# View direction, then what is at the top and at the left: as seen from the feet, and facing the patient.
VIEW_DEFINITIONS = {"axial": ("IS", "A", "R"), "coronal": ("AP", "S", "R"), "sagittal": ("LR", "S", "A")}


@dataclass(frozen=True)
class AnatomicalView:
    """A view of a volume along `normal_axis`: which axes are rows and columns of the image, and whether they are flipped."""

    normal_axis: int
    row_axis: int
    column_axis: int
    is_row_flipped: bool = False
    is_column_flipped: bool = False
    name: str = ""

    def extract_slices(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the slices (n,h,w,…) of an array (D,H,W,…) as the view shows them, sharing its memory."""
        transposed = array.transpose(self.normal_axis, self.row_axis, self.column_axis, *range(3, array.ndim))
        return transposed[:, :: -1 if self.is_row_flipped else 1, :: -1 if self.is_column_flipped else 1]

    def project_voxel(self, voxel: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[float, float]:
        """Return (row, column) of a voxel's center in edge coordinates of the slice."""
        row, column = voxel[self.row_axis] + 0.5, voxel[self.column_axis] + 0.5
        row = shape[self.row_axis] - row if self.is_row_flipped else row
        return row, shape[self.column_axis] - column if self.is_column_flipped else column

    def get_edge_letters(self, axis_letters: tuple[AxisLetters, ...] | None) -> tuple[str, str, str, str]:
        """Return the letters at the top, bottom, left and right edge, or empty strings where unknown."""
        if axis_letters is None:
            return "", "", "", ""
        top, bottom = axis_letters[self.row_axis][:: -1 if self.is_row_flipped else 1]
        left, right = axis_letters[self.column_axis][:: -1 if self.is_column_flipped else 1]
        return top, bottom, left, right


def choose_views(axis_letters: tuple[AxisLetters, ...] | None) -> tuple[AnatomicalView, AnatomicalView, AnatomicalView]:
    """Return the axial, coronal and sagittal view, oriented as in radiology.

    Without letters for all three directions, the views are along axis 0, 1 and 2.
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


def check_affine(affine: ArrayLike) -> NDArray[np.float64]:
    """Return the affine (4,4) from array index to millimeters in RAS+ as float64. Raises InputError if it is not one."""
    matrix = np.asarray(affine, np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:3, :3]) < 3:
        raise InputError(f"the affine is {matrix.tolist()}; expected a finite, invertible (4,4) from index to mm")
    return matrix


def compute_spacing(affine: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return millimeters per voxel along each array axis."""
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(0))
    return float(lengths[0]), float(lengths[1]), float(lengths[2])


def compute_cell_affine(affine: ArrayLike | None, cells_to_voxels: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the affine (4,4) of a map's cells from that of the voxels and a matrix (3,4) from cell edges to voxel edges.

    The affine refers to voxel centers, which are at 0.5 in edge coordinates.
    """
    if affine is None:
        return None
    cell_matrix, shift = np.eye(4), np.eye(4)
    cell_matrix[:3], shift[:3, 3] = cells_to_voxels, 0.5
    return np.asarray(check_affine(affine) @ np.linalg.inv(shift) @ cell_matrix @ shift)


def get_axis_letters(affine: NDArray[np.float64]) -> tuple[AxisLetters, AxisLetters, AxisLetters]:
    """Return the letters at the low and high end of each array axis, for an oblique volume the nearest ones.

    >>> get_axis_letters(np.diag([-1.0, 1, 2, 1]))
    (('R', 'L'), ('P', 'A'), ('I', 'S'))
    """
    letters: list[AxisLetters] = []
    for k, axis in enumerate(match_world_axes(affine)):
        low, high = WORLD_AXIS_LETTERS[axis]
        letters.append((low, high) if affine[axis, k] > 0 else (high, low))
    first, second, third = letters
    return first, second, third


def match_world_axes(affine: NDArray[np.float64]) -> tuple[int, ...]:
    """Return which of x, y and z each array axis runs along: different ones, so that all together are nearest."""
    cosines = np.abs(affine[:3, :3] / compute_spacing(affine))
    return max(permutations(range(3)), key=lambda axes: sum(cosines[axis, k] for k, axis in enumerate(axes)))


def format_location(affine: NDArray[np.float64], voxel: ArrayLike) -> tuple[str, str, str]:
    """Format a voxel's center as viewers do: `R 12.0`, `P 3.5`, `S 40.0`, in millimeters from the origin."""
    point = affine[:3, :3] @ np.asarray(voxel, np.float64) + affine[:3, 3]
    x, y, z = (
        f"{pair[int(value > 0)]} {abs(round(value, 1)):.1f}"
        for pair, value in zip(WORLD_AXIS_LETTERS, point.tolist(), strict=True)
    )
    return x, y, z
