"""Extents: which part of the input a map lies over, after padding, crops and windows.

A plane of cells that were padded, cropped or moved lies over another part of the input than the one it is drawn on.
Convolutions without padding also leave out a border, but by less than their receptive fields: that is tolerated up to a
part of a cell. What a model crops or pads beyond what its kernels need is tolerated only up to a small part of the axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
RESIZE_FUNCTIONS = ("adaptive_", "interpolate", "upsample")
MAX_SHIFT = 0.75  # of a cell, by which a plane in place may lie off
MAX_MARGIN = 0.15  # of an axis, which a plane in place with small cells may leave out, or add, on each side
MAX_CUT = 0.032  # of an axis, by which crops and pads may move an end of a plane in place
EXTENT_DIGITS = 9


class AxisExtent(NamedTuple):
    """Where a plane starts and ends along one axis, as shares of the input.

    `low_cut`, `high_cut`: by how much crops moved each end inward; negative for pads. Windows do not count, and neither
    does a crop or a pad by one cell. `low_pad`, `high_pad`: what was padded since the last window, which may need it.
    """

    low: float = 0.0
    high: float = 1.0
    low_cut: float = 0.0
    high_cut: float = 0.0
    low_pad: float = 0.0
    high_pad: float = 0.0


Extent = tuple[AxisExtent, ...]


def compute_output_extent(
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
        pairs = reversed([*zip(widths[::2], widths[1::2], strict=True), *[(0, 0)] * len(size)][: len(size)])
        padded = []
        for axis, cells, (before, after) in zip(extent, size, pairs, strict=True):
            step = (axis.high - axis.low) / cells
            padded.append(_crop_or_pad_axis(axis, axis.low - step * before, axis.high + step * after, step))
        return tuple(padded)
    if name[:-2] not in STRIDE_ARGUMENTS:
        is_resized = name.startswith(RESIZE_FUNCTIONS)
        cells_of_axes = zip(extent, size, strict=True) if is_resized else ()
        return (
            tuple(_apply_window_margin(axis, 0.0, (axis.high - axis.low) / cells) for axis, cells in cells_of_axes)
            or extent
        )
    kind, (place, kernel_place) = name[:-2], STRIDE_ARGUMENTS[name[:-2]]
    stride = args[place] if len(args) > place else kwargs.get("stride")
    if kernel_place and stride in (None, [], ()):
        stride = args[kernel_place] if len(args) > kernel_place else kwargs["kernel_size"]
    strides = list(stride) if isinstance(stride, list | tuple) else [stride or 1]
    # without padding, a window returns fewer cells than it takes, on both sides
    scaled = []
    for axis, before, after, step in zip(extent, size, output_size, strides * len(size), strict=False):
        share = after / (before * step) if kind == "conv_transpose" else after * step / before
        width = axis.high - axis.low
        scaled.append(_apply_window_margin(axis, width * (share - 1) / 2, width / before))
    return tuple(scaled)


def _crop_or_pad_axis(axis: AxisExtent, low: float, high: float, cell: float) -> AxisExtent:
    """Return the extent of a plane that is cropped or padded to other ends. `cell`: the size of a cell."""
    low_cut, low_pad = _move_end_inward(axis.low_cut, axis.low_pad, low - axis.low, cell)
    high_cut, high_pad = _move_end_inward(axis.high_cut, axis.high_pad, axis.high - high, cell)
    return _round_extent(AxisExtent(low, high, low_cut, high_cut, low_pad, high_pad))


def _move_end_inward(cut: float, pad: float, change: float, cell: float) -> tuple[float, float]:
    """Return the cut and the padding at one end that moves inward by `change`. A crop first removes the padding."""
    cropped = change - pad
    if cropped <= 0:
        return cut, -cropped
    return (cut + cropped if cropped > _round_up(cell) else cut), 0.0


def _apply_window_margin(axis: AxisExtent, margin: float, cell: float) -> AxisExtent:
    """Return the extent of what a window makes of a plane, which moves each end outward by `margin`."""
    unused = [max(0.0, pad + min(margin, 0.0)) for pad in (axis.low_pad, axis.high_pad)]
    low_left, high_left = (share if share > _round_up(cell) else 0.0 for share in unused)
    low, high = axis.low - margin, axis.high + margin
    return _round_extent(AxisExtent(low, high, axis.low_cut - low_left, axis.high_cut - high_left))


def _round_up(cell: float) -> float:
    return cell * (1 + 1e-6)


def _round_extent(axis: AxisExtent) -> AxisExtent:
    return AxisExtent(*(round(share, EXTENT_DIGITS) for share in axis))


def covers_input_evenly(extent: Extent | None, grid: Sequence[int]) -> bool:
    """Whether the cells of a plane with this extent lie about where they are drawn, evenly over the whole input."""
    for axis, cells in zip(extent or (), grid, strict=False):
        low, high = axis.low, axis.high
        shift, margin = abs(low + high - 1) / 2, abs(high - low - 1) / 2
        if shift * cells > MAX_SHIFT or (margin > MAX_MARGIN and margin * (cells - 1) > MAX_SHIFT):
            return False
        used = _apply_window_margin(axis, 0.0, (high - low) / cells)
        if max(abs(used.low_cut), abs(used.high_cut)) > MAX_CUT:
            return False
    return extent is not None


def join_extents(extents: Sequence[Extent | None], grid: Sequence[int]) -> Extent | None:
    """Return the mean extent of several planes of one grid, or None if they lie over different parts of the input.

    A crop that makes a plane fit to what convolutions left of another one is no cut.
    """
    in_order = [extent for extent in dict.fromkeys(extents) if extent is not None]
    if not in_order or None in extents:
        return None
    if len(in_order) == 1:
        return in_order[0]
    joined = tuple(
        _round_extent(
            AxisExtent(
                *(sum(ends) / len(axes) for ends in ([axis.low for axis in axes], [axis.high for axis in axes])),
                *(min(shares, key=abs) for shares in zip(*(axis[2:] for axis in axes), strict=True)),
            )
        )
        for axes in zip(*in_order, strict=True)
    )
    is_close = all(
        abs(end - mean) * cells <= MAX_SHIFT
        for extent in in_order
        for axis, mean_axis, cells in zip(extent, joined, grid, strict=True)
        for end, mean in zip(axis[:2], mean_axis[:2], strict=True)
    )
    return joined if is_close or all(covers_input_evenly(extent, grid) for extent in in_order) else None


def find_channel_extents(positions: Tensor, axis: int, length: int, extent: AxisExtent) -> list[AxisExtent | None]:
    """Return for each plane (planes,*grid) of positions where it starts and ends along one axis, within the extent.

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
    scale = (extent.high - extent.low) / length
    ends = zip(starts.tolist(), stops.tolist(), (steps[:, 0] * scale).tolist(), is_in_order.tolist(), strict=True)
    return [
        _crop_or_pad_axis(extent, extent.low + scale * start, extent.low + scale * stop, cell) if valid else None
        for start, stop, cell, valid in ends
    ]
