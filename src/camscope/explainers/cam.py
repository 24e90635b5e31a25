"""CAM: a weighted sum of one layer's channels."""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer

SPACE = -1


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
