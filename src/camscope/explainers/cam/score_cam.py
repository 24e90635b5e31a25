"""CAMs that weight channels by the score of the masked input: Score-CAM, SS-CAM, IS-CAM, Group-CAM and Opti-CAM.

H_k is channel k, A_k, enlarged to the input and then scaled to 0..1 (Wang et al. 2020, eq. 7 and 8).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.cam.base import SPATIAL_AXIS, BaseWeightedChannels, LayerExplainer, compute_value_range
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import ADAM_EPSILON, BatchedMixin, RandomMixin
from camscope.explainers.core.resampling import (
    blur_input,
    compute_minimum_and_range,
    enlarge_to_input,
    find_nonconstant_channels,
    scale_to_unit_range,
    select_strongest_channels,
)
from camscope.explainers.core.setting_types import PositiveInteger, PositiveNumber
from camscope.hooks.gradients import GradientScope, run_with_gradients


class Masking(NamedTuple):
    """How masks hide parts of the input.

    `apply_masks` takes inputs (R,C,*S), masks (R,1,*S) and the number of the variant (R,), as each mask has `n_variants`.
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
        """Return how masks are applied to inputs (N,C,*S)."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the softmax of the channel scores."""
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
        """Return the score (M,) of inputs under M masks, each the mean over all variants of the mask."""
        x = features.x

        def build_inputs(part: slice) -> tuple[Tensor, Tensor]:
            numbers = torch.arange(part.start, part.stop, device=x.device)
            rows = numbers // n_variants
            inputs = x if len(x) == 1 else x[sample_index[rows]]
            return apply_masks(inputs, build_masks(rows).to(x.dtype), numbers % n_variants), sample_index[rows]

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
        """Return the masking x ∘ H."""
        return Masking(lambda inputs, masks, numbers: inputs * masks)


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
        """Return the masking x ∘ (H + σ n), or x ∘ H + σ (max x - min x) n."""
        shape = (self.n_samples, 1 if self.noise == "map" else x.shape[1], *x.shape[2:])
        drawn = torch.randn(shape, generator=self.generator(), dtype=torch.float32, device="cpu")
        noises = self.sigma * drawn.to(x)

        def apply_masks(inputs: Tensor, masks: Tensor, numbers: Tensor) -> Tensor:
            if self.noise == "map":
                return inputs * (masks + noises[numbers])
            return inputs * masks + compute_value_range(inputs) * noises[numbers]

        return Masking(apply_masks, self.n_samples, self.n_samples)


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
        """Return the masking x ∘ H i/N."""
        steps = torch.arange(1, self.n_samples + 1, dtype=torch.float64, device="cpu") / self.n_samples
        factors = steps.to(x).view(-1, *[1] * (x.ndim - 1))
        return Masking(lambda inputs, masks, numbers: inputs * (masks * factors[numbers]), self.n_samples)


BLUR_SIGMA, BLUR_RADIUS = 50 / 224, 25 / 224  # of an axis: the authors' blur of 51 x 51 pixels for inputs of 224
MASK_QUANTILE = 0.7  # of a mask's cells: the authors' threshold is the 70th percentile


