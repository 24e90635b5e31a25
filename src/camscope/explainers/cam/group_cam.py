"""Group-CAM: groups of channels, weighted by the probability that they restore in a blurred input."""

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import InputVariants, LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin
from camscope.explainers.core.resize_and_blur import blur_input, compute_minimum_and_range, enlarge_to_input
from camscope.explainers.core.validated_setting_types import PositiveInteger

BLUR_SIGMA, BLUR_RADIUS = 50 / 224, 25 / 224  # of an axis: the authors' blur of 51 x 51 pixels for inputs of 224
MASK_QUANTILE = 0.7  # of a mask's cells: the authors' threshold is the 70th percentile


@register
class GroupCAM(LayerExplainer, BatchedMixin):
    """Sum of channel groups, each weighted by the probability gained if it unblurs the input (Zhang et al. 2021).

    The map is relu Σ_g (p(x M_g + b (1 - M_g)) - p(b)) M_g. b is the blurred input. p is the class's probability, so
    that a constant added to all logits changes nothing; for a callable target or a model with one output it is the
    score. M_g is relu Σ_k mean(g_k) A_k over one of `n_groups` groups of neighboring channels, without the cells up to
    its 70th percentile, enlarged and scaled to 0..1. The map is the sum before it is enlarged. The weights keep their
    signs, as in the authors' first code. An empty mask is not run. Use it as a faster Score-CAM: its passes do not grow
    with the channels.

    Args:
        n_groups: Number of channel groups.

    >>> GroupCAM(model, "layer4", n_groups=8).explain(image, "nodule").status
    'ok'

    """

    name, title, paper = "groupcam", "Group-CAM", "arXiv:2103.13859"
    forward_passes, backward_passes = "2 + n_groups", "1"
    needs_gradient = runs_model = True
    n_groups: PositiveInteger = 32

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the weighted sum of the group masks. A mask's weight is the class probability that it restores."""
        x, masks = features.x, self._build_group_masks(features)
        background = blur_input(x, BLUR_SIGMA, BLUR_RADIUS)
        samples, groups = masks.flatten(2).any(SPATIAL_AXIS).nonzero().T
        sample_index = torch.arange(len(x), device=x.device)

        def build_restored_inputs(part: slice) -> InputVariants:
            rows = samples[part]
            mask = enlarge_to_input(masks[rows, groups[part]], x)[:, None].to(x.dtype)
            return InputVariants(background[rows].lerp(x[rows], mask), rows)

        def build_blurred_inputs(part: slice) -> InputVariants:
            return InputVariants(background[part], sample_index[part])

        blurred = features.score_inputs(len(x), build_blurred_inputs, as_probability=True)
        restored = features.score_inputs(len(samples), build_restored_inputs, as_probability=True)
        gains = masks.new_zeros(masks.shape[:2])
        gains[samples, groups] = (restored - blurred[samples]).to(masks.dtype)
        return torch.einsum("ng,ng...->n...", gains, masks).relu()

    def _build_group_masks(self, features: LayerFeatures) -> Tensor:
        """Build the mask (N,G,*s) of each channel group. At the size of the input, its values span 0..1. A constant mask is 0."""
        weights = features.gradient.flatten(2).mean(SPATIAL_AXIS)
        channels = weights.view(*weights.shape, *[1] * (features.x.ndim - 2)) * features.activation
        masks = torch.stack([group.sum(1) for group in channels.chunk(self.n_groups, 1)], 1).relu()
        thresholds = masks.flatten(2).quantile(MASK_QUANTILE, SPATIAL_AXIS)
        masks = masks.where(masks > thresholds.view(*thresholds.shape, *[1] * (masks.ndim - 2)), 0)
        scaled = []
        for mask in masks.unbind(1):
            low, span = compute_minimum_and_range(enlarge_to_input(mask, features.x))
            scaled.append((mask - low) / span)
        return torch.stack(scaled, 1)
