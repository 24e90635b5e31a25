"""Base classes of methods that explain one layer, and of weighted sums of the channels of a layer."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from camscope.errors import CamscopeError
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.cam.layer_pass import LayerSelectionMixin, SharedLayerPass
from camscope.explainers.core.base_method import (
    AttributionMaps,
    BaseMethod,
    DeferredMap,
    compute_map_or_raise,
    compute_map_or_return_error,
    is_below_precision,
)
from camscope.explainers.core.resampling import crop_padding
from camscope.targets import Score


class LayerExplainer(LayerSelectionMixin):
    """Base class of methods that compute a map from the channels of one layer. A subclass implements `combine`.

    >>> from camscope import LayerExplainer, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> class ActivationNorm(LayerExplainer):
    ...     name = "activation norm"
    ...     def combine(self, features):
    ...         return features.activation.norm(dim=1)
    >>> ActivationNorm(model, "layer4").explain(image, "nodule").grid
    (16, 16)
    """

    @abstractmethod
    def combine(self, features: LayerFeatures) -> Tensor:
        """Compute the map by the formula of the method, as (N,*s) or flattened to (N,cells)."""

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the method also works on an integer input: it never changes the input."""
        return not self.has_custom_backward and (self.runs_partial_forward or not self.runs_model)

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*s) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. All share one forward pass, and each has one backward pass."""
        return [compute_map_or_raise(entry) for entry in LayerExplainer.compute_shared_maps([self], x, scores)[0]]

    @property
    def share_key(self) -> Hashable:
        """Methods with equal keys share a forward pass, also if their layers differ."""
        return (LayerExplainer, self.precision, self.output_index, self.call_index, self.on_nonfinite)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps | DeferredMap | CamscopeError]]:
        """Compute the maps [method][score] with one shared forward pass, and one backward pass per score.

        The methods may explain different layers. If the layer is chosen automatically and differs between the scores, each
        change of the layer needs another forward pass. Methods that run the model again do so afterwards, without hooks. All
        others compute their maps at once, so that only one score's gradients are in memory.
        """
        layer_explainers = [explainer for explainer in explainers if isinstance(explainer, LayerExplainer)]
        chooser = next((explainer for explainer in layer_explainers if explainer.layer is None), None)
        chosen = [chooser and chooser.choose_layer_name(x, score) for score in scores]
        results: list[list[AttributionMaps | DeferredMap | CamscopeError]] = [[] for _ in layer_explainers]
        for chosen_layer, indices in groupby(range(len(scores)), chosen.__getitem__):
            layers = [str(explainer.layer or chosen_layer) for explainer in layer_explainers]
            group = [scores[i] for i in indices]
            with SharedLayerPass(layer_explainers, layers, x, group) as shared:
                for i in range(len(group)):
                    for t, features in shared.iter_features(i):
                        compute = partial(layer_explainers[t]._combine_to_maps, features)
                        is_deferred = layer_explainers[t].runs_model
                        results[t].append(compute if is_deferred else compute_map_or_return_error(compute))
        return results

    def _combine_to_maps(self, features: LayerFeatures) -> AttributionMaps:
        score, gradient = features.score, features.optional_gradient
        with score.score_range_tracked() as scores:
            cells = self.combine(features)
        attribution = cells.view(len(cells), *features.activation.shape[2:]) if cells.ndim == 2 else cells
        notes = [*self.describe_chosen_layer(features.layer, score.model), *features.notes]
        if features.input_shares is not None:
            attribution = crop_padding(attribution, features.input_shares)
            notes.append("the detector pads its input: the map is the part of the layer that shows it, interpolated")
        zero, constant = None, scores.is_constant(score.machine_epsilon)
        if gradient is not None:  # a method that also runs other inputs may have a map despite a zero gradient
            zero = ~(gradient.flatten(1).any(1) | attribution.flatten(1).any(1))
            if constant is None and not self.has_custom_backward:
                constant = is_below_precision(score.machine_epsilon, features.values, gradient, features.activation)
        if self.runs_model and any(module.training for module in score.model.modules()):
            notes.append(f"in train mode a layer may mix the inputs of a pass, and {self.name} fills its passes itself")
        return AttributionMaps(
            attribution,
            features.layer,
            features.layout,
            zero,
            constant,
            tuple(notes),
            tuple(map(tuple, features.sample_notes)),
            layout_unverified=features.layout_unverified,
        )


SPATIAL_AXIS = -1
CANCELLATION_RATIO = 0.05  # a denominator smaller than this share of its terms has nearly canceled
MAX_CANCELLED_SHARE = 0.1  # of the map, by terms with such a denominator


class BaseWeightedChannels(LayerExplainer):
    """Base class of weighted sums of the channels of one layer. A subclass implements `channel_weights`.

    The class constant `relu` says whether negative values of the sum become 0.

    >>> from camscope import BaseWeightedChannels, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> class ChannelSum(BaseWeightedChannels):
    ...     name = "channel sum"
    ...     def channel_weights(self, features):
    ...         return features.activation.new_ones(1, 1, 1)
    >>> ChannelSum(model, "layer4").explain(image, "nodule").caption
    'nodule (p=0.99) · channel sum · layer4'
    """

    relu: ClassVar[bool] = True

    @abstractmethod
    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute one weight per channel (N,K,1), or one per cell of each channel (N,K,cells)."""

    def combine(self, features: LayerFeatures) -> Tensor:
        """Sum the contributions of all channels. Apply a ReLU if the method has one."""
        cells = self.contributions(features).sum(1)
        return cells.relu() if self.relu else cells

    def contributions(self, features: LayerFeatures) -> Tensor:
        """Return the contribution of each channel to the map (N,K,cells): weight times activation."""
        return self.channel_weights(features) * features.activation.flatten(2)


