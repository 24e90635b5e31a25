"""Resize, blur and min-max scale maps (R,*s) and inputs (N,C,*S) with any number of spatial axes."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.targets import full_precision


def enlarge_to_input(maps: Tensor, x: Tensor) -> Tensor:
    """Resize maps (R,*s) to the size of the input (R,*S) by linear interpolation between cell centers."""
    return resize_maps(maps, x.shape[2:])


def compute_minimum_and_range(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the range of each mask (R,*S), with shape (R,1,...). A constant mask has range 1."""
    axes = tuple(range(1, masks.ndim))
    low, high = masks.amin(axes, keepdim=True), masks.amax(axes, keepdim=True)
    return low, torch.where(high > low, high - low, 1)


def scale_to_unit_range(masks: Tensor) -> Tensor:
    """Scale each mask (R,*S) to 0..1 by its minimum and maximum. A constant mask becomes 0."""
    low, span = compute_minimum_and_range(masks)
    return (masks - low) / span


def select_strongest_channels(activation: Tensor, n_channels: int | None) -> Tensor:
    """Return a mask (N,K) of the `n_channels` channels of each sample with the largest mean absolute activation."""
    flat = activation.flatten(2)
    if n_channels is None or n_channels >= flat.shape[1]:
        return torch.ones_like(flat[..., 0], dtype=torch.bool)
    best = flat.abs().mean(-1).topk(n_channels, dim=1).indices
    return torch.zeros_like(flat[..., 0], dtype=torch.bool).scatter_(1, best, True)


def find_nonconstant_channels(activation: Tensor) -> Tensor:
    """Return a mask (N,K) of the channels whose activation (N,K,*s) differs between cells."""
    flat = activation.flatten(2)
    return flat.amax(-1) > flat.amin(-1)


def blur_input(x: Tensor, sigma: float, radius: float) -> Tensor:
    """Blur an input (N,C,*S) with a Gaussian. Beyond its borders the input is reflected.

    `sigma` and the `radius` at which the Gaussian is cut off are shares of each axis.
    """
    wide = full_precision(x)
    with torch.autocast(x.device.type, enabled=False):
        for axis in range(2, x.ndim):
            cells = x.shape[axis]
            wide = smooth_axis(wide, axis, sigma * cells, min(max(1, round(radius * cells)), cells - 1), "reflect")
    return wide.to(x.dtype)


def smooth_axis(
    values: Tensor, axis: int, sigma: float, radius: int, padding_mode: Literal["reflect", "replicate"]
) -> Tensor:
    """Smooth values along one axis with a Gaussian. The width `sigma` and the cutoff `radius` are in cells."""
    steps = torch.arange(-radius, radius + 1, dtype=values.dtype, device=values.device)
    bell = (-0.5 * (steps / sigma) ** 2).exp() if sigma > 0 else torch.ones_like(steps)
    lines = values.movedim(axis, -1)
    rows = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (radius, radius), mode=padding_mode)
    return F.conv1d(rows, (bell / bell.sum())[None, None]).view(lines.shape).movedim(-1, axis)


INTERPOLATION_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def resize_maps(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """Resize maps (R,*s) to a grid by linear interpolation between cell centers."""
    if maps.shape[1:] == tuple(grid):
        return maps
    return F.interpolate(maps[:, None], tuple(grid), mode=INTERPOLATION_MODES[len(grid)], align_corners=False)[:, 0]


def crop_padding(maps: Tensor, input_shares: Sequence[float]) -> Tensor:
    """Remove the padding at the ends of the axes of maps (N,*s). Resize the remaining part to the previous size.

    `input_shares` is the share of each axis that the input covers.
    """
    for axis, share in enumerate(input_shares, start=1):
        cells = maps.shape[axis]
        places = ((torch.arange(cells, device=maps.device, dtype=maps.dtype) + 0.5) * share - 0.5).clamp(min=0)
        low = places.floor().long()
        step = (places - low).view(-1, *[1] * (maps.ndim - 1 - axis))
        high = (low + 1).clamp(max=cells - 1)
        maps = maps.index_select(axis, low).lerp(maps.index_select(axis, high), step)
    return maps


def resize_input(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize an input (N,C,*S) by linear interpolation. Axes that shrink are antialiased."""
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    for axis, length in enumerate(size, start=2):
        if values.shape[axis] != length:
            rows = values.movedim(axis, -1)
            lines = F.interpolate(
                rows.reshape(-1, 1, 1, rows.shape[-1]),
                (1, length),
                mode="bilinear",
                align_corners=False,
                antialias=True,
            )
            values = lines.reshape(*rows.shape[:-1], length).movedim(-1, axis)
    return values.to(x.dtype)
