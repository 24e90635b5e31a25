"""Calls: every function of PyTorch that a model calls, as it calls it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Calls(TorchFunctionMode):
    """Inside the `with`, in this thread, each call goes through `called`; what that calls goes the usual way."""

    @abstractmethod
    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the model is given in place of the function's result; `named` is this call's own."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `called`."""
        return self.called(func, args, dict(kwargs or {}))


def name_of(func: Callable[..., Any]) -> str:
    """`relu` of `torch.relu`, `Tensor.relu_` and `F.relu` alike."""
    return getattr(func, "__name__", "").strip("_")
