"""`Placement`: transform coordinates and maps between the model's input and the original image.

Coordinates are continuous and in array order: (row, column), or (depth, row, column). Pixel i covers [i, i + 1], so its
center is i + 0.5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from camscope.errors import GeometryError
from camscope.map_interpolation import (
    Interpolation,
    interpolate_along_axes,
    interpolate_at_points,
    require_interpolation,
    reshape_along_axis,
)
from camscope.plurals import plural

FloatArray = NDArray[np.floating[Any]]
PIXELS_PER_BLOCK = 1 << 20  # pixels that a general affine projection processes at once


class ProjectedMap(NamedTuple):
    """A map on the original image: values (H,W), and a mask (H,W) of the pixels that the model's input covers.

    Values outside of the input are 0.
    """

    values: FloatArray
    covered: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Placement:
    """An affine transform from the model's input to the original image.

    Args:
        matrix: (n,n+1), the linear part and the offset of the transform from input to image coordinates.
        input_size: Size of the model's input in pixels along each of the n axes.
        image_size: Size of the original image.

    Raises:
        GeometryError: The matrix is not invertible, or a size is not positive.

    >>> place = Placement.identity((480, 640)).resized((240, 320)).cropped((8, 48), (224, 224))
    >>> place.to_image([[112, 112]]).tolist()  # the crop's center, on the 480 x 640 original
    [[240.0, 320.0]]
    >>> values, covered = place.project(np.ones((7, 7)))  # a map of any grid, resized to the original
    >>> values.shape, float(covered.mean().round(3))
    ((480, 640), 0.653)

    """

    matrix: NDArray[np.float64]
    input_size: tuple[int, ...]
    image_size: tuple[int, ...]

    def __post_init__(self) -> None:
        matrix = np.array(self.matrix, np.float64)
        matrix.setflags(write=False)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "input_size", _require_positive_size(self.input_size, len(self.input_size)))
        object.__setattr__(self, "image_size", _require_positive_size(self.image_size, len(self.input_size)))
        n = len(self.input_size)
        if matrix.shape != (n, n + 1):
            raise GeometryError(
                f"the matrix of a placement has shape {matrix.shape}; expected ({n}, {n + 1}) for {plural(n, 'dimension')}"
            )
        if not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:, :n]) < n:
            raise GeometryError(
                f"the matrix of a placement is {matrix.tolist()}; expected a finite and invertible matrix"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    @classmethod
    def identity(cls, size: Sequence[int]) -> Self:
        """Return the placement of an input that is the whole image, pixel by pixel."""
        return cls(np.eye(len(size), len(size) + 1), tuple(size), tuple(size))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a placement from the dict that `to_dict` returned."""
        try:
            return cls(np.array(data["matrix"], np.float64), tuple(data["input_size"]), tuple(data["image_size"]))
        except (KeyError, TypeError, ValueError) as error:
            raise GeometryError(
                f"the dict is not a placement ({error!r}); expected the result of Placement.to_dict"
            ) from error

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the placement as a dict of lists of numbers, which JSON can store."""
        sizes = {"input_size": list(self.input_size), "image_size": list(self.image_size)}
        return {"matrix": self.matrix.tolist(), **sizes}

    def on_resized_image(self, size: Sequence[int]) -> Self:
        """Return the placement of the same input after the original image is resized."""
        if tuple(size) == self.image_size:
            return self
        size = _require_positive_size(size, self._n_axes)
        ratio = np.divide(size, self.image_size)[:, None]
        return type(self)(self.matrix * ratio, self.input_size, size)

    # Steps of preprocessing. Each returns the placement after that step.

    def resized(self, size: Sequence[int]) -> Self:
        """Return the placement after the input is resized to `size`."""
        size = _require_positive_size(size, self._n_axes)
        return self._build_placement_of_new_input(
            np.diag(np.divide(self.input_size, size)), np.zeros(self._n_axes), size
        )

    def cropped(self, start: Sequence[int], size: Sequence[int]) -> Self:
        """Return the placement after the input is cropped to `size` pixels from `start`.

        A crop that reaches beyond the input counts as padded there.
        """
        return self._build_placement_of_new_input(
            np.eye(self._n_axes), _require_whole_numbers(start, self._n_axes, "start"), size
        )

    def padded(self, before: Sequence[int], after: Sequence[int]) -> Self:
        """Return the placement after padding: pixels are added before and after each axis of the input."""
        first = _require_whole_numbers(before, self._n_axes, "before")
        last = _require_whole_numbers(after, self._n_axes, "after")
        return self.cropped((-first).tolist(), (first + last + self.input_size).tolist())

    def flipped(self, axis: int) -> Self:
        """Return the placement after one axis of the input is reversed."""
        linear, offset = np.eye(self._n_axes), np.zeros(self._n_axes)
        linear[axis, axis], offset[axis] = -1, self.input_size[axis]
        return self._build_placement_of_new_input(linear, offset, self.input_size)

    def transposed(self, axes: Sequence[int]) -> Self:
        """Return the placement after the axes of the input are reordered, as by `numpy.transpose`."""
        if sorted(axes) != list(range(self._n_axes)):
            raise GeometryError(f"axes is {tuple(axes)}; expected each of the {plural(self._n_axes, 'axis')} once")
        return self._build_placement_of_new_input(
            np.eye(self._n_axes)[list(axes)].T, np.zeros(self._n_axes), [self.input_size[axis] for axis in axes]
        )

    def composed(self, inner: Self) -> Self:
        """Chain two placements: return where the input of `inner` lies on the image of this placement.

        The image of `inner` must be the input of this placement.

        """
        if inner.image_size != self.input_size:
            raise GeometryError(
                f"the image size of the inner placement is {inner.image_size}; expected {self.input_size}, the input size"
            )
        return self._build_placement_of_new_input(inner.matrix[:, :-1], inner.matrix[:, -1], inner.input_size)

    # Coordinates and maps.

    def cell_to_image_matrix(self, grid: Sequence[int]) -> NDArray[np.float64]:
        """Return the matrix (n,n+1) that transforms cell coordinates of a map to pixel coordinates of the image."""
        grid = _require_positive_size(grid, self._n_axes)
        scaled = self.matrix[:, : self._n_axes] * np.divide(self.input_size, grid)
        return np.column_stack([scaled, self.matrix[:, self._n_axes]])

    def to_image(self, points: ArrayLike) -> NDArray[np.float64]:
        """Transform points (M,n) of the model's input to points of the original image."""
        return _require_points_array(points, self._n_axes) @ self.matrix[:, :-1].T + self.matrix[:, -1]

    def to_input(self, points: ArrayLike) -> NDArray[np.float64]:
        """Transform points (M,n) of the original image to points of the model's input."""
        inverse = _invert_affine(self.matrix)
        return _require_points_array(points, self._n_axes) @ inverse[:, :-1].T + inverse[:, -1]

    def project(self, attribution: ArrayLike, interpolation: Interpolation = "bilinear") -> ProjectedMap:
        """Resample a map (h,w) on the pixel grid of the original image.

        The outermost cells reach to the border of the input. The values are float64 for a float64 map, otherwise float32.

        Args:
            attribution: The map.
            interpolation: "bilinear" is linear along each axis between the centers of cells. "cells" draws each cell as a
                block. "smooth" is a cubic through the values of the cells, without kinks and without overshoot.

        Returns:
            The values, and the mask of the pixels that the map covers.

        Raises:
            GeometryError: The map has another number of axes.
            InputError: The interpolation is unknown.

        >>> Placement.identity((4,)).project([0.0, 1.0]).values.tolist()
        [0.0, 0.25, 0.75, 1.0]

        """
        require_interpolation(interpolation)
        attribution = np.asarray(attribution)
        attribution = attribution if attribution.dtype == np.float64 else attribution.astype(np.float32)
        if attribution.ndim != self._n_axes or not attribution.size:
            raise GeometryError(
                f"the map has shape {attribution.shape}; expected {plural(self._n_axes, 'axis')} of length 1 or more"
            )
        inverse = _invert_affine(self.cell_to_image_matrix(attribution.shape))
        depends = inverse[:, :-1] != 0
        if (depends.sum(0) == 1).all() and (depends.sum(1) == 1).all():  # each image axis depends on one map axis
            axes = depends.argmax(0).tolist()
            return _project_separable(attribution, inverse, self.image_size, axes, interpolation)
        return _project_affine(attribution, inverse, self.image_size, interpolation)

    @property
    def _n_axes(self) -> int:
        return len(self.input_size)

    def _comparison_key(self) -> tuple[object, ...]:
        return (self.matrix.tobytes(), self.input_size, self.image_size)

    def _build_placement_of_new_input(self, linear: FloatArray, offset: ArrayLike, size: Sequence[int]) -> Self:
        """Return the placement of a new input with the shape `size` on the original image.

        `linear` and `offset` transform the coordinates of the new input to coordinates of the present input.
        """
        matrix = np.column_stack([self.matrix[:, :-1] @ linear, self.to_image(np.asarray(offset)[None])[0]])
        return type(self)(matrix, _require_positive_size(size, self._n_axes), self.image_size)


