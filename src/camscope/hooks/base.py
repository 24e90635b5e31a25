"""The base of all hooks: find layers by name, and set hooks for one thread until the end of a `with`.

A layer that autograd runs again for activation checkpointing does not count as a second call.
"""

import difflib
import fnmatch
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import CheckpointFunction

from camscope.errors import LayerError, ModelError
from camscope.hooks.hook_free_copies import ExcludedFromCopies, exclude_flags_from_copies, hooks_excluded_from_copies

GLOB_CHARACTERS = set("*?[")
WRAPPER_ATTRIBUTES = {  # attributes in which a wrapper stores its model; they are part of the wrapper's layer names
    "module",  # DataParallel, DistributedDataParallel, AveragedModel
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Lightning Fabric
}

P = ParamSpec("P")
T = TypeVar("T")


class Removable(Protocol):
    """The handle of any PyTorch hook."""

    def remove(self) -> None:
        """Remove the hook."""


class Hooks(ExitStack):
    """Handles of hooks that are removed when the `with` ends, also by an error. Subclasses set their hooks in `_install`."""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.enter_context(hooks_excluded_from_copies())
            self._install()
        except BaseException:
            self.close()
            raise
        return self

    def _install(self) -> None:
        """Set the hooks when the `with` begins."""

    def _enter_gradient_scope(self) -> None:
        """Start without gradients, in a scope that supports `torch.autograd.grad`."""
        self.enter_context(torch.inference_mode(False))
        self.enter_context(torch.no_grad())
        self.enter_context(autocast_uncached())
        self.enter_context(reentrant_checkpoints_disabled())

    def add_handle(self, handle: Removable) -> None:
        """Store a handle, and remove its hook at the end of the `with`."""
        exclude_flags_from_copies(handle)
        self.callback(handle.remove)


def register_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Removable:
    """Call a hook with a tensor's gradient. The hook's result replaces the gradient; None leaves it unchanged."""
    register: Callable[..., Removable] = tensor.register_hook
    return register(hook)


class ThreadLocalHook(ExcludedFromCopies, Generic[P, T]):
    """A hook that acts only in the thread that created it, and that copies of the model do not get."""

    def __init__(self, hook: Callable[P, T]) -> None:
        self._hook, self._thread_id = hook, threading.get_ident()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what the hook returns, or None in another thread."""
        return self._hook(*args, **kwargs) if threading.get_ident() == self._thread_id else None


def thread_local_hook(hook: Callable[P, T]) -> Callable[P, T | None]:
    """Return a hook that runs only in the current thread."""
    return ThreadLocalHook(hook)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, AveragedModel and `torch.compile`.

    Args:
        model: The model, wrapped or not.

    Returns:
        The innermost module.

    Raises:
        ModelError: The model is no `torch.nn.Module`.

    >>> layer = nn.ReLU()
    >>> unwrap(nn.DataParallel(layer)) is layer
    True

    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def check_initialized(model: nn.Module) -> None:
    """Raise ModelError if a lazy layer has no weights yet."""
    for path, module in model.named_modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            if is_lazy(value):
                raise ModelError(
                    f"layer {path!r} ({type(module).__name__}) has no weights yet: before explaining, run model(x) once and "
                    "load its weights"
                )


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the module of one layer.

    The prefix of a wrapper is optional: `layer4`, `module.layer4` and `_orig_mod.layer4` are the same layer.

    Args:
        model: The model.
        layer: Name or module of the layer.

    Returns:
        The name without the prefix of a wrapper, and the module.

    Raises:
        LayerError: The name is unknown, and the message lists the nearest names, or the module is not a part of the
            model.

    >>> find_layer(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "1")
    ('1', ReLU())

    """
    inner = unwrap(model)
    if not isinstance(layer, str | nn.Module):
        raise LayerError(
            f"the layer is {layer!r:.60}; expected one layer name or module. To explain several layers, use fuse()"
        )
    if isinstance(layer, nn.Module):
        target = unwrap(layer)
        for name, module in inner.named_modules():
            if unwrap(module) is target:
                return name, module
        raise LayerError(f"the layer {type(layer).__name__} is not a part of this {type(model).__name__}")
    try:
        return layer, inner.get_submodule(layer)
    except AttributeError:
        bare_name = strip_wrapper_names(layer)
        for name, module in inner.named_modules():
            if bare_name and strip_wrapper_names(name) == bare_name:
                return name, module
        nearest = difflib.get_close_matches(layer, [name for name, _ in inner.named_modules()], n=3, cutoff=0.0)
    raise LayerError(f"no layer {layer!r} in {type(model).__name__}; nearest names: {', '.join(nearest) or 'none'}")


