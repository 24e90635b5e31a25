"""Maps and inputs on another grid of the same plane: what a cell says is said at its centre."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def on_grid(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """(R,*s) -> (R,*grid): linear interpolation between cell centres; the same maps where the grid is theirs."""
    if maps.shape[1:] == tuple(grid):
        return maps
    return F.interpolate(maps[:, None], tuple(grid), mode=LINEAR[len(grid)], align_corners=False)[:, 0]


def first_part(maps: Tensor, shares: Sequence[float]) -> Tensor:
    """(N,*s) -> (N,*s): only the first share of each axis, on as many cells; linear interpolation between cell centres."""
    for axis, share in enumerate(shares, start=1):
        cells = maps.shape[axis]
        places = ((torch.arange(cells, device=maps.device, dtype=maps.dtype) + 0.5) * share - 0.5).clamp(min=0)
        low = places.floor().long()
        step = (places - low).view(-1, *[1] * (maps.ndim - 1 - axis))
        high = (low + 1).clamp(max=cells - 1)
        maps = maps.index_select(axis, low).lerp(maps.index_select(axis, high), step)
    return maps


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
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
