"""Muted hooks: a forward pass of the model without the hooks that were set before."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

from camscope.hooks.base import unwrap

_lock = threading.RLock()  # one thread at a time: what is installed must be what is removed


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
    """Silence, in this thread, every forward hook that was set before, on a module of the model or on all modules.

    Each hook keeps its place and its handle. Forward passes in other threads run it as usual.
    """
    with _lock:
        replaced = [
            (hooks, key, _MutedHook(hook))
            for hooks in _iter_hook_dicts(unwrap(model))
            for key, hook in list(hooks.items())
        ]
        try:
            for hooks, key, muted in replaced:
                if hooks.get(key) is muted.hook:
                    hooks[key] = muted
            yield
        finally:
            for hooks, key, muted in replaced:
                if hooks.get(key) is muted:
                    hooks[key] = muted.hook


def _iter_hook_dicts(model: nn.Module) -> Iterator[MutableMapping[int, Any]]:
    yield everywhere._global_forward_hooks
    yield everywhere._global_forward_pre_hooks
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if isinstance(hooks := getattr(module, name, None), MutableMapping):  # a TorchScript module may have none
                yield hooks
