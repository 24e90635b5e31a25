"""The body of a function of PyTorch, for a mode that watches what is called in it."""

from collections.abc import Callable
from types import FunctionType
from typing import Any


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its question whether a mode takes over: asked in the mode, it would never begin."""
    body = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    body.__defaults__, body.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return body
