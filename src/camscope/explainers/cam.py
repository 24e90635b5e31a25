"""CAM: a weighted sum of one layer's channels."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer

SPACE = -1
CANCELLED = 0.05  # of the sizes of its terms: what is left of a denominator
CARRIED = 0.1  # of the map, by terms with such a denominator


class WeightedChannels(LayerExplainer):
    """A weighted sum of one layer's channels, whatever the weights come from. A method writes `channel_weights`."""

    relu: ClassVar[bool] = True

    @abstractmethod
    def channel_weights(self, features: Features) -> Tensor:
        """-> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts."""

    def combine(self, features: Features) -> Tensor:
        """(N,*s): Σ_k of `contributions`, and the ReLU where the method has one."""
        cells = self.contributions(features).sum(1)
        return (cells.relu() if self.relu else cells).view(len(cells), *features.activation.shape[2:])

    def contributions(self, features: Features) -> Tensor:
        """(N,K,cells): each channel's part of the map."""
        return self.channel_weights(features) * features.activation.flatten(2)


class CAM(WeightedChannels):
    """A weighted sum of one layer's channels, by the score's gradient. A method writes `weights`, and nothing else."""

    backwards: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells), (N,K,cells) -> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts.

        The cells of a grid of any rank lie on the last axis, `SPACE`.
        """

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1) or (N,K,cells): see `weights`."""
        return self.weights(features.activation.flatten(2), features.gradient.flatten(2))


class QuotientCAM(CAM):
    """A CAM whose channels weigh Σ n / d, with a note where d's that nearly cancel carry the map. Writes `quotients`."""

    @abstractmethod
    def quotients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,cells) twice -> n, d, and the sizes of d's terms; each (N,K,1) or (N,K,cells)."""

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1): Σ n / d, 0 where d is."""
        above, below, _ = self.quotients(activation, gradient)
        return _divided(above, below).sum(SPACE, keepdim=True)

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1): see `weights`."""
        parts = self.quotients(features.activation.flatten(2), features.gradient.flatten(2))
        return sum_of_quotients(features, *parts)


def sum_of_quotients(features: Features, above: Tensor, below: Tensor, size: Tensor) -> Tensor:
    """(N,K,1): Σ above / below, 0 where that is; a note on a sample of whose Σ|w A| much has a `below` small beside `size`."""
    parts = _divided(above, below)
    carried = parts.abs() * features.activation.flatten(2).abs().sum(SPACE, keepdim=True)
    doubtful = torch.where(below.abs() < CANCELLED * size, carried, 0)
    share = doubtful.flatten(1).sum(1) / carried.flatten(1).sum(1)
    for sample in (share > CARRIED).nonzero()[:, 0].tolist():
        features.note(
            sample,
            f"{float(share[sample]):.0%} of the map at layer {features.layer!r} comes from denominators that cancel to less "
            f"than {CANCELLED:.0%} of their terms: a slight change of the input, or of the precision, may turn it over; "
            f"choose a layer after a ReLU, or gradcam",
        )
    return parts.sum(SPACE, keepdim=True)


def _divided(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below != 0, above / below, 0)
