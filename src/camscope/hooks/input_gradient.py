"""The gradient of scores at the input of a model, without anything kept on the model or on the input."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from camscope.errors import ModelError
from camscope.hooks.base import autocast_uncached
from camscope.hooks.calls import Calls
from camscope.hooks.checkpoint import plain_checkpoints

T = TypeVar("T")
Staying = AbstractContextManager[object]
HALF_PRECISION_BOOSTS = (1.0, 2.0**6, 2.0**12, 2.0**15)  # of a score whose gradient vanishes; 2^16 is too large


def input_gradients(x: Tensor, run: Callable[[Tensor], Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """`run` maps x (N,C,*S) to numbers (N,), several times -> all of them, and the gradient of each at x, at least float32.

    One forward pass, one backward pass each; a second forward pass where the model turns gradients off, in which it
    cannot. A float16 gradient that vanishes is taken again times 2^k. ModelError where no gradient reaches the input.
    """

    def attempt(staying: Staying) -> tuple[list[Tensor], list[Tensor]] | None:
        # a clone, since a model that changes its input has an error of its own, and autograd's of a leaf comes before it
        leaf = x.detach().clone().requires_grad_()
        with staying:
            values = list(run(leaf.clone()))
        torch.set_grad_enabled(True)  # even where the model switches it off and never back on
        found = [_gradient(one, leaf, keep=one is not values[-1]) for one in values]
        gradients = [one for one in found if one is not None]
        return ([one.detach() for one in values], gradients) if len(gradients) == len(values) else None

    return with_gradients(attempt)


def with_gradients(attempt: Callable[[Staying], T | None]) -> T:
    """What `attempt` finds with gradients on; it runs the model inside the scope that it is given.

    None says that no gradient came through. It is tried once more, then, in a scope that lets the model turn gradients
    off nowhere; a ModelError if that is of no use.
    """
    for staying in (nullcontext(), GradientsStayOn()):
        with torch.enable_grad(), autocast_uncached(), plain_checkpoints():
            found = attempt(staying)
        if found is not None:
            return found
    raise ModelError(
        "the score does not depend on the input by a way that gradients go: the model detaches it, runs a part under "
        "inference_mode, or the target reads something else; pass a method without gradients, such as occlusion"
    )


class GradientsStayOn(Calls):
    """Inside the `with`, in this thread, nothing turns gradients off."""

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns; switches of gradients are passed over."""
        return None if func is torch._C._set_grad_enabled else func(*args, **named)


def _gradient(values: Tensor, leaf: Tensor, *, keep: bool) -> Tensor | None:
    """(N,C,*S), or None where there is no way to the leaf."""
    if not values.requires_grad:
        return None
    if leaf.dtype != torch.float16:
        (one,) = torch.autograd.grad(values.sum(), leaf, retain_graph=keep, allow_unused=True)
        return None if one is None else one.to(torch.promote_types(leaf.dtype, torch.float32))
    gradient = torch.zeros((), device=leaf.device, dtype=torch.float32)
    for boost in HALF_PRECISION_BOOSTS:
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            values.sum() * boost, leaf, retain_graph=keep or boost != HALF_PRECISION_BOOSTS[-1], allow_unused=True
        )
        if grads[0] is None:
            return None
        found = grads[0].float() / boost
        lost = ~gradient.flatten(1).any(1) if gradient.ndim else torch.ones_like(values, dtype=torch.bool)
        rows = lost & (found.flatten(1).isfinite().all(1) | (boost == 1))
        gradient = torch.where(rows.view(-1, *[1] * (found.ndim - 1)), found, gradient)
        if bool(gradient.flatten(1).any(1).all()):
            break
    return gradient
