"""Forgetting: an explainer on a copy of its model whose parts have lost what they learnt; the user's model stays as it is."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, ModelError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import seeds
from camscope.explainers.core.evaluation_context import expect_count, expect_whole
from camscope.hooks.base import Hooks, find_layer, unwrap

MOST = 20  # parts that a model is taken as, unless they are named


@dataclass(frozen=True)
class Part:
    """Some modules of a model that lose their values in one step: `modules` are those that hold any themselves."""

    name: str
    modules: tuple[str, ...]


def untrained(tool: Explainer, seed: int = 0) -> Explainer:
    """The same explainer of the same architecture with none of its training, for whatever is measured of the trained one.

    Every module is asked for its own `reset_parameters`: convolutions and linear layers draw as PyTorch does for a new
    one; normalisation layers get weight 1 and bias 0, BatchNorm's statistics mean 0 and variance 1. The values of a module
    without one (a class token, attention's joint projection) change places among themselves.
    """
    expect_whole(seed=seed)
    return stripped(tool, [part.modules for part in parts(tool.model, most=1)], seed)


def stripped(tool: Explainer, groups: Sequence[Sequence[str]], seed: int) -> Explainer:
    """The explainer on a copy, whose modules of these groups have lost their values; a group's draws are its own."""
    other = copied(tool)
    for modules, one in zip(groups, seeds(len(groups), torch.Generator(device="cpu").manual_seed(seed)), strict=True):
        reset(other.model, modules, one)
    return other


def copied(tool: Explainer) -> Explainer:
    """The same explainer on a copy of its model, the eager one; ModelError where it cannot be copied."""
    try:
        other = copy.deepcopy(tool, {id(tool.model): copy.deepcopy(unwrap(tool.model))})
    except (RuntimeError, TypeError) as error:
        name = type(tool.model).__name__
        raise ModelError(
            f"{name} cannot be copied ({error}), and yours is left as it is: pass an explainer of a model that "
            f"copy.deepcopy takes"
        ) from error
    other.on_nonfinite = "warn"  # a net of random weights may run out of range: then that map has no number
    return other


def reset(model: nn.Module, modules: Sequence[str], seed: int) -> None:
    """Modules by name lose their values, in place; drawn on the CPU, and nobody else's random numbers move on."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        for name in modules:
            _reset_one(model.get_submodule(name))
    finally:
        torch.set_rng_state(before)


@torch.no_grad()
def _reset_one(module: nn.Module) -> None:
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


def parts(model: nn.Module, x: Tensor | None = None, *, most: int = MOST) -> list[Part]:
    """The model from its output down to its input, in `most` parts at most.

    It begins as one part; the modules with the most inside are opened, all that are equally large at once, while the parts
    are not too many. Parts are in the order in which `x` (N,C,*S) runs through them, turned over; without one in that of
    the model's own listing.
    """
    expect_count(most=most)
    inner = unwrap(model)
    found = [("", inner)]
    holders = _holders(inner)
    if not holders:
        raise ModelError(f"{type(inner).__name__} has no parameters: there is nothing to lose")
    while True:
        sizes = [len(_inside(name, holders)) for name, _ in found]
        largest = max(sizes)
        opened = [
            part
            for size, (name, module) in zip(sizes, found, strict=True)
            for part in (_children(name, module, holders) if size == largest > 1 else [(name, module)])
        ]
        if len(opened) > most or opened == found:
            break
        found = opened
    places = _order(inner, x)
    made = [Part(name.strip(".") or type(inner).__name__, tuple(_inside(name, holders))) for name, _ in found]
    return sorted(made, key=lambda part: min(places[name] for name in part.modules), reverse=True)


def named(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[Part]:
    """The parts that the user named, in the order given; LayerError for one without parameters."""
    inner = unwrap(model)
    holders, made = _holders(inner), []
    for layer in layers:
        name, _ = find_layer(inner, layer)
        if not (modules := _inside(name, holders)):
            raise LayerError(f"layer {name!r} has no parameters: there is nothing to lose")
        made.append(Part(name, tuple(modules)))
    if not made:
        raise LayerError("layers is empty: name one at least, or leave it out")
    return made


def leave_nothing(model: nn.Module, steps: Sequence[Part]) -> bool:
    """Whether these parts are the whole model."""
    return set(_holders(unwrap(model))) <= {name for part in steps for name in part.modules}


def _holders(model: nn.Module) -> list[str]:
    """Names of modules with values of their own: parameters, or the statistics of a BatchNorm without any."""
    return [
        name
        for name, module in model.named_modules()
        if any(value is not None for value in module._parameters.values())
        or (module._buffers and callable(getattr(module, "reset_parameters", None)))
    ]


def _inside(name: str, holders: Sequence[str]) -> list[str]:
    """Those that a module is or holds. A name that ends in a dot is of a module's own values, without what is inside."""
    if name.endswith("."):
        return [name.removesuffix(".")]
    return [one for one in holders if not name or one == name or one.startswith(f"{name}.")]


def _children(name: str, module: nn.Module, holders: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The parts of a part: its children that hold anything, and what it holds itself."""
    own = [(f"{name}.", module)] if name in holders else []
    below = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return own + [(key, child) for key, child in below if _inside(key, holders)]


def _order(model: nn.Module, x: Tensor | None) -> dict[str, int]:
    """When each module first ran; one that was never called ran with what it is a part of."""
    listed = {name: place for place, (name, _) in enumerate(model.named_modules())}
    if x is None:
        return listed
    ran: dict[str, int] = {}
    other = copy.deepcopy(model).eval()
    with Hooks() as hooks, torch.no_grad():
        for name, module in other.named_modules():
            hooks.hold(module.register_forward_pre_hook(partial(_noted, ran, name)))
        other(x)
    for name in listed:
        ran.setdefault(name, ran.get(name.rpartition(".")[0], 0))
    return ran


def _noted(ran: dict[str, int], name: str, *_: object) -> None:
    ran.setdefault(name, len(ran))
