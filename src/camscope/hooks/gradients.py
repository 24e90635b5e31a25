"""Gradients of scores at the input, the operations in a graph, and replaced backward rules.

- `compute_scores_and_input_gradients` computes gradients at the input without leaving anything on the model.
- `iter_graph_nodes` walks the graph behind a tensor.
- `apply_relu_rule` changes the backward pass of ReLUs: guided backpropagation and deconvnet.
- `RescaleRule` is DeepLIFT's rule: elementwise functions multiply by Δout/Δin from a reference pass.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node

from camscope.errors import ModelError
from camscope.hooks.base import autocast_uncached, reentrant_checkpoints_disabled
from camscope.hooks.function_mode import ACTIVATIONS, SCALAR_ARITHMETIC, BaseFunctionMode, function_name

T = TypeVar("T")
GradientScope = AbstractContextManager[object]
HALF_PRECISION_BOOSTS = (1.0, 2.0**6, 2.0**12, 2.0**15)  # of a score whose gradient vanishes; 2^16 is too large


def compute_scores_and_input_gradients(
    x: Tensor, score_function: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores (N,) of an input x (N,C,*S), and the gradient of each score at x.

    It takes one forward pass and one backward pass per score. Where the model turns gradients off, a second forward pass
    prevents that. A float16 gradient that vanishes is computed again from the score times 2^k.
    Raises ModelError where no gradient reaches the input.
    """

    def compute_in_scope(scope: GradientScope) -> tuple[list[Tensor], list[Tensor]] | None:
        # a clone: for a model that changes its input, autograd's error about a leaf would come before our own
        leaf = x.detach().clone().requires_grad_()
        with scope:
            values = list(score_function(leaf.clone()))
        torch.set_grad_enabled(True)  # even where the model switches it off and leaves it off
        computed = [_compute_gradient(value, leaf, retain_graph=value is not values[-1]) for value in values]
        gradients = [gradient for gradient in computed if gradient is not None]
        return ([value.detach() for value in values], gradients) if len(gradients) == len(values) else None

    return run_with_gradients(compute_in_scope)


def run_with_gradients(run_in_scope: Callable[[GradientScope], T | None]) -> T:
    """Run a function with gradients enabled, and return its result.

    None means that no gradient arrived. It then runs once more in a scope in which the model cannot turn gradients off.
    Raises ModelError where that does not help.
    """
    for scope in (nullcontext(), GradientsEnabledMode()):
        with torch.enable_grad(), autocast_uncached(), reentrant_checkpoints_disabled():
            result = run_in_scope(scope)
        if result is not None:
            return result
    raise ModelError(
        "no gradient flows from the score to the input: the model detaches the input, runs a module under "
        "inference_mode, or the target does not depend on the model; use a method without gradients, such as occlusion"
    )


