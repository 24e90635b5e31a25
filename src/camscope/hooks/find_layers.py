"""Find the layers of a model by name, glob pattern or module, and unwrap models from DataParallel and others."""

import difflib
import fnmatch
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from camscope.errors import LayerError, ModelError
from camscope.hooks.wrap_black_box_function_as_module import wrap_function

GLOB_CHARACTERS = set("*?[")
WRAPPER_ATTRIBUTES = {  # attributes in which a wrapper stores its model; they are part of the wrapper's layer names
    "module",  # DataParallel, DistributedDataParallel, AveragedModel
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Lightning Fabric
}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper: DataParallel, DistributedDataParallel, AveragedModel or `torch.compile`.

    A function from a batch to scores becomes a module that calls it.

    Args:
        model: The model, wrapped or not.

    Returns:
        The innermost module.

    Raises:
        ModelError: The model is neither a `torch.nn.Module` nor a function.

    >>> layer = nn.ReLU()
    >>> unwrap(nn.DataParallel(layer)) is layer
    True

    """
    value: object = model
    if not isinstance(value, nn.Module):
        return wrap_function(value)
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def check_lazy_layers_initialized(model: nn.Module) -> None:
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
        LayerError: The name is unknown, or the module is not a part of the model. The message lists the nearest names.

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


def strip_wrapper_names(name: str) -> str:
    """Remove the names that wrappers add, such as DataParallel's `module`, from the name or pattern of a layer.

    >>> strip_wrapper_names("module.encoder._orig_mod.layer4")
    'encoder.layer4'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def find_layers(model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module]) -> dict[str, nn.Module]:
    """Return layers by name, in the order of the model. Select them by names, glob patterns (`"layer*.conv1"`) or modules.

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
