"""Compute which part of the input a map covers, after padding, crops, convolutions and poolings.

If a model pads, crops or shifts a map, its cells no longer cover the part of the input over which they are drawn. A
border that convolutions without padding leave out is tolerated up to a part of a cell. Crops and pads that no kernel
needs are tolerated up to a small part of the axis.
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
MAX_SHIFT = 0.75  # largest shift of a map that still covers the input evenly, in cells
MAX_MARGIN = 0.15  # largest margin on each side that such a map may leave out or add, as a share of the axis
MAX_CUT = 0.032  # by how much crops and pads may move an end of such a map, as a share of the axis
EXTENT_DIGITS = 9


class AxisExtent(NamedTuple):
    """The part of one axis of the input that a map covers, from `low` to `high`, as shares of the axis.

    `low_cut` and `high_cut` say how far crops moved each end inward. They are negative for pads, and ignore a crop or a
    pad by one cell. `low_pad` and `high_pad` are the padding since the last convolution or pooling, which the next one
    may need.
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
    """Compute which part of the image a function's output covers, from the extent of its input. `size` is in cells."""
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
    # without padding, a convolution returns fewer cells than it takes, on both sides
    scaled = []
    for axis, before, after, step in zip(extent, size, output_size, strides * len(size), strict=False):
        share = after / (before * step) if kind == "conv_transpose" else after * step / before
        width = axis.high - axis.low
        scaled.append(_apply_window_margin(axis, width * (share - 1) / 2, width / before))
    return tuple(scaled)


def _crop_or_pad_axis(axis: AxisExtent, low: float, high: float, cell_size: float) -> AxisExtent:
    """Return the extent of a map after a crop or a pad. `low` and `high` are the new ends of the map."""
    low_cut, low_pad = _move_end_inward(axis.low_cut, axis.low_pad, low - axis.low, cell_size)
    high_cut, high_pad = _move_end_inward(axis.high_cut, axis.high_pad, axis.high - high, cell_size)
    return _round_axis_shares(AxisExtent(low, high, low_cut, high_cut, low_pad, high_pad))


class AxisEnd(NamedTuple):
    """What happened to one end of an axis: how far crops moved it inward, and its padding since the last window."""

    cut: float
    pad: float


def _move_end_inward(cut: float, pad: float, distance: float, cell_size: float) -> AxisEnd:
    """Move one end of a map inward by a distance. Remove the padding first, and then crop cells.

    A negative distance adds padding.
    """
    cropped = distance - pad
    if cropped <= 0:
        return AxisEnd(cut, -cropped)
    return AxisEnd(cut + cropped if cropped > _add_rounding_margin(cell_size) else cut, 0.0)


def _apply_window_margin(axis: AxisExtent, margin: float, cell_size: float) -> AxisExtent:
    """Return the extent after a convolution or pooling. Each end moves outward by `margin`, or inward
    where it is negative, which uses up padding.
    """
    unused = [max(0.0, pad + min(margin, 0.0)) for pad in (axis.low_pad, axis.high_pad)]
    low_left, high_left = (share if share > _add_rounding_margin(cell_size) else 0.0 for share in unused)
    low, high = axis.low - margin, axis.high + margin
    return _round_axis_shares(AxisExtent(low, high, axis.low_cut - low_left, axis.high_cut - high_left))


def _add_rounding_margin(cell_size: float) -> float:
    return cell_size * (1 + 1e-6)


def _round_axis_shares(axis: AxisExtent) -> AxisExtent:
    return AxisExtent(*(round(share, EXTENT_DIGITS) for share in axis))


def covers_input_evenly(extent: Extent | None, grid: Sequence[int]) -> bool:
    """Whether a map with this extent covers the whole input evenly. A small shift or margin is allowed."""
    for axis, cells in zip(extent or (), grid, strict=False):
        low, high = axis.low, axis.high
        shift, margin = abs(low + high - 1) / 2, abs(high - low - 1) / 2
        if shift * cells > MAX_SHIFT or (margin > MAX_MARGIN and margin * (cells - 1) > MAX_SHIFT):
            return False
        used = _apply_window_margin(axis, 0.0, (high - low) / cells)
        if max(abs(used.low_cut), abs(used.high_cut)) > MAX_CUT:
            return False
    return extent is not None


def average_agreeing_extents(extents: Sequence[Extent | None], grid: Sequence[int]) -> Extent | None:
    """Return the mean extent of several maps of the same grid. Return None if the maps cover different parts of the input.

    A crop that fits one map to a smaller one, which convolutions without padding made, does not count as a crop.
    """
    in_order = [extent for extent in dict.fromkeys(extents) if extent is not None]
    if not in_order or None in extents:
        return None
    if len(in_order) == 1:
        return in_order[0]
    joined = tuple(
        _round_axis_shares(
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
    """Return the extent of each channel along one axis. `positions` (channels,*grid) says from where each cell comes.

    `length` and `extent` are those of the source map. A channel has no extent, but None, if its positions do not ascend
    evenly along the axis, or if they vary along another axis.
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