class BaseCAM(BaseWeightedChannels):
    """Base class of CAMs whose channel weights come from the gradient of the score. A subclass implements only `weights`.

    >>> from camscope import SPATIAL_AXIS, BaseCAM, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> class MaxCAM(BaseCAM):
    ...     name = "max-cam"
    ...     def weights(self, activation, gradient):
    ...         return gradient.amax(SPATIAL_AXIS, keepdim=True)
    >>> MaxCAM(model, "layer4").explain(image, "nodule").status
    'ok'
    """

    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Compute weights (N,K,1) or (N,K,cells) from a layer's activation and the score's gradient there, both (N,K,cells).

        The grid may have any number of axes. All its cells lie on the last axis, `SPATIAL_AXIS`.
        """

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the result of `weights` for the layer."""
        return self.weights(features.activation.flatten(2), features.gradient.flatten(2))


class QuotientTerms(NamedTuple):
    """Numerators and denominators of channel weights, and the size that a denominator has if its terms do not cancel."""

    numerator: Tensor
    denominator: Tensor
    uncancelled_size: Tensor


class BaseQuotientCAM(BaseWeightedChannels):
    """Base class of CAMs whose channel weights are sums of quotients. A subclass implements `quotient_terms`."""

    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True

    @abstractmethod
    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> QuotientTerms:
        """Compute terms (N,K,1) or (N,K,cells) from a layer's activation and the score's gradient, both (N,K,cells)."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Sum the quotients over the cells."""
        return sum_quotients(
            features, self.quotient_terms(features.activation.flatten(2), features.gradient.flatten(2))
        )


def sum_quotients(features: LayerFeatures, terms: QuotientTerms) -> Tensor:
    """Sum numerator / denominator over the cells, (N,K,1). A quotient with denominator 0 counts as 0.

    A note reports if denominators whose terms nearly cancel determine the map.
    """
    numerator, denominator, uncancelled_size = terms
    parts = torch.where(denominator != 0, numerator / denominator, 0)
    carried = parts.abs() * features.activation.flatten(2).abs().sum(SPATIAL_AXIS, keepdim=True)
    doubtful = torch.where(denominator.abs() < CANCELLATION_RATIO * uncancelled_size, carried, 0)
    share = doubtful.flatten(1).sum(1) / carried.flatten(1).sum(1)
    for sample in (share > MAX_CANCELLED_SHARE).nonzero()[:, 0].tolist():
        features.add_note(
            sample,
            f"{float(share[sample]):.0%} of the map at layer {features.layer!r} comes from denominators that cancel to less "
            f"than {CANCELLATION_RATIO:.0%} of their terms: a slight change of the input, or of the precision, may turn it over; "
            f"choose a layer after a ReLU, or gradcam",
        )
    return parts.sum(SPATIAL_AXIS, keepdim=True)


def compute_value_range(x: Tensor) -> Tensor:
    """Return the maximum minus the minimum (R,1,1,..) of each input (R,C,*S)."""
    axes = tuple(range(1, x.ndim))
    return x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)
