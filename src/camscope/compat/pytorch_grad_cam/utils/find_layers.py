"""Search and replacement of layers, under the names of pytorch-grad-cam."""

from collections.abc import Callable, Iterable

from torch import nn


def replace_layer_recursive(model: nn.Module, old_layer: nn.Module, new_layer: nn.Module) -> bool:
    """Replace the first occurrence of a layer in a model. Return whether there was one."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old_layer:
                parent._modules[name] = new_layer
                return True
    return False


def replace_all_layer_type_recursive(model: nn.Module, old_layer_type: type[nn.Module], new_layer: nn.Module) -> None:
    """Replace all layers of a type by the module `new_layer`."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, old_layer_type):
                parent._modules[name] = new_layer


def find_layer_types_recursive(model: nn.Module, layer_types: Iterable[type[nn.Module]]) -> list[nn.Module]:
    """Return all layers whose type is one of `layer_types`."""
    types = tuple(layer_types)
    return find_layer_predicate_recursive(model, lambda layer: type(layer) in types)


def find_layer_predicate_recursive(model: nn.Module, predicate: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return all layers for which the predicate is true."""
    return [layer for layer in model.modules() if predicate(layer)]
