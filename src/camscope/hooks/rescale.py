"""Rescale: a backward pass in which elementwise functions pass on Δout/Δin from a reference pass (DeepLIFT's rule)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from camscope.hooks.calls import Calls, name_of
from camscope.hooks.vocabulary import ACTIVATIONS, ARITHMETIC

ELEMENTWISE = ACTIVATIONS | ARITHMETIC


class Rescale(Calls):
    """Inside the `with`: a reference pass, then a pass whose gradient is DeepLIFT's multiplier of the difference.

        with Rescale() as rule:
            reference(model, x)             # calls rule.begin() at the layer from which on the two passes differ
            rule.pause()
            score = model(x).sum()          # calls rule.follow() there
            torch.autograd.grad(score, layer_output)

    The n-th elementwise function behind the layer is the n-th of the other pass, however the model is written, and wherever its
    rows lie. Where the model took another path, and where the two inputs are the same to within rounding, a function
    keeps its gradient; so do all other operations. Acts in the thread that entered it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[int, tuple[str, Tensor]] = {}
        self.pause()

    def begin(self) -> None:
        """From here on this pass is the reference."""
        self._count, self._noting, self._following = 0, True, False

    def pause(self) -> None:
        """From here on functions are what they are."""
        self._count, self._noting, self._following = 0, False, False

    def follow(self) -> None:
        """From here on this pass is held against the reference."""
        self._count, self._noting, self._following = 0, False, True

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The result of every function that the model calls: its own, with another way back for elementwise ones."""
        name, more = name_of(func), dict(named)
        first = args[0] if args else more.pop("input", None)
        several = name != "prelu" and any(isinstance(one, Tensor) for one in (*args[1:], *more.values()))
        drawn = name == "rrelu" and (more.get("training") or True in args[3:])  # anew each time
        if name not in ELEMENTWISE or several or drawn or not isinstance(first, Tensor):
            return func(*args, **named)
        return self._elementwise(name, first, lambda z: func(z, *args[1:], **more))

    def _elementwise(self, name: str, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        place, self._count = self._count, self._count + 1
        if self._noting:
            self._references[place] = name, z.detach().clone()
        known, reference = self._references.get(place, ("", z))
        if (
            not self._following
            or name != known
            or z.shape != reference.shape
            or not (z.requires_grad and torch.is_grad_enabled())
        ):
            return function(z)
        given = z.detach().clone()
        result, multiplier = _rescaled(function, given, reference)
        passed: Tensor = _Passed.apply(z, result, multiplier)
        in_place = result.data_ptr() == given.data_ptr()
        return z.copy_(passed) if in_place else passed


def _rescaled(function: Callable[[Tensor], Tensor], z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """f(z), which may be written over z, and (f(z) - f(reference)) / (z - reference); f' where that is rounding."""
    leaf = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        slope = function(leaf.clone())
    (gradient,) = torch.autograd.grad(slope, leaf, torch.ones_like(slope))
    step, size = z - reference, torch.maximum(z.abs(), reference.abs())
    with torch.no_grad():
        result = function(z)
        secant = (result - function(reference.clone())) / step
    # half of the digits: below, rounding costs the secant more than its curvature costs the gradient
    told = (step.abs() > torch.finfo(z.dtype).eps ** 0.5 * size) & secant.isfinite()
    return result, torch.where(told, secant, gradient)


class _Passed(torch.autograd.Function):
    """A result worked out already, and what its input's gradient is multiplied by on the way back."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, result: Tensor, multiplier: Tensor) -> Tensor:
        ctx.multiplier = multiplier  # not among the saved tensors: a checkpoint that runs again would miss it there
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.multiplier, None, None
