"""Methods that change the layer's activation and see what the rest of the model makes of it. A: (N,K,cells)."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.cam import SPACE, WeightedChannels
from camscope.explainers.features import Features


@register
class AblationCAM(WeightedChannels):
    """Each channel weighs what the score loses without it: relu Σ_k (y - y_k) A_k (Desai & Ramaswamy 2020).

    y_k: the score with channel k set to zero. The paper divides by y, which no scaled map can see where y > 0, and which
    turns the map inside out where a logit is negative; it is left out. A channel that is zero anyway weighs nothing and
    costs nothing. `batch_size`: altered copies in one pass; None: as many as fit into memory.
    """

    name, paper = "ablationcam", "doi:10.1109/WACV45572.2020.9093360"
    forwards: ClassVar[str] = "3 + K rests"
    runs_model: ClassVar[bool] = True
    batch_size: int | None = None

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1)"""
        alive = features.activation.flatten(2).any(SPACE).nonzero()

        def without_one_each(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
            owners, channels = alive[part].T
            rows = torch.arange(len(owners), device=owners.device)
            return lambda maps: maps.index_put_((rows, channels), maps.new_zeros(())), owners

        left = features.scores_with(len(alive), without_one_each)
        weights = features.values.new_zeros(features.activation.shape[:2])
        weights[alive[:, 0], alive[:, 1]] = features.values[alive[:, 0]] - left
        return weights[..., None].to(features.activation.dtype)
