"""Put a model in eval mode for one thread, without a change of the flags that other threads see."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from camscope.hooks.thread_local_hooks import is_autograd_thread

_modes_lock = threading.Lock()
_flags_by_thread: dict[int, dict[int, bool]] = {}  # by thread: the flags that it sees, by the module's id
# by thread: how often it is inside `evaluation_mode` with each of these modules
_use_counts_by_thread: dict[int, Counter[int]] = {}
# of modules whose own flag is set: by how many threads, and what it was
_original_flags: dict[int, tuple[int, bool]] = {}


class _ThreadTrainingFlag:
    """The attribute `nn.Module.training` during an explanation. Each thread inside `evaluation_mode` has its own
    flags.
    """

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> bool:
        for flags in _get_training_flags_of_this_thread():
            if id(module) in flags:
                return flags[id(module)]
        try:
            return bool(vars(module)["training"])
        except (KeyError, TypeError):  # TorchScript has its flag elsewhere, the class has none
            raise AttributeError(f"{type(module).__name__!r} object has no attribute 'training'") from None

    def __set__(self, module: nn.Module, training: bool) -> None:
        for flags in _get_training_flags_of_this_thread():
            if id(module) in flags:
                flags[id(module)] = training
                return
        vars(module)["training"] = training

    def __delete__(self, module: nn.Module) -> None:
        """Delete the flag of a module. TorchScript deletes it from each module that it has just created."""
        if vars(module).pop("training", None) is None:
            raise AttributeError("training")


def _get_training_flags_of_this_thread() -> Iterable[dict[int, bool]]:
    """Return the `training` flags for this thread, by module id. A thread of autograd gets the flags of all threads."""
    if (flags := _flags_by_thread.get(threading.get_ident())) is not None:
        return (flags,)
    return tuple(_flags_by_thread.values()) if is_autograd_thread() else ()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model and its submodules in eval mode inside the `with`, for this thread only.

    Other threads see the flags unchanged. TorchScript, and modules that DataParallel runs in other threads, need a real
    change of the flag. It is restored when the last thread leaves.
    """
    modules = list(model.modules())
    flagged_modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    if any(isinstance(module, DataParallel) for module in modules):
        flagged_modules = []
    thread_id = threading.get_ident()
    with _modes_lock:
        if not _flags_by_thread:
            setattr(nn.Module, "training", _ThreadTrainingFlag())  # noqa: B010 - mypy knows the attribute as a bool
        flags = _flags_by_thread.setdefault(thread_id, {})
        inside = _use_counts_by_thread.setdefault(thread_id, Counter())
        flags.update((id(module), False) for module in flagged_modules)
        inside.update(map(id, flagged_modules))
        overriding_modules = [
            module for module in modules if getattr(module, "training", False) or id(module) in _original_flags
        ]
        for module in overriding_modules:
            users, flag = _original_flags.get(id(module), (0, module.training))
            _original_flags[id(module)] = (users + 1, flag)
            module.training = False
    try:
        yield
    finally:
        with _modes_lock:
            for module in overriding_modules:
                users, flag = _original_flags.pop(id(module))
                if users > 1:
                    _original_flags[id(module)] = (users - 1, flag)
                else:
                    module.training = flag
            inside.subtract(map(id, flagged_modules))
            for key in [id(module) for module in flagged_modules if not inside[id(module)]]:
                del flags[key], inside[key]
            if not flags and _flags_by_thread.pop(thread_id, None) is not None:
                del _use_counts_by_thread[thread_id]
                if not _flags_by_thread:
                    del nn.Module.training
