"""LIFT-CAM: channels weighed by what they contribute to the score, in one backward pass. A: (N,K,*s)."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.cam import SPACE, WeightedChannels
from camscope.explainers.features import Features
from camscope.hooks.rescale import Rescale
from camscope.hooks.tap import Tap

INCOMPLETE = 0.01  # of the score's change


@register
class LIFTCAM(WeightedChannels):
    """Each channel weighs its DeepLIFT contribution, reference 0: relu Σ_k a_k A_k, a_k = Σ m_k ∘ A_k (Jung & Oh 2021).

    m: the gradient where elementwise functions pass on Δout/Δin between A and 0 (Rescale rule). Products, max pooling,
    softmax and normalisations behind the layer keep their gradient: where Σ_k a_k misses y(A) - y(0) by more than 1 %,
    a note says so. Pooling and a linear head have none of these: there a_k = w_k mean(A_k), the exact Shapley value.
    """

    name, paper = "liftcam", "arXiv:2102.05228"
    forwards: ClassVar[str] = "1 + 2 rests"
    backwards: ClassVar[str] = "1"
    runs_model: ClassVar[bool] = True
    runs_rest: ClassVar[bool] = True

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1)"""
        with Rescale() as rule:

            def blank(maps: Tensor) -> None:
                rule.begin()
                maps.zero_()

            blanked = features.score.read(features.passed(blank), len(features.x))
            rule.pause()
            tap = Tap(features.score.model, features.layer, output=features.output, call=features.call)
            with tap:
                output = tap.run(lambda: features.passed(lambda maps: rule.follow()))
                tap.backward(features.score.read(output, len(features.x)).sum())
        multipliers = features.to_maps(tap.gradient).to(features.activation)
        contributions = (multipliers * features.activation).flatten(2).sum(SPACE, keepdim=True)
        self._check(features, contributions.sum((1, 2)), features.values - blanked)
        return contributions

    def _check(self, features: Features, total: Tensor, change: Tensor) -> None:
        """A note where a sample's contributions miss the score's change."""
        gap = (total - change).abs() / change.abs()
        rounding = torch.finfo(change.dtype).eps ** 0.5 * features.values.abs()
        gap = torch.where((total - change).abs() > rounding, gap, 0)
        for sample in (gap > INCOMPLETE).nonzero()[:, 0].tolist():
            features.note(
                sample,
                f"the channels' contributions add up to {float(total[sample]):.3g}, where the score loses "
                f"{float(change[sample]):.3g} without them all: what is not elementwise behind the layer keeps its gradient",
            )
