"""How a volume's axes lie: the letters at their ends, and three ways to look at it as a radiologist does.

World coordinates are millimetres, RAS+: x grows to the patient's right, y to the front, z upwards.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import InputError

Letters: TypeAlias = tuple[str, str]  # at the low and at the high end of an axis
WORLD: tuple[Letters, Letters, Letters] = (("L", "R"), ("P", "A"), ("I", "S"))
# What is looked along, then what is at the top and at the left: the patient is seen from the feet, and face to face.
LOOKS = {"axial": ("IS", "A", "R"), "coronal": ("AP", "S", "R"), "sagittal": ("LR", "S", "A")}


@dataclass(frozen=True)
class View:
    """A way to look at a volume: along the axis `normal`, its axes `rows` and `columns` on the picture, backwards or not."""

    normal: int
    rows: int
    columns: int
    up: bool = False
    mirrored: bool = False
    name: str = ""

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """(D,H,W,…) -> (n,h,w,…): slice after slice, each as it is looked at; shares its memory."""
        turned = array.transpose(self.normal, self.rows, self.columns, *range(3, array.ndim))
        return turned[:, :: -1 if self.up else 1, :: -1 if self.mirrored else 1]

    def place(self, voxel: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[float, float]:
        """(row, column) of a voxel's centre, on the edges of the slice's pixels."""
        row, column = voxel[self.rows] + 0.5, voxel[self.columns] + 0.5
        return shape[self.rows] - row if self.up else row, shape[self.columns] - column if self.mirrored else column

    def edges(self, labels: tuple[Letters, ...] | None) -> tuple[str, str, str, str]:
        """The letters at the top, the bottom, the left and the right; empty ones where nothing is known."""
        if labels is None:
            return "", "", "", ""
        top, bottom = labels[self.rows][:: -1 if self.up else 1]
        left, right = labels[self.columns][:: -1 if self.mirrored else 1]
        return top, bottom, left, right


def views(labels: tuple[Letters, ...] | None) -> tuple[View, View, View]:
    """Axial, coronal and sagittal, turned as radiologists turn them, if the letters tell which is which; else axis 0, 1, 2."""
    ends = None if labels is None else ["".join(sorted(pair)) for pair in labels]
    if labels is None or ends is None or sorted(ends) != ["AP", "IS", "LR"]:
        return View(0, 1, 2, name="axis 0"), View(1, 0, 2, name="axis 1"), View(2, 0, 1, name="axis 2")
    where = {letter: (axis, place) for axis, pair in enumerate(labels) for place, letter in enumerate(pair)}
    axial, coronal, sagittal = (
        View(ends.index(normal), where[top][0], where[left][0], bool(where[top][1]), bool(where[left][1]), name)
        for name, (normal, top, left) in LOOKS.items()
    )
    return axial, coronal, sagittal


def checked_world(world: ArrayLike) -> NDArray[np.float64]:
    """(4,4): array index, whole numbers at the voxels' centres -> millimetres, RAS+; InputError for what is none."""
    matrix = np.asarray(world, np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:3, :3]) < 3:
        raise InputError(
            f"the world is {matrix.tolist()}; expected a finite, invertible (4,4) from index to millimetres"
        )
    return matrix


def spacing(world: NDArray[np.float64]) -> tuple[float, float, float]:
    """Millimetres a voxel, along each array axis."""
    along = np.sqrt((world[:3, :3] ** 2).sum(0))
    return float(along[0]), float(along[1]), float(along[2])


def world_of_cells(world: ArrayLike | None, cells: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """(4,4) of an image's voxels and (3,4) from the edges of a map's cells to those of the voxels -> (4,4) of the cells.

    The world counts from a voxel's centre, which is 0.5 on its edges.
    """
    if world is None:
        return None
    place, shift = np.eye(4), np.eye(4)
    place[:3], shift[:3, 3] = cells, 0.5
    return np.asarray(checked_world(world) @ np.linalg.inv(shift) @ place @ shift)


def letters(world: NDArray[np.float64]) -> tuple[Letters, Letters, Letters]:
    """The letters at the low and the high end of each array axis; of an oblique volume the nearest.

    >>> letters(np.diag([-1.0, 1, 2, 1]))
    (('R', 'L'), ('P', 'A'), ('I', 'S'))
    """
    first, second, third = (_pair(axis, world[axis, k] > 0) for k, axis in enumerate(_nearest(world)))
    return first, second, third


def axis_of(world: NDArray[np.float64], axis: int) -> int:
    """Which of x, y and z an array axis runs along, or nearest to."""
    return _nearest(world)[axis]


def _nearest(world: NDArray[np.float64]) -> tuple[int, ...]:
    """Each array axis' own axis of the world, so that together they are nearest."""
    share = np.abs(world[:3, :3] / spacing(world))
    return max(permutations(range(3)), key=lambda axes: sum(share[axis, k] for k, axis in enumerate(axes)))


def _pair(axis: int, forward: bool) -> Letters:
    low, high = WORLD[axis]
    return (low, high) if forward else (high, low)


def located(world: NDArray[np.float64], voxel: ArrayLike) -> tuple[str, str, str]:
    """Where a voxel's centre lies, as a viewer says it: `R 12.0`, `P 3.5`, `S 40.0`, in millimetres from the origin."""
    point = world[:3, :3] @ np.asarray(voxel, np.float64) + world[:3, 3]
    x, y, z = (
        f"{pair[int(value > 0)]} {abs(round(value, 1)):.1f}" for pair, value in zip(WORLD, point.tolist(), strict=True)
    )
    return x, y, z
