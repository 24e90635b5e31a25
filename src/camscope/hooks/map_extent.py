"""Extents: which part of the input a map lies over, after padding, crops and windows.

A plane of cells that were padded, cropped or moved lies over another part of the input than the one it is drawn on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# where the function has no other stride, its kernel is the stride
STRIDE_ARGUMENTS = {
    "conv": (3, None),
    "conv_transpose": (3, None),
    "lp_pool": (3, 2),
    "max_pool": (2, 1),
    "avg_pool": (2, 1),
}
MAX_SHIFT = 0.75  # of a cell, by which a plane in place may lie off
MAX_MARGIN = 0.15  # of an axis, which a plane in place with small cells may leave out, or add, on each side
EXTENT_DIGITS = 9

# for each axis, where a plane starts and ends as a share of the input
Extent = tuple[tuple[float, float], ...]


def update_extent(
    extent: Extent,
    name: str,
    size: Sequence[int],
    output_size: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Extent:
    """Return the extent of a function's output, from that of its input."""
    if name == "pad":
        widths = list(args[1] if len(args) > 1 else kwargs["pad"])
        pairs = [*zip(widths[::2], widths[1::2], strict=True), *[(0, 0)] * len(size)]
        steps = [(high - low) / cells for (low, high), cells in zip(extent, size, strict=True)]
        padded = zip(extent, steps, reversed(pairs[: len(size)]), strict=True)
        return _round_extent(
            (low - step * before, high + step * after) for (low, high), step, (before, after) in padded
        )
    kind, (place, kernel_place) = name[:-2], STRIDE_ARGUMENTS.get(name[:-2], (0, None))
    if not place:
        return extent
    stride = args[place] if len(args) > place else kwargs.get("stride")
    if kernel_place and stride in (None, [], ()):
        stride = args[kernel_place] if len(args) > kernel_place else kwargs["kernel_size"]
    strides = list(stride) if isinstance(stride, list | tuple) else [stride or 1]
    # without padding, a window returns fewer cells than it takes, on both sides
    scaled = []
    for (low, high), before, after, step in zip(extent, size, output_size, strides * len(size), strict=False):
        share = after / (before * step) if kind == "conv_transpose" else after * step / before
        margin = (high - low) * (share - 1) / 2
        scaled.append((low - margin, high + margin))
    return _round_extent(scaled)


def _round_extent(extent: Iterable[tuple[float, float]]) -> Extent:
    return tuple((round(low, EXTENT_DIGITS), round(high, EXTENT_DIGITS)) for low, high in extent)


def is_aligned(extent: Extent | None, grid: Sequence[int]) -> bool:
    """Whether the cells of a plane with this extent lie about where they are drawn, evenly over the whole input."""
    for (low, high), cells in zip(extent or (), grid, strict=False):
        shift, margin = abs(low + high - 1) / 2, abs(high - low - 1) / 2
        if shift * cells > MAX_SHIFT or (margin > MAX_MARGIN and margin * (cells - 1) > MAX_SHIFT):
            return False
    return extent is not None


def join_extents(extents: Sequence[Extent | None], grid: Sequence[int]) -> Extent | None:
    """Return the mean extent of several planes of one grid, or None if they lie over different parts of the input."""
    in_order = [extent for extent in dict.fromkeys(extents) if extent is not None]
    if not in_order or None in extents:
        return None
    if len(in_order) == 1:
        return in_order[0]
    means = [[sum(ends) / len(in_order) for ends in zip(*axis, strict=True)] for axis in zip(*in_order, strict=True)]
    joined = _round_extent((low, high) for low, high in means)
    is_close = all(
        abs(end - mean) * cells <= MAX_SHIFT
        for extent in in_order
        for axis, mean_axis, cells in zip(extent, joined, grid, strict=True)
        for end, mean in zip(axis, mean_axis, strict=True)
    )
    return joined if is_close or all(is_aligned(extent, grid) for extent in in_order) else None


def find_ends(
    positions: Tensor, axis: int, length: int, extent: tuple[float, float]
) -> list[tuple[float, float] | None]:
    """Return for each plane (planes,*grid) of positions where it starts and ends along one axis, a share of the input.

    None: the positions do not ascend evenly along this axis, or differ along another one.
    """
    n_after = positions.ndim - axis - 2
    lines = positions  # (planes, cells)
    for other in reversed(range(1, positions.ndim)):
        lines = lines if other == axis + 1 else lines.select(other, 0)
    count = lines.shape[1]
    expected = lines.view(len(lines), *[1] * axis, count, *[1] * n_after)
    is_in_order = (positions == expected).flatten(1).all(1)
    lines = lines.double()
    steps = (lines[:, -1:] - lines[:, :1]) / max(count - 1, 1) if length > 1 < count else torch.ones_like(lines[:, :1])
    if length > 1:
        even = lines[:, :1] + steps * torch.arange(count, device=lines.device)
        is_in_order &= (steps[:, 0] > 0) & (lines.diff(dim=1) >= 0).all(1) & ((lines - even).abs() <= 1).all(1)
    starts, stops = lines[:, 0] + 0.5 - steps[:, 0] / 2, lines[:, -1] + 0.5 + steps[:, 0] / 2
    low, scale = extent[0], (extent[1] - extent[0]) / length
    ends = zip(starts.tolist(), stops.tolist(), is_in_order.tolist(), strict=True)
    return [
        _round_extent([(low + scale * start, low + scale * stop)])[0] if valid else None for start, stop, valid in ends
    ]
