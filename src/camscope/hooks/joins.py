"""Joins: of which pieces a model puts its sequences of tokens together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

JOINING = (torch.cat, torch.concat, torch.concatenate)


class Joins(TorchFunctionMode):
    """Inside the `with`, in this thread: `pieces` learns the lengths of what was joined to so many tokens (N,T,K)."""

    def __init__(self, pieces: dict[int, tuple[int, ...]]) -> None:
        super().__init__()
        self._pieces = pieces

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What the function returns."""
        given = kwargs or {}
        result = func(*args, **given)
        if func in JOINING and isinstance(result, Tensor) and result.ndim == 3:
            axis = args[1] if len(args) > 1 else given.get("dim", given.get("axis", 0))
            if axis in (1, -2):
                parts = args[0] if args else given["tensors"]
                self._pieces[result.shape[1]] = tuple(part.shape[1] for part in parts)
        return result