class GradientsEnabledMode(BaseFunctionMode):
    """A function mode in which nothing turns gradients off in this thread."""

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function and return its result. Calls that switch gradients on or off are ignored."""
        return None if func is torch._C._set_grad_enabled else func(*args, **kwargs)


def _compute_gradient(values: Tensor, leaf: Tensor, *, retain_graph: bool) -> Tensor | None:
    """Return the gradient (N,C,*S) of the values at the leaf, or None if the values do not depend on the leaf."""
    if not values.requires_grad:
        return None
    if leaf.dtype != torch.float16:
        (grad,) = torch.autograd.grad(values.sum(), leaf, retain_graph=retain_graph, allow_unused=True)
        return None if grad is None else grad.to(torch.promote_types(leaf.dtype, torch.float32))
    gradient = torch.zeros_like(leaf, dtype=torch.float32)
    for boost in HALF_PRECISION_BOOSTS:
        retain = retain_graph or boost != HALF_PRECISION_BOOSTS[-1]
        boosted = values.sum() * boost
        grads: Sequence[Tensor | None] = torch.autograd.grad(boosted, leaf, retain_graph=retain, allow_unused=True)
        if grads[0] is None:
            return None
        rescaled = grads[0].float() / boost
        rows = ~gradient.flatten(1).any(1) & (rescaled.flatten(1).isfinite().all(1) | (boost == 1))
        gradient = torch.where(rows.view(-1, *[1] * (rescaled.ndim - 1)), rescaled, gradient)
        if bool(gradient.flatten(1).any(1).all()):
            break
    return gradient


OPAQUE_NODES = {
    "DifferentiableGraph": "a scripted part",
    "CopySlices": "an operation in place on a view",
    "Where": "torch.where",
}


def iter_graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield each node of the autograd graph of some outputs once."""
    waiting = [output.grad_fn for output in outputs]
    visited: set[Node | None] = {None}
    while waiting:
        node = waiting.pop()
        if node not in visited and node is not None:
            visited.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def operation_name(node: Node) -> str:
    """Return the name of a node's operation: "Relu" for ReluBackward0."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def describe_opaque_node(node: Node) -> str | None:
    """Describe a node that may hide operations, such as a scripted module. Return None for other nodes."""
    kind = operation_name(node)
    step: object = node
    if isinstance(step, BackwardCFunction):  # of Python
        return f"the function {kind} with a custom backward"
    factors = [getattr(node, f"_saved_{name}", None) for name in ("self", "other")] if kind == "Mul" else []
    if any(isinstance(factor, Tensor) and factor.dtype == torch.bool for factor in factors):
        return "a product with true and false"
    return OPAQUE_NODES.get(kind)


ReluRule = Literal["guided", "deconvnet"]

# the attribute with the lower bound of an operation that is a ReLU where it is 0: hardtanh is relu6, clamp x.clamp(min=0)
RELU_FLOOR_ATTRIBUTES = {
    "Threshold": "_saved_threshold",
    "Hardtanh": "_saved_min_val",
    "Clamp": "_saved_min",
    "ClampMin": "_saved_min",
}
# nodes are named for their functions, except these
ACTIVATION_BY_NODE_NAME = {"".join(word.capitalize() for word in name.split("_")): name for name in ACTIVATIONS}
ACTIVATION_BY_NODE_NAME |= {"PreluKernel": "prelu", "RreluWithNoise": "rrelu", "Maximum": "maximum", "Glu": "glu"}


@dataclass
class ReluReport:
    """How many ReLUs, other activations, and operations that may hide some of either a backward pass meets."""

    relus: Counter[str] = field(default_factory=Counter)
    other_activations: Counter[str] = field(default_factory=Counter)
    opaque_operations: Counter[str] = field(default_factory=Counter)


def apply_relu_rule(values: Iterable[Tensor], rule: ReluRule) -> ReluReport:
    """Replace the backward rule of all ReLUs in the autograd graph of some values.

    "guided" keeps positive gradients where the input is positive, "deconvnet" keeps positive gradients whatever the input. The
    hooks belong to the graph of this call, so the model has none, and other threads have their own graphs.
    """
    report = ReluReport()
    for node in iter_graph_nodes(values):
        kind = operation_name(node)
        if hiding := describe_opaque_node(node):
            report.opaque_operations[hiding] += 1
        elif kind == "Relu" or (kind in RELU_FLOOR_ATTRIBUTES and _is_zero(getattr(node, RELU_FLOOR_ATTRIBUTES[kind]))):
            report.relus[{"Hardtanh": "relu6", "ClampMin": "clamp"}.get(kind, kind.lower())] += 1
            if rule == "guided":
                node.register_prehook(_clamp_to_positive)
            else:
                node.register_hook(lambda inputs, outputs: (*_clamp_to_positive(outputs), *inputs[1:]))
        elif kind in ACTIVATION_BY_NODE_NAME:
            report.other_activations[ACTIVATION_BY_NODE_NAME[kind]] += 1
    return report


def _is_zero(bound: object) -> bool:
    return not bool(bound.any()) if isinstance(bound, Tensor) else bound == 0


def _clamp_to_positive(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.clamp(min=0) for gradient in gradients)


RESCALED_FUNCTIONS = ACTIVATIONS | SCALAR_ARITHMETIC


class RescaleRule(BaseFunctionMode):
    """A reference pass, then a pass whose gradient is DeepLIFT's multiplier of the difference.

        with RescaleRule() as rule:
            reference(model, x)             # calls rule.start_reference_pass() at the layer from which the passes differ
            rule.pause()
            score = model(x).sum()          # calls rule.start_input_pass() there
            torch.autograd.grad(score, layer_output)

    The n-th elementwise function after the layer is compared with the n-th of the other pass, however the model is written.
    A function keeps its gradient where the model took another path, and where the two inputs agree within rounding. All other
    operations keep theirs too. The rule acts in the thread that entered it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[int, tuple[str, Tensor]] = {}
        self.pause()

    def pause(self) -> None:
        """Call the following functions unchanged."""
        self._call_count, self._is_recording, self._is_comparing = 0, False, False

    def start_reference_pass(self) -> None:
        """Record the following calls as the reference pass."""
        self.pause()
        self._is_recording = True

    def start_input_pass(self) -> None:
        """Compare the following calls with the reference pass."""
        self.pause()
        self._is_comparing = True

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function and return its result. An elementwise function gets DeepLIFT's backward rule."""
        name, keywords = function_name(func), dict(kwargs)
        first = args[0] if args else keywords.pop("input", None)
        several = name != "prelu" and any(isinstance(arg, Tensor) for arg in (*args[1:], *keywords.values()))
        is_random = name == "rrelu" and (keywords.get("training") or True in args[3:])  # anew each time
        if name not in RESCALED_FUNCTIONS or several or is_random or not isinstance(first, Tensor):
            return func(*args, **kwargs)
        return self._apply_elementwise(name, first, lambda z: func(z, *args[1:], **keywords))

    def _apply_elementwise(self, name: str, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        call_number, self._call_count = self._call_count, self._call_count + 1
        if self._is_recording:
            self._references[call_number] = name, z.detach().clone()
        reference_name, reference = self._references.get(call_number, ("", z))
        is_comparable = self._is_comparing and name == reference_name and z.shape == reference.shape
        if not (is_comparable and z.requires_grad and torch.is_grad_enabled()):
            return function(z)
        z_copy = z.detach().clone()
        result, multiplier = _compute_multiplier(function, z_copy, reference)
        passed: Tensor = _MultiplyGradient.apply(z, result, multiplier)
        in_place = result.data_ptr() == z_copy.data_ptr()
        return z.copy_(passed) if in_place else passed


def _compute_multiplier(function: Callable[[Tensor], Tensor], z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(z), and DeepLIFT's multiplier (f(z) - f(reference)) / (z - reference).

    The multiplier is the gradient f' where the difference is only rounding. f(z) may overwrite z.
    """
    leaf = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        slope = function(leaf.clone())
    (gradient,) = torch.autograd.grad(slope, leaf, torch.ones_like(slope))
    step, size = z - reference, torch.maximum(z.abs(), reference.abs())
    with torch.no_grad():
        result = function(z)
        secant = (result - function(reference.clone())) / step
    # half of the digits: below, rounding in the secant is larger than the curvature's effect on the gradient
    is_reliable = (step.abs() > torch.finfo(z.dtype).eps ** 0.5 * size) & secant.isfinite()
    return result, torch.where(is_reliable, secant, gradient)


class _MultiplyGradient(torch.autograd.Function):
    """A result that is computed already, with the factor of its input's gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, result: Tensor, multiplier: Tensor) -> Tensor:
        ctx.multiplier = multiplier  # not among the saved tensors: a checkpoint that runs again would miss it there
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.multiplier, None, None
