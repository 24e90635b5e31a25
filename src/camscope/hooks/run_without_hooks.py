"""Run a model without the hooks that users set: on a copy of its modules, or with the hooks muted in one thread."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from camscope.hooks.find_layers import unwrap
from camscope.hooks.intercept_torch_functions import ForwardOverride

_mute_lock = threading.RLock()  # one thread at a time: what is installed must be what is removed


def copy_without_hooks(model: nn.Module) -> nn.Module:
    """Copy a model without its hooks and compiled code. The copy shares parameters and buffers with the model.

    An attribute that the copy sets on itself does not change the model.
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
    """A forward hook that does nothing in the thread that muted it. Other threads run the original hook."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self._thread = hook, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == self._thread else self.hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:  # a copy of the model has the hook itself
        return _rebuild_as_original_hook, (self.hook,)


def _rebuild_as_original_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


@contextmanager
def hooks_muted(model: nn.Module) -> Iterator[None]:
    """Disable all forward hooks of a model inside the `with`. Other threads are not affected.

    Each hook keeps its position and its handle. Forward passes in other threads run the hooks as usual.
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
