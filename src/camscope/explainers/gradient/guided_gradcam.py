"""Guided Grad-CAM: Grad-CAM times guided backpropagation at each pixel."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from camscope.explainers.cam.gradcam_variants import GradCAM
from camscope.explainers.cam.layer_selection_mixin import LayerSelectionMixin
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.resize_and_blur import enlarge_to_input
from camscope.explainers.gradient.guided_backprop import RectifiedGradientExplainer
from camscope.hooks.relu_backward_rules import ReluRule
from camscope.targets import Score


@register
class GuidedGradCAM(RectifiedGradientExplainer, LayerSelectionMixin):
    """Grad-CAM, enlarged to the input, times guided backpropagation at each pixel (Selvaraju et al. 2017, section 3.2).

    Use it to see details inside the region that Grad-CAM marks.

    >>> explanation = GuidedGradCAM(model, "layer4").explain(image, "nodule")
    >>> explanation.grid, explanation.layer
    ((128, 128), 'layer4')
    """

    name, title, paper = "guidedgradcam", "Guided Grad-CAM", "arXiv:1610.02391"
    forward_passes = backward_passes = "2"
    rule: ClassVar[ReluRule] = "guided"

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. There are two forward passes for all, and two backward passes for each score."""
        cams = self.with_chosen_layers(x, scores[0]).with_method(GradCAM).compute_maps(x, scores)
        chosen = self.describe_chosen_layer(str(cams[0].layer), scores[0].model)
        maps = []
        for cam, signal in zip(cams, super().compute_maps(x, scores), strict=True):
            zero = [part.zero_gradient for part in (cam, signal) if part.zero_gradient is not None]
            # no CAM is negative, so that reducing the channels before or after the product is the same
            product = enlarge_to_input(cam.attribution, x) * signal.attribution
            notes = (*chosen, *cam.notes, *signal.notes)
            maps.append(replace(cam, attribution=product, zero_gradient=zero[0] | zero[-1], notes=notes))
        return maps
