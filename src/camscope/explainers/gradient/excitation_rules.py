"""How a unit's winning probability is shared among the units that it was made of. p: that of the outputs.

Winners: a mode under which a model's way back hands on winning probabilities in place of gradients.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import Node

from camscope.errors import ModelError
from camscope.hooks.base import Hooks, here_only
from camscope.hooks.function_mode import (
    ACTIVATIONS,
    AVERAGES,
    DROPOUTS,
    SCALINGS,
    Calls,
    body_of,
    floor,
    name_of,
    negates,
)
from camscope.hooks.gradients import kind_of_step, steps
from camscope.pytree import leaves
from camscope.targets import full_precision


class Share(Protocol):
    """p of an operation's outputs, and what it kept of its inputs -> p of each input."""

    splits: bool  # whether an output has several inputs, which share what it has

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """P of each input; at least float32."""


class Shared(torch.autograd.Function):
    """The value of an operation, worked out by `compute`, whose way back is a share of probabilities."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, compute: Callable[[], Tensor], share: Share, kept: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        """The value; `kept`: what the share needs of the inputs."""
        result = compute()
        if result is inputs[0]:
            ctx.mark_dirty(result)
        ctx.save_for_backward(*kept)
        ctx.share = share  # type: ignore[attr-defined]  # a context takes what the way back needs
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, p: Tensor) -> tuple[Tensor | None, ...]:
        """P of each input."""
        kept = ctx.saved_tensors  # which a checkpoint makes again, under the mode that made this
        with torch._C.DisableTorchFunction():
            return None, None, None, *ctx.share(full_precision(p), *kept)


@dataclass
class HandedOn:
    """Each output has one input, which gets all of it."""

    splits: bool = False

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """P"""
        return (p,)


@dataclass
class Scaled:
    """Each output is its input times a constant, of which the signs are kept: a negative one does not excite."""

    splits: bool = False

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """P where the constant is positive"""
        return (torch.where(kept[0] > 0, p, 0),)


@dataclass
class Added:
    """a + b share by what is positive of each; kept are their parts of that. Where neither is, nothing excites."""

    shapes: tuple[torch.Size, torch.Size]
    splits: bool = True

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """P relu(a) / (relu(a) + relu(b)), and the same of b"""
        return tuple((p * part).sum_to_size(shape) for part, shape in zip(kept, self.shapes, strict=True))


@dataclass
class Averaged:
    """A mean, or any sum under positive weights that are no parameters: by the inputs' own size."""

    function: Callable[[Tensor], Tensor]
    splits: bool = True

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """See `spread`."""
        return (spread(p, kept[0].clamp(min=0), self.function),)


