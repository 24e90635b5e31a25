"""Max pooling whose windows overlap, as one whose windows do not: captum's rule for it keeps one window a pixel only."""

from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

POOLS: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}


class Windows(nn.Module):
    """The same maximum: every window is laid out by itself, and a pooling without overlap takes the largest of each."""

    def __init__(self, pool: Any, rank: int) -> None:
        super().__init__()
        self.size, self.stride, self.padding = (
            _each(one, rank) for one in (pool.kernel_size, pool.stride, pool.padding)
        )
        self.pool = nn.MaxPool1d(prod(self.size))

    def forward(self, x: Tensor) -> Tensor:
        """(N,K,*s) -> (N,K,*t)"""
        rank = len(self.size)
        sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
        # beyond the border lies what is less than all: the same in every row, so that it changes nothing
        laid = F.pad(x, sides, value=float(x.detach().amin()) - 1)
        for axis, (size, step) in enumerate(zip(self.size, self.stride, strict=True), start=x.ndim - rank):
            laid = laid.unfold(axis, size, step)
        grid = laid.shape[: x.ndim]
        largest: Tensor = self.pool(laid.reshape(len(x), -1, prod(self.size)))
        return largest.view(grid)


def laid_out(model: nn.Module) -> None:
    """Replace, in a copy of a model, every max pooling whose windows overlap."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            rank = POOLS.get(type(child), 0) if child is not None else 0
            if rank and _overlaps(child, rank):
                parent._modules[key] = Windows(child, rank)


def _overlaps(pool: Any, rank: int) -> bool:
    overlap = any(
        step < size for size, step in zip(_each(pool.kernel_size, rank), _each(pool.stride, rank), strict=True)
    )
    plain = not (pool.ceil_mode or pool.return_indices or pool._forward_hooks or pool._forward_pre_hooks)
    return overlap and plain and set(_each(pool.dilation, rank)) == {1}


def _each(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * rank
