"""`Denoised`: a CAM projected on the first principal component of its channel contributions."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import BaseWeightedChannels
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.principal_component import project_on_first_component
from camscope.explainers.core.run_methods_in_shared_passes import compute_group_maps
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.targets import Score


class Denoised(Wrapper):
    """Denoise a CAM: project the map on the first principal component of its channel contributions.

    The map (N,cells) is the sum of contributions (N,K,cells). It is projected on their first right singular vector,
    without centering. A ReLU follows if the method has one. The result is in units of the score. If all channels agree,
    it is the map itself. Denoised(Augmented(x)) is the same as Augmented(Denoised(x)). The map of a method without
    channels stays unchanged, with a note.

    It costs as much as the inner method. Use it if single channels clutter the map.

    Args:
        explainer: The method.

    >>> from camscope import GradCAM
    >>> Denoised(GradCAM(model, "layer4")).explain(image, "nodule").method
    'gradcam, denoised'

    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    @property
    def share_key(self) -> Hashable:
        """A key for shared passes: denoised methods with equal keys have inner methods that share passes."""
        return (Denoised, self.explainer.share_key) if isinstance(self.explainer, BaseWeightedChannels) else id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps]]:
        """Compute the maps of denoised methods whose inner methods share passes, as rows [method][score]."""
        inner = [wrapper.explainer for wrapper in explainers if isinstance(wrapper, Denoised)]
        channel_methods = [method for method in inner if isinstance(method, BaseWeightedChannels)]
        if len(channel_methods) < len(inner):
            return [wrapper.compute_maps(x, scores) for wrapper in explainers]
        principal_methods = [copy.copy(method) for method in channel_methods]  # with the same passes
        for principal, method in zip(principal_methods, channel_methods, strict=True):
            vars(principal)["compute_layer_map"] = partial(_project_on_principal_component, method)
        return compute_group_maps(principal_methods, x, scores)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the denoised map of each score. If the inner explainer is a wrapper, denoise the methods that it wraps."""
        inner = self.explainer
        if isinstance(inner, BaseWeightedChannels):
            return list(self.compute_shared_maps([self], x, scores)[0])
        if isinstance(inner, Denoised):
            return inner.compute_maps(x, scores)
        if isinstance(inner, Wrapper):
            return inner._with_inner_explainers([Denoised(explainer) for explainer in inner.inner]).compute_maps(
                x, scores
            )
        note = f"{inner.composed_name} computes a single map, so that nothing was denoised"
        return [replace(maps, notes=(*maps.notes, note)) for maps in inner.compute_maps(x, scores)]


def _project_on_principal_component(method: BaseWeightedChannels, features: LayerFeatures) -> Tensor:
    """Project the channel contributions of a method on their first principal component. Return the map (N,cells)."""
    parts = method.contributions(features)
    total, component = parts.sum(1), project_on_first_component(parts)
    size = component.abs().amax(1, keepdim=True)
    along = torch.where(size > 0, component / size, 0)  # near 1, where a square neither vanishes nor overflows
    length = along.square().sum(1, keepdim=True)
    cells = torch.where(length > 0, (total * along).sum(1, keepdim=True) / length, 0) * along
    return cells.relu() if method.relu else cells
