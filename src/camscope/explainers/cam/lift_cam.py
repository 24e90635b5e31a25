"""LIFT-CAM: channels weighted by their DeepLIFT contribution. A: activation of the layer (N,K,*s)."""

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS, BaseWeightedChannels
from camscope.explainers.core.base_explainer import register
from camscope.hooks.deep_lift_rescale_rule import RescaleRule
from camscope.hooks.tap_layer_output_and_gradient import Tap

MAX_RELATIVE_COMPLETENESS_GAP = 0.01  # of the score's change


@register
class LIFTCAM(BaseWeightedChannels):
    """Sum of the channels, each weighted by its DeepLIFT contribution: relu Σ_k a_k A_k, a_k = Σ m_k ∘ A_k (Jung & Oh 2021).

    m is the gradient with the Rescale rule: elementwise functions pass on Δout/Δin between A and the reference 0. Products,
    max pooling, softmax and normalizations behind the layer keep their gradient. A note reports if Σ_k a_k differs from y(A)
    - y(0) by more than 1 %. For pooling and a linear head a_k = w_k mean(A_k), the exact Shapley value.

    Use it for weights that approximate Shapley values, at the cost of a gradient.

    >>> LIFTCAM(model, "layer4").explain(image, "nodule").caption
    'nodule (p=0.99) · LIFT-CAM · layer4'
    """

    name, title, paper = "liftcam", "LIFT-CAM", "arXiv:2102.05228"
    forward_passes, backward_passes = "1 + 2 partial forwards", "1"
    runs_model = runs_partial_forward = True

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the DeepLIFT contribution (N,K,1) of each channel. The reference activation is zero."""
        score, n_samples = features.score, len(features.x)
        with RescaleRule() as rule:

            def set_to_zero(maps: Tensor) -> None:
                rule.start_reference_pass()
                maps.zero_()

            blank_scores = score.read_score(features.run_with_edit(set_to_zero), n_samples)
            rule.stop_recording_and_applying()
            with Tap(
                score.model, features.layer, output_index=features.output_index, call_index=features.call_index
            ) as tap:
                output = tap.run(lambda: features.run_with_edit(lambda maps: rule.start_input_pass()))
                tap.backward(score.read_score(output, n_samples).sum())
        multipliers = features.to_maps(tap.gradient).to(features.activation)
        contributions = (multipliers * features.activation).flatten(2).sum(SPATIAL_AXIS, keepdim=True)
        total, change = contributions.sum((1, 2)), features.values - blank_scores
        rounding = torch.finfo(change.dtype).eps ** 0.5 * features.values.abs()
        gap = torch.where((total - change).abs() > rounding, (total - change).abs() / change.abs(), 0)
        for sample in (gap > MAX_RELATIVE_COMPLETENESS_GAP).nonzero()[:, 0].tolist():
            features.add_note(
                sample,
                f"the channels' contributions add up to {float(total[sample]):.3g}, where the score loses "
                f"{float(change[sample]):.3g} without them all: what is not elementwise behind the layer keeps its gradient",
            )
        return contributions
