"""How a unit's winning probability is shared among the units that it was made of. p: that of the outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

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
