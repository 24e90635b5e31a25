"""`ScoreFunction`: a callable from a batch to scores as a module, for methods that need only the scores of a model."""

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.pytree import map_leaves


class ScoreFunction(nn.Module):
    """A module that calls a function and returns its result as tensors.

    The function takes a batch (N,C,*S) and returns scores (N,K), as a tensor or a NumPy array. A dict or list of
    arrays works, too, such as the boxes of a detector. The function is called without gradients, and has no layers.

    Args:
        function: The function.
        identity: Text that identifies the function in results. Default: its name and its code, but not the values that it
            uses. It makes the digest of the model.

    >>> def mean_of_channels(batch):
    ...     return batch.numpy().mean((2, 3))
    >>> ScoreFunction(mean_of_channels)(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3])

    """

    def __init__(self, function: Callable[..., Any], identity: str | None = None) -> None:
        super().__init__()
        self.function, self.name = function, str(getattr(function, "__name__", type(function).__name__))
        digest = hashlib.sha256((_describe_code(function) if identity is None else identity).encode()).digest()
        self.register_buffer("identity", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the scores of a batch (N,C,*S)."""
        return to_tensors(self.function(x.detach(), *args, **kwargs), x.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScoreFunction":
        return copy.copy(self)  # the function may hold a session or a connection that has no copy


_lock = threading.Lock()
_modules_by_function: WeakValueDictionary[Any, ScoreFunction] = WeakValueDictionary()


def wrap_function(function: object) -> ScoreFunction:
    """Return the module that calls a function. Repeated calls return the same module while an explainer of the function exists.

    Raises:
        ModelError: The model is no function, but a class, for example.

    """
    if isinstance(function, type):
        raise ModelError(
            f"the model is the class {function.__name__} itself: pass an instance, e.g. {function.__name__}(…)"
        )
    if not callable(function) or type(function).__name__ == "ExportedProgram":  # calling it raises an error
        raise ModelError(
            f"the model is a {type(function).__name__}; expected a torch.nn.Module, or a function from a batch to scores"
        )
    try:
        hash(function)
        key: Any = function
    except TypeError:
        key = id(function)  # not used again while the module holds the function
    with _lock:
        module = _modules_by_function.get(key)
        if module is None:
            module = _modules_by_function[key] = ScoreFunction(function).eval()
    return module


def is_opaque(module: nn.Module) -> bool:
    """Whether hooks cannot see the inner steps of a module, as in TorchScript or a plain function."""
    return isinstance(module, torch.jit.ScriptModule | ScoreFunction)


def to_tensors(value: Any, device: torch.device) -> Any:
    """Convert arrays, and lists of numbers, in a result to tensors. The tensors have no gradients."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: to_tensors(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple) and not _is_list_of_numbers(value):
        return [to_tensors(item, device) for item in value]
    if isinstance(value, list | tuple | Number | np.ndarray) or hasattr(value, "__array__"):
        array = np.array(value)  # a copy, which the function cannot change
        if array.dtype.kind in "biuf":
            return torch.from_numpy(array).to(device)
    return map_leaves(value, Tensor.detach)


def _is_list_of_numbers(value: Any) -> bool:
    """Whether a list, which may be nested, holds only numbers."""
    return bool(value) and all(
        isinstance(item, Number) or (isinstance(item, list | tuple) and _is_list_of_numbers(item)) for item in value
    )


def _describe_code(function: Any) -> str:
    """Return the name of a function and its code. For a callable object, return the name of its class."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    owner = inner if hasattr(inner, "__qualname__") else type(inner)
    parts = [getattr(owner, "__module__", ""), getattr(owner, "__qualname__", "")]
    if code is not None:
        constants = [item for item in code.co_consts if isinstance(item, str | int | float | None)]
        parts += [code.co_code.hex(), repr(constants), repr(code.co_names)]
    return "\n".join(map(str, parts))
