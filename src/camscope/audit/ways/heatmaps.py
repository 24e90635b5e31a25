"""Maps as points: pooled to a coarse grid, so that two that are near one another show heat in about the same places."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.base import Floats

Sign = Literal["positive", "both"]


def pooled(maps: npt.ArrayLike, side: int, sign: Sign = "positive") -> Floats:
    """(N,*s) -> (N,*side): area means of the positive part, or of heat and cold alike; an axis of fewer cells keeps its own."""
    heat = np.asarray(maps, np.float64)
    if heat.ndim < 2 or not heat.size:
        raise InputError(f"maps {heat.shape}: expected (N,*s), one or more axes of cells")
    if not np.isfinite(heat).all():
        raise InputError(f"map {int(np.argwhere(~np.isfinite(heat))[0][0])} holds NaN or infinity")
    if sign not in ("positive", "both"):
        raise InputError(f"sign={sign!r}: expected 'positive' or 'both'")
    heat = heat.clip(min=0) if sign == "positive" else np.abs(heat)
    return _along_axes(heat, [_areas(size, min(side, size)) for size in heat.shape[1:]])


def placed(grid: Floats, mirror: bool, blur: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(N,*side) -> (M,cells) of the maps with any heat, each of sum 1, and (N,) which these are.

    `mirror`: heat on the left and on the right is in the same place. `blur`: how far off it is still in about the same
    place, as a share of the picture: heat in neighbouring cells is alike, and noise cancels out.
    """
    folded = grid + grid[..., ::-1] if mirror else grid
    soft = _along_axes(folded, [_soft(size, blur * size) for size in folded.shape[1:]]).reshape(len(grid), -1)
    there = soft.sum(1) > 0
    return soft[there] / soft[there].sum(1, keepdims=True), there


def _along_axes(values: Floats, weights: list[Floats]) -> Floats:
    """(N,*s), for each axis (t,s) -> (N,*t)."""
    for axis, own in enumerate(weights, 1):
        values = np.moveaxis(np.tensordot(own, values, (1, axis)), 0, axis)
    return values


def _areas(size: int, side: int) -> Floats:
    """(side,size): how much of each of `size` cells lies in each of `side` larger ones; rows sum to 1."""
    edges, cells = np.linspace(0, size, side + 1), np.arange(size)
    shared = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.asarray(shared.clip(min=0) * side / size)


def _soft(size: int, width: float) -> Floats:
    """(size,size): a Gaussian around each cell, of sum 1 within the picture."""
    if width <= 0:
        return np.eye(size)
    away = np.subtract.outer(np.arange(size), np.arange(size)) / width
    bell = np.exp(-0.5 * away**2)
    return np.asarray(bell / bell.sum(1, keepdims=True))