def has_global_hooks() -> bool:
    """Return whether hooks are registered for all modules. PyTorch has no public function for it."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(all_modules, f"_global{name}") for name in names)


def strip_wrapper_names(name: str) -> str:
    """Remove the attribute names of wrappers, such as DataParallel's `module`, from a layer's name or pattern.

    >>> strip_wrapper_names("module.encoder._orig_mod.layer4")
    'encoder.layer4'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def find_layers(model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module]) -> dict[str, nn.Module]:
    """Return layers by name, selected by names, glob patterns (`"layer*.conv1"`) or modules. The order is the model's.

    Args:
        model: The model.
        layers: Names, glob patterns or modules.

    Returns:
        The modules by name.

    >>> list(find_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "[0-9]"))
    ['0', '1']

    """
    requested = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str | nn.Module) else [layers]
    if len(requested) == 1 and not (isinstance(requested[0], str) and GLOB_CHARACTERS & set(requested[0])):
        return dict([find_layer(model, requested[0])])
    modules = dict(unwrap(model).named_modules())
    names: set[str] = set()
    name_by_bare_name = {strip_wrapper_names(name): name for name in reversed(modules)}
    for layer in requested:
        matches = fnmatch.filter(modules, layer) if isinstance(layer, str) else []
        if isinstance(layer, str) and not matches:
            matches = [name_by_bare_name[n] for n in fnmatch.filter(name_by_bare_name, strip_wrapper_names(layer))]
        names.update(matches or [find_layer(model, layer)[0]])
    ordered = [*(name for name in modules if name in names), *sorted(names - modules.keys())]
    return {name: modules[name] if name in modules else find_layer(model, name)[1] for name in ordered}


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """Disable autocast's cache of weights inside the `with`. A cached weight without a graph would break later training."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


_modes_lock = threading.Lock()
_flags_by_thread: dict[int, dict[int, bool]] = {}  # by thread: the flags that it sees, by the module's id
# by thread: how often it is inside `evaluation_mode` with each of these modules
_use_counts_by_thread: dict[int, Counter[int]] = {}
# of modules whose own flag is set: by how many threads, and what it was
_original_flags: dict[int, tuple[int, bool]] = {}


class _ThreadTrainingFlag:
    """`nn.Module.training` during an explanation: a thread inside `evaluation_mode` reads and sets its own flags."""

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> bool:
        for flags in _flags_of_this_thread():
            if id(module) in flags:
                return flags[id(module)]
        try:
            return bool(vars(module)["training"])
        except (KeyError, TypeError):  # TorchScript has its flag elsewhere, the class has none
            raise AttributeError(f"{type(module).__name__!r} object has no attribute 'training'") from None

    def __set__(self, module: nn.Module, training: bool) -> None:
        for flags in _flags_of_this_thread():
            if id(module) in flags:
                flags[id(module)] = training
                return
        vars(module)["training"] = training

    def __delete__(self, module: nn.Module) -> None:
        """Delete the flag of a module, as TorchScript does for one that it has just created."""
        if vars(module).pop("training", None) is None:
            raise AttributeError("training")


def _flags_of_this_thread() -> Iterable[dict[int, bool]]:
    """Return the `training` flags that apply to this thread. Autograd's threads see the flags of all threads."""
    if (flags := _flags_by_thread.get(threading.get_ident())) is not None:
        return (flags,)
    return tuple(_flags_by_thread.values()) if is_autograd_thread() else ()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode inside the `with`, for this thread only.

    The flags of the modules stay unchanged. Where a module stores its flag in another way (TorchScript, a property), or is run
    by other threads (DataParallel), the flag itself is set, and restored when the last thread leaves.
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


def is_recomputing() -> bool:
    """Whether this thread is inside a backward pass. A layer that runs there repeats an earlier call."""
    return torch._C._current_graph_task_id() != -1


def is_autograd_thread() -> bool:
    """Whether autograd started this thread, for example for an accelerator."""
    return is_recomputing() and isinstance(threading.current_thread(), threading._DummyThread)


_checkpoint_lock = threading.Lock()
_uncheckpointed_threads: list[int] = []


@contextmanager
def reentrant_checkpoints_disabled() -> Iterator[None]:
    """Disable reentrant checkpoints of this thread inside the `with`. They do not support `autograd.grad`."""
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