def project_mask_to_input(
    mask: NDArray[np.bool_], input_size: Sequence[int], to_image: Callable[[FloatArray], NDArray[np.float64]]
) -> NDArray[np.bool_]:
    """Resample a mask of the original image at the pixel centers of the model's input.

    `to_image` maps points of the input to the image. Input pixels outside the image are False.
    """
    centers = np.indices(tuple(input_size)).reshape(len(input_size), -1).T + 0.5
    pixels = np.floor(to_image(centers)).astype(np.int64)
    inside = ((pixels >= 0) & (pixels < mask.shape)).all(1)
    sampled = np.zeros(len(pixels), np.bool_)
    sampled[inside] = mask[tuple(pixels[inside].T)]
    return sampled.reshape(tuple(input_size))


def _require_positive_size(size: Sequence[int], n_axes: int) -> tuple[int, ...]:
    numbers = _require_whole_numbers(size, n_axes, "size")
    if n_axes == 0 or numbers.min() < 1:
        raise GeometryError(f"the size is {tuple(size)}; expected positive integers")
    return tuple(numbers.tolist())


def _require_whole_numbers(values: Sequence[int], n_axes: int, name: str) -> NDArray[np.int64]:
    numbers = np.asarray(values)
    if numbers.shape != (n_axes,) or not np.equal(numbers, np.round(numbers)).all():
        raise GeometryError(f"{name} is {values!r}; expected {plural(n_axes, 'integer')}, one for each axis")
    return numbers.astype(np.int64)


