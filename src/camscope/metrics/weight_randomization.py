"""Randomize the weights of a model, all or part by part, in a copy of its explainer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, ModelError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.explainers.core.setting_checks import check_integer, check_positive_integer
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.hooks.thread_local_hooks import Hooks

MAX_MODEL_PARTS = 20  # parts that a model is split into by default


@dataclass(frozen=True)
class ModelPart:
    """Modules of a model that are randomized in one step. `module_names` lists those with weights."""

    name: str
    module_names: tuple[str, ...]


def randomize_weights(explainer: Explainer, seed: int = 0) -> Explainer:
    """Copy an explainer and its model. Randomize all weights of the copied model.

    `reset_parameters` of each module is called, so that each layer is initialized as PyTorch initializes a new layer.
    BatchNorm statistics get mean 0 and variance 1. Some modules have no such method, such as a class token or the joint
    projection of attention. Their values are permuted.

    Args:
        explainer: The method with its model, which stays unchanged.
        seed: Seed of the weights.

    Returns:
        The explainer with the untrained model.

    >>> from camscope import GradCAM, load_model
    >>> explainer = GradCAM(load_model("phantom"), "layer4")
    >>> bool((randomize_weights(explainer).model.fc.weight == explainer.model.fc.weight).all())
    False

    """
    check_integer(seed=seed)
    randomized, (whole,) = copy_explainer(explainer), split_model(explainer.model, max_parts=1)
    (model_seed,) = draw_seeds(1, torch.Generator(device="cpu").manual_seed(seed))
    randomize_modules(randomized.model, whole.module_names, model_seed)
    return randomized


def copy_explainer(explainer: Explainer) -> Explainer:
    """Copy an explainer and its uncompiled model. Raise a ModelError if the model cannot be copied."""
    try:
        copied = copy.deepcopy(explainer, {id(explainer.model): copy.deepcopy(unwrap(explainer.model))})
    except (RuntimeError, TypeError) as error:
        model_name = type(explainer.model).__name__
        raise ModelError(
            f"{model_name} cannot be copied ({error}): pass an explainer of a model that copy.deepcopy can copy"
        ) from error
    copied.on_nonfinite = "warn"  # random weights may overflow: the map is then undefined
    return copied


def randomize_modules(model: nn.Module, module_names: Sequence[str], seed: int) -> None:
    """Randomize the weights of the named modules of a model in place. The global random state is restored."""
    random_state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        for name in module_names:
            _randomize_module(model.get_submodule(name))
    finally:
        torch.set_rng_state(random_state)


@torch.no_grad()
def _randomize_module(module: nn.Module) -> None:
    """Reset the weights of a module. Without `reset_parameters`, shuffle the values of each weight."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    values = [(value, value.device) for value in tensors if value is not None]
    reset = getattr(module, "reset_parameters", None)
    for value, _ in values:
        value.data = value.data.cpu()
    if callable(reset):
        reset()
    else:
        for value in module.parameters(recurse=False):
            flat = value.flatten()
            value.copy_(flat[torch.randperm(len(flat), device="cpu")].view_as(value))
    for value, device in values:
        value.data = value.data.to(device)


def split_model(model: nn.Module, x: Tensor | None = None, *, max_parts: int = MAX_MODEL_PARTS) -> list[ModelPart]:
    """Split a model into at most `max_parts` parts. The part that runs last on `x` comes first."""
    check_positive_integer(max_parts=max_parts)
    inner = unwrap(model)
    if isinstance(inner, torch.jit.ScriptModule):
        raise ModelError(f"{type(inner).__name__} is TorchScript: to randomize weights, pass the original nn.Module")
    modules = [("", inner)]
    holders = _list_modules_with_weights(inner)
    if not holders:
        raise ModelError(f"{type(inner).__name__} has no parameters: there is nothing to randomize")
    while True:
        sizes = [len(_list_weighted_modules_inside(name, holders)) for name, _ in modules]
        largest = max(sizes)
        split = []
        for size, (name, module) in zip(sizes, modules, strict=True):
            split += _split_part(name, module, holders) if size == largest > 1 else [(name, module)]
        if len(split) > max_parts or split == modules:
            break
        modules = split
    positions = _record_execution_order(inner, x)
    parts = [
        ModelPart(name.strip(".") or type(inner).__name__, tuple(_list_weighted_modules_inside(name, holders)))
        for name, _ in modules
    ]
    return sorted(parts, key=lambda part: min(positions[name] for name in part.module_names), reverse=True)


def build_parts_from_layers(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[ModelPart]:
    """Build one part of the model for each layer in `layers`. Raise a LayerError for a layer without parameters."""
    inner = unwrap(model)
    parts: list[ModelPart] = []
    holders = _list_modules_with_weights(inner)
    for layer in layers:
        name, _ = find_layer(inner, layer)
        if not (modules := _list_weighted_modules_inside(name, holders)):
            raise LayerError(f"layer {name!r} has no parameters: there is nothing to randomize")
        parts.append(ModelPart(name, tuple(modules)))
    if not parts:
        raise LayerError("layers is empty: pass at least one layer, or None for all")
    return parts


def covers_all_weights(model: nn.Module, model_parts: Sequence[ModelPart]) -> bool:
    """Return whether the parts together contain every module with weights."""
    covered = {name for part in model_parts for name in part.module_names}
    return set(_list_modules_with_weights(unwrap(model))) <= covered


def _list_modules_with_weights(model: nn.Module) -> list[str]:
    """Return the names of modules that directly hold parameters or BatchNorm statistics. Child modules are separate."""
    return [
        name
        for name, module in model.named_modules()
        if any(value is not None for value in module._parameters.values())
        or (module._buffers and callable(getattr(module, "reset_parameters", None)))
    ]


def _list_weighted_modules_inside(name: str, weighted_modules: Sequence[str]) -> list[str]:
    """Return the modules with weights inside the module `name`. If `name` ends in a dot, return only that module."""
    if name.endswith("."):
        return [name.removesuffix(".")]
    return [module for module in weighted_modules if not name or module == name or module.startswith(f"{name}.")]


def _split_part(name: str, module: nn.Module, weighted_modules: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Split a module into its children with weights. Weights outside the children form a separate part."""
    own_weights = [(f"{name}.", module)] if name in weighted_modules else []
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return own_weights + [child for child in children if _list_weighted_modules_inside(child[0], weighted_modules)]


def _record_execution_order(model: nn.Module, x: Tensor | None) -> dict[str, int]:
    """Return the position at which each module is first called. A module that is never called has its parent's position."""
    listing = {name: position for position, (name, _) in enumerate(model.named_modules())}
    if x is None:
        return listing
    execution_order: dict[str, int] = {}
    copied = copy.deepcopy(model).eval()
    with Hooks() as hooks, torch.no_grad():
        for name, module in copied.named_modules():
            hooks.add_handle(module.register_forward_pre_hook(partial(_record_first_call, execution_order, name)))
        copied(x)
    for name in listing:
        execution_order.setdefault(name, execution_order.get(name.rpartition(".")[0], 0))
    return execution_order


def _record_first_call(execution_order: dict[str, int], name: str, *args: object) -> None:
    execution_order.setdefault(name, len(execution_order))
