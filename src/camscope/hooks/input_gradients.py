"""Compute the gradients of scores at the input of a model, also where the model turns gradients off."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from camscope.errors import ModelError
from camscope.hooks.intercept_torch_functions import BaseFunctionMode
from camscope.hooks.thread_local_hooks import autocast_uncached, reentrant_checkpoints_disabled

T = TypeVar("T")
GradientScope = AbstractContextManager[object]
NO_INPUT_GRADIENT = (
    "no gradient flows from the score to the input: the model detaches the input, runs a module under "
    "inference_mode, or the target does not depend on the model; use a method without gradients, such as occlusion"
)
HALF_PRECISION_BOOSTS = (1.0, 2.0**6, 2.0**12, 2.0**15)  # of a score whose gradient vanishes; 2^16 is too large


def compute_scores_and_input_gradients(
    x: Tensor, score_function: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists for an input x (N,C,*S): the scores, each (N,), and the gradient (N,C,*S) of each score at x.

    There is one forward pass, and one backward pass per score. If the model turns gradients off, a second forward pass
    prevents that. A float16 gradient that is rounded to zero is computed again from the score times 2^k. Raise
    ModelError if no gradient reaches the input.
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


def connect_input_leaf(x: Tensor) -> Tensor:
    """Return a copy of an input at which a gradient can be computed. It belongs to the graph of x, if x has one."""
    return x.clone() if x.requires_grad else x.detach().clone().requires_grad_()


def compute_gradient_with_graph(values: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient (N,C,*S) of scores (N,) at an input, with its graph. Raise ModelError if there is no gradient."""
    gradient = None
    if values.requires_grad:
        (gradient,) = torch.autograd.grad(values.sum(), leaf, create_graph=True, allow_unused=True)
    if gradient is None:
        raise ModelError(NO_INPUT_GRADIENT)
    return gradient.to(torch.promote_types(leaf.dtype, torch.float32))


def run_with_gradients(run_in_scope: Callable[[GradientScope], T | None]) -> T:
    """Run a function with gradients enabled, and return its result.

    If the function returns None, no gradient arrived. It then runs again in a scope in which the model cannot turn
    gradients off. Raise ModelError if the second run also returns None.
    """
    for scope in (nullcontext(), GradientsEnabledMode()):
        with torch.enable_grad(), autocast_uncached(), reentrant_checkpoints_disabled():
            result = run_in_scope(scope)
        if result is not None:
            return result
    raise ModelError(NO_INPUT_GRADIENT)


class GradientsEnabledMode(BaseFunctionMode):
    """A function mode that ignores every attempt to turn gradients off in this thread."""

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. Ignore a call that would turn gradients on or off."""
        return None if func is torch._C._set_grad_enabled else func(*args, **kwargs)


def _compute_gradient(values: Tensor, leaf: Tensor, *, retain_graph: bool) -> Tensor | None:
    """Return the gradient (N,C,*S) of values at an input `leaf`. Return None if the values do not depend on this input."""
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
