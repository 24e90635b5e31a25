"""CAMs that weight channels by the score of the masked input: Score-CAM, SS-CAM and IS-CAM.

H_k is channel k, A_k, enlarged to the input and then scaled to 0..1 (Wang et al. 2020, eq. 7 and 8).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.cam.layer_features_and_perturbed_scores import InputVariants, LayerFeatures
from camscope.explainers.cam.weighted_channels_explainer import BaseWeightedChannels, compute_value_range_per_sample
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin
from camscope.explainers.core.random_mixin import RandomMixin
from camscope.explainers.core.resize_and_blur import (
    enlarge_to_input,
    find_nonconstant_channels,
    scale_to_unit_range,
    select_strongest_channels,
)
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber


class Masking(NamedTuple):
    """A function that applies masks to inputs, and the number of variants per mask.

    `apply_masks` takes inputs (R,C,*S), masks (R,1,*S) and the variant index (R,) of each row.
    """

    apply_masks: Callable[[Tensor, Tensor, Tensor], Tensor]
    n_variants: int = 1
    n_variants_of_empty_mask: int = 1


@dataclass(kw_only=True, eq=False, repr=False)
class BaseScoreCAM(BaseWeightedChannels, BatchedMixin):
    """Base class of CAMs with weights α = softmax of the scores of masked inputs. A subclass implements `create_masking`.

    The map is relu Σ_k α_k A_k. The softmax is over the channels, of the mean score of all variants of a channel's
    mask.

    The papers subtract the score of an empty input, which cancels in the softmax. All constant channels of a sample
    share one empty mask.

    Args:
        n_channels: Use only this number of channels, those with the largest mean absolute value. All others have weight
            0, which is an approximation. None: all channels.

    """

    runs_model: ClassVar[bool] = True
    n_channels: PositiveInteger | None = None

    @abstractmethod
    def create_masking(self, x: Tensor) -> Masking:
        """Create the function that applies masks to inputs (N,C,*S). State how many masked copies it makes per mask."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Compute the channel weights (N,K,1). Each channel masks the input. The softmax of the resulting scores gives
        the weights.
        """
        activation, x = features.activation, features.x
        chosen, live = select_strongest_channels(activation, self.n_channels), find_nonconstant_channels(activation)
        samples, channels = (chosen & live).nonzero().T
        has_empty_mask = (chosen & ~live).any(1)

        def build_masks(rows: Tensor) -> Tensor:
            return scale_to_unit_range(enlarge_to_input(activation[samples[rows], channels[rows]], x))[:, None]

        def build_zero_masks(rows: Tensor) -> Tensor:
            return x.new_zeros(1).expand(len(rows), 1, *x.shape[2:])

        apply_masks, n_variants, n_variants_of_empty_mask = self.create_masking(x)
        compute_mean_scores = partial(self._compute_mean_scores, features, apply_masks)
        scores = activation.new_full(chosen.shape, -torch.inf)
        scores[samples, channels] = compute_mean_scores(samples, build_masks, n_variants)
        empty_scores, empty = activation.new_zeros(len(scores)), has_empty_mask.nonzero()[:, 0]
        empty_scores[empty] = compute_mean_scores(empty, build_zero_masks, n_variants_of_empty_mask)
        return torch.where(chosen & ~live, empty_scores[:, None], scores).softmax(1)[..., None]

    def _compute_mean_scores(
        self,
        features: LayerFeatures,
        apply_masks: Callable[[Tensor, Tensor, Tensor], Tensor],
        sample_index: Tensor,
        build_masks: Callable[[Tensor], Tensor],
        n_variants: int,
    ) -> Tensor:
        """Compute the mean score (M,) of the inputs under each of M masks. The mean is over the masked copies of one mask."""
        x = features.x

        def build_inputs(part: slice) -> InputVariants:
            numbers = torch.arange(part.start, part.stop, device=x.device)
            rows = numbers // n_variants
            inputs = x if len(x) == 1 else x[sample_index[rows]]
            masked = apply_masks(inputs, build_masks(rows).to(x.dtype), numbers % n_variants)
            return InputVariants(masked, sample_index[rows])

        scores = features.score_inputs(len(sample_index) * n_variants, build_inputs)
        return scores.to(features.activation.dtype).view(-1, n_variants).mean(1)


@register
class ScoreCAM(BaseScoreCAM):
    """Sum of the channels, weighted by the scores of inputs masked with a channel: relu Σ_k α_k A_k (Wang et al. 2020,
    alg. 1).

    α is the softmax of the scores of x ∘ H_k over the channels. The scores are logits, as in the algorithm. The
    authors' code weights by probabilities, without a softmax over the channels. The figures of the paper fit both.

    Use it if gradients saturate: each channel is judged by the score of the input that it lets through.

    >>> explanation = ScoreCAM(model, "layer4", n_channels=8).explain(image, "nodule")
    >>> explanation.heatmap().shape, explanation.status
    ((128, 128), 'ok')
    """

    name, title, paper = "scorecam", "Score-CAM", "arXiv:1910.01279"
    forward_passes: ClassVar[str] = "1 + K"

    def create_masking(self, x: Tensor) -> Masking:
        """Define how Score-CAM masks the input x by the mask H: x ∘ H."""
        return Masking(lambda inputs, masks, variant_indices: inputs * masks)


@register
class SSCAM(BaseScoreCAM, RandomMixin):
    """Score-CAM with scores averaged over noisy masks x ∘ (H_k + σ n_i), n_i ~ N(0, 1) (Wang et al. 2020b).

    σ is a fraction of the range of the map or input, so the unit does not matter. The authors' code divides by the
    range and squares. All channels get the same noise. Use it if Score-CAM maps change with small changes of the image.
    It costs `n_samples` times as much.

    Args:
        n_samples: Number of noise tensors.
        sigma: Standard deviation σ of the noise, as a fraction of the range.
        noise: "map" for x ∘ (H_k + σ n_i), or "input" for x ∘ H_k + σ (max x - min x) n_i, the two variants of the
            paper.

    >>> SSCAM(model, "layer4", n_samples=2, n_channels=4).explain(image, "nodule").grid
    (16, 16)

    """

    name, title, paper = "sscam", "SS-CAM", "arXiv:2006.14255"
    forward_passes: ClassVar[str] = "1 + n_samples x K"
    n_samples: PositiveInteger = 35
    sigma: PositiveNumber = 0.5
    noise: Literal["map", "input"] = "map"

    def create_masking(self, x: Tensor) -> Masking:
        """Define how SS-CAM masks x by the mask H with noise n: x ∘ (H + σ n) or x ∘ H + σ (max x - min x) n."""
        shape = (self.n_samples, 1 if self.noise == "map" else x.shape[1], *x.shape[2:])
        drawn = torch.randn(shape, generator=self.generator(), dtype=torch.float32, device="cpu")
        noises = self.sigma * drawn.to(x)

        def apply_noisy_masks(inputs: Tensor, masks: Tensor, noise_indices: Tensor) -> Tensor:
            if self.noise == "map":
                return inputs * (masks + noises[noise_indices])
            return inputs * masks + compute_value_range_per_sample(inputs) * noises[noise_indices]

        return Masking(apply_noisy_masks, self.n_samples, self.n_samples)


@register
class ISCAM(BaseScoreCAM):
    """Score-CAM with scores averaged over masks of increasing strength x ∘ H_k i/N, i = 1..N (Naidu et al. 2020).

    The authors' code scales like this. The formula of the paper, as others quote it, sums the steps, so that inputs are
    up to (N - 1)/2 times as bright as the image. The empty mask has one input only. Use it if Score-CAM maps are noisy.
    It costs `n_samples` times as much.

    Args:
        n_samples: Number N of steps.

    >>> ISCAM(model, "layer4", n_samples=2, n_channels=4).explain(image, "nodule").method_title
    'IS-CAM'

    """

    name, title, paper = "iscam", "IS-CAM", "arXiv:2010.03023"
    forward_passes: ClassVar[str] = "1 + n_samples x K"
    n_samples: PositiveInteger = 10

    def create_masking(self, x: Tensor) -> Masking:
        """Define how IS-CAM masks the input x by the mask H in step i of N: x ∘ H i/N."""
        steps = torch.arange(1, self.n_samples + 1, dtype=torch.float64, device="cpu") / self.n_samples
        factors = steps.to(x).view(-1, *[1] * (x.ndim - 1))
        return Masking(
            lambda inputs, masks, variant_indices: inputs * (masks * factors[variant_indices]), self.n_samples
        )
