"""Rules of Excitation Backprop: how the probability p of an operation's outputs is shared among its inputs.

Inside `excitation_backprop_scope`, the backward pass of a model propagates winning probabilities, not gradients.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import Node

from camscope.errors import ModelError
from camscope.hooks.intercept_torch_functions import (
    ACTIVATIONS,
    AVERAGING_FUNCTIONS,
    DROPOUTS,
    SCALING_FUNCTIONS,
    BaseFunctionMode,
    bypass_torch_function,
    find_activation_lower_bound,
    get_function_name,
    selects_bicubic_interpolation,
)
from camscope.hooks.relu_backward_rules import get_operation_name, iter_graph_nodes
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.pytree import iter_leaves
from camscope.targets import full_precision

# p of the outputs, and what was saved of the inputs -> p of each input
ExcitationRule = Callable[..., tuple[Tensor, ...]]


class RuledFunction(torch.autograd.Function):
    """An operation with a rule: its backward pass propagates probabilities by this rule, instead of gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        compute: Callable[[], Tensor],
        rule: ExcitationRule,
        saved: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> Tensor:
        """Compute the operation. Save the tensors that the backward pass needs to apply the rule."""
        result = compute()
        if result is inputs[0]:
            ctx.mark_dirty(result)
        ctx.save_for_backward(*saved)
        ctx.rule = rule  # type: ignore[attr-defined]  # a context takes what the backward pass needs
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, p: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the probability of each input by the rule. The output has probability p."""
        saved = ctx.saved_tensors  # a checkpoint computes them again, under the mode of the forward pass
        with torch._C.DisableTorchFunction():
            return None, None, None, *ctx.rule(full_precision(p), *saved)


def pass_to_only_input(p: Tensor) -> tuple[Tensor, ...]:
    """Pass the whole probability of an output to its input. The operation has a single input."""
    return (p,)


def pass_where_factor_is_positive(p: Tensor, factor_sign: Tensor) -> tuple[Tensor, ...]:
    """Pass the probability of a product x · c to x where the constant c is positive. Elsewhere pass 0."""
    return (torch.where(factor_sign > 0, p, 0),)


def share_among_summands(shapes: Sequence[torch.Size], p: Tensor, *shares: Tensor) -> tuple[Tensor, ...]:
    """Share the probability p of a sum among its terms, in proportion to the positive part of each term."""
    return tuple((p * share).sum_to_size(shape) for share, shape in zip(shares, shapes, strict=True))


def share_among_averaged_inputs(function: Callable[[Tensor], Tensor], p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Share the probability p of a mean or a positively weighted sum among its inputs, in proportion to the input values."""
    return (share_among_linear_inputs(p, x.clamp(min=0), function),)


