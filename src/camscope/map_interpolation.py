"""Interpolate a map between the centers of its cells: as blocks, linearly, or by a smooth curve without overshoot.

Cell coordinates are continuous: cell i covers [i, i + 1], so its center is i + 0.5. Beyond the outermost centers, the map
keeps the value of the outermost cells.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError

FloatArray = NDArray[np.floating[Any]]
Interpolation = Literal["smooth", "bilinear", "cells"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("smooth", "bilinear", "cells")


def require_interpolation(interpolation: str) -> None:
    """Raise an InputError if a name is not one of INTERPOLATIONS."""
    if interpolation not in INTERPOLATIONS:
        raise InputError(f"interpolation={interpolation!r}; choose from {', '.join(INTERPOLATIONS)}")


def interpolate_along_axes(
    attribution: FloatArray, coordinates: Sequence[FloatArray], interpolation: Interpolation
) -> FloatArray:
    """Resample a map on a grid. `coordinates` holds the cell coordinates (length,) of the grid along each axis."""
    if interpolation == "cells":
        for axis, cell in enumerate(coordinates):
            attribution = attribution.take(_find_cell(cell, attribution.shape[axis]), axis)
        return attribution
    values = attribution
    slopes = _compute_slopes_of_all_axes(attribution) if interpolation == "smooth" else []
    for axis, cell in enumerate(coordinates):
        low, share = split_into_index_and_fraction(cell, attribution.shape[axis])
        high = np.minimum(low + 1, attribution.shape[axis] - 1)
        share = reshape_along_axis(share.astype(attribution.dtype), axis, attribution.ndim)
        weight = _smooth_step(share) if interpolation == "smooth" else share
        resampled = [_blend(array, low, high, weight, axis) for array in (values, *slopes[1:])]
        if interpolation == "smooth":
            resampled[0] += _blend_slopes(slopes[0], low, high, share, axis)
        values, slopes = resampled[0], resampled[1:]
    return values.clip(attribution.min(), attribution.max(), out=values) if interpolation == "smooth" else values


def interpolate_at_points(attribution: FloatArray, cells: FloatArray, interpolation: Interpolation) -> FloatArray:
    """Interpolate a map at M points. Return the values (M,). `cells` (n,M) are the points in cell coordinates."""
    if interpolation == "cells":
        return attribution[tuple(map(_find_cell, cells, attribution.shape))]
    pairs = [split_into_index_and_fraction(cell, length) for cell, length in zip(cells, attribution.shape, strict=True)]
    slopes = _compute_slopes_of_all_axes(attribution) if interpolation == "smooth" else []
    total = np.zeros(cells.shape[1], np.float64)
    for corner in itertools.product((0, 1), repeat=attribution.ndim):
        index = tuple(
            np.minimum(low + up, n - 1) for (low, _), up, n in zip(pairs, corner, attribution.shape, strict=True)
        )
        steps = [_smooth_step(share) if slopes else share for _, share in pairs]
        shares = [step if up else 1 - step for step, up in zip(steps, corner, strict=True)]
        total += attribution[index] * np.prod(shares, axis=0)
        for axis, slope in enumerate(slopes):
            share = pairs[axis][1]
            slope_weight = -(share**2) * (1 - share) if corner[axis] else share * (1 - share) ** 2
            remaining = [factor for n, factor in enumerate(shares) if n != axis]
            total += slope[index] * slope_weight * np.prod(remaining, axis=0)
    return total.clip(attribution.min(), attribution.max()) if interpolation == "smooth" else total


def compute_limited_slopes(values: FloatArray, axis: int) -> FloatArray:
    """Return the slope of the smooth map at each cell center along an axis, in values per cell.

    The slope is the harmonic mean of the differences to both neighbors, and 0 where their signs differ. So a local
    maximum is flat. With n axes, a slope is at most 3/n times the smaller difference. Then each Bézier point of the cubic
    between the centers is at most as far from a cell's value as the mean of its neighbors, and nothing overshoots.
    """
    if values.shape[axis] == 1:
        return np.zeros_like(values)
    step = np.diff(values, axis=axis)
    edge = np.zeros_like(values.take([0], axis))
    before, after = np.concatenate([edge, step], axis), np.concatenate([step, edge], axis)
    smaller = np.minimum(abs(before), abs(after))
    larger = np.maximum(abs(before), abs(after))
    ratio = np.divide(smaller, larger, out=np.zeros_like(values), where=larger > 0)
    size = smaller * np.minimum(2 / (1 + ratio), 3 / values.ndim).astype(values.dtype)
    return np.where(np.sign(before) == np.sign(after), np.sign(after) * size, np.zeros_like(values))


def split_into_index_and_fraction(cell: FloatArray, length: int) -> tuple[NDArray[np.int64], FloatArray]:
    """Split each cell coordinate into the index of the cell before it and the fraction of the way to the next cell."""
    position = np.clip(cell - 0.5, 0, length - 1)
    low = np.floor(position).astype(np.int64)
    return low, position - low


def _compute_slopes_of_all_axes(values: FloatArray) -> list[FloatArray]:
    return [compute_limited_slopes(values, axis) for axis in range(values.ndim)]


def _find_cell(cell: FloatArray, length: int) -> NDArray[np.int64]:
    return np.clip(np.floor(cell).astype(np.int64), 0, length - 1)


def _smooth_step(share: FloatArray) -> FloatArray:
    """Return the cubic from 0 to 1 whose slope is 0 at both ends."""
    return share * share * (3 - 2 * share)


def _blend(
    values: FloatArray, low: NDArray[np.int64], high: NDArray[np.int64], weight: FloatArray, axis: int
) -> FloatArray:
    """Return the values at the indices `low`, moved toward those at `high` by a weight in 0..1."""
    first = values.take(low, axis)
    step = values.take(high, axis)
    step -= first
    step *= weight
    step += first
    return step


def _blend_slopes(
    slopes: FloatArray, low: NDArray[np.int64], high: NDArray[np.int64], share: FloatArray, axis: int
) -> FloatArray:
    """Return the part of the cubic that depends on the slopes at both centers."""
    first, second = slopes.take(low, axis), slopes.take(high, axis)
    first *= share * (1 - share) ** 2
    second *= share**2 * (1 - share)
    first -= second
    return first


def reshape_along_axis(values: NDArray[Any], axis: int, n_axes: int) -> NDArray[Any]:
    """Reshape a vector so that it lies along one of n axes."""
    shape = [1] * n_axes
    shape[axis] = -1
    return values.reshape(shape)
