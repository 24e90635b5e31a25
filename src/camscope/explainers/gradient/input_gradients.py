"""Gradients at the input: saliency, guided backpropagation, deconvnet, SmoothGrad. R: backward signal at a ReLU's output."""

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
from camscope.explainers.core.base_method import AttributionMaps
from camscope.explainers.core.batching import RandomMixin, draw_normal, draw_seeds
from camscope.explainers.core.pixel_base import (
    ChannelReduction,
    InputGradientExplainer,
    MultiPassExplainer,
    PerturbedEvaluator,
    PixelExplainer,
)
from camscope.explainers.core.resampling import enlarge_to_input
from camscope.explainers.core.setting_types import NonNegativeNumber, PositiveInteger
from camscope.hooks.gradients import ReluReport, ReluRule, apply_relu_rule
from camscope.targets import Score, full_precision


class RectifiedGradientExplainer(InputGradientExplainer):
    """Base class of input gradients with a modified backward `rule` in every ReLU.

    ReLUs are found in the autograd graph of the score: modules, functions, in place, ReLU6, a clamp or a threshold at 0.
    Other activations, such as a GELU, have their usual gradient, which a note reports. A model without a ReLU is an error.
    """

    rule: ClassVar[ReluRule]

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. All share one forward pass, and each has one backward pass."""
        reports: list[ReluReport] = []
        signals = self.compute_gradients(x, scores, lambda values: reports.append(apply_relu_rule(values, self.rule)))
        notes = describe_relus(reports[-1], self.composed_name)  # of the pass whose graph reached the input
        return [self.compute_maps_from_gradient(x, *pair, *notes) for pair in zip(scores, signals, strict=True)]


def describe_relus(report: ReluReport, title: str) -> list[str]:
    """Return notes about the ReLUs and other activations that the signal reached. Raises ModelError if it reached no ReLU."""
    if not report.relus:
        operations = _format_counts(report.other_activations + report.opaque_operations) or "no activation"
        raise ModelError(
            f"{title} changes the backward pass of ReLUs, but no ReLU can be reached in this model. These operations were found: "
            f"{operations}. Pass saliency, or a method that explains a layer"
        )
    notes = [f"{report.relus.total()} ReLUs were reached: {_format_counts(report.relus)}"]
    for counts, text in (
        (report.other_activations, "other activations, which keep their usual gradient: "),
        (report.opaque_operations, "ReLUs may be hidden, with the usual gradient, in "),
    ):
        notes += [f"{text}{_format_counts(counts)}"] if counts else []
    return notes


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


@register
class GuidedBackprop(RectifiedGradientExplainer):
    """Input gradient in which ReLUs block negative signals and negative inputs z: 1[z > 0] relu(R) (Springenberg et al. 2015).

    The maps are sharp, but nearly the same for every class.

    Use it to see which details the network reacts to, but not to explain a class.

    >>> GuidedBackprop(model).explain(image, "nodule").grid
    (128, 128)
    """

    name, title, paper = "guidedbackprop", "Guided Backprop", "arXiv:1412.6806"
    rule: ClassVar[ReluRule] = "guided"


@register
class Deconvnet(RectifiedGradientExplainer):
    """Input gradient in which ReLUs block negative signals, for any ReLU input: relu(R) (Zeiler & Fergus 2014).

    A max pooling passes the signal to the maxima, as the switches of the paper do. The upper limit of a ReLU6 is ignored.

    Use it to compare with guided backpropagation. Like it, the map depends little on the class.

    >>> Deconvnet(model, channel_reduction="abs").explain(image, "nodule").parameters["channel_reduction"]
    'abs'
    """

    name, title, paper = "deconvnet", "DeconvNet", "arXiv:1311.2901"
    rule: ClassVar[ReluRule] = "deconvnet"


@register
class Saliency(InputGradientExplainer):
    """Absolute gradient at each pixel, maximum over the color channels: max_c |∂f/∂x_c| (Simonyan et al. 2014, section 3.1).

    The map shows which pixels change the score fastest. Use it as the simplest map of single pixels. It is noisy, and
    does not show how much a pixel contributes.

    >>> explanation = Saliency(model).explain(image, "nodule")
    >>> float(explanation.attribution.min()) >= 0, explanation.grid
    (True, (128, 128))
    """

    name, title, paper = "saliency", "Saliency", "arXiv:1312.6034"
    channel_reduction: ChannelReduction = "max"


@register
class InputXGradient(InputGradientExplainer):
    """Input times gradient, summed over the color channels: Σ_c x_c ∂f/∂x_c (Shrikumar et al. 2016).

    The map is the contribution of each pixel to a linear model. Use it as a fast approximation of integrated gradients
    with a baseline of zero.

    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2, bias=False))
    >>> x = torch.rand(1, 1, 8, 8)
    >>> attribution = InputXGradient(linear).attribute(x, 0)
    >>> torch.allclose(attribution.sum(), linear(x)[0, 0], atol=1e-5)
    True
    """

    name, title, paper = "inputxgradient", "Input x Gradient", "arXiv:1605.01713"

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return input times gradient."""
        return x * gradient


