"""Isolation: run a model without changes to its buffers and the random number generators, or without its hooks."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as all_modules
from torch.utils.weak import WeakIdKeyDictionary

from camscope.errors import warn_caller
from camscope.hooks.base import unwrap
from camscope.hooks.function_mode import BaseFunctionMode, ForwardOverride, bypass_torch_function
from camscope.pytree import map_leaves

CONTAINERS = (tuple, list, Mapping)  # of tensors, among the arguments of PyTorch's functions
_writes_buffers_by_model = WeakIdKeyDictionary()  # by model: whether its forward wrote a buffer in eval mode
_mute_lock = threading.RLock()  # one thread at a time: what is installed must be what is removed


class BufferCopyMode(BaseFunctionMode):
    """A function mode that gives PyTorch functions of this thread copies of a model's buffers, such as running statistics.

    A tensor that shares the memory of a buffer, as a view or under another name, becomes a view of the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._originals = {id(buffer): buffer for buffer in model.buffers()}
        self._copies: dict[int, Tensor] = {}
        self._storage_copies: dict[int, UntypedStorage | None] = {}  # the copy, once there is one
        for buffer in self._originals.values():
            if (storage := _get_storage(buffer)) is not None:
                self._storage_copies[storage._cdata] = None

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function on copies of the buffers, and return its result."""
        if func is torch.autograd.grad:  # which repeats checkpoints
            with self:
                return bypass_torch_function(func)(*args, **kwargs)
        return func(*map(self._copy_argument, args), **{name: self._copy_argument(kwargs[name]) for name in kwargs})

    def _copy_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._get_copy(value)
        return map_leaves(value, self._get_copy) if isinstance(value, CONTAINERS) or is_dataclass(value) else value

    def _get_copy(self, tensor: Tensor) -> Tensor:
        if self._originals.get(id(tensor)) is tensor:
            if id(tensor) not in self._copies:
                self._copies[id(tensor)] = self._view_storage_copy(tensor, tensor.detach().clone)
            return self._copies[id(tensor)]
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return tensor
        return self._view_storage_copy(tensor, lambda: tensor)

    def _view_storage_copy(self, tensor: Tensor, make_default: Callable[[], Tensor]) -> Tensor:
        """Return the same view of the copied memory, or `make_default()` if the tensor shares no memory with a buffer."""
        storage = _get_storage(tensor)
        if storage is None or storage._cdata not in self._storage_copies:
            return make_default()
        with torch._C.DisableTorchFunction():
            copy = self._storage_copies[storage._cdata]
            if copy is None:
                copy = self._storage_copies[storage._cdata] = storage.clone()
            other: Tensor = tensor.new_empty(0)
            return other.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


def _get_storage(tensor: Tensor) -> UntypedStorage | None:
    """Return the memory of a tensor, or None if the tensor has no memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a subclass
        return None
    return storage if storage.nbytes() else None


@contextmanager
def buffers_and_rng_restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and all random number generators at the end of the `with`.

    The generators of PyTorch, NumPy and Python belong to the process: numbers that other threads draw meanwhile repeat later.
    """
    devices = {value.device for value in (*model.parameters(), *model.buffers())}
    with all_rng_restored(list(devices)), _replaced_buffers_restored(model), BufferCopyMode(model):
        yield


@contextmanager
def eval_mode_buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model in eval mode at the end of the `with`. Its forward may write buffers.

    PyTorch's own layers write none in eval mode. A layer of another kind with buffers, and any model in train mode, runs on
    copies. Any other model is observed: if its forward writes a buffer, the buffer is restored, and the next call runs on
    copies. That requires a single running thread, since otherwise the change might come from another one.
    """
    buffers = list(model.buffers())
    if not buffers:
        yield
        return
    if _may_write_buffers(model):
        with _replaced_buffers_restored(model), BufferCopyMode(model):
            yield
        return
    snapshots = [(b, b._version, b.detach().clone()) for b in buffers if not b.is_inference()]
    with _replaced_buffers_restored(model):
        try:
            yield
        finally:
            written = [(b, copy) for b, version, copy in snapshots if b._version != version]
            if written:
                _writes_buffers_by_model[model] = True
                if threading.active_count() == 1:
                    _restore_buffers(written)
                else:
                    warn_caller(
                        f"the forward of {type(model).__name__} wrote buffers in eval mode while other threads ran, so they "
                        f"are not restored; later calls leave them unchanged"
                    )


