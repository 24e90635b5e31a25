"""Base classes of maps that are a weighted sum of the channels of one layer, such as `BaseCAM`."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures

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
        """Compute one weight per channel (N,K,1), or one weight per channel and cell (N,K,cells)."""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the map as the sum of the weighted channels. Apply a ReLU if the method has one."""
        cells = self.contributions(features).sum(1)
        return cells.relu() if self.relu else cells

    def contributions(self, features: LayerFeatures) -> Tensor:
        """Return the weighted channels (N,K,cells): weight times activation. Their sum is the map."""
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
    differentiable: ClassVar[bool] = True

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Compute weights (N,K,1) or (N,K,cells). The activation and the gradient of the layer are (N,K,cells).

        The grid may have any number of axes. All its cells lie on the last axis, `SPATIAL_AXIS`.
        """

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the channel weights by passing the activation and the gradient of the score to `weights`."""
        return self.weights(features.activation.flatten(2), features.gradient.flatten(2))


class QuotientTerms(NamedTuple):
    """Numerators and denominators of channel weights. `uncancelled_size` is a denominator's size without cancellation."""

    numerator: Tensor
    denominator: Tensor
    uncancelled_size: Tensor


class BaseQuotientCAM(BaseWeightedChannels):
    """Base class of CAMs whose channel weights are sums of quotients. A subclass implements `quotient_terms`."""

    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True

    @abstractmethod
    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> QuotientTerms:
        """Compute numerator and denominator of each weight, (N,K,1) or (N,K,cells), from activation and gradient (N,K,cells)."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the channel weights (N,K,1): the sum over the cells of numerator / denominator."""
        return sum_quotients(
            features, self.quotient_terms(features.activation.flatten(2), features.gradient.flatten(2))
        )


def sum_quotients(features: LayerFeatures, terms: QuotientTerms) -> Tensor:
    """Sum numerator / denominator over the cells (N,K,1). If the denominator is 0, the quotient counts as 0.

    If the terms of denominators nearly cancel and these quotients determine the map, a note reports it.
    """
    numerator, denominator, uncancelled_size = terms
    is_defined = denominator != 0
    # the inner `where` keeps a division by zero out of the graph, in which it would make all derivatives NaN
    parts = torch.where(is_defined, numerator / torch.where(is_defined, denominator, 1), 0)
    carried = parts.detach().abs() * features.activation.detach().flatten(2).abs().sum(SPATIAL_AXIS, keepdim=True)
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


def compute_value_range_per_sample(x: Tensor) -> Tensor:
    """Return the maximum minus the minimum of each input (R,C,*S), as (R,1,1,...)."""
    axes = tuple(range(1, x.ndim))
    return x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)