@dataclass
class Weighted:
    """A convolution or a linear layer: P(a_j | a_i) = a_j w⁺_ij / Σ_k a_k w⁺_ik, 0 where that sum is (Zhang et al. 2016).

    `signs`: of the batch norm behind it, with which it is one linear map. `least`: responses are counted from each
    channel's least number, at the input, not from 0. `contrast`: less what the same unit with opposite weights would hand
    on.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    signs: Tensor | None = None
    least: bool = False
    contrast: bool = False
    splits: bool = True

    def __call__(self, p: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """Σ_i P(a_j | a_i) p_i"""
        x = full_precision(kept[0])
        space = tuple(range(2, x.ndim)) or (1,)
        response = x - x.amin(space, keepdim=True) if self.least else x.clamp(min=0)
        found = self._by(p, response, 1)
        return (found - self._by(p, response, -1) if self.contrast else found,)

    def _by(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        if self.signs is None:
            return self._through(p, response, sign)
        up, down = (torch.where(chosen, p, 0) for chosen in (self.signs > 0, self.signs < 0))
        found = self._through(up, response, sign)
        return found + self._through(down, response, -sign) if bool((self.signs < 0).any()) else found

    def _through(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        weight = (sign * full_precision(self.weight.detach())).clamp(min=0)
        weight = weight / weight.amax().clamp(min=torch.finfo(weight.dtype).tiny)  # no ratio depends on the scale
        return spread(p, response, lambda a: self.function(a, weight))


def spread(p: Tensor, response: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """P of the outputs of a linear function of responses that are not negative -> p of those; (N,…) each."""
    response = full_precision(response)
    largest = response.flatten(1).amax(1).view(-1, *[1] * (response.ndim - 1))
    with torch.enable_grad():
        a = torch.where(largest > 0, response / largest, 0).requires_grad_()
        total = function(a)
        each = torch.where(total > 0, p.view(total.shape) / total, 0).detach()
        (found,) = torch.autograd.grad(total, a, each)
    return a.detach() * found


WEIGHTED = {"linear", *(f"conv{way}{rank}d" for way in ("", "_transpose") for rank in (1, 2, 3))}
ADDED = {"add", "iadd", "radd"}
# steps whose outputs are copies of some of their inputs: a gradient goes through them as a probability does
COPYING = {
    *("Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze"),
    *("Expand", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "ConstantPadNd", "Index"),
    *("IndexSelect", "Gather", "ToCopy", "PixelShuffle", "Flip", "Roll", "Max", "Amax", "Repeat", "AdaptiveMaxPool2D"),
    *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool3D", "AccumulateGrad", "Identity"),
    *(f"{kind}Pad{rank}D" for kind in ("Reflection", "Replication") for rank in (1, 2, 3)),
}


@contextmanager
def winning(model: nn.Module, *, pixels: bool = False) -> Iterator["Winners"]:
    """Inside the `with`, in this thread, `torch.autograd.grad` of the model's output is the winning probabilities' way back.

    What is done with the output, outside of the model, has the way back that it always has.
    """
    with Hooks() as hooks, Winners(pixels=pixels) as winners:
        hooks.hold(model.register_forward_pre_hook(here_only(partial(winners.turn, True))))
        hooks.hold(model.register_forward_hook(here_only(partial(winners.turn, False)), always_call=True))
        yield winners


class Winners(Calls):
    """The mode of `winning`: what the model calls is worked out as ever, and has another way back.

    `pixels`: they go back to the input, whose numbers may be negative. `signed`: activations met that may be, too.
    """

    def __init__(self, *, pixels: bool = False) -> None:
        super().__init__()
        self._pixels, self._inside = pixels, False
        self.signed: Counter[str] = Counter()
        self._last: tuple[Tensor, Tensor, tuple[int, int], Weighted] | None = None  # output, input, versions, share

    def turn(self, inside: bool, *_: object) -> None:
        """Whether what is called next is the model's."""
        self._inside, self._last = inside, None

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns, with the way back of a probability where there is a rule for it."""
        name = name_of(func)
        if func is torch.autograd.grad:  # which runs checkpoints again
            return self._again(func, args, named)
        first = args[0] if args else named.get("input")
        if not self._inside or not _flows(first):
            with torch.no_grad() if self._inside and _of_parameters(args, named) else nullcontext():
                return func(*args, **named)
        rest = args[1:] if args else ()
        named.pop("input", None)
        return self._ruled(name, partial(func, **named), first, rest, named)

    def _again(self, grad: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        self.turn(True)
        try:
            with self:
                return body_of(grad)(*args, **named)
        finally:
            self.turn(False)

    def _ruled(self, name: str, func: Callable[..., Any], x: Tensor, rest: Sequence[Any], named: dict[str, Any]) -> Any:
        other = rest[0] if rest else named.get("other")
        if name in WEIGHTED:
            return self._weighted(func, x, rest, named)
        if name in AVERAGES and not negates(named):
            return _shared(func, Averaged(lambda a: func(a, *rest)), (x.detach(),), (x,), rest)
        if name == "batch_norm":
            return self._normed(func, x, rest, named)
        if name in ADDED and _flows(other) and named.get("alpha", 1) == 1:
            return _added(func, x, other, rest)
        if name in SCALINGS and not _flows(other):
            return _shared(func, Scaled(), (torch.as_tensor(other, device=x.device).detach().sign(),), (x,), rest)
        if name in ACTIVATIONS | DROPOUTS:  # each output has one input: a unit and its own activation are one
            self.signed.update([name] * (name in ACTIVATIONS and floor(name, rest, named) < 0))
            return _handed_on(func, x, rest)
        return func(x, *rest)

    def _weighted(self, func: Callable[..., Any], x: Tensor, rest: Sequence[Any], named: dict[str, Any]) -> Tensor:
        weight = rest[0] if rest else named["weight"]
        more = {key: value for key, value in named.items() if key not in ("weight", "bias")}
        plain: Callable[..., Tensor] = func.func if isinstance(func, partial) else func
        share = Weighted(lambda a, w: plain(a, w, None, *rest[2:], **more), weight, least=self._pixels and _of_input(x))
        result = _shared(func, share, (x.detach(),), (x,), rest)
        self._last = result, x, (result._version, x._version), share
        return result

    def _normed(self, func: Callable[..., Any], x: Tensor, rest: Sequence[Any], named: dict[str, Any]) -> Tensor:
        """A batch norm straight behind a linear map is one with it; elsewhere it hands on, where it keeps the sign."""
        gamma = rest[2] if len(rest) > 2 else named.get("weight")
        signs = torch.ones_like(x[:1]) if gamma is None else gamma.detach().sign().view(1, -1, *[1] * (x.ndim - 2))
        if self._last is not None and self._last[0] is x:
            _, source, versions, share = self._last
            if versions == (x._version, source._version):
                inputs = (x.detach(), *rest)
                known = replace(share, signs=signs)
                found: Tensor = Shared.apply(lambda: func(*inputs), known, (source.detach(),), source)
                return found
        return _shared(func, Scaled(), (signs,), (x,), rest)


def expect_rules(output: Any, method: str) -> None:
    """A ModelError where a step of an output's graph has no rule."""
    missing = Counter(kind_of_step(node) for node in steps(_live(output)) if not _has_a_rule(node))
    if missing:
        listed = ", ".join(f"{kind} x {count}" for kind, count in missing.most_common(4))
        raise ModelError(
            f"{method} has no rule for a part of the way to the layer ({listed}): it knows convolutions, linear layers, means, "
            f"maxima, sums, concatenations, batch norms and activations; choose a later layer, or pass gradcam"
        )


