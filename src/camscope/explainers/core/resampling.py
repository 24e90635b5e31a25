"""Masks made of a layer's channels: (R,*s) -> (R,*S), any number of spatial axes, everything on the input's device.

Maps and inputs on another grid of the same plane: what a cell says is said at its centre.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.targets import full_precision


def enlarge_to_input(maps: Tensor, x: Tensor) -> Tensor:
    """(R,*s) -> (R,*S): linear interpolation between cell centres, to the input's size."""
    return resize_maps(maps, x.shape[2:])


def compute_minimum_and_range(masks: Tensor) -> tuple[Tensor, Tensor]:
    """(R,*S) -> the least value of each, and the way from there to the largest, 1 where there is none: (R,1,..) both."""
    axes = tuple(range(1, masks.ndim))
    low, high = masks.amin(axes, keepdim=True), masks.amax(axes, keepdim=True)
    return low, torch.where(high > low, high - low, 1)


def scale_to_unit_range(masks: Tensor) -> Tensor:
    """(R,*S) -> 0..1 each; a constant one is 0."""
    low, span = compute_minimum_and_range(masks)
    return (masks - low) / span


def select_strongest_channels(activation: Tensor, n_channels: int | None) -> Tensor:
    """(N,K,*s) -> (N,K) bool: the `n_channels` channels of each sample that are strongest: whose mean size over space is largest."""
    flat = activation.flatten(2)
    if n_channels is None or n_channels >= flat.shape[1]:
        return torch.ones_like(flat[..., 0], dtype=torch.bool)
    best = flat.abs().mean(-1).topk(n_channels, dim=1).indices
    return torch.zeros_like(flat[..., 0], dtype=torch.bool).scatter_(1, best, True)


def find_nonconstant_channels(activation: Tensor) -> Tensor:
    """(N,K,*s) -> (N,K) bool: channels that are not constant."""
    flat = activation.flatten(2)
    return flat.amax(-1) > flat.amin(-1)


def blur_input(x: Tensor, sigma: float, radius: float) -> Tensor:
    """(N,C,*S): a Gaussian along each axis in turn; `sigma` and `radius`, where it is cut off, are fractions of the axis.

    Beyond the border the input is mirrored. Computed in float32 at least, also under autocast.
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
    """The same shape: means along one axis under a Gaussian of so many cells, cut off beyond `radius` of them."""
    steps = torch.arange(-radius, radius + 1, dtype=values.dtype, device=values.device)
    bell = (-0.5 * (steps / sigma) ** 2).exp() if sigma > 0 else torch.ones_like(steps)
    lines = values.movedim(axis, -1)
    rows = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (radius, radius), mode=padding_mode)
    return F.conv1d(rows, (bell / bell.sum())[None, None]).view(lines.shape).movedim(-1, axis)


INTERPOLATION_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def resize_maps(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """(R,*s) -> (R,*grid): linear interpolation between cell centres; the same maps where the grid is theirs."""
    if maps.shape[1:] == tuple(grid):
        return maps
    return F.interpolate(maps[:, None], tuple(grid), mode=INTERPOLATION_MODES[len(grid)], align_corners=False)[:, 0]


def crop_padding(maps: Tensor, input_shares: Sequence[float]) -> Tensor:
    """(N,*s) -> (N,*s): only the first share of each axis, on as many cells; linear interpolation between cell centres."""
    for axis, share in enumerate(input_shares, start=1):
        cells = maps.shape[axis]
        places = ((torch.arange(cells, device=maps.device, dtype=maps.dtype) + 0.5) * share - 0.5).clamp(min=0)
        low = places.floor().long()
        step = (places - low).view(-1, *[1] * (maps.ndim - 1 - axis))
        high = (low + 1).clamp(max=cells - 1)
        maps = maps.index_select(axis, low).lerp(maps.index_select(axis, high), step)
    return maps


def resize_input(x: Tensor, size: Sequence[int]) -> Tensor:
    """(N,C,*S) -> (N,C,*size): linear, antialiased where it shrinks, one axis after the other, of any rank."""
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
