"""Opti-CAM: a weighted mean of the channels, optimized so that the input under this mask has a high score."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.random_mixin import ADAM_EPSILON
from camscope.explainers.core.resize_and_blur import enlarge_to_input, find_nonconstant_channels, scale_to_unit_range
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.hooks.input_gradients import GradientScope, run_with_gradients


@register
class OptiCAM(LayerExplainer):
    """Weighted mean of the channels, optimized to maximize the score of the input that it masks (Zhang et al. 2024).

    The mean is S = Σ_k softmax(u)_k relu(A_k). Enlarged and scaled to 0..1, it masks the input as x ∘ S. The map is S
    minus its least cell, so it is 0 where the mask hides most. Adam starts from equal shares, separately for each
    sample. A constant channel has no share: no mask shows it, and its gradient would be rounding. The epsilon of Adam
    is tiny, so the unit of the score does not matter. Hidden pixels are zero, the mean color of most preprocessings; in
    the authors' demo they are black. Use it for maps whose cells keep the score if all other pixels are hidden: this is
    what it optimizes.

    Args:
        n_steps: Steps of Adam.
        learning_rate: Learning rate of Adam.

    >>> explanation = OptiCAM(model, "layer4", n_steps=5).explain(image, "nodule")
    >>> float(explanation.attribution.min())
    0.0

    """

    name, title, paper = "opticam", "Opti-CAM", "arXiv:2301.07002"
    forward_passes, backward_passes = "1 + n_steps", "n_steps"
    runs_model: ClassVar[bool] = True
    n_steps: PositiveInteger = 50
    learning_rate: PositiveNumber = 0.1

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the map: a weighted mean of the channels with optimized weights. Subtract the minimum of the map."""
        channels = features.activation.relu()
        live = find_nonconstant_channels(channels)
        shares = channels.new_zeros(live.shape).masked_fill(~live & live.any(1, keepdim=True), -torch.inf)
        optimizer = torch.optim.Adam([shares], self.learning_rate, eps=ADAM_EPSILON)
        for _ in range(self.n_steps):
            shares.grad = -_compute_logit_gradient(features, channels, shares)
            optimizer.step()
        mixture = _average_channels_with_softmax_weights(shares, channels)
        return mixture - mixture.amin(tuple(range(1, mixture.ndim)), keepdim=True)


def _average_channels_with_softmax_weights(logits: Tensor, channels: Tensor) -> Tensor:
    """Compute a weighted mean (N,*s) of channels (N,K,*s). The weights are the softmax of logits (N,K)."""
    return torch.einsum("nk,nk...->n...", logits.softmax(1), channels)


def _compute_logit_gradient(features: LayerFeatures, channels: Tensor, logits: Tensor) -> Tensor:
    """Compute the gradient (N,K) of the masked input's score with respect to the logits of the channel weights."""

    def compute_gradient_in(scope: GradientScope) -> Tensor | None:
        leaf = logits.detach().requires_grad_()
        mask = scale_to_unit_range(
            enlarge_to_input(_average_channels_with_softmax_weights(leaf, channels), features.x)
        )[:, None]
        with scope:
            scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            return None
        gradients: Sequence[Tensor | None] = torch.autograd.grad(scores.sum(), leaf, allow_unused=True)
        return gradients[0]

    return run_with_gradients(compute_gradient_in)
