"""What every hook here needs: layers found by name, hooks that act in one thread and are gone after the `with`."""

import difflib
import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from camscope.errors import LayerError, ModelError

GLOB = set("*?[")
WRAPPER_ATTRIBUTES = {  # under which a wrapper keeps its model: it is a part of the names that the wrapper prints
    "module",  # DataParallel, DistributedDataParallel, AveragedModel
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Lightning Fabric
}

P = ParamSpec("P")
T = TypeVar("T")


class Removable(Protocol):
    """A handle of any PyTorch hook."""

    def remove(self) -> None:
        """Take the hook away."""


class Hooks(ExitStack):
    """Handles that are removed when the `with` ends, however it ends."""

    def hold(self, handle: Removable) -> None:
        """Keep a handle until the end of the `with`."""
        self.callback(handle.remove)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Removable:
    """Hook a tensor: what the hook returns takes the place of the gradient, None leaves it."""
    register: Callable[..., Removable] = tensor.register_hook
    return register(hook)


def here_only(hook: Callable[P, T]) -> Callable[P, T | None]:
    """The hook, silent in every thread but the one that made it: others share the model, not the question."""
    owner = threading.get_ident()

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return hook(*args, **kwargs) if threading.get_ident() == owner else None

    return guarded


def unwrap(model: nn.Module) -> nn.Module:
    """The module in DataParallel, DistributedDataParallel, AveragedModel and `torch.compile`: there hooks fire in Python."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Name and module of one layer, given by either; an unknown name is answered with the nearest ones.

    A name may have or lack a wrapper's prefix: `layer4`, `module.layer4` and `_orig_mod.layer4` are one layer.

    >>> find_layer(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "1")
    ('1', ReLU())
    """
    inner = unwrap(model)
    if not isinstance(layer, str | nn.Module):
        raise LayerError(
            f"the layer is {layer!r:.60}; expected one name or module (for several, explain each and fuse the results)"
        )
    if isinstance(layer, nn.Module):
        wanted = unwrap(layer)
        for name, module in inner.named_modules():
            if unwrap(module) is wanted:
                return name, module
        raise LayerError(f"the layer {type(layer).__name__} given is not a part of this {type(model).__name__}")
    try:
        return layer, inner.get_submodule(layer)
    except AttributeError:
        plain = without_wrappers(layer)
        for name, module in inner.named_modules():
            if plain and without_wrappers(name) == plain:
                return name, module
        near = difflib.get_close_matches(layer, [name for name, _ in inner.named_modules()], n=3, cutoff=0.0)
    raise LayerError(f"no layer {layer!r} in {type(model).__name__}; nearest names: {', '.join(near) or 'none'}")


def without_wrappers(name: str) -> str:
    """The name of a layer, or a pattern of names, without the attributes of wrappers.

    >>> without_wrappers("module.encoder._orig_mod.layer4")
    'encoder.layer4'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def find_layers(model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module]) -> dict[str, nn.Module]:
    """Layers by name, glob pattern (`"layer*.conv1"`) or module, in the model's own order."""
    wanted = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str | nn.Module) else [layers]
    if len(wanted) == 1 and not (isinstance(wanted[0], str) and GLOB & set(wanted[0])):
        return dict([find_layer(model, wanted[0])])
    modules = dict(unwrap(model).named_modules())
    names: set[str] = set()
    plain = {without_wrappers(name): name for name in reversed(modules)}
    for layer in wanted:
        matches = fnmatch.filter(modules, layer) if isinstance(layer, str) else []
        if isinstance(layer, str) and not matches:
            matches = [plain[name] for name in fnmatch.filter(plain, without_wrappers(layer))]
        names.update(matches or [find_layer(model, layer)[0]])
    return {name: modules.get(name) or find_layer(model, name)[1] for name in sorted(names, key=_order(modules))}


def _order(modules: dict[str, nn.Module]) -> Callable[[str], int]:
    places = {name: place for place, name in enumerate(modules)}
    return lambda name: places.get(name, len(places))


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """No cache of autocast weights for a while: casts made without gradients would spoil a training step that follows."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


_modes_lock = threading.Lock()
_modes: dict[int, tuple[int, bool]] = {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every submodule in eval mode for a while; each flag put back when the last thread that needs it leaves.

    Flags are set, `train()` is not called: a module may do more there than set its flag. They are counted one by one:
    one thread may be inside with a model, another one with a part of it.
    """
    modules = [module for module in model.modules() if hasattr(module, "training")]  # frozen TorchScript has no mode
    with _modes_lock:
        if not _modes and not any(module.training for module in modules):
            modules = []  # nothing to set, and nobody inside who would put anything back
        for module in modules:
            users, flag = _modes.get(id(module), (0, module.training))
            _modes[id(module)] = (users + 1, flag)
            _set_mode(module, False)
    try:
        yield
    finally:
        with _modes_lock:
            for module in modules:
                users, flag = _modes.pop(id(module))
                if users > 1:
                    _modes[id(module)] = (users - 1, flag)
                else:
                    _set_mode(module, flag)


def _set_mode(module: nn.Module, training: bool) -> None:
    if module.training != training:
        module.training = training