def _require_points_array(points: ArrayLike, n_axes: int) -> NDArray[np.float64]:
    array = np.asarray(points, np.float64)
    if array.ndim == 0 or array.shape[-1] != n_axes:
        raise GeometryError(f"the points have shape {array.shape}; expected (M, {n_axes})")
    return array


def _invert_affine(matrix: FloatArray) -> NDArray[np.float64]:
    square = np.vstack([matrix, np.eye(len(matrix) + 1)[-1:]])
    return np.asarray(np.linalg.inv(square)[:-1], np.float64)


def _project_separable(
    attribution: FloatArray,
    inverse: FloatArray,
    size: Sequence[int],
    axes: Sequence[int],
    interpolation: Interpolation,
) -> ProjectedMap:
    """Resample a map along one axis after another. This is exact and fast."""
    coordinates = [
        (np.arange(length) + 0.5) * inverse[axes[axis], axis] + inverse[axes[axis], -1]
        for axis, length in enumerate(size)
    ]
    values = interpolate_along_axes(attribution.transpose(axes), coordinates, interpolation)
    covered = np.ones((), np.bool_)
    for axis, cell in enumerate(coordinates):
        inside = (cell >= 0) & (cell <= attribution.shape[axes[axis]])
        covered = covered & reshape_along_axis(inside, axis, len(size))
    covered = np.ascontiguousarray(np.broadcast_to(covered, values.shape))
    values[~covered] = 0
    return ProjectedMap(values, covered)


def _project_affine(
    attribution: FloatArray, inverse: FloatArray, size: Sequence[int], interpolation: Interpolation
) -> ProjectedMap:
    """Resample a map with any affine transform."""
    values, covered = np.zeros(size, attribution.dtype), np.zeros(size, np.bool_)
    step = max(1, PIXELS_PER_BLOCK // max(1, int(np.prod(size[1:]))))
    for start in range(0, size[0], step):
        rows = slice(start, min(start + step, size[0]))
        index = np.indices((rows.stop - rows.start, *size[1:]), np.float64) + 0.5
        index[0] += rows.start
        cell = np.tensordot(inverse[:, :-1], index, 1) + reshape_along_axis(inverse[:, -1], 0, len(size) + 1)
        limit = reshape_along_axis(np.array(attribution.shape), 0, len(size) + 1)
        inside = ((cell >= 0) & (cell <= limit)).all(0)
        covered[rows] = inside
        values[rows][inside] = interpolate_at_points(attribution, cell[:, inside], interpolation)
    return ProjectedMap(values, covered)