@register
class GuidedGradCAM(RectifiedGradientExplainer, LayerSelectionMixin):
    """Grad-CAM, enlarged to the input, times guided backpropagation at each pixel (Selvaraju et al. 2017, section 3.2).

    Use it to see details inside the region that Grad-CAM marks.

    >>> explanation = GuidedGradCAM(model, "layer4").explain(image, "nodule")
    >>> explanation.grid, explanation.layer
    ((128, 128), 'layer4')
    """

    name, title, paper = "guidedgradcam", "Guided Grad-CAM", "arXiv:1610.02391"
    forward_passes = backward_passes = "2"
    rule: ClassVar[ReluRule] = "guided"

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. All share two forward passes, and each has two backward passes."""
        cams = self.with_chosen_layers(x, scores[0]).create_sibling(GradCAM).compute_maps(x, scores)
        chosen = self.describe_chosen_layer(str(cams[0].layer), scores[0].model)
        maps = []
        for cam, signal in zip(cams, super().compute_maps(x, scores), strict=True):
            zero = [part.zero_gradient for part in (cam, signal) if part.zero_gradient is not None]
            # no CAM is negative, so that reducing the channels before or after the product is the same
            product = enlarge_to_input(cam.attribution, x) * signal.attribution
            notes = (*chosen, *cam.notes, *signal.notes)
            maps.append(replace(cam, attribution=product, zero_gradient=zero[0] | zero[-1], notes=notes))
        return maps


@dataclass(kw_only=True, eq=False, repr=False)
class NoisyGradientExplainer(PixelExplainer, MultiPassExplainer, RandomMixin):
    """Base class of methods that combine gradients at noisy copies of the input. A subclass implements `combine_moments`.

    A copy is x + σ z, where z is normal noise. All inputs get the same z.

    Args:
        n_samples: Number of noisy copies.
        sigma: Standard deviation σ of the noise, as a share of the range of each input.

    """

    forward_passes, backward_passes = "1 + n_samples", "n_samples"
    n_samples: PositiveInteger = 25
    sigma: NonNegativeNumber = 0.15

    @abstractmethod
    def combine_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the values (N,C,*S) from the mean and the variance of the gradients over the copies, both float64."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,*S) of one score."""
        evaluator = PerturbedEvaluator(self, x, score)
        moments = [self._compute_mean_and_variance(evaluator, sample) for sample in range(len(x))]
        mean, variance = (torch.stack(moment) for moment in zip(*moments, strict=True))
        gradient = self.combine_moments(mean, variance).to(torch.promote_types(x.dtype, torch.float32))
        reached = (mean != 0) | (variance != 0)
        return AttributionMaps(self.reduce_channels(gradient), zero_gradient=~reached.flatten(1).any(1))

    def _compute_mean_and_variance(self, evaluator: PerturbedEvaluator, sample: int) -> tuple[Tensor, Tensor]:
        """Return mean and variance (C,*S) of the gradients. Differences to the first gradient avoid cancellation."""
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
