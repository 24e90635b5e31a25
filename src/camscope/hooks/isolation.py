"""Isolation: a model that runs in train mode without its buffers or anybody's random numbers changing."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope.hooks.calls import Calls
from camscope.hooks.shadow import Shadow
from camscope.structure import mapped


class PrivateBuffers(Calls):
    """Inside the `with`, in this thread, functions of PyTorch get copies of a model's buffers, such as running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._originals = {id(buffer): buffer for buffer in model.buffers()}
        self._copies: dict[int, Tensor] = {}

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The function's result, on the copies."""
        return func(*mapped(tuple(args), self._copy), **mapped(named, self._copy))

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._originals.get(id(tensor)) is not tensor:
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor.detach().clone()
        return self._copies[id(tensor)]


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Run `model` in the modes that it is in; its buffers, and the state of every generator, are the same afterwards.

    The generators of PyTorch, NumPy and Python belong to the process: what other threads draw meanwhile is drawn again.
    """
    if not any(getattr(module, "training", False) for module in model.modules()):
        yield
        return
    cards = {value.device for value in (*model.parameters(), *model.buffers()) if value.device.type == "cuda"}
    buffers: list[tuple[nn.Module, Mapping[str, Tensor | None]]] = [(m, dict(m._buffers)) for m in model.modules()]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(cards)), PrivateBuffers(model):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, before in buffers:
            for name, buffer in before.items():  # one that the model replaced
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer


def bare_copy(model: nn.Module) -> nn.Module:
    """The same modules, parameters and buffers in another tree, uncompiled and without hooks.

    What it sets on itself is not the model's.
    """
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if isinstance(original := module._modules.get("_orig_mod"), nn.Module):
            return copied(original)
        if id(module) not in copies:
            other = copies[id(module)] = object.__new__(type(module))
            vars(other).update({name: _without_hooks(name, value) for name, value in vars(module).items()})
            vars(other)["_compiled_call_impl"] = None
            forward = vars(other).pop("forward", None)
            if forward is not None and not isinstance(forward, Shadow):  # the model's own, of this module
                own = getattr(forward, "__self__", None) is module
                vars(other)["forward"] = MethodType(forward.__func__, other) if own else forward
            vars(other)["_modules"] = {
                name: None if part is None else copied(part) for name, part in module._modules.items()
            }
        return copies[id(module)]

    return copied(model)


def _without_hooks(name: str, value: Any) -> Any:
    if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
        return type(value)()
    return dict(value) if name in ("_parameters", "_buffers") else value
