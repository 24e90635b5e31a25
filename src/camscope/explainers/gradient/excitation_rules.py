"""Rules that share the winning probability p of an operation's outputs among its inputs.

Inside `excitation_backprop_scope`, the backward pass of a model propagates winning probabilities, not gradients.
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
from camscope.hooks.base import Hooks, thread_local_hook
from camscope.hooks.function_mode import (
    ACTIVATIONS,
    AVERAGING_FUNCTIONS,
    DROPOUTS,
    SCALING_FUNCTIONS,
    BaseFunctionMode,
    activation_lower_bound,
    bypass_torch_function,
    function_name,
    has_negative_weights,
)
from camscope.hooks.gradients import iter_graph_nodes, operation_name
from camscope.pytree import iter_leaves
from camscope.targets import full_precision


class ExcitationRule(Protocol):
    """p of an operation's outputs, and what it kept of its inputs -> p of each input."""

    splits: bool  # whether an output has several inputs, which share what it has

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """P of each input; at least float32."""


class RuledFunction(torch.autograd.Function):
    """The value of an operation, worked out by `compute`, whose way back is a share of probabilities."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        compute: Callable[[], Tensor],
        rule: ExcitationRule,
        saved: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> Tensor:
        """The value; `saved`: what the share needs of the inputs."""
        result = compute()
        if result is inputs[0]:
            ctx.mark_dirty(result)
        ctx.save_for_backward(*saved)
        ctx.share = rule  # type: ignore[attr-defined]  # a context takes what the way back needs
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, p: Tensor) -> tuple[Tensor | None, ...]:
        """P of each input."""
        saved = ctx.saved_tensors  # which a checkpoint makes again, under the mode that made this
        with torch._C.DisableTorchFunction():
            return None, None, None, *ctx.share(full_precision(p), *saved)


@dataclass
class PassThroughRule:
    """Rule of operations whose outputs have one input each: it receives all probability."""

    splits: bool = False

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """P"""
        return (p,)


@dataclass
class ScalingRule:
    """Each output is its input times a constant, of which the signs are kept: a negative one does not excite."""

    splits: bool = False

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """P where the constant is positive"""
        return (torch.where(saved[0] > 0, p, 0),)


@dataclass
class AdditionRule:
    """a + b share by what is positive of each; kept are their parts of that. Where neither is, nothing excites."""

    shapes: tuple[torch.Size, torch.Size]
    splits: bool = True

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """P relu(a) / (relu(a) + relu(b)), and the same of b"""
        return tuple((p * part).sum_to_size(shape) for part, shape in zip(saved, self.shapes, strict=True))


@dataclass
class AveragingRule:
    """A mean, or any sum under positive weights that are no parameters: by the inputs' own size."""

    function: Callable[[Tensor], Tensor]
    splits: bool = True

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """See `share_probability`."""
        return (share_probability(p, saved[0].clamp(min=0), self.function),)


