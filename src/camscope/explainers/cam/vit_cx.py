"""ViT-CX: channels of a layer are clustered to masks. The map is the mean effect of the masks at each position."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import InputVariants, LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import compute_value_range_per_sample
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin
from camscope.explainers.core.random_mixin import RandomMixin
from camscope.explainers.core.resize_and_blur import enlarge_to_input, resize_maps, scale_to_unit_range
from camscope.explainers.core.validated_setting_types import NonNegativeNumber


@register
class ViTCX(LayerExplainer, BatchedMixin, RandomMixin):
    """Mean effect on the class probability of the masks that show a position: Σ_i s_i M_i / Σ_i M_i (Xie et al. 2023).

    The smallest cell is subtracted. s_i = p(x M_i + Z (1 - M_i)) - p(x + Z (1 - M_i)) is the effect of mask i: the
    class probability if only this mask shows the input, minus the probability if only the noise Z is added. Without
    several classes, p is the score. The masks M_i are channels scaled to 0..1. Similar masks are joined by complete
    linkage, and their sum is scaled again. A position that no mask shows is 0, and so is the map of a single mask. K
    counts the joined masks. Use it for vision transformers, for which it was made.

    Linkage, `distance` and noise (0.1 of pixels in -1..1) are those of the authors' code. There are three differences.
    All masks get the same Z. Masks are scaled and counted on the grid of the layer. p(x), which the authors add to
    every s_i, and the division by the number of masks are left out: they shift or scale all cells alike.

    Args:
        distance: Masks are joined below this distance, one minus the cosine of the enlarged masks.
        sigma: Standard deviation of the noise, as a fraction of the image's range. 0: no noise.

    >>> explanation = ViTCX(model, "layer4", distance=0.5).explain(image, "nodule")
    >>> float(explanation.attribution.min())
    0.0

    """

    name, title, paper = "vitcx", "ViT-CX", "arXiv:2211.03064"
    forward_passes: ClassVar[str] = "1 + 2 x K"
    runs_model: ClassVar[bool] = True
    distance: NonNegativeNumber = 0.1
    sigma: NonNegativeNumber = 0.05

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute how much each mask changes the class probability. A cell gets the mean over the masks that show it."""
        masks = self._build_cluster_masks(features)
        live = masks.flatten(2).any(2)
        probabilities = masks.new_zeros(*live.shape, 2)
        probabilities[live] = self._compute_masked_and_noisy_probabilities(features, masks, live)
        gains = probabilities[..., 0] - probabilities[..., 1]
        # subtracted before the mean, so that one mask, or equal ones, give 0 and not rounding
        gains = torch.where(live, gains - gains.masked_fill(~live, torch.inf).amin(1, keepdim=True), 0)
        statement = "no two masks differ in what they do to the score"
        features.add_rounding_notes(statement, gains, probabilities.flatten(1))
        cover = masks.sum(1)
        means = torch.where(cover > 0, torch.einsum("nk,nk...->n...", gains, masks) / cover, torch.inf)
        least = means.flatten(1).amin(1).view(-1, *[1] * (means.ndim - 1))
        return torch.where(cover > 0, means - least, 0)

    def _build_cluster_masks(self, features: LayerFeatures) -> Tensor:
        """Build masks (N,K,*s). The mask of a cluster of similar channels is their sum, scaled to 0..1. All others are 0."""
        channels = scale_each_mask_to_unit_range(features.activation)
        clusters = cluster_masks_by_complete_linkage(
            compute_cosine_distances(channels, features.x.shape[2:]), self.distance
        )
        members = clusters[..., None] == torch.arange(clusters.shape[1], device=clusters.device)
        return scale_each_mask_to_unit_range((members.mT.to(channels) @ channels.flatten(2)).view_as(channels))

    def _compute_masked_and_noisy_probabilities(
        self, features: LayerFeatures, masks: Tensor, is_nonempty: Tensor
    ) -> Tensor:
        """Compute two class probabilities (masks,2) for each nonempty mask M: p(x M + Z (1 - M)) and p(x + Z (1 - M))."""
        x, (samples, mask_index) = features.x, is_nonempty.nonzero().T
        drawn = torch.randn(x.shape[1:], generator=self.generator(), dtype=torch.float32, device="cpu")
        noise = self.sigma * compute_value_range_per_sample(x) * drawn.to(x)

        def build_inputs(part: slice) -> InputVariants:
            numbers = torch.arange(part.start, part.stop, device=x.device)
            rows, shows_all = numbers // 2, (numbers % 2 == 1).view(-1, *[1] * (x.ndim - 1))
            sample_index = samples[rows]
            mask = scale_to_unit_range(enlarge_to_input(masks[sample_index, mask_index[rows]], x))[:, None].to(x.dtype)
            inputs = x[sample_index] * torch.where(shows_all, 1, mask) + noise[sample_index] * (1 - mask)
            return InputVariants(inputs, sample_index)

        scores = features.score_inputs(2 * len(samples), build_inputs, as_probability=True)
        return scores.to(masks.dtype).view(-1, 2)


def scale_each_mask_to_unit_range(masks: Tensor) -> Tensor:
    """Scale each mask (N,K,*s) to 0..1 by its minimum and maximum. A constant mask becomes 0."""
    return scale_to_unit_range(masks.flatten(0, 1)).view_as(masks)


def compute_cosine_distances(masks: Tensor, size: Sequence[int]) -> Tensor:
    """Compute the cosine distances (N,K,K) between masks that are enlarged to `size`. The distance to a zero mask is infinite."""
    # EᵀE of the matrix E that enlarges an axis gives the products of enlarged masks, so that no mask is enlarged
    overlap = masks
    for axis, length in enumerate(size, start=2):
        enlarging = resize_maps(torch.eye(masks.shape[axis], dtype=masks.dtype, device=masks.device), (length,))
        overlap = (overlap.movedim(axis, -1) @ enlarging @ enlarging.mT).movedim(-1, axis)
    products = masks.flatten(2) @ overlap.flatten(2).mT
    lengths = products.diagonal(dim1=1, dim2=2).sqrt()
    scale = lengths[:, :, None] * lengths[:, None]
    return torch.where(scale > 0, (1 - products / scale).clamp(min=0), torch.inf)


def cluster_masks_by_complete_linkage(distances: Tensor, max_distance: float) -> Tensor:
    """Cluster masks by complete linkage. The distances between the masks are (N,K,K).

    Return the index (N,K) of the first mask in each mask's cluster.
    """
    # all pairs of mutual nearest neighbors are joined in one step, which gives the same clusters as one after the other
    indices = torch.arange(distances.shape[1], device=distances.device).expand(distances.shape[:2])
    # symmetric, also in rounding: otherwise no two clusters might be mutual neighbors
    between = torch.maximum(distances, distances.mT)
    between = between.masked_fill(indices[:, :, None] == indices[:, None], torch.inf)
    clusters = indices
    while True:
        near, other = between.amin(2), between.argmin(2)  # the first of several, so that some pair is mutual
        is_joined = (other.gather(1, other) == indices) & (near < max_distance)
        if not bool(is_joined.any()):
            return clusters
        partner = torch.where(is_joined, other, indices)
        clusters = torch.minimum(indices, partner).gather(1, clusters)
        between = torch.maximum(between, between.gather(1, partner[:, :, None].expand_as(between)))
        between = torch.maximum(between, between.gather(2, partner[:, None].expand_as(between)))
        removed = partner < indices
        between = between.masked_fill(removed[:, :, None] | removed[:, None], torch.inf)
