"""SmoothGrad, SmoothGrad Squared and VarGrad: gradients at noisy copies of the input."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.pixel_explainers import (
    ChannelReduction,
    MultiPassExplainer,
    PixelExplainer,
)
from camscope.explainers.core.random_mixin import RandomMixin, draw_normal, draw_seeds
from camscope.explainers.core.validated_setting_types import NonNegativeNumber, PositiveInteger
from camscope.hooks.input_gradients import compute_gradient_with_graph, connect_input_leaf
from camscope.targets import Score, full_precision


@dataclass(kw_only=True, eq=False, repr=False)
class NoisyGradientExplainer(PixelExplainer, MultiPassExplainer, RandomMixin):
    """Base class of methods that combine gradients at noisy copies of the input. A subclass implements `combine_moments`.

    A copy is x + σ z, where z is normal noise. All inputs get the same z.

    Args:
        n_samples: Number of noisy copies.
        sigma: Standard deviation σ of the noise, as a share of the range of each input.

    """

    forward_passes, backward_passes = "1 + n_samples", "n_samples"
    differentiable = True
    n_samples: PositiveInteger = 25
    sigma: NonNegativeNumber = 0.15

    @abstractmethod
    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the attribution from the mean and the variance of the gradients at noisy copies (N,C,*S), in float64."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,*S) of one score."""
        evaluator = PerturbedEvaluator(self, x, score)
        moments = [self._compute_mean_and_variance(evaluator, sample) for sample in range(len(x))]
        mean, variance = (torch.stack(moment) for moment in zip(*moments, strict=True))
        gradient = self.combine_moments(mean, variance).to(torch.promote_types(x.dtype, torch.float32))
        reached = (mean != 0) | (variance != 0)
        return AttributionMaps(self.reduce_channels(gradient), zero_gradient=~reached.flatten(1).any(1))

    def compute_differentiable_map(self, x: Tensor, score: Score) -> Tensor:
        """Compute the map (N,*S) with its graph. One pass per noisy copy of the batch."""
        full, axes = full_precision(x), tuple(range(1, x.ndim))
        spread = self.sigma * (full.amax(axes, keepdim=True) - full.amin(axes, keepdim=True))
        check_finite("the score", score(x), self.on_nonfinite)  # the clean pass fixes the class
        gradients = []
        for seed in draw_seeds(self.n_samples, self.generator()):
            leaf = connect_input_leaf((full + spread * draw_normal([seed], full[0])).to(x.dtype))
            gradients.append(compute_gradient_with_graph(score(leaf.clone()), leaf))
        stacked = torch.stack(gradients).double()
        moments = stacked.mean(0), stacked.var(0, correction=0)
        return self.reduce_channels(self.combine_moments(*moments).to(torch.promote_types(x.dtype, torch.float32)))

    def _compute_mean_and_variance(self, evaluator: PerturbedEvaluator, sample: int) -> tuple[Tensor, Tensor]:
        """Compute the mean and the variance (C,*S) of the gradients at noisy copies of one sample."""
        x = full_precision(evaluator.x[sample])
        spread = self.sigma * (x.amax() - x.amin())
        seeds = draw_seeds(self.n_samples, self.generator())
        first: list[Tensor] = []
        total, squares = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))

        def add_gradients(part: slice) -> None:
            noisy = x + spread * draw_normal(seeds[part], x)
            gradients = evaluator.compute_scores_and_gradients(sample, noisy.to(evaluator.x.dtype))[1].double()
            differences = gradients - (first or gradients)[0]  # the last step that can run out of memory
            first.extend(gradients[:1].clone() if not first else ())
            for difference in differences:
                total.add_(difference)
                squares.addcmul_(difference, difference)

        evaluator.process_chunks(sample, self.n_samples, add_gradients, with_gradients=True)
        shift = total / self.n_samples
        return first[0] + shift, (squares / self.n_samples - shift.square()).clamp_(min=0)


@register
class SmoothGrad(NoisyGradientExplainer):
    """Absolute mean gradient of noisy copies of the input: Σ_c |1/n Σ_t ∂f(x + σ z_t)/∂x_c| (Smilkov et al. 2017).

    The channels are reduced by their absolute values, as in the authors' figures; `channel_reduction="sum"` keeps the signs.

    Use it if a saliency map is too noisy to read.

    >>> explanation = SmoothGrad(model, n_samples=4, seed=1).explain(image, "nodule")
    >>> explanation.parameters["seed"], explanation.grid
    (1, (128, 128))
    """

    name, title, paper = "smoothgrad", "SmoothGrad", "arXiv:1706.03825"
    channel_reduction: ChannelReduction = "abs"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the mean gradient."""
        return mean


@register
class SmoothGradSquared(NoisyGradientExplainer):
    """Mean squared gradient of noisy copies of the input: 1/n Σ_t (∂f(x + σ z_t)/∂x)² (Hooker et al. 2019).

    Use it where the sign of the gradient differs between the copies, so that their mean is near 0.

    >>> SmoothGradSquared(model, n_samples=4).explain(image, "nodule").status
    'ok'
    """

    name, title, paper = "smoothgradsquared", "SmoothGrad Squared", "arXiv:1806.10758"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the mean squared gradient."""
        return mean.square() + variance


@register
class VarGrad(NoisyGradientExplainer):
    """Variance of the gradient over noisy copies of the input: 1/n Σ_t (g_t - 1/n Σ g)² (Adebayo et al. 2018).

    The map shows where the gradient changes, not its size. It is 0 where the score is linear.

    Use it to see where a saliency map is unstable.

    >>> explanation = VarGrad(model, n_samples=4).explain(image, "nodule")
    >>> float(explanation.attribution.min()) >= 0
    True
    """

    name, title, paper = "vargrad", "VarGrad", "arXiv:1810.03307"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the variance of the gradient."""
        return variance