@dataclass
class LinearRule:
    """A convolution or a linear layer: P(a_j | a_i) = a_j w⁺_ij / Σ_k a_k w⁺_ik, 0 where that sum is (Zhang et al. 2016).

    `norm_signs`: of the batch norm behind it, with which it is one linear map. `from_channel_minimum`: responses are
    counted from each channel's minimum at the input, not from 0. `contrastive`: subtract what the same unit with
    opposite weights would pass on.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    norm_signs: Tensor | None = None
    from_channel_minimum: bool = False
    contrastive: bool = False
    splits: bool = True

    def __call__(self, p: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """Σ_i P(a_j | a_i) p_i"""
        x = full_precision(saved[0])
        space = tuple(range(2, x.ndim)) or (1,)
        response = x - x.amin(space, keepdim=True) if self.from_channel_minimum else x.clamp(min=0)
        shares = self._propagate(p, response, 1)
        return (shares - self._propagate(p, response, -1) if self.contrastive else shares,)

    def _propagate(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        if self.norm_signs is None:
            return self._propagate_signed(p, response, sign)
        up, down = (torch.where(chosen, p, 0) for chosen in (self.norm_signs > 0, self.norm_signs < 0))
        shares = self._propagate_signed(up, response, sign)
        return shares + self._propagate_signed(down, response, -sign) if bool((self.norm_signs < 0).any()) else shares

    def _propagate_signed(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        weight = (sign * full_precision(self.weight.detach())).clamp(min=0)
        weight = weight / weight.amax().clamp(min=torch.finfo(weight.dtype).tiny)  # no ratio depends on the scale
        return share_probability(p, response, lambda a: self.function(a, weight))


def share_probability(p: Tensor, response: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """P of the outputs of a linear function of responses that are not negative -> p of those; (N,…) each."""
    response = full_precision(response)
    largest = response.flatten(1).amax(1).view(-1, *[1] * (response.ndim - 1))
    with torch.enable_grad():
        a = torch.where(largest > 0, response / largest, 0).requires_grad_()
        total = function(a)
        each = torch.where(total > 0, p.view(total.shape) / total, 0).detach()
        (gradient,) = torch.autograd.grad(total, a, each)
    return a.detach() * gradient


LINEAR_FUNCTIONS = {"linear", *(f"conv{direction}{rank}d" for direction in ("", "_transpose") for rank in (1, 2, 3))}
ADDITION_FUNCTIONS = {"add", "iadd", "radd"}
# steps whose outputs are copies of some of their inputs: a gradient goes through them as a probability does
COPY_NODES = {
    *("Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze"),
    *("Expand", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "ConstantPadNd", "Index"),
    *("IndexSelect", "Gather", "ToCopy", "PixelShuffle", "Flip", "Roll", "Max", "Amax", "Repeat", "AdaptiveMaxPool2D"),
    *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool3D", "AccumulateGrad", "Identity"),
    *(f"{kind}Pad{rank}D" for kind in ("Reflection", "Replication") for rank in (1, 2, 3)),
}


@contextmanager
def excitation_backprop_scope(model: nn.Module, *, to_pixels: bool = False) -> Iterator["ExcitationBackpropMode"]:
    """Inside the `with`, in this thread, `torch.autograd.grad` of the model's output is the winning probabilities' way back.

    What is done with the output, outside of the model, has the way back that it always has.
    """
    with Hooks() as hooks, ExcitationBackpropMode(to_pixels=to_pixels) as winners:
        hooks.add_handle(model.register_forward_pre_hook(thread_local_hook(partial(winners.set_inside_model, True))))
        hooks.add_handle(
            model.register_forward_hook(thread_local_hook(partial(winners.set_inside_model, False)), always_call=True)
        )
        yield winners


class ExcitationBackpropMode(BaseFunctionMode):
    """The mode of `excitation_backprop_scope`: what the model calls is worked out as ever, and has another way back.

    `to_pixels`: they go back to the input, whose numbers may be negative. `signed_activations`: activations met that may be, too.
    """

    def __init__(self, *, to_pixels: bool = False) -> None:
        super().__init__()
        self._to_pixels, self._is_inside_model = to_pixels, False
        self.signed_activations: Counter[str] = Counter()
        self._last_linear_call: tuple[Tensor, Tensor, tuple[int, int], LinearRule] | None = (
            None  # output, input, versions, share
        )

    def set_inside_model(self, inside: bool, *_: object) -> None:
        """Set whether the following calls belong to the model."""
        self._is_inside_model, self._last_linear_call = inside, None

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function returns, with the way back of a probability where there is a rule for it."""
        name = function_name(func)
        if func is torch.autograd.grad:  # which runs checkpoints again
            return self._run_grad_with_rules(func, args, kwargs)
        first = args[0] if args else kwargs.get("input")
        if not self._is_inside_model or not _carries_probability(first):
            with (
                torch.no_grad()
                if self._is_inside_model and _depends_on_parameters_only(args, kwargs)
                else nullcontext()
            ):
                return func(*args, **kwargs)
        more_args = args[1:] if args else ()
        kwargs.pop("input", None)
        return self._call_with_rule(name, partial(func, **kwargs), first, more_args, kwargs)

    def _run_grad_with_rules(self, grad: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.set_inside_model(True)
        try:
            with self:
                return bypass_torch_function(grad)(*args, **kwargs)
        finally:
            self.set_inside_model(False)

    def _call_with_rule(
        self, name: str, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        other = args[0] if args else kwargs.get("other")
        if name in LINEAR_FUNCTIONS:
            return self._call_linear(func, x, args, kwargs)
        if name in AVERAGING_FUNCTIONS and not has_negative_weights(kwargs):
            return _apply_rule(func, AveragingRule(lambda a: func(a, *args)), (x.detach(),), (x,), args)
        if name == "batch_norm":
            return self._call_batch_norm(func, x, args, kwargs)
        if name in ADDITION_FUNCTIONS and _carries_probability(other) and kwargs.get("alpha", 1) == 1:
            return _apply_addition(func, x, other, args)
        if name in SCALING_FUNCTIONS and not _carries_probability(other):
            return _apply_rule(
                func, ScalingRule(), (torch.as_tensor(other, device=x.device).detach().sign(),), (x,), args
            )
        if name in ACTIVATIONS | DROPOUTS:  # each output has one input: a unit and its own activation are one
            self.signed_activations.update(
                [name] * (name in ACTIVATIONS and activation_lower_bound(name, args, kwargs) < 0)
            )
            return _apply_pass_through(func, x, args)
        return func(x, *args)

    def _call_linear(self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        weight = args[0] if args else kwargs["weight"]
        more = {key: value for key, value in kwargs.items() if key not in ("weight", "bias")}
        plain: Callable[..., Tensor] = func.func if isinstance(func, partial) else func
        share = LinearRule(
            lambda a, w: plain(a, w, None, *args[2:], **more),
            weight,
            from_channel_minimum=self._to_pixels and _is_first_layer_input(x),
        )
        result = _apply_rule(func, share, (x.detach(),), (x,), args)
        self._last_linear_call = result, x, (result._version, x._version), share
        return result

    def _call_batch_norm(
        self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """A batch norm straight behind a linear map is one with it; elsewhere it hands on, where it keeps the sign."""
        gamma = args[2] if len(args) > 2 else kwargs.get("weight")
        signs = torch.ones_like(x[:1]) if gamma is None else gamma.detach().sign().view(1, -1, *[1] * (x.ndim - 2))
        if self._last_linear_call is not None and self._last_linear_call[0] is x:
            _, source, versions, share = self._last_linear_call
            if versions == (x._version, source._version):
                inputs = (x.detach(), *args)
                rule = replace(share, norm_signs=signs)
                output: Tensor = RuledFunction.apply(lambda: func(*inputs), rule, (source.detach(),), source)
                return output
        return _apply_rule(func, ScalingRule(), (signs,), (x,), args)


def check_excitation_rules(output: Any, method: str) -> None:
    """Raise ModelError if an operation in the graph of an output has no rule."""
    missing = Counter(
        operation_name(node)
        for node in iter_graph_nodes(_find_differentiable_tensors(output))
        if not _has_excitation_rule(node)
    )
    if missing:
        listed = ", ".join(f"{kind} x {count}" for kind, count in missing.most_common(4))
        raise ModelError(
            f"{method} has no rule for a part of the way to the layer ({listed}): it knows convolutions, linear layers, means, "
            f"maxima, sums, concatenations, batch norms and activations; choose a later layer, or pass gradcam"
        )


def enable_contrast(output: Any) -> None:
    """The last linear layers behind an output hand on less what units with opposite weights would: see `LinearRule`."""
    for share in _find_last_linear_rules(_find_differentiable_tensors(output)):
        share.contrastive = True


def _find_differentiable_tensors(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in iter_leaves(output) if leaf.requires_grad]


def _has_excitation_rule(node: Node) -> bool:
    kind = operation_name(node)
    inputs = [before is not None and operation_name(before) != "AccumulateGrad" for before, _ in node.next_functions]
    constant = (kind == "Add" and sum(inputs) <= 1) or (
        kind == "Sub" and inputs == [True, *[False] * (len(inputs) - 1)]
    )
    return constant or kind in COPY_NODES or hasattr(node, "share")


def _find_last_linear_rules(outputs: Sequence[Tensor]) -> list[LinearRule]:
    """Find the last linear layer on each path to the output."""
    waiting, heads = [output.grad_fn for output in outputs], list[LinearRule]()
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if isinstance(share := getattr(node, "share", None), LinearRule):
            heads.append(share)
        else:
            waiting.extend(before for before, _ in node.next_functions)
    return heads


def _carries_probability(value: object) -> TypeGuard[Tensor]:
    """Return whether probability propagates back through a tensor; False for parameters."""
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf and torch.is_grad_enabled()


def _depends_on_parameters_only(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a value depends only on parameters, and so is a constant."""
    leaves = [leaf for _, leaf in iter_leaves((args, kwargs))]
    return any(isinstance(leaf, nn.Parameter) for leaf in leaves) and not any(
        _carries_probability(leaf) for leaf in leaves
    )


def _is_first_layer_input(x: Tensor) -> bool:
    """Return whether only copies, constants and activations lie between the input and this value."""
    node = x.grad_fn
    while node is not None and operation_name(node) != "AccumulateGrad":
        if getattr(getattr(node, "share", None), "splits", False):
            return False
        node = node.next_functions[0][0]
    return True


def _apply_rule(
    func: Callable[..., Any],
    rule: ExcitationRule,
    saved: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    args: Sequence[Any],
) -> Tensor:
    output: Tensor = RuledFunction.apply(lambda: func(inputs[0], *args), rule, saved, *inputs)
    return output


def _apply_pass_through(func: Callable[..., Any], x: Tensor, args: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = func(x, *args)  # in place it stays the step that it was, which is what is wanted
    return result if result is x else _apply_rule(lambda _: result, PassThroughRule(), (), (x,), ())


def _apply_addition(func: Callable[..., Any], a: Tensor, b: Tensor, args: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        first, second = a.clamp(min=0), b.clamp(min=0)
        total = first + second
        parts = tuple(torch.where(total > 0, summand / total, 0) for summand in (first, second))
    return _apply_rule(func, AdditionRule((a.shape, b.shape)), parts, (a, b), args)