@contextmanager
def rng_restored(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the random number generators at the end of the `with`, if no other thread runs."""
    with nullcontext() if threading.active_count() > 1 else all_rng_restored(devices):
        yield


@contextmanager
def all_rng_restored(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the random number generators of PyTorch, NumPy and Python at the end of the `with`."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _may_write_buffers(model: nn.Module) -> bool:
    return model in _writes_buffers_by_model or any(
        vars(module).get("training", False)
        or (getattr(module, "_buffers", None) and not type(module).__module__.startswith("torch.nn."))
        for module in model.modules()
    )


@contextmanager
def _replaced_buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers that the model replaces by new tensors of the same shape."""
    scripted = [part for part in model.modules() if isinstance(part, torch.jit.ScriptModule)]
    copies = [(b, b.detach().clone()) for part in scripted for b in part.buffers(recurse=False)]
    ordinary = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
    buffers: list[tuple[nn.Module, Mapping[str, Tensor | None]]] = [(part, dict(part._buffers)) for part in ordinary]
    try:
        yield
    finally:
        for module, before in buffers:
            for name, buffer in before.items():
                now = module._buffers.get(name)
                # a buffer of another shape is a table for another input size, which the module may store elsewhere
                if now is None or buffer is None or _shape_and_dtype(now) == _shape_and_dtype(buffer):
                    module._buffers[name] = buffer
        _restore_buffers([(buffer, copy) for buffer, copy in copies if not torch.equal(buffer, copy)])


def _shape_and_dtype(tensor: Tensor) -> tuple[object, ...]:
    """Return the shape and dtype of a tensor. A nested tensor has the list of its shapes instead of one."""
    return ([part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape), tensor.dtype


def _restore_buffers(buffers_and_copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the values back into buffers, without a change of their version counters."""
    for buffer, copy in buffers_and_copies:
        with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
            buffer.copy_(copy)


def copy_without_hooks(model: nn.Module) -> nn.Module:
    """Copy the module tree without hooks and compilation. Parameters and buffers are shared.

    Attributes that the copy sets on itself do not reach the model.
    """
    copies: dict[int, nn.Module] = {}

    def copy_module(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if isinstance(original := module._modules.get("_orig_mod"), nn.Module):
            return copy_module(original)
        if id(module) not in copies:
            other = copies[id(module)] = object.__new__(type(module))
            vars(other).update(vars(module))
            for name, value in vars(module).items():
                if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                    vars(other)[name] = type(value)()
                elif name in ("_parameters", "_buffers"):
                    vars(other)[name] = dict(value)
            vars(other)["_compiled_call_impl"] = None
            forward = vars(other).pop("forward", None)
            if forward is not None and not isinstance(forward, ForwardOverride):  # the model's own, of this module
                is_bound_here = getattr(forward, "__self__", None) is module
                vars(other)["forward"] = MethodType(forward.__func__, other) if is_bound_here else forward
            vars(other)["_modules"] = {
                name: None if part is None else copy_module(part) for name, part in module._modules.items()
            }
        return copies[id(module)]

    return copy_module(model)


class _MutedHook:
    """A forward hook that is silent in one thread."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self._thread = hook, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == self._thread else self.hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:  # a copy of the model has the hook itself
        return _return_hook, (self.hook,)


def _return_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


@contextmanager
def hooks_muted(model: nn.Module) -> Iterator[None]:
    """Disable all existing forward hooks of the model inside the `with`, for this thread.

    Each hook keeps its place and its handle. Forward passes in other threads run it as usual.
    """
    with _mute_lock:
        hook_dicts: list[Any] = [all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks]
        for module in unwrap(model).modules():
            both = (getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))
            hook_dicts += [hooks for hooks in both if isinstance(hooks, MutableMapping)]  # TorchScript may have none
        replaced = [(hooks, key, _MutedHook(hook)) for hooks in hook_dicts for key, hook in list(hooks.items())]
        try:
            for hooks, key, muted in replaced:
                if hooks.get(key) is muted.hook:
                    hooks[key] = muted
            yield
        finally:
            for hooks, key, muted in replaced:
                if hooks.get(key) is muted:
                    hooks[key] = muted.hook