@dataclass
class LinearRule:
    """Rule of a convolution or linear layer: P(a_j | a_i) = a_j w⁺_ij / Σ_k a_k w⁺_ik (Zhang et al. 2016).

    If the sum is 0, P is 0. `norm_signs` are the signs of the factors of a batch norm behind the layer. With
    `from_channel_minimum`, responses count from the minimum of each channel and not from 0. With `contrastive`, the
    probability that opposite weights would pass on is subtracted.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    norm_signs: Tensor | None = None
    from_channel_minimum: bool = False
    contrastive: bool = False

    def __call__(self, p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the probability of each input a_j from the probabilities p_i of the outputs a_i: Σ_i P(a_j | a_i) p_i."""
        x = full_precision(x)
        space = tuple(range(2, x.ndim)) or (1,)
        response = x - x.amin(space, keepdim=True) if self.from_channel_minimum else x.clamp(min=0)
        shares = self._share_among_inputs_through_norm(p, response, 1)
        return (shares - self._share_among_inputs_through_norm(p, response, -1) if self.contrastive else shares,)

    def _share_among_inputs_through_norm(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        """Share p among the inputs by weights of one sign. Use the other sign where a merged batch norm has a negative factor."""
        if self.norm_signs is None:
            return self._share_among_inputs_by_weight_sign(p, response, sign)
        up, down = (torch.where(chosen, p, 0) for chosen in (self.norm_signs > 0, self.norm_signs < 0))
        shares = self._share_among_inputs_by_weight_sign(up, response, sign)
        return (
            shares + self._share_among_inputs_by_weight_sign(down, response, -sign)
            if bool((self.norm_signs < 0).any())
            else shares
        )

    def _share_among_inputs_by_weight_sign(self, p: Tensor, response: Tensor, sign: int) -> Tensor:
        """Share p among the inputs `response`. Only weights of one sign count. The shares are in proportion to input x weight."""
        weight = (sign * full_precision(self.weight.detach())).clamp(min=0)
        weight = weight / weight.amax().clamp(min=torch.finfo(weight.dtype).tiny)  # no ratio depends on the scale
        return share_among_linear_inputs(p, response, lambda a: self.function(a, weight))


def share_among_linear_inputs(p: Tensor, response: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Share the probability p of a linear function's outputs among its non-negative inputs `response` (N,...)."""
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
# operations whose outputs are copies of some of their inputs: a probability passes through them as a gradient does
COPY_NODES = {
    *("Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze"),
    *("Expand", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "ConstantPadNd", "Index"),
    *("IndexSelect", "Gather", "ToCopy", "PixelShuffle", "Flip", "Roll", "Max", "Amax", "Repeat", "AdaptiveMaxPool2D"),
    *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool3D", "AccumulateGrad", "Identity"),
    *(f"{kind}Pad{rank}D" for kind in ("Reflection", "Replication") for rank in (1, 2, 3)),
}


@contextmanager
def excitation_backprop_scope(model: nn.Module, *, to_pixels: bool = False) -> Iterator["ExcitationBackpropMode"]:
    """Inside the `with`, `torch.autograd.grad` returns winning probabilities instead of gradients, for this thread only."""
    with Hooks() as hooks, ExcitationBackpropMode(to_pixels=to_pixels) as mode:
        enter, leave = (thread_local_hook(partial(mode.set_inside_model, inside)) for inside in (True, False))
        hooks.add_handle(model.register_forward_pre_hook(enter))
        hooks.add_handle(model.register_forward_hook(leave, always_call=True))
        yield mode


class ExcitationBackpropMode(BaseFunctionMode):
    """The function mode of `excitation_backprop_scope`. It also counts activations whose outputs may be negative."""

    def __init__(self, *, to_pixels: bool = False) -> None:
        super().__init__()
        self._to_pixels, self._is_inside_model = to_pixels, False
        self.signed_activations: Counter[str] = Counter()
        # output, input, versions of both, and rule
        self._last_linear_call: tuple[Tensor, Tensor, tuple[int, int], LinearRule] | None = None

    def set_inside_model(self, inside: bool, *_: object) -> None:
        """Set whether the following function calls belong to the forward pass of the model."""
        self._is_inside_model, self._last_linear_call = inside, None

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. If there is an excitation rule for it, the backward pass uses the rule."""
        if func is torch.autograd.grad:  # which runs checkpoints again
            return self._run_grad_with_rules(func, args, kwargs)
        first = args[0] if args else kwargs.get("input")
        if not self._is_inside_model or not _carries_probability(first):
            is_constant = self._is_inside_model and _depends_on_parameters_only(args, kwargs)
            with torch.no_grad() if is_constant else nullcontext():
                return func(*args, **kwargs)
        kwargs.pop("input", None)
        return self._call_with_rule(get_function_name(func), partial(func, **kwargs), first, args[1:], kwargs)

    def _run_grad_with_rules(self, grad: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `torch.autograd.grad` while the rules apply, so that repeated checkpoints also use them."""
        self.set_inside_model(True)
        try:
            with self:
                return bypass_torch_function(grad)(*args, **kwargs)
        finally:
            self.set_inside_model(False)

    def _call_with_rule(
        self, name: str, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of the model so that its backward pass follows the rule of excitation backprop."""
        other = args[0] if args else kwargs.get("other")
        if name in LINEAR_FUNCTIONS:
            return self._call_linear(func, x, args, kwargs)
        if name in AVERAGING_FUNCTIONS and not selects_bicubic_interpolation(kwargs):
            return _apply_rule(
                func, partial(share_among_averaged_inputs, lambda a: func(a, *args)), (x.detach(),), (x,), args
            )
        if name == "batch_norm":
            return self._call_or_merge_batch_norm(func, x, args, kwargs)
        if name in ADDITION_FUNCTIONS and _carries_probability(other) and kwargs.get("alpha", 1) == 1:
            return _apply_addition_rule(func, x, other, args)
        if name in SCALING_FUNCTIONS and not _carries_probability(other):
            sign = torch.as_tensor(other, device=x.device).detach().sign()
            return _apply_rule(func, pass_where_factor_is_positive, (sign,), (x,), args)
        if name in ACTIVATIONS | DROPOUTS:  # each output has one input: a unit and its own activation are one
            if name in ACTIVATIONS and find_activation_lower_bound(name, args, kwargs) < 0:
                self.signed_activations[name] += 1
            with torch.no_grad():
                result: Tensor = func(x, *args)
            # an activation in place adds no step to the graph
            return result if result is x else _apply_rule(lambda _: result, pass_to_only_input, (), (x,), ())
        return func(x, *args)

    def _call_linear(self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Call a linear function or convolution so that its backward pass shares probability by positive weights."""
        weight = args[0] if args else kwargs["weight"]
        more = {key: value for key, value in kwargs.items() if key not in ("weight", "bias")}
        original: Callable[..., Tensor] = func.func if isinstance(func, partial) else func
        rule = LinearRule(
            lambda a, w: original(a, w, None, *args[2:], **more),
            weight,
            from_channel_minimum=self._to_pixels and _is_first_layer_input(x),
        )
        result = _apply_rule(func, rule, (x.detach(),), (x,), args)
        self._last_linear_call = result, x, (result._version, x._version), rule
        return result

    def _call_or_merge_batch_norm(
        self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Apply a batch norm. If it directly follows a linear layer, merge the norm into the linear layer's rule."""
        gamma = args[2] if len(args) > 2 else kwargs.get("weight")
        signs = torch.ones_like(x[:1]) if gamma is None else gamma.detach().sign().view(1, -1, *[1] * (x.ndim - 2))
        if self._last_linear_call is not None and self._last_linear_call[0] is x:
            _, source, versions, rule = self._last_linear_call
            if versions == (x._version, source._version):
                merged, detached = replace(rule, norm_signs=signs), x.detach()
                return _apply_rule(lambda _: func(detached, *args), merged, (source.detach(),), (source,), ())
        return _apply_rule(func, pass_where_factor_is_positive, (signs,), (x,), args)


def check_excitation_rules(output: Any, method: str) -> None:
    """Check that all operations between the layer and the score have an excitation rule. Otherwise raise ModelError.

    The autograd graph of `output` lists the operations.
    """
    nodes = iter_graph_nodes(_find_differentiable_tensors(output))
    missing = Counter(get_operation_name(node) for node in nodes if not _has_excitation_rule(node))
    if missing:
        listed = ", ".join(f"{kind} x {count}" for kind, count in missing.most_common(4))
        raise ModelError(
            f"{method} has no rule for some operations between the layer and the score: {listed}. It supports convolutions, "
            f"linear layers, means, maxima, sums, concatenations, batch norms and activations: choose a later layer, or use "
            f"gradcam"
        )


def make_last_rules_contrastive(output: Any) -> None:
    """Make the rules of the last linear layers before the output contrastive."""
    waiting = [tensor.grad_fn for tensor in _find_differentiable_tensors(output)]
    while waiting:
        node = waiting.pop()
        if isinstance(rule := getattr(node, "rule", None), LinearRule):
            rule.contrastive = True
        elif node is not None:
            waiting.extend(before for before, _ in node.next_functions)


def _find_differentiable_tensors(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in iter_leaves(output) if leaf.requires_grad]


def _has_excitation_rule(node: Node) -> bool:
    """Return whether excitation backprop has a rule for a node of the graph. Constants and copies need none."""
    kind = get_operation_name(node)
    inputs = [
        before is not None and get_operation_name(before) != "AccumulateGrad" for before, _ in node.next_functions
    ]
    adds_constant = kind == "Add" and sum(inputs) <= 1
    subtracts_constant = kind == "Sub" and inputs[:1] == [True] and sum(inputs) == 1
    return adds_constant or subtracts_constant or kind in COPY_NODES or hasattr(node, "rule")


def _carries_probability(value: object) -> TypeGuard[Tensor]:
    """Whether backpropagation assigns probability to a tensor. Parameters get none."""
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf and torch.is_grad_enabled()


def _depends_on_parameters_only(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    leaves = [leaf for _, leaf in iter_leaves((args, kwargs))]
    has_parameter = any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    return has_parameter and not any(_carries_probability(leaf) for leaf in leaves)


def _is_first_layer_input(x: Tensor) -> bool:
    """Whether no layer comes before x. Copies, constants and activation functions do not count as layers."""
    node = x.grad_fn
    while node is not None and get_operation_name(node) != "AccumulateGrad":
        if getattr(node, "rule", pass_to_only_input) not in (pass_to_only_input, pass_where_factor_is_positive):
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


def _apply_addition_rule(func: Callable[..., Any], a: Tensor, b: Tensor, args: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        first, second = a.clamp(min=0), b.clamp(min=0)
        total = first + second
        shares = tuple(torch.where(total > 0, summand / total, 0) for summand in (first, second))
    return _apply_rule(func, partial(share_among_summands, (a.shape, b.shape)), shares, (a, b), args)
