"""CAMs weighted by scores: Score-CAM, Group-CAM and Opti-CAM.

- Group-CAM: the layer's channels are masks by the group, laid over a blurred copy of the input.
- Opti-CAM: the mixture of channels under which the input scores most.

Methods that mask the input with one channel of the layer at a time and weigh it by what the model makes of that.

H_k: channel k, A_k, enlarged to the input and then stretched to 0..1 (Wang et al. 2020, eq. 7 and 8).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.explainers.cam.base import SPATIAL_AXIS, BaseWeightedChannels, LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import ADAM_EPSILON, BatchedMixin, RandomMixin
from camscope.explainers.core.evaluation_context import check_one_of, check_positive_integer, check_positive_number
from camscope.explainers.core.resampling import (
    blur_input,
    compute_minimum_and_range,
    enlarge_to_input,
    find_nonconstant_channels,
    scale_to_unit_range,
    select_strongest_channels,
)
from camscope.hooks.gradients import GradientScope, run_with_gradients

MaskingFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(kw_only=True, eq=False, repr=False)
class BaseScoreCAM(BaseWeightedChannels, BatchedMixin):
    """A channel weighs the softmax over channels of its mean score: relu Σ_k α_k A_k. A method writes `create_masking`.

    The papers subtract the score of an empty input, which cancels in the softmax. A constant channel shows nothing: the
    same empty mask serves all of a sample's. `n_channels`: only so many channels, the strongest on average; the others weigh
    nothing (an approximation).
    """

    runs_model: ClassVar[bool] = True
    n_channels: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(None, n_channels=self.n_channels)

    @property
    def n_variants_per_mask(self) -> int:
        """How many inputs each mask makes."""
        return 1

    @property
    def n_variants_of_empty_mask(self) -> int:
        """How many different inputs the empty mask makes."""
        return 1

    @abstractmethod
    def create_masking(self, x: Tensor) -> MaskingFunction:
        """For inputs (N,C,*S): a function of rows (R,C,*S), masks (R,1,*S), turns (R,) -> what the model sees (R,C,*S)."""

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        activation, x = features.activation, features.x
        chosen, live, masking = (
            select_strongest_channels(activation, self.n_channels),
            find_nonconstant_channels(activation),
            self.create_masking(x),
        )
        sample_rows, channels = (chosen & live).nonzero().T
        empty = (chosen & ~live).any(1).nonzero()[:, 0]
        scores = activation.new_full(chosen.shape, -torch.inf)

        def build_masks(rows: Tensor) -> Tensor:
            return scale_to_unit_range(enlarge_to_input(activation[sample_rows[rows], channels[rows]], x))[:, None]

        def nothing(rows: Tensor) -> Tensor:
            return x.new_zeros(1).expand(len(rows), 1, *x.shape[2:])

        scores[sample_rows, channels] = self._compute_mean_scores(
            features, masking, sample_rows, build_masks, self.n_variants_per_mask
        )
        of_nothing = activation.new_zeros(len(scores))
        of_nothing[empty] = self._compute_mean_scores(features, masking, empty, nothing, self.n_variants_of_empty_mask)
        return torch.where(chosen & ~live, of_nothing[:, None], scores).softmax(1)[..., None]

    def _compute_mean_scores(
        self,
        features: LayerFeatures,
        mask_rows: MaskingFunction,
        sample_index: Tensor,
        build_masks: Callable[[Tensor], Tensor],
        n_variants_per_mask: int,
    ) -> Tensor:
        """(M,): the mean score over all turns of M masks of these samples."""
        x = features.x

        def versions(part: slice) -> tuple[Tensor, Tensor]:
            numbers = torch.arange(part.start, part.stop, device=x.device)
            rows = numbers // n_variants_per_mask
            inputs = x if len(x) == 1 else x[sample_index[rows]]
            return mask_rows(inputs, build_masks(rows).to(x.dtype), numbers % n_variants_per_mask), sample_index[rows]

        scores = features.score_inputs(len(sample_index) * n_variants_per_mask, versions)
        return scores.to(features.activation.dtype).view(-1, n_variants_per_mask).mean(1)


@register
class ScoreCAM(BaseScoreCAM):
    """Each channel weighs the softmax of the scores of x ∘ H_k: relu Σ_k α_k A_k (Wang et al. 2020, algorithm 1).

    The scores are logits, as in the algorithm; the authors' code weighs by probabilities, without a softmax over the
    channels, and the figures of the paper fit either.
    """

    name, title, paper = "scorecam", "Score-CAM", "arXiv:1910.01279"
    forward_passes: ClassVar[str] = "1 + K"

    def create_masking(self, x: Tensor) -> MaskingFunction:
        """Rows x ∘ H."""
        return lambda rows, masks, turns: rows * masks


@register
class SSCAM(BaseScoreCAM, RandomMixin):
    """Score-CAM with the mean score of noisy masks: of x ∘ (H_k + σ n_i), n_i ~ N(0, 1) (Wang et al. 2020b).

    `n_samples`: noises; `sigma`: their standard deviation; `noise`: "map", or "input" for x ∘ H_k + σ (max x - min x) n_i,
    the paper's two variants. σ is a fraction of the range of what it is added to, so that no unit matters; the authors'
    code divides by the range and squares. Every channel meets the same noises, so that channels differ by what they show.
    """

    name, title, paper = "sscam", "SS-CAM", "arXiv:2006.14255"
    forward_passes: ClassVar[str] = "1 + n_samples x K"
    n_samples: int = 35
    sigma: float = 0.5
    noise: Literal["map", "input"] = "map"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)
        check_positive_number(sigma=self.sigma)
        check_one_of("noise", self.noise, "map", "input")

    @property
    def n_variants_per_mask(self) -> int:
        """One for each noise."""
        return self.n_samples

    @property
    def n_variants_of_empty_mask(self) -> int:
        """The noises alone are as many."""
        return self.n_samples

    def create_masking(self, x: Tensor) -> MaskingFunction:
        """Rows x ∘ (H + σ n), or x ∘ H + σ (max x - min x) n."""
        shape = (self.n_samples, 1 if self.noise == "map" else x.shape[1], *x.shape[2:])
        drawn = torch.randn(shape, generator=self.generator(), dtype=torch.float32, device="cpu")
        noises = self.sigma * drawn.to(x)
        if self.noise == "map":
            return lambda rows, masks, turns: rows * (masks + noises[turns])
        return lambda rows, masks, turns: rows * masks + compute_value_range(rows) * noises[turns]


@register
class ISCAM(BaseScoreCAM):
    """Score-CAM with the mean score of masks that fade in: of x ∘ H_k i/N, i = 1..N (Naidu et al. 2020).

    `n_samples`: N. The authors' code scales like this; the paper's formula, as others quote it, adds the steps up and
    reaches inputs (N - 1)/2 times as bright as the image. Steps of nothing are nothing: the empty input runs once.
    """

    name, title, paper = "iscam", "IS-CAM", "arXiv:2010.03023"
    forward_passes: ClassVar[str] = "1 + n_samples x K"
    n_samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)

    @property
    def n_variants_per_mask(self) -> int:
        """One for each step."""
        return self.n_samples

    def create_masking(self, x: Tensor) -> MaskingFunction:
        """Rows x ∘ H i/N."""
        numbers = torch.arange(1, self.n_samples + 1, dtype=torch.float64, device="cpu")
        steps = (numbers / self.n_samples).to(x).view(-1, *[1] * (x.ndim - 1))
        return lambda rows, masks, turns: rows * (masks * steps[turns])


def compute_value_range(x: Tensor) -> Tensor:
    """(R,C,*S) -> (R,1,1,..): from the smallest value of each row to the largest."""
    axes = tuple(range(1, x.ndim))
    return x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)


BLUR_SIGMA, BLUR_RADIUS = 50 / 224, 25 / 224  # of an axis: the authors' blur of 51 x 51 pixels for inputs of 224
MASK_QUANTILE = 0.7  # of a mask's cells: the authors' threshold is the 70th percentile


@register
class GroupCAM(LayerExplainer, BatchedMixin):
    """Each group's mask M_g weighs what it restores: relu Σ_g (p(x M_g + b (1 - M_g)) - p(b)) M_g (Zhang et al. 2021).

    b: the input, blurred. p: the class's probability, so that a constant added to all logits changes nothing; the score
    itself where it has no rivals (a callable target, one output). M_g: relu Σ_k mean(g_k) A_k over one of `n_groups`
    groups of neighboring channels, without the cells up to its 70th percentile, enlarged and stretched to 0..1; the
    map is the sum before it is enlarged. The signs of the weights are kept, as in the authors' first code. An empty mask
    restores nothing and costs nothing.
    """

    name, title, paper = "groupcam", "Group-CAM", "arXiv:2103.13859"
    forward_passes: ClassVar[str] = "2 + n_groups"
    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True
    runs_model: ClassVar[bool] = True
    n_groups: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_groups=self.n_groups)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        x, masks = features.x, self._build_group_masks(features)
        background = blur_input(x, BLUR_SIGMA, BLUR_RADIUS)
        sample_rows, groups = masks.flatten(2).any(SPATIAL_AXIS).nonzero().T
        every = torch.arange(len(x), device=x.device)

        def restored(part: slice) -> tuple[Tensor, Tensor]:
            rows = sample_rows[part]
            mask = enlarge_to_input(masks[rows, groups[part]], x)[:, None].to(x.dtype)
            return background[rows].lerp(x[rows], mask), rows

        before = features.compute_input_probabilities(len(x), lambda part: (background[part], every[part]))
        gains = masks.new_zeros(masks.shape[:2])
        gains[sample_rows, groups] = (
            features.compute_input_probabilities(len(sample_rows), restored) - before[sample_rows]
        ).to(masks.dtype)
        return torch.einsum("ng,ng...->n...", gains, masks).relu()

    def _build_group_masks(self, features: LayerFeatures) -> Tensor:
        """(N,G,*s): each group's mask, on such a scale that the enlarged one goes from 0 to 1; zero where it is flat."""
        weights = features.gradient.flatten(2).mean(SPATIAL_AXIS)
        parts = (weights.view(*weights.shape, *[1] * (features.x.ndim - 2)) * features.activation).chunk(
            self.n_groups, 1
        )
        masks = torch.stack([part.sum(1) for part in parts], 1).relu()
        faint = masks.flatten(2).quantile(MASK_QUANTILE, SPATIAL_AXIS)
        masks = masks.where(masks > faint.view(*faint.shape, *[1] * (masks.ndim - 2)), 0)
        return torch.stack([scale_mask_by_enlarged_range(mask, features.x) for mask in masks.unbind(1)], 1)


