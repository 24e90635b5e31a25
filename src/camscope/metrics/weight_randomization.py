"""Forgetting: an explainer on a copy of its model whose parts have lost what they learnt; the user's model stays as it is."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, ModelError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import draw_seeds
from camscope.explainers.core.evaluation_context import check_integer, check_positive_integer
from camscope.hooks.base import Hooks, find_layer, unwrap

MAX_MODEL_PARTS = 20  # parts that a model is taken as, unless they are named


@dataclass(frozen=True)
class ModelPart:
    """Some modules of a model that lose their values in one step: `module_names` are those that hold any themselves."""

    name: str
    module_names: tuple[str, ...]


def randomize_weights(explainer: Explainer, seed: int = 0) -> Explainer:
    """The same explainer of the same architecture with none of its training, for whatever is measured of the trained one.

    Every module is asked for its own `reset_parameters`: convolutions and linear layers draw as PyTorch does for a new
    one; normalisation layers get weight 1 and bias 0, BatchNorm's statistics mean 0 and variance 1. The values of a module
    without one (a class token, attention's joint projection) change places among themselves.
    """
    check_integer(seed=seed)
    return randomize_modules(explainer, [part.module_names for part in split_model(explainer.model, max_parts=1)], seed)


def randomize_modules(explainer: Explainer, module_groups: Sequence[Sequence[str]], seed: int) -> Explainer:
    """The explainer on a copy, whose modules of these groups have lost their values; a group's draws are its own."""
    other = copy_explainer(explainer)
    for modules, one in zip(
        module_groups, draw_seeds(len(module_groups), torch.Generator(device="cpu").manual_seed(seed)), strict=True
    ):
        reset_modules(other.model, modules, one)
    return other


def copy_explainer(explainer: Explainer) -> Explainer:
    """The same explainer on a copy of its model, the eager one; ModelError where it cannot be copied."""
    try:
        other = copy.deepcopy(explainer, {id(explainer.model): copy.deepcopy(unwrap(explainer.model))})
    except (RuntimeError, TypeError) as error:
        name = type(explainer.model).__name__
        raise ModelError(
            f"{name} cannot be copied ({error}), and yours is left as it is: pass an explainer of a model that "
            f"copy.deepcopy takes"
        ) from error
    other.on_nonfinite = "warn"  # a net of random weights may run out of range: then that map has no number
    return other


def reset_modules(model: nn.Module, module_names: Sequence[str], seed: int) -> None:
    """Modules by name lose their values, in place; drawn on the CPU, and nobody else's random numbers move on."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        for name in module_names:
            _reset_module(model.get_submodule(name))
    finally:
        torch.set_rng_state(before)


@torch.no_grad()
def _reset_module(module: nn.Module) -> None:
    own = [*module._parameters.values(), *module._buffers.values()]
    held = [(value, value.device) for value in own if value is not None]
    renew = getattr(module, "reset_parameters", None)
    for value, _ in held:
        value.data = value.data.cpu()
    if callable(renew):
        renew()
    else:
        for value in module.parameters(recurse=False):
            flat = value.flatten()
            value.copy_(flat[torch.randperm(len(flat), device="cpu")].view_as(value))
    for value, device in held:
        value.data = value.data.to(device)


def split_model(model: nn.Module, x: Tensor | None = None, *, max_parts: int = MAX_MODEL_PARTS) -> list[ModelPart]:
    """The model from its output down to its input, in `max_parts` parts at most.

    It begins as one part; the modules with the most inside are opened, all that are equally large at once, while the parts
    are not too many. Parts are in the order in which `x` (N,C,*S) runs through them, turned over; without one in that of
    the model's own listing.
    """
    check_positive_integer(max_parts=max_parts)
    inner = unwrap(model)
    found = [("", inner)]
    holders = _list_modules_with_weights(inner)
    if not holders:
        raise ModelError(f"{type(inner).__name__} has no parameters: there is nothing to lose")
    while True:
        sizes = [len(_list_weighted_modules_inside(name, holders)) for name, _ in found]
        largest = max(sizes)
        opened = [
            part
            for size, (name, module) in zip(sizes, found, strict=True)
            for part in (_split_part(name, module, holders) if size == largest > 1 else [(name, module)])
        ]
        if len(opened) > max_parts or opened == found:
            break
        found = opened
    places = _record_execution_order(inner, x)
    made = [
        ModelPart(name.strip(".") or type(inner).__name__, tuple(_list_weighted_modules_inside(name, holders)))
        for name, _ in found
    ]
    return sorted(made, key=lambda part: min(places[name] for name in part.module_names), reverse=True)


def select_parts(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[ModelPart]:
    """The parts that the user named, in the order given; LayerError for one without parameters."""
    inner = unwrap(model)
    holders, made = _list_modules_with_weights(inner), []
    for layer in layers:
        name, _ = find_layer(inner, layer)
        if not (modules := _list_weighted_modules_inside(name, holders)):
            raise LayerError(f"layer {name!r} has no parameters: there is nothing to lose")
        made.append(ModelPart(name, tuple(modules)))
    if not made:
        raise LayerError("layers is empty: name one at least, or leave it out")
    return made


def cover_whole_model(model: nn.Module, model_parts: Sequence[ModelPart]) -> bool:
    """Whether these parts are the whole model."""
    return set(_list_modules_with_weights(unwrap(model))) <= {
        name for part in model_parts for name in part.module_names
    }


def _list_modules_with_weights(model: nn.Module) -> list[str]:
    """Names of modules with values of their own: parameters, or the statistics of a BatchNorm without any."""
    return [
        name
        for name, module in model.named_modules()
        if any(value is not None for value in module._parameters.values())
        or (module._buffers and callable(getattr(module, "reset_parameters", None)))
    ]


def _list_weighted_modules_inside(name: str, weighted_modules: Sequence[str]) -> list[str]:
    """Those that a module is or holds. A name that ends in a dot is of a module's own values, without what is inside."""
    if name.endswith("."):
        return [name.removesuffix(".")]
    return [one for one in weighted_modules if not name or one == name or one.startswith(f"{name}.")]


def _split_part(name: str, module: nn.Module, weighted_modules: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The parts of a part: its children that hold anything, and what it holds itself."""
    own = [(f"{name}.", module)] if name in weighted_modules else []
    below = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return own + [(key, child) for key, child in below if _list_weighted_modules_inside(key, weighted_modules)]


def _record_execution_order(model: nn.Module, x: Tensor | None) -> dict[str, int]:
    """When each module first ran; one that was never called ran with what it is a part of."""
    listed = {name: place for place, (name, _) in enumerate(model.named_modules())}
    if x is None:
        return listed
    ran: dict[str, int] = {}
    other = copy.deepcopy(model).eval()
    with Hooks() as hooks, torch.no_grad():
        for name, module in other.named_modules():
            hooks.add_handle(module.register_forward_pre_hook(partial(_record_first_call, ran, name)))
        other(x)
    for name in listed:
        ran.setdefault(name, ran.get(name.rpartition(".")[0], 0))
    return ran


def _record_first_call(execution_order: dict[str, int], name: str, *args: object) -> None:
    execution_order.setdefault(name, len(execution_order))
