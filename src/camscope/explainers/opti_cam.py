"""Opti-CAM: the mixture of channels under which the input scores most."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.adam import Adam
from camscope.explainers.base import register
from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.masks import enlarged, stretched, varying
from camscope.explainers.scope import expect_count, expect_positive
from camscope.hooks.input_gradient import Staying, with_gradients


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
        adam = Adam(self.learning_rate)
        for _ in range(self.steps):
            shares = shares + adam.move(-slope(features, channels, shares))
        mixture = mixed(shares, channels)
        return mixture - mixture.amin(tuple(range(1, mixture.ndim)), keepdim=True)


def mixed(shares: Tensor, channels: Tensor) -> Tensor:
    """(N,K), (N,K,*s) -> (N,*s): Σ_k softmax(u)_k A_k"""
    return torch.einsum("nk,nk...->n...", shares.softmax(1), channels)


def slope(features: Features, channels: Tensor, shares: Tensor) -> Tensor:
    """(N,K): the gradient of the masked input's score with respect to u. Nobody's `.grad` is touched."""

    def attempt(staying: Staying) -> Tensor | None:
        leaf = shares.detach().requires_grad_()
        mask = stretched(enlarged(mixed(leaf, channels), features.x))[:, None]
        with staying:
            scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            return None
        found: Sequence[Tensor | None] = torch.autograd.grad(scores.sum(), leaf, allow_unused=True)
        return found[0]

    return with_gradients(attempt)
