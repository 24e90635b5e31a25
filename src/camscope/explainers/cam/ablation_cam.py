"""Ablation-CAM: channels weighted by the score that is lost without them. A: activation of the layer (N,K,*s)."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import ActivationVariants, LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS, BaseWeightedChannels
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin


@register
class AblationCAM(BaseWeightedChannels, BatchedMixin):
    """Sum of the channels, each weighted by the score that is lost without it: relu Σ_k (y - y_k) A_k (Desai & Ramaswamy 2020).

    y_k is the score with channel k set to zero. The division by y in the paper is left out: it only scales the map if y
    is positive, and inverts it if a logit is negative. A channel of zeros has no weight and no cost.

    Use it if gradients saturate or are noisy: it measures what the score loses, without a gradient.

    >>> explanation = AblationCAM(model, "layer4", batch_size=32).explain(image, "nodule")
    >>> explanation.grid, explanation.status
    ((16, 16), 'ok')
    """

    name, title, paper = "ablationcam", "Ablation-CAM", "doi:10.1109/WACV45572.2020.9093360"
    forward_passes: ClassVar[str] = "1 + K partial forwards"
    runs_model = runs_partial_forward = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the weights (N,K,1). The weight of a channel is the drop of the score after setting the channel to zero."""
        alive = features.activation.flatten(2).any(SPATIAL_AXIS).nonzero()

        def build_variants_without_channel(part: slice) -> ActivationVariants:
            samples, channels = alive[part].T
            rows = torch.arange(len(samples), device=samples.device)
            return ActivationVariants(lambda maps: maps.index_put_((rows, channels), maps.new_zeros(())), samples)

        weights = features.values.new_zeros(features.activation.shape[:2])
        weights[alive[:, 0], alive[:, 1]] = features.compute_score_losses(len(alive), build_variants_without_channel)
        return weights[..., None].to(features.activation.dtype)
