"""Smooth Grad-CAM++: Grad-CAM++ with gradients averaged over noisy inputs."""

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import (
    SPATIAL_AXIS,
    BaseWeightedChannels,
    QuotientTerms,
    compute_value_range_per_sample,
    sum_quotients,
)
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.random_mixin import RandomMixin
from camscope.explainers.core.validated_setting_types import NonNegativeNumber, PositiveInteger


@register
class SmoothGradCAMPlusPlus(BaseWeightedChannels, RandomMixin):
    """Grad-CAM++ with powers of the gradient averaged over noisy inputs: relu Σ_k w_k A_k (Omeiza et al. 2019).

    w = Σ α relu(<g>), α = <g²> / (2 <g²> + <g³> ΣA), A of the clean input; without noise this is Grad-CAM++. The paper
    is reported to have <g> in the numerator of α, which makes α depend on the unit of the score; Grad-CAM++ has <g²>
    there. The noise is the same for every input of a batch. A note reports denominators that nearly cancel. Use it if
    the Grad-CAM++ map changes with small changes of the image.

    Args:
        n_samples: Number of noisy inputs.
        sigma: Standard deviation of the noise, as a share of the range of each input, as in SmoothGrad.

    >>> explanation = SmoothGradCAMPlusPlus(model, "layer4", n_samples=4).explain(image, "nodule")
    >>> explanation.parameters["n_samples"], explanation.grid
    (4, (16, 16))

    """

    name, title, paper = "smoothgradcam++", "Smooth Grad-CAM++", "arXiv:1908.01224"
    forward_passes = backward_passes = "1 + n_samples"
    needs_gradient = runs_model = True
    n_samples: PositiveInteger = 25
    sigma: NonNegativeNumber = 0.15

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the Smooth Grad-CAM++ weights (N,K,1), from gradients at noisy copies of the input."""
        x, generator = features.x, self.generator()
        spread = compute_value_range_per_sample(x) * self.sigma
        largest = features.gradient.flatten(1).abs().amax(1).view(-1, 1, 1)
        unit = torch.where(largest > 0, largest, 1)  # cubes of small gradients are too small for a float
        first = second = third = torch.zeros_like(features.activation.flatten(2))
        for _ in range(self.n_samples):
            noise = torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)
            gradient = features.recompute(x + spread * noise).gradient.flatten(2) / unit
            first, second, third = first + gradient, second + gradient**2, third + gradient**3
        activation, third = features.activation.flatten(2), third * unit
        below = 2 * second + third * activation.sum(SPATIAL_AXIS, keepdim=True)
        size = 2 * second + third.abs() * activation.abs().sum(SPATIAL_AXIS, keepdim=True)
        terms = QuotientTerms(second * first.relu(), below, size)
        return sum_quotients(features, terms) * unit / self.n_samples
