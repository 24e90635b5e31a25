"""Set hooks for one thread until the end of a `with`, and adapt autocast and checkpoints to them.

A layer that autograd runs again for activation checkpointing does not count as a second call.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import CheckpointFunction

from camscope.hooks.exclude_hooks_from_copies import (
    ExcludedFromCopies,
    exclude_flags_from_copies,
    hooks_excluded_from_copies,
)

P = ParamSpec("P")
T = TypeVar("T")


class Removable(Protocol):
    """A handle as PyTorch returns it for a hook."""

    def remove(self) -> None:
        """Remove the hook from its module or tensor."""


class Hooks(ExitStack):
    """Hooks that are removed at the end of the `with`, also after an error. Subclasses set their hooks in
    `_install_hooks`.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.enter_context(hooks_excluded_from_copies())
            self._install_hooks()
        except BaseException:
            self.close()
            raise
        return self

    def _install_hooks(self) -> None:
        """Install the hooks. This is called when the `with` begins."""

    def _enter_gradient_scope(self) -> None:
        """Turn gradients off inside the `with`. A hook can turn them on again, for its layer and all later layers."""
        self.enter_context(torch.inference_mode(False))
        self.enter_context(torch.no_grad())
        self.enter_context(autocast_uncached())
        self.enter_context(reentrant_checkpoints_disabled())

    def add_handle(self, handle: Removable) -> None:
        """Register a handle. The hook of this handle is removed at the end of the `with`."""
        exclude_flags_from_copies(handle)
        self.callback(handle.remove)


def register_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Removable:
    """Register a hook on the gradient of a tensor. If the hook returns a tensor, that tensor replaces the gradient."""
    register: Callable[..., Removable] = tensor.register_hook
    return register(hook)


class ThreadLocalHook(ExcludedFromCopies, Generic[P, T]):
    """A hook that acts only in the thread that created it. Copies of the model do not have it."""

    def __init__(self, hook: Callable[P, T]) -> None:
        self._hook, self._thread_id = hook, threading.get_ident()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call the hook and return its result. In any other thread, do nothing and return None."""
        return self._hook(*args, **kwargs) if threading.get_ident() == self._thread_id else None


def thread_local_hook(hook: Callable[P, T]) -> Callable[P, T | None]:
    """Return a hook that runs only in the current thread."""
    return ThreadLocalHook(hook)


def has_global_hooks() -> bool:
    """Whether there are hooks that apply to all modules. PyTorch has no public function to check this."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(all_modules, f"_global{name}") for name in names)


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """Disable autocast's cache of weights inside the `with`. Weights cached without gradients would break training."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def is_in_backward_pass() -> bool:
    """Whether this thread is in a backward pass. A layer runs there only if a checkpoint repeats an earlier call."""
    return torch._C._current_graph_task_id() != -1


def is_autograd_thread() -> bool:
    """Whether autograd started this thread for a backward pass. Autograd does so for accelerators."""
    return is_in_backward_pass() and isinstance(threading.current_thread(), threading._DummyThread)


_checkpoint_lock = threading.Lock()
_uncheckpointed_threads: list[int] = []


@contextmanager
def reentrant_checkpoints_disabled() -> Iterator[None]:
    """Disable reentrant activation checkpoints in this thread inside the `with`, because `autograd.grad` fails with them."""
    thread_id, original = threading.get_ident(), super(CheckpointFunction, CheckpointFunction).apply

    def apply(function: Callable[..., Any], preserve: bool, *args: object) -> Any:
        if threading.get_ident() in _uncheckpointed_threads:
            return function(*args)
        return original(function, preserve, *args)

    with _checkpoint_lock:
        if not _uncheckpointed_threads:
            CheckpointFunction.apply = apply
        _uncheckpointed_threads.append(thread_id)
    try:
        yield
    finally:
        with _checkpoint_lock:
            _uncheckpointed_threads.remove(thread_id)
            if not _uncheckpointed_threads:
                del CheckpointFunction.apply
