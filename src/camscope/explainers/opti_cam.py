"""Opti-CAM: the mixture of channels under which the input scores most."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.base import register
from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.masks import enlarged, stretched
from camscope.explainers.scope import expect_positive
from camscope.hooks.checkpoint import plain_checkpoints

KEPT = 0.9, 0.999  # of Adam's running means of the gradient and of its square, at each step


@register
class OptiCAM(LayerExplainer):
    """The channel mixture S = Σ_k softmax(u)_k relu(A_k) with the highest score of x ∘ S (Zhang et al. 2024).

    S masks the input enlarged and stretched to 0..1; the map is S, stretched. `steps` of Adam at `learning_rate` start
    from equal shares; the best mixture met is kept, each sample's its own. The mask hides with zero, the mean colour of
    most preprocessings, where the authors' demo hides with black. Adam's gradients are scaled exactly, without its
    epsilon, so that the map does not depend on the unit of the score.
    """

    name, paper = "opticam", "arXiv:2301.07002"
    forwards: ClassVar[str] = "1 + steps"
    backwards: ClassVar[str] = "steps"
    runs_model: ClassVar[bool] = True
    steps: int = 50
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_positive(steps=self.steps, learning_rate=self.learning_rate)

    def combine(self, features: Features) -> Tensor:
        """(N,*s)"""
        channels = features.activation.relu()
        shares = torch.zeros_like(channels.flatten(2)[..., 0])
        mean, square = torch.zeros_like(shares), torch.zeros_like(shares)
        best, highest = stretched(mixed(shares, channels)), features.values.new_full(features.values.shape, -torch.inf)
        for step in range(1, self.steps + 1):
            scores, gradient = climb(features, channels, shares)
            better = (scores > highest).view(-1, *[1] * (best.ndim - 1))
            best = torch.where(better, stretched(mixed(shares, channels)), best)
            highest = torch.maximum(highest, scores)
            mean = mean.lerp(gradient, 1 - KEPT[0])
            square = square.lerp(gradient**2, 1 - KEPT[1])
            size = (square / (1 - KEPT[1] ** step)).sqrt()
            move = torch.where(size > 0, mean / (1 - KEPT[0] ** step) / size, 0)
            shares = shares + self.learning_rate * move
        return best


def mixed(shares: Tensor, channels: Tensor) -> Tensor:
    """(N,K), (N,K,*s) -> (N,*s): Σ_k softmax(u)_k A_k"""
    return torch.einsum("nk,nk...->n...", shares.softmax(1), channels)


def climb(features: Features, channels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """(N,), (N,K): the score of the masked input, and its gradient with respect to u. Nobody's `.grad` is touched."""
    with torch.enable_grad(), plain_checkpoints():
        shares = shares.detach().requires_grad_()
        mask = stretched(enlarged(mixed(shares, channels), features.x))[:, None]
        scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            raise LayerError(
                "the score's gradient does not reach the input: the model detaches it, or turns gradients off, on the way"
            )
        (gradient,) = torch.autograd.grad(scores.sum(), shares, allow_unused=True)
    return scores.detach(), torch.zeros_like(shares) if gradient is None else gradient
