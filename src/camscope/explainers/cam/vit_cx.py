"""ViT-CX: the layer's channels are masks, alike ones joined, and a place counts what the masks that show it do."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.cam.score import compute_value_range
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import BatchedMixin, RandomMixin
from camscope.explainers.core.evaluation_context import check_number
from camscope.explainers.core.resampling import enlarge_to_input, resize_maps, scale_to_unit_range


@register
class ViTCX(LayerExplainer, BatchedMixin, RandomMixin):
    """The mean gain of the masks at each place, Σ_i s_i M_i / Σ_i M_i, less its least cell (Xie et al. 2023).

    s_i = p(x M_i + Z (1 - M_i)) - p(x + Z (1 - M_i)): the class's probability where only the mask shows the input, less
    what the noise Z alone makes of it; the score itself where the class has no rivals. The masks M_i are channels
    stretched to 0..1; those less than `distance` apart, one minus the cosine of the enlarged ones, are joined by complete
    linkage, and their sum is stretched again. A place that no mask shows is 0, and so is the map of a single mask.
    `sigma`: the noise's standard deviation as a fraction of the image's range; 0: none. K counts the joined masks.

    Linkage, `distance` and noise are those of the authors' code, 0.1 of pixels in -1..1. Otherwise here: all masks meet
    the same Z, so that they differ by what they show; they are stretched and counted on the layer's grid; p(x), which is
    added to every s_i there, and a division by the number of masks are left out: the one moves all cells alike, the other
    scales them.
    """

    name, title, paper = "vitcx", "ViT-CX", "arXiv:2211.03064"
    forward_passes: ClassVar[str] = "1 + 2 x K"
    runs_model: ClassVar[bool] = True
    distance: float = 0.1
    sigma: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(low=0, distance=self.distance, sigma=self.sigma)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        masks = self._build_cluster_masks(features)
        live = masks.flatten(2).any(2)
        chances = masks.new_zeros(*live.shape, 2)
        chances[live] = self._compute_probabilities(features, masks, live)
        gains = chances[..., 0] - chances[..., 1]
        # before the mean: what one mask, or equal ones, make of it is then nothing, and not rounding
        gains = torch.where(live, gains - gains.masked_fill(~live, torch.inf).amin(1, keepdim=True), 0)
        features.add_rounding_notes("no two masks differ in what they do to the score", gains, chances.flatten(1))
        cover = masks.sum(1)
        means = torch.where(cover > 0, torch.einsum("nk,nk...->n...", gains, masks) / cover, torch.inf)
        least = means.flatten(1).amin(1).view(-1, *[1] * (means.ndim - 1))
        return torch.where(cover > 0, means - least, 0)

    def _build_cluster_masks(self, features: LayerFeatures) -> Tensor:
        """(N,K,*s): the sum of each cluster's masks, 0..1, at the place of its first; zeros elsewhere."""
        channels = scale_each_to_unit_range(features.activation)
        homes = cluster_masks(compute_cosine_distances(channels, features.x.shape[2:]), self.distance)
        members = homes[..., None] == torch.arange(homes.shape[1], device=homes.device)
        return scale_each_to_unit_range((members.mT.to(channels) @ channels.flatten(2)).view_as(channels))

    def _compute_probabilities(self, features: LayerFeatures, masks: Tensor, is_nonempty: Tensor) -> Tensor:
        """(M,2): p(x M + Z (1 - M)) and p(x + Z (1 - M)) of the M live masks of all samples."""
        x, (sample_rows, numbers) = features.x, is_nonempty.nonzero().T
        drawn = torch.randn(x.shape[1:], generator=self.generator(), dtype=torch.float32, device="cpu")
        noise = self.sigma * compute_value_range(x) * drawn.to(x)

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part.start, part.stop, device=x.device)
            which, whole = rows // 2, (rows % 2 == 1).view(-1, *[1] * (x.ndim - 1))
            sample_rows_of_part = sample_rows[which]
            mask = scale_to_unit_range(enlarge_to_input(masks[sample_rows_of_part, numbers[which]], x))[:, None].to(
                x.dtype
            )
            return x[sample_rows_of_part] * torch.where(whole, 1, mask) + noise[sample_rows_of_part] * (
                1 - mask
            ), sample_rows_of_part

        return features.score_inputs(2 * len(sample_rows), versions, as_probability=True).to(masks.dtype).view(-1, 2)


def scale_each_to_unit_range(masks: Tensor) -> Tensor:
    """(N,K,*s) -> 0..1 each; a constant one is 0."""
    return scale_to_unit_range(masks.flatten(0, 1)).view_as(masks)


def compute_cosine_distances(masks: Tensor, size: Sequence[int]) -> Tensor:
    """(N,K,*s) -> (N,K,K): one minus the cosines of the masks as they are enlarged to `size`; inf for one of zeros.

    Enlarging is a matrix E for each axis: EᵀE tells how two enlarged masks overlap, and nothing large is made.
    """
    overlap = masks
    for axis, length in enumerate(size, start=2):
        enlarging = resize_maps(torch.eye(masks.shape[axis], dtype=masks.dtype, device=masks.device), (length,))
        overlap = (overlap.movedim(axis, -1) @ enlarging @ enlarging.mT).movedim(-1, axis)
    products = masks.flatten(2) @ overlap.flatten(2).mT
    lengths = products.diagonal(dim1=1, dim2=2).sqrt()
    scale = lengths[:, :, None] * lengths[:, None]
    return torch.where(scale > 0, (1 - products / scale).clamp(min=0), torch.inf)


def cluster_masks(distances: Tensor, max_distance: float) -> Tensor:
    """(N,K,K) -> (N,K): the first member of each one's cluster; clusters less than `max_distance` apart are joined.

    As far apart as their furthest members (complete linkage): then those that are nearest to each other may be joined
    at once, all pairs in one step, and the clusters are those of one pair after the other.
    """
    every = torch.arange(distances.shape[1], device=distances.device).expand(distances.shape[:2])
    # rounding may see two otherwise from either side, and none would be each other's nearest
    between = torch.maximum(distances, distances.mT)
    between = between.masked_fill(every[:, :, None] == every[:, None], torch.inf)
    homes = every
    while True:
        near, other = between.amin(2), between.argmin(2)  # the first of several: so that some two name each other
        joining = (other.gather(1, other) == every) & (near < max_distance)
        if not bool(joining.any()):
            return homes
        partner = torch.where(joining, other, every)
        homes = torch.minimum(every, partner).gather(1, homes)
        between = torch.maximum(between, between.gather(1, partner[:, :, None].expand_as(between)))
        between = torch.maximum(between, between.gather(2, partner[:, None].expand_as(between)))
        gone = partner < every
        between = between.masked_fill(gone[:, :, None] | gone[:, None], torch.inf)
