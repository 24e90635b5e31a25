"""Group-CAM: the layer's channels are masks by the group, laid over a blurred copy of the input."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.cam import SPACE
from camscope.explainers.chunks import InPasses
from camscope.explainers.features import Features
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.masks import blurred, enlarged, extent
from camscope.explainers.scope import expect_count

SIGMA, REACH = 50 / 224, 25 / 224  # of an axis: the authors' blur of 51 x 51 pixels for inputs of 224
FAINT = 0.7  # of a mask's cells: the authors' threshold is the 70th percentile


@register
class GroupCAM(LayerExplainer, InPasses):
    """Each group's mask M_g weighs what it restores: relu Σ_g (p(x M_g + b (1 - M_g)) - p(b)) M_g (Zhang et al. 2021).

    b: the input, blurred. p: the class's probability, so that a constant added to all logits changes nothing; the score
    itself where it has no rivals (a callable target, one output). M_g: relu Σ_k mean(g_k) A_k over one of `groups`
    groups of neighbouring channels, without the cells up to its 70th percentile, enlarged and stretched to 0..1; the
    map is the sum before it is enlarged. The signs of the weights are kept, as in the authors' first code. An empty mask
    restores nothing and costs nothing.
    """

    name, paper = "groupcam", "arXiv:2103.13859"
    forwards: ClassVar[str] = "2 + groups"
    backwards: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True
    runs_model: ClassVar[bool] = True
    groups: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(groups=self.groups)

    def combine(self, features: Features) -> Tensor:
        """(N,*s)"""
        x, masks = features.x, self._masks(features)
        background = blurred(x, SIGMA, REACH)
        owners, groups = masks.flatten(2).any(SPACE).nonzero().T
        every = torch.arange(len(x), device=x.device)

        def restored(part: slice) -> tuple[Tensor, Tensor]:
            rows = owners[part]
            shown = enlarged(masks[rows, groups[part]], x)[:, None].to(x.dtype)
            return background[rows].lerp(x[rows], shown), rows

        before = features.chances_of(len(x), lambda part: (background[part], every[part]))
        gains = masks.new_zeros(masks.shape[:2])
        gains[owners, groups] = (features.chances_of(len(owners), restored) - before[owners]).to(masks.dtype)
        return torch.einsum("ng,ng...->n...", gains, masks).relu()

    def _masks(self, features: Features) -> Tensor:
        """(N,G,*s): each group's mask, on such a scale that the enlarged one goes from 0 to 1; zero where it is flat."""
        weights = features.gradient.flatten(2).mean(SPACE)
        parts = (weights.view(*weights.shape, *[1] * (features.x.ndim - 2)) * features.activation).chunk(self.groups, 1)
        masks = torch.stack([part.sum(1) for part in parts], 1).relu()
        faint = masks.flatten(2).quantile(FAINT, SPACE)
        masks = masks.where(masks > faint.view(*faint.shape, *[1] * (masks.ndim - 2)), 0)
        return torch.stack([scaled(mask, features.x) for mask in masks.unbind(1)], 1)


def scaled(mask: Tensor, x: Tensor) -> Tensor:
    """(N,*s): less its least value and divided by its span, both of the enlarged mask."""
    low, span = extent(enlarged(mask, x))
    return (mask - low) / span
