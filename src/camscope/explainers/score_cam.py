"""Methods that mask the input with the layer's channels and see what the model makes of it. A: (N,K,*s)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.cam import SPACE, WeightedChannels
from camscope.explainers.features import Features

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@register
class ScoreCAM(WeightedChannels):
    """Each channel weighs the softmax of the scores of x ∘ H_k: relu Σ_k α_k A_k (Wang et al. 2020, eq. 7 to 9, alg. 1).

    H_k: channel k enlarged to the input, stretched to 0..1. The baseline f(0) of eq. 6 cancels in the softmax over the
    channels. A constant channel masks everything: one pass of the empty input serves them all. `top`: only the so many
    channels that vary most, an approximation; `batch_size`: masked inputs in one pass; None: as many as fit into memory.
    """

    name, paper = "scorecam", "arXiv:1910.01279"
    forwards: ClassVar[str] = "2 + K"
    runs_model: ClassVar[bool] = True
    top: int | None = None
    batch_size: int | None = None

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1)"""
        chosen = varying(features.activation, self.top)
        pairs = chosen.nonzero()

        def masked(part: slice) -> tuple[Tensor, Tensor]:
            owners, channels = pairs[part].T
            masks = stretched(enlarged(features.activation[owners, channels], features.x))
            return features.x[owners] * masks[:, None].to(features.x.dtype), owners

        every = torch.arange(len(features.x), device=features.x.device)
        empty = features.scores_of(len(every), lambda part: (torch.zeros_like(features.x[part]), every[part]))
        scores = empty[:, None].repeat(1, chosen.shape[1])
        scores[chosen] = features.scores_of(len(pairs), masked)
        if self.top is not None:
            scores = scores.masked_fill(~chosen, -torch.inf)
        return scores.to(features.activation.dtype).softmax(1)[..., None]


def varying(activation: Tensor, top: int | None = None) -> Tensor:
    """(N,K) bool: channels that are not constant; of them, the `top` ones of each sample that vary most."""
    flat = activation.flatten(2)
    spread = flat.std(SPACE, correction=0)
    live = flat.amax(SPACE) > flat.amin(SPACE)
    if top is None:
        return live
    if top < 1:
        raise InputError(f"top={top}: expected a number of channels, 1 or more")
    best = spread.topk(min(top, spread.shape[1]), dim=1).indices
    return live & torch.zeros_like(live).scatter_(1, best, True)


def enlarged(maps: Tensor, x: Tensor) -> Tensor:
    """(R,*s) -> (R,*S): linear interpolation between cell centres, to the input's size."""
    size = x.shape[2:]
    return F.interpolate(maps[:, None], size, mode=LINEAR[len(size)], align_corners=False)[:, 0]


def stretched(masks: Tensor) -> Tensor:
    """(R,*S) -> 0..1 each; a constant one is 0."""
    flat = masks.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    span = torch.where(high > low, high - low, 1)
    return ((flat - low) / span).view_as(masks)
