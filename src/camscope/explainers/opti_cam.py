"""Opti-CAM: the mixture of channels under which the input scores most."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.base import register
from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.masks import enlarged, stretched, varying
from camscope.explainers.scope import expect_count, expect_positive
from camscope.hooks.checkpoint import plain_checkpoints

KEPT = 0.9, 0.999  # of Adam's running means of the gradient and of its square, at each step


@register
class OptiCAM(LayerExplainer):
    """The channel mixture S = Σ_k softmax(u)_k relu(A_k) with the highest score of x ∘ S (Zhang et al. 2024).

    S masks the input enlarged and stretched to 0..1; the map is S less its least cell: zero where the mask hides most.
    `steps` of Adam at `learning_rate` start from equal shares, each sample for itself. A constant channel has no share:
    no mask shows it, and its gradient would be rounding. Adam goes without its epsilon, so that the unit of the score
    does not matter. The mask hides with zero, the mean colour of most preprocessings; the authors' demo with black.
    """

    name, paper = "opticam", "arXiv:2301.07002"
    forwards: ClassVar[str] = "1 + steps"
    backwards: ClassVar[str] = "steps"
    runs_model: ClassVar[bool] = True
    steps: int = 50
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps)
        expect_positive(learning_rate=self.learning_rate)

    def combine(self, features: Features) -> Tensor:
        """(N,*s)"""
        channels = features.activation.relu()
        live = varying(channels)
        shares = channels.new_zeros(live.shape).masked_fill(~live & live.any(1, keepdim=True), -torch.inf)
        mean, square = channels.new_zeros(live.shape), channels.new_zeros(live.shape)
        for step in range(1, self.steps + 1):
            gradient = slope(features, channels, shares)
            mean = mean.lerp(gradient, 1 - KEPT[0])
            square = square.lerp(gradient**2, 1 - KEPT[1])
            size = (square / (1 - KEPT[1] ** step)).sqrt()
            move = torch.where(size > 0, mean / (1 - KEPT[0] ** step) / size, 0)
            shares = shares + self.learning_rate * move
        mixture = mixed(shares, channels)
        return mixture - mixture.amin(tuple(range(1, mixture.ndim)), keepdim=True)


def mixed(shares: Tensor, channels: Tensor) -> Tensor:
    """(N,K), (N,K,*s) -> (N,*s): Σ_k softmax(u)_k A_k"""
    return torch.einsum("nk,nk...->n...", shares.softmax(1), channels)


def slope(features: Features, channels: Tensor, shares: Tensor) -> Tensor:
    """(N,K): the gradient of the masked input's score with respect to u. Nobody's `.grad` is touched."""
    with torch.enable_grad(), plain_checkpoints():
        shares = shares.detach().requires_grad_()
        mask = stretched(enlarged(mixed(shares, channels), features.x))[:, None]
        scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            raise LayerError(
                "the score's gradient does not reach the input: the model detaches it, or turns gradients off, on the way"
            )
        (gradient,) = torch.autograd.grad(scores.sum(), shares, allow_unused=True)
    return torch.zeros_like(shares) if gradient is None else gradient
