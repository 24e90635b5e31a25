"""Joins: of which pieces a model puts its sequences of tokens together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from camscope.hooks.calls import Calls

JOINING = (torch.cat, torch.concat, torch.concatenate)


class Joins(Calls):
    """Inside the `with`, in this thread: `pieces` learns the lengths of what was joined to so many tokens (N,T,K)."""

    def __init__(self, pieces: dict[int, tuple[int, ...]]) -> None:
        super().__init__()
        self._pieces = pieces

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        result = func(*args, **named)
        if func in JOINING and isinstance(result, Tensor) and result.ndim == 3:
            axis = args[1] if len(args) > 1 else named.get("dim", named.get("axis", 0))
            if axis in (1, -2):
                parts = args[0] if args else named["tensors"]
                self._pieces[result.shape[1]] = tuple(part.shape[1] for part in parts)
        return result
