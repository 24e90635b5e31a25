"""Masks made of a layer's channels: (R,*s) -> (R,*S), any number of spatial axes, everything on the input's device."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.explainers.grids import on_grid
from camscope.targets import full_precision


def enlarged(maps: Tensor, x: Tensor) -> Tensor:
    """(R,*s) -> (R,*S): linear interpolation between cell centres, to the input's size."""
    return on_grid(maps, x.shape[2:])


def extent(masks: Tensor) -> tuple[Tensor, Tensor]:
    """(R,*S) -> the least value of each, and the way from there to the largest, 1 where there is none: (R,1,..) both."""
    axes = tuple(range(1, masks.ndim))
    low, high = masks.amin(axes, keepdim=True), masks.amax(axes, keepdim=True)
    return low, torch.where(high > low, high - low, 1)


def stretched(masks: Tensor) -> Tensor:
    """(R,*S) -> 0..1 each; a constant one is 0."""
    low, span = extent(masks)
    return (masks - low) / span


def leading(activation: Tensor, top: int | None) -> Tensor:
    """(N,K,*s) -> (N,K) bool: the `top` channels of each sample that are strongest: whose mean size over space is largest."""
    flat = activation.flatten(2)
    if top is None or top >= flat.shape[1]:
        return torch.ones_like(flat[..., 0], dtype=torch.bool)
    best = flat.abs().mean(-1).topk(top, dim=1).indices
    return torch.zeros_like(flat[..., 0], dtype=torch.bool).scatter_(1, best, True)


def varying(activation: Tensor) -> Tensor:
    """(N,K,*s) -> (N,K) bool: channels that are not constant."""
    flat = activation.flatten(2)
    return flat.amax(-1) > flat.amin(-1)


def blurred(x: Tensor, sigma: float, reach: float) -> Tensor:
    """(N,C,*S): a Gaussian along each axis in turn; `sigma` and `reach`, where it is cut off, are fractions of the axis.

    Beyond the border the input is mirrored. Computed in float32 at least, also under autocast.
    """
    wide = full_precision(x)
    with torch.autocast(x.device.type, enabled=False):
        for axis in range(2, x.ndim):
            cells = x.shape[axis]
            wide = smoothed(wide, axis, sigma * cells, min(max(1, round(reach * cells)), cells - 1), "reflect")
    return wide.to(x.dtype)


def smoothed(values: Tensor, axis: int, sigma: float, reach: int, border: Literal["reflect", "replicate"]) -> Tensor:
    """The same shape: means along one axis under a Gaussian of so many cells, cut off beyond `reach` of them."""
    steps = torch.arange(-reach, reach + 1, dtype=values.dtype, device=values.device)
    bell = (-0.5 * (steps / sigma) ** 2).exp() if sigma > 0 else torch.ones_like(steps)
    lines = values.movedim(axis, -1)
    rows = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (reach, reach), mode=border)
    return F.conv1d(rows, (bell / bell.sum())[None, None]).view(lines.shape).movedim(-1, axis)
