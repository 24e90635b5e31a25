"""FEM: the sum of the channel means at cells of unusually strong activation."""

from typing import ClassVar

from torch import Tensor

from camscope.explainers.cam.kpca_cam import RELATIVE_ROUNDING
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.validated_setting_types import NonNegativeNumber


@register
class FEM(LayerExplainer):
    """Sum of the channel means at cells of unusually strong activation: Σ_k μ_k [A_k > μ_k + k σ_k] (Fuad et al. 2020).

    μ, σ: mean and standard deviation over the channel's cells. A constant channel marks no cell, and with k = 2 a
    channel of five cells or fewer marks none. The map is negative where a mean is: the method is made for layers after
    a ReLU. Use it without a class and without a gradient, for what is rare and strong in the layer.

    Args:
        k_sigma: Number k of standard deviations.

    >>> strict, loose = (FEM(model, "layer4", k_sigma=k).explain(image).attribution for k in (3.0, 1.0))
    >>> int((strict > 0).sum()) <= int((loose > 0).sum())
    True

    """

    name, title, paper = "fem", "FEM", "doi:10.1109/IPTA50016.2020.9286629"
    class_specific: ClassVar[bool] = False
    k_sigma: NonNegativeNumber = 2.0

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Sum over the channels. A channel adds its mean at the cells where it is unusually strong, and 0 at all others."""
        activation = features.activation.flatten(2).double()
        mean = activation.mean(SPATIAL_AXIS, keepdim=True)
        least = self.k_sigma * activation.std(SPATIAL_AXIS, correction=0, keepdim=True)
        beyond = activation - mean - least > RELATIVE_ROUNDING * (mean.abs() + least)
        return (mean * beyond).sum(1).to(features.activation.dtype)