@register
class GroupCAM(LayerExplainer, BatchedMixin):
    """Sum of channel groups, each weighted by the probability gained if it unblurs the input (Zhang et al. 2021).

    The map is relu Σ_g (p(x M_g + b (1 - M_g)) - p(b)) M_g. b is the blurred input. p is the class's probability, so
    that a constant added to all logits changes nothing; for a callable target or a model with one output it is the
    score. M_g is relu Σ_k mean(g_k) A_k over one of `n_groups` groups of neighboring channels, without the cells up to
    its 70th percentile, enlarged and scaled to 0..1. The map is the sum before it is enlarged. The weights keep their
    signs, as in the authors' first code. An empty mask is not run. Use it as a faster Score-CAM: its passes do not grow
    with the channels.

    Args:
        n_groups: Number of channel groups.

    >>> GroupCAM(model, "layer4", n_groups=8).explain(image, "nodule").status
    'ok'

    """

    name, title, paper = "groupcam", "Group-CAM", "arXiv:2103.13859"
    forward_passes, backward_passes = "2 + n_groups", "1"
    needs_gradient = runs_model = True
    n_groups: PositiveInteger = 32

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the sum of the masks, weighted by the gained probability."""
        x, masks = features.x, self._build_group_masks(features)
        background = blur_input(x, BLUR_SIGMA, BLUR_RADIUS)
        samples, groups = masks.flatten(2).any(SPATIAL_AXIS).nonzero().T
        sample_index = torch.arange(len(x), device=x.device)

        def build_restored_inputs(part: slice) -> tuple[Tensor, Tensor]:
            rows = samples[part]
            mask = enlarge_to_input(masks[rows, groups[part]], x)[:, None].to(x.dtype)
            return background[rows].lerp(x[rows], mask), rows

        def build_blurred_inputs(part: slice) -> tuple[Tensor, Tensor]:
            return background[part], sample_index[part]

        blurred = features.score_inputs(len(x), build_blurred_inputs, as_probability=True)
        restored = features.score_inputs(len(samples), build_restored_inputs, as_probability=True)
        gains = masks.new_zeros(masks.shape[:2])
        gains[samples, groups] = (restored - blurred[samples]).to(masks.dtype)
        return torch.einsum("ng,ng...->n...", gains, masks).relu()

    def _build_group_masks(self, features: LayerFeatures) -> Tensor:
        """Return the mask of each channel group (N,G,*s). The enlarged masks lie in 0..1, and a constant mask is 0."""
        weights = features.gradient.flatten(2).mean(SPATIAL_AXIS)
        channels = weights.view(*weights.shape, *[1] * (features.x.ndim - 2)) * features.activation
        masks = torch.stack([group.sum(1) for group in channels.chunk(self.n_groups, 1)], 1).relu()
        thresholds = masks.flatten(2).quantile(MASK_QUANTILE, SPATIAL_AXIS)
        masks = masks.where(masks > thresholds.view(*thresholds.shape, *[1] * (masks.ndim - 2)), 0)
        scaled = []
        for mask in masks.unbind(1):
            low, span = compute_minimum_and_range(enlarge_to_input(mask, features.x))
            scaled.append((mask - low) / span)
        return torch.stack(scaled, 1)


@register
class OptiCAM(LayerExplainer):
    """Weighted mean of the channels, optimized to maximize the score of the input that it masks (Zhang et al. 2024).

    The mean is S = Σ_k softmax(u)_k relu(A_k). Enlarged and scaled to 0..1, it masks the input as x ∘ S. The map is S
    minus its least cell, so it is 0 where the mask hides most. Adam starts from equal shares, separately for each
    sample. A constant channel has no share: no mask shows it, and its gradient would be rounding. The epsilon of Adam
    is tiny, so the unit of the score does not matter. Hidden pixels are zero, the mean color of most preprocessings; in
    the authors' demo they are black. Use it for maps whose cells keep the score if all other pixels are hidden: this is
    what it optimizes.

    Args:
        n_steps: Steps of Adam.
        learning_rate: Learning rate of Adam.

    >>> explanation = OptiCAM(model, "layer4", n_steps=5).explain(image, "nodule")
    >>> float(explanation.attribution.min())
    0.0

    """

    name, title, paper = "opticam", "Opti-CAM", "arXiv:2301.07002"
    forward_passes, backward_passes = "1 + n_steps", "n_steps"
    runs_model: ClassVar[bool] = True
    n_steps: PositiveInteger = 50
    learning_rate: PositiveNumber = 0.1

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return the optimized mean of the channels, minus its smallest cell."""
        channels = features.activation.relu()
        live = find_nonconstant_channels(channels)
        shares = channels.new_zeros(live.shape).masked_fill(~live & live.any(1, keepdim=True), -torch.inf)
        optimizer = torch.optim.Adam([shares], self.learning_rate, eps=ADAM_EPSILON)
        for _ in range(self.n_steps):
            shares.grad = -_compute_logit_gradient(features, channels, shares)
            optimizer.step()
        mixture = _average_channels(shares, channels)
        return mixture - mixture.amin(tuple(range(1, mixture.ndim)), keepdim=True)


def _average_channels(logits: Tensor, channels: Tensor) -> Tensor:
    """Return the mean (N,*s) of channels (N,K,*s), weighted by the softmax of logits (N,K)."""
    return torch.einsum("nk,nk...->n...", logits.softmax(1), channels)


def _compute_logit_gradient(features: LayerFeatures, channels: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient (N,K) of the masked input's score with respect to the logits of the channel weights."""

    def compute_gradient_in(scope: GradientScope) -> Tensor | None:
        leaf = logits.detach().requires_grad_()
        mask = scale_to_unit_range(enlarge_to_input(_average_channels(leaf, channels), features.x))[:, None]
        with scope:
            scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            return None
        gradients: Sequence[Tensor | None] = torch.autograd.grad(scores.sum(), leaf, allow_unused=True)
        return gradients[0]

    return run_with_gradients(compute_gradient_in)