def set_against_duals(output: Any) -> None:
    """The last linear layers behind an output hand on less what units with opposite weights would: see `Weighted`."""
    for share in _heads(_live(output)):
        share.contrast = True


def _live(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(output) if leaf.requires_grad]


def _has_a_rule(node: Node) -> bool:
    kind = kind_of_step(node)
    inputs = [before is not None and kind_of_step(before) != "AccumulateGrad" for before, _ in node.next_functions]
    constant = (kind == "Add" and sum(inputs) <= 1) or (
        kind == "Sub" and inputs == [True, *[False] * (len(inputs) - 1)]
    )
    return constant or kind in COPYING or hasattr(node, "share")


def _heads(outputs: Sequence[Tensor]) -> list[Weighted]:
    """The linear layers that come last on each way."""
    waiting, heads = [one.grad_fn for one in outputs], list[Weighted]()
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if isinstance(share := getattr(node, "share", None), Weighted):
            heads.append(share)
        else:
            waiting.extend(before for before, _ in node.next_functions)
    return heads


def _flows(value: object) -> TypeGuard[Tensor]:
    """Whether a tensor depends on what probabilities go back to; a parameter does not."""
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf and torch.is_grad_enabled()


def _of_parameters(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether parameters are all that a value is made of: it is a constant, then, as they are."""
    found = [leaf for _, leaf in leaves((args, named))]
    return any(isinstance(one, nn.Parameter) for one in found) and not any(_flows(one) for one in found)


def _of_input(x: Tensor) -> bool:
    """Whether nothing but copies, constants and activations lies between the input and this."""
    node = x.grad_fn
    while node is not None and kind_of_step(node) != "AccumulateGrad":
        if getattr(getattr(node, "share", None), "splits", False):
            return False
        node = node.next_functions[0][0]
    return True


def _shared(
    func: Callable[..., Any], share: Share, kept: tuple[Tensor, ...], inputs: tuple[Tensor, ...], rest: Sequence[Any]
) -> Tensor:
    found: Tensor = Shared.apply(lambda: func(inputs[0], *rest), share, kept, *inputs)
    return found


def _handed_on(func: Callable[..., Any], x: Tensor, rest: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = func(x, *rest)  # in place it stays the step that it was, which is what is wanted
    return result if result is x else _shared(lambda _: result, HandedOn(), (), (x,), ())


def _added(func: Callable[..., Any], a: Tensor, b: Tensor, rest: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        first, second = a.clamp(min=0), b.clamp(min=0)
        total = first + second
        parts = tuple(torch.where(total > 0, one / total, 0) for one in (first, second))
    return _shared(func, Added((a.shape, b.shape)), parts, (a, b), rest)
