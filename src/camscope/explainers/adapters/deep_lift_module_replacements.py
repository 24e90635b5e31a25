"""Replace modules that captum's DeepLIFT has no rule for by equivalent ones: clipped ReLUs and overlapping max poolings."""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from camscope.explainers.adapters.model_copy_for_hooks import iter_parent_name_and_child

CLIPPED_RELU_TYPES = (nn.ReLU6, nn.Hardtanh)


def treat_clipped_relus_as_relus(model: nn.Module) -> None:
    """Give modules that clip, such as ReLU6, the type ReLU. Captum then applies its ReLU rule. The modules still clip."""
    modules: Iterator[Any] = model.modules()  # whose types change
    for part in modules:
        if type(part) in CLIPPED_RELU_TYPES:
            clip = partial(F.hardtanh, min_val=part.min_val, max_val=part.max_val, inplace=part.inplace)
            part.__class__ = nn.ReLU  # the object stays the same for hooks and other modules
            vars(part)["forward"] = clip


RANK_BY_MAX_POOL: dict[type, int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}


class NonOverlappingMaxPool(nn.Module):
    """A max pooling with overlapping windows. It copies each window to a separate row, and pools the rows."""

    def __init__(self, pool: Any, rank: int) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = (
            _expand_per_axis(size, rank) for size in (pool.kernel_size, pool.stride, pool.padding)
        )
        self.pool = nn.MaxPool1d(prod(self.kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        """Max-pool x (N,K,*s): return the maximum of each pooling window, as (N,K,*t)."""
        rank = len(self.kernel_size)
        sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
        # the padding is less than every value, and the same in every row
        laid = F.pad(x, sides, value=float(x.detach().amin()) - 1)
        for axis, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True), start=x.ndim - rank):
            laid = laid.unfold(axis, size, step)
        grid = laid.shape[: x.ndim]
        largest: Tensor = self.pool(laid.reshape(len(x), -1, prod(self.kernel_size)))
        return largest.view(grid)


def replace_overlapping_pools(model: nn.Module) -> None:
    """Replace each overlapping max pooling by an equivalent module that captum supports."""
    for parent, key, child in list(iter_parent_name_and_child(model)):
        rank = RANK_BY_MAX_POOL.get(type(child), 0)
        if rank and _is_replaceable_overlapping_pool(child, rank):
            parent._modules[key] = NonOverlappingMaxPool(child, rank)


def _is_replaceable_overlapping_pool(pool: Any, rank: int) -> bool:
    """Whether a pooling has overlapping windows, no forward hooks, and only options that its replacement supports."""
    if pool.ceil_mode or pool.return_indices or pool._forward_hooks or pool._forward_pre_hooks:
        return False
    sizes, steps, dilations = (_expand_per_axis(v, rank) for v in (pool.kernel_size, pool.stride, pool.dilation))
    return set(dilations) == {1} and any(step < size for size, step in zip(sizes, steps, strict=True))


def _expand_per_axis(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * rank
