"""ShapleyCAM: Grad-CAM with a second-order correction of the gradient."""

from collections.abc import Hashable
from typing import Any, ClassVar, Literal

from torch import Tensor

from camscope.explainers.cam.finer_cam import require_class_logits
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import (
    SPATIAL_AXIS,
    BaseWeightedChannels,
)
from camscope.explainers.core.base_explainer import register
from camscope.targets import Score


@register
class ShapleyCAM(BaseWeightedChannels):
    """Grad-CAM with a second-order correction of the gradient: relu Σ_k mean(g - H A / 2)_k A_k (Cai 2025).

    The weights approximate Shapley values of the utility, whose Hessian at the layer is H. If the model behind the
    layer is piecewise linear (ReLU, pooling, a linear head), the logit has no curvature and the map is that of
    Grad-CAM. With "rest", or with attention, GELU or a LayerNorm behind the layer, it differs. Use it at layers with
    attention or a norm behind them.

    Args:
        utility: "logit" for y_c, or "rest" for y_c + ln p_c, the residual softmax of the paper.

    >>> import numpy as np
    >>> from camscope import GradCAM
    >>> first, second = (cls(model, "layer4").explain(image, "nodule").attribution for cls in (ShapleyCAM, GradCAM))
    >>> np.allclose(first, second, atol=1e-4)  # ReLU, pooling and a linear head have no curvature
    True

    """

    name, title, paper = "shapleycam", "ShapleyCAM", "arXiv:2501.06261"
    backward_passes: ClassVar[str] = "3"
    needs_gradient = second_order = differentiable = True
    utility: Literal["logit", "rest"] = "logit"

    @property
    def differentiated_score_key(self) -> Hashable:
        """A key that is equal for methods with the same `compute_differentiated_score`. For most it is the logit's key."""
        return "score" if self.utility == "logit" else (ShapleyCAM, self.utility)

    def compute_differentiated_score(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Compute the utility (N,) of each sample. The method approximates the Shapley values of this utility."""
        target_scores = score.read_score(output, n_samples)
        if self.utility == "logit":
            return target_scores
        logits, _ = require_class_logits(f"{self.name} with utility='rest'", score, output)
        return 2 * target_scores - logits.logsumexp(1)

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the ShapleyCAM weights (N,K,1): the mean of g - H A / 2 over the cells of each channel."""
        return (features.gradient - features.compute_curvature() / 2).flatten(2).mean(SPATIAL_AXIS, keepdim=True)
