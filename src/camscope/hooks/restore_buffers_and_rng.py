"""Run a model without lasting changes of its buffers and of the random number generators."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.weak import WeakIdKeyDictionary

from camscope.errors import warn_caller
from camscope.hooks.intercept_torch_functions import BaseFunctionMode, bypass_torch_function
from camscope.pytree import TYPES_WITHOUT_TENSORS, map_leaves

CONTAINERS = (tuple, list, Mapping)  # of tensors, among the arguments of PyTorch's functions
_writes_buffers_by_model = WeakIdKeyDictionary()  # by model: whether its forward wrote a buffer in eval mode


class BufferCopyMode(BaseFunctionMode):
    """A function mode that gives PyTorch functions copies of a model's buffers, such as running statistics, in this
    thread.

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

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. The function gets copies of the buffers instead of the buffers."""
        if func is torch.autograd.grad:  # which repeats checkpoints
            with self:
                return bypass_torch_function(func)(*args, **kwargs)
        return func(
            *map(self._replace_buffers_in_argument, args),
            **{name: self._replace_buffers_in_argument(kwargs[name]) for name in kwargs},
        )

    def _replace_buffers_in_argument(self, value: Any) -> Any:
        """Replace the buffers in an argument of a torch function by their copies, also inside containers."""
        if isinstance(value, Tensor):
            return self._get_copy_if_buffer(value)
        if type(value) in TYPES_WITHOUT_TENSORS:
            return value
        return (
            map_leaves(value, self._get_copy_if_buffer)
            if isinstance(value, CONTAINERS) or is_dataclass(value)
            else value
        )

    def _get_copy_if_buffer(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor that is a buffer or a view of one. Return any other tensor unchanged."""
        if self._originals.get(id(tensor)) is tensor:
            if id(tensor) not in self._copies:
                self._copies[id(tensor)] = self._get_view_of_copied_storage(tensor, tensor.detach().clone)
            return self._copies[id(tensor)]
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return tensor
        return self._get_view_of_copied_storage(tensor, lambda: tensor)

    def _get_view_of_copied_storage(self, tensor: Tensor, make_default: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the same shape and strides whose values are in a copy of the tensor's memory.

        All views share this copy. Return `make_default()` if no buffer uses the memory.
        """
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
    """At the end of the `with`, restore the model's buffers and all random number generators.

    The generators of PyTorch, NumPy and Python belong to the process. If other threads draw numbers meanwhile, these
    numbers come again later.
    """
    devices = {value.device for value in (*model.parameters(), *model.buffers())}
    with all_rng_restored(list(devices)), _replaced_buffers_restored(model), BufferCopyMode(model):
        yield


@contextmanager
def eval_mode_buffers_restored(model: nn.Module) -> Iterator[None]:
    """If the forward of a model in eval mode writes buffers, restore them at the end of the `with`.

    PyTorch's own layers write no buffers in eval mode. Models with other layers that have buffers, and models in train
    mode, run on copies. All other models are watched: a buffer that the forward writes is restored, and the next call
    runs on copies. If several threads run, the buffer is not restored, as another thread may have written it.
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
def rng_restored_unless_other_threads_run(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore all random number generators at the end of the `with`. Do nothing if other threads run."""
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
    """The model may replace a buffer by a new tensor of the same shape. Put the old one back at the end of the `with`."""
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
    """Return the shape and the dtype of a tensor. A nested tensor has a list of shapes, one for each part."""
    return ([part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape), tensor.dtype


def _restore_buffers(buffers_and_copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy stored values back into buffers. This leaves the version counters of the buffers unchanged."""
    for buffer, copy in buffers_and_copies:
        with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
            buffer.copy_(copy)