def scale_mask_by_enlarged_range(mask: Tensor, x: Tensor) -> Tensor:
    """(N,*s): less its least value and divided by its span, both of the enlarged mask."""
    low, span = compute_minimum_and_range(enlarge_to_input(mask, x))
    return (mask - low) / span


@register
class OptiCAM(LayerExplainer):
    """The channel mixture S = Σ_k softmax(u)_k relu(A_k) with the highest score of x ∘ S (Zhang et al. 2024).

    S masks the input enlarged and stretched to 0..1; the map is S less its least cell: zero where the mask hides most.
    `n_steps` of Adam at `learning_rate` start from equal shares, each sample for itself. A constant channel has no share:
    no mask shows it, and its gradient would be rounding. The epsilon of Adam is tiny, so that the unit of the score
    does not matter. The mask hides with zero, the mean color of most preprocessings; the authors' demo with black.
    """

    name, title, paper = "opticam", "Opti-CAM", "arXiv:2301.07002"
    forward_passes: ClassVar[str] = "1 + n_steps"
    backward_passes: ClassVar[str] = "n_steps"
    runs_model: ClassVar[bool] = True
    n_steps: int = 50
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_steps=self.n_steps)
        check_positive_number(learning_rate=self.learning_rate)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s)"""
        channels = features.activation.relu()
        live = find_nonconstant_channels(channels)
        shares = channels.new_zeros(live.shape).masked_fill(~live & live.any(1, keepdim=True), -torch.inf)
        optimizer = torch.optim.Adam([shares], self.learning_rate, eps=ADAM_EPSILON)
        for _ in range(self.n_steps):
            shares.grad = -compute_mixture_gradient(features, channels, shares)
            optimizer.step()
        mixture = mix_channels(shares, channels)
        return mixture - mixture.amin(tuple(range(1, mixture.ndim)), keepdim=True)


def mix_channels(logits: Tensor, channels: Tensor) -> Tensor:
    """(N,K), (N,K,*s) -> (N,*s): Σ_k softmax(u)_k A_k"""
    return torch.einsum("nk,nk...->n...", logits.softmax(1), channels)


def compute_mixture_gradient(features: LayerFeatures, channels: Tensor, logits: Tensor) -> Tensor:
    """(N,K): the gradient of the masked input's score with respect to u. Nobody's `.grad` is touched."""

    def attempt(staying: GradientScope) -> Tensor | None:
        leaf = logits.detach().requires_grad_()
        mask = scale_to_unit_range(enlarge_to_input(mix_channels(leaf, channels), features.x))[:, None]
        with staying:
            scores = features.score(features.x * mask.to(features.x.dtype))
        if not scores.requires_grad:
            return None
        gradients: Sequence[Tensor | None] = torch.autograd.grad(scores.sum(), leaf, allow_unused=True)
        return gradients[0]

    return run_with_gradients(attempt)
