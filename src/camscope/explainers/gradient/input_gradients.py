"""Gradients at the input: saliency, guided backpropagation, deconvnet and SmoothGrad.

- `RectifiedGradientExplainer`: base of methods that pass only positive signals back through ReLUs.
- The plain gradient at the input, and its product with the input.
- Guided Grad-CAM: Grad-CAM times guided backpropagation.
- Gradients at noisy copies of the input: their mean, the mean of their squares, their variance.

R is the signal that arrives at the output of a ReLU.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import ModelError
from camscope.explainers.cam.gradient import GradCAM
from camscope.explainers.cam.layer_pass import LayerSelectionMixin
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import RandomMixin, draw_normal, draw_seeds
from camscope.explainers.core.evaluation_context import check_number, check_positive_integer
from camscope.explainers.core.maps import AttributionMaps
from camscope.explainers.core.pixel_base import (
    ChannelReduction,
    InputGradientExplainer,
    MultiPassExplainer,
    PerturbedEvaluator,
    PixelExplainer,
)
from camscope.explainers.core.resampling import enlarge_to_input
from camscope.hooks.gradients import ReluReport, ReluRule, apply_relu_rule
from camscope.targets import Score, full_precision


class RectifiedGradientExplainer(InputGradientExplainer):
    """The gradient at the input, by another `rule` in every ReLU; a ModelError where there is none.

    ReLUs are found in the score's graph, however they were called: modules, functions, in place, ReLU6, a clamp or a
    threshold at 0. Of an activation that is none, such as a GELU, the gradient is its own, and a note says so.
    """

    rule: ClassVar[ReluRule]

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The signal that arrives."""
        return gradient

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        met: list[ReluReport] = []
        signals = self.compute_gradients(x, scores, lambda values: met.append(apply_relu_rule(values, self.rule)))
        notes = describe_relus(met[-1], self.full_name)  # of the pass whose graph reached the input
        return [self.compute_maps_from_gradient(x, *pair, *notes) for pair in zip(scores, signals, strict=True)]


def describe_relus(report: ReluReport, title: str) -> list[str]:
    """Describe the ReLUs that the signal reached, and other activations."""
    if not report.relus:
        operations = _format_counts(report.other_activations + report.opaque_operations) or "no activation at all"
        raise ModelError(
            f"{title} changes the way back through ReLUs, and none can be reached in this model (what was found: {operations}); "
            f"the map would be the plain gradient's: pass saliency, or a method that looks at a layer"
        )
    notes = [f"{report.relus.total()} ReLUs were reached: {_format_counts(report.relus)}"]
    if report.other_activations:
        notes.append(
            f"activations that are no ReLUs, through which the gradient is their own: {_format_counts(report.other_activations)}"
        )
    if report.opaque_operations:
        notes.append(f"ReLUs may be hidden, with the plain gradient, in {_format_counts(report.opaque_operations)}")
    return notes


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


@register
class GuidedBackprop(RectifiedGradientExplainer):
    """Through each ReLU goes what is positive of the signal, where its input z is: 1[z > 0] relu(R) (Springenberg et al. 2015).

    The maps are sharp, but nearly the same for every class.
    """

    name, title, paper = "guidedbackprop", "Guided Backprop", "arXiv:1412.6806"
    rule: ClassVar[ReluRule] = "guided"


@register
class Deconvnet(RectifiedGradientExplainer):
    """Through each ReLU goes what is positive of the signal, whatever its input: relu(R) (Zeiler & Fergus 2014).

    A max pooling hands it to the places of the maxima, as the paper's switches do. The limit of a ReLU6 does not count.
    """

    name, title, paper = "deconvnet", "DeconvNet", "arXiv:1311.2901"
    rule: ClassVar[ReluRule] = "deconvnet"


@register
class Saliency(InputGradientExplainer):
    """How much each pixel would change the score: max_c |∂f/∂x_c| (Simonyan et al. 2014, section 3.1)."""

    name, title, paper = "saliency", "Saliency", "arXiv:1312.6034"
    channel_reduction: ChannelReduction = "max"

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """∂f/∂x"""
        return gradient


@register
class InputXGradient(InputGradientExplainer):
    """The score as far as it is linear in the input: Σ_c x_c ∂f/∂x_c (Shrikumar et al. 2016)."""

    name, title, paper = "inputxgradient", "Input x Gradient", "arXiv:1605.01713"

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """X ∂f/∂x"""
        return x * gradient


@register
class GuidedGradCAM(RectifiedGradientExplainer, LayerSelectionMixin):
    """Grad-CAM of a layer, linearly enlarged, times guided backpropagation, cell by cell (Selvaraju et al. 2017, section 3.2)."""

    name, title, paper = "guidedgradcam", "Guided Grad-CAM", "arXiv:1610.02391"
    forward_passes: ClassVar[str] = "2"
    backward_passes: ClassVar[str] = "2"
    rule: ClassVar[ReluRule] = "guided"

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The maps of several scores from two forward passes, two backward passes each."""
        cams = self.resolve(x, scores[0]).create_sibling(GradCAM).compute_maps(x, scores)
        signals = super().compute_maps(x, scores)
        chosen = self.describe_chosen_layer(str(cams[0].layer), scores[0].model)
        return [
            self._multiply_cam_and_signal(x, cam, signal, chosen) for cam, signal in zip(cams, signals, strict=True)
        ]

    def _multiply_cam_and_signal(
        self, x: Tensor, cam: AttributionMaps, signal: AttributionMaps, layer_notes: Sequence[str]
    ) -> AttributionMaps:
        nothing = [part.zero_gradient for part in (cam, signal) if part.zero_gradient is not None]
        return replace(
            cam,
            attribution=enlarge_to_input(cam.attribution, x)
            * signal.attribution,  # no CAM is negative: over the channels before or after is the same
            zero_gradient=nothing[0] | nothing[-1],
            notes=(*layer_notes, *cam.notes, *signal.notes),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NoisyGradientExplainer(PixelExplainer, MultiPassExplainer, RandomMixin):
    """Base of methods that combine gradients at copies x + σ z of the input, z normal. Implement `combine_moments`.

    `n_samples` is the number of copies. `sigma` is σ as a share of the range of each input. Every input gets the same z.
    """

    n_samples: int = 25
    sigma: float = 0.15

    forward_passes: ClassVar[str] = "1 + n_samples"
    backward_passes: ClassVar[str] = "n_samples"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_samples=self.n_samples)
        check_number(low=0, sigma=self.sigma)

    @abstractmethod
    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """(N,C,*S) twice, in float64: of the gradients over the copies -> (N,C,*S)."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """See `reduce_channels`."""
        runs = PerturbedEvaluator(self, x, score)
        moments = [self._compute_moments(runs, sample) for sample in range(len(x))]
        mean, variance = (torch.stack(moment) for moment in zip(*moments, strict=True))
        gradient = self.combine_moments(mean, variance).to(torch.promote_types(x.dtype, torch.float32))
        reached = (mean != 0) | (variance != 0)
        return AttributionMaps(self.reduce_channels(gradient), zero_gradient=~reached.flatten(1).any(1))

    def _compute_moments(self, evaluator: PerturbedEvaluator, sample: int) -> tuple[Tensor, Tensor]:
        """Return mean and variance, both (C,*S), from differences to the first gradient, which avoids cancellation."""
        x = full_precision(evaluator.x[sample])
        spread = self.sigma * (x.amax() - x.amin())
        each = draw_seeds(self.n_samples, self.generator())
        first: list[Tensor] = []
        total, squares = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))

        def work(part: slice) -> None:
            noisy = x + spread * draw_normal(each[part], x)
            gradients = evaluator.compute_gradients(sample, noisy.to(evaluator.x.dtype))[1].double()
            apart = gradients - (first or gradients)[0]  # the last that takes memory: from here on all of it is added
            first.extend(gradients[:1].clone() if not first else ())
            for gradient_row in apart:
                total.add_(gradient_row)
                squares.addcmul_(gradient_row, gradient_row)

        evaluator.process_chunks(sample, self.n_samples, work, with_gradients=True)
        shift = total / self.n_samples
        return first[0] + shift, (squares / self.n_samples - shift.square()).clamp_(min=0)


@register
class SmoothGrad(NoisyGradientExplainer):
    """The mean of noisy copies' gradients: Σ_c |1/n Σ_t ∂f(x + σ z_t)/∂x_c| (Smilkov et al. 2017).

    Their sizes are added over the channels, as the authors draw it; `channels="sum"` keeps the signs.
    """

    name, title, paper = "smoothgrad", "SmoothGrad", "arXiv:1706.03825"
    channel_reduction: ChannelReduction = "abs"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ g_t"""
        return mean


@register
class SmoothGradSquared(NoisyGradientExplainer):
    """The mean of noisy copies' squared gradients: 1/n Σ_t (∂f(x + σ z_t)/∂x)² (Hooker et al. 2019)."""

    name, title, paper = "smoothgradsquared", "SmoothGrad Squared", "arXiv:1806.10758"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ g_t²"""
        return mean.square() + variance


@register
class VarGrad(NoisyGradientExplainer):
    """The variance of noisy copies' gradients: 1/n Σ_t (g_t - 1/n Σ g)² (Adebayo et al. 2018).

    It is 0 where the score is linear: the map shows where the gradient changes, not how large it is.
    """

    name, title, paper = "vargrad", "VarGrad", "arXiv:1810.03307"

    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ (g_t - mean)²"""
        return variance
