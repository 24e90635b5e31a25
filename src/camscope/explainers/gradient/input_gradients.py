"""Gradients at the input: saliency, guided backpropagation, deconvnet and SmoothGrad.

- Rectified: what every method shares that lets only positive gradients back through ReLUs.
- The bare gradient at the input, and the input times it.
- Guided Grad-CAM: where Grad-CAM looks, in the detail of guided backpropagation.
- Gradients at noisy copies of the input: their mean, the mean of their squares, their variance.

Gradients of which only what is positive goes back through ReLUs. R: the signal that arrives at a ReLU's output.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import ModelError
from camscope.explainers.cam.base import AtLayer
from camscope.explainers.cam.gradient import GradCAM
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import Seeded, normal, seeds
from camscope.explainers.core.evaluation_context import expect_count, expect_number
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import Channels, ManyRuns, OneGradient, PixelExplainer, Runs
from camscope.explainers.core.resampling import enlarged
from camscope.hooks.gradients import Met, Rule, rectify
from camscope.targets import Score, full_precision


class Rectified(OneGradient):
    """The gradient at the input, by another `rule` in every ReLU; a ModelError where there is none.

    ReLUs are found in the score's graph, however they were called: modules, functions, in place, ReLU6, a clamp or a
    threshold at 0. Of an activation that is none, such as a GELU, the gradient is its own, and a note says so.
    """

    rule: ClassVar[Rule]

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The signal that arrives."""
        return gradient

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        met: list[Met] = []
        signals = self.gradients(x, scores, lambda values: met.append(rectify(values, self.rule)))
        notes = said(met[-1], self.title)  # of the pass whose graph reached the input
        return [self.map_of(x, *one, *notes) for one in zip(scores, signals, strict=True)]


def said(met: Met, title: str) -> list[str]:
    """What a result says of the ReLUs that were reached, and of what was not."""
    if not met.relus:
        found = _listed(met.others + met.hiding) or "no activation at all"
        raise ModelError(
            f"{title} changes the way back through ReLUs, and none can be reached in this model (what was found: {found}); "
            f"the map would be the plain gradient's: pass saliency, or a method that looks at a layer"
        )
    notes = [f"{met.relus.total()} ReLUs were reached: {_listed(met.relus)}"]
    if met.others:
        notes.append(f"activations that are no ReLUs, through which the gradient is their own: {_listed(met.others)}")
    if met.hiding:
        notes.append(f"ReLUs may be hidden, with the plain gradient, in {_listed(met.hiding)}")
    return notes


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


@register
class GuidedBackprop(Rectified):
    """Through each ReLU goes what is positive of the signal, where its input z is: 1[z > 0] relu(R) (Springenberg et al. 2015).

    Sharp, and nearly the same for every class: it shows what the network sees, not what it decides by.
    """

    name, paper = "guidedbackprop", "arXiv:1412.6806"
    rule: ClassVar[Rule] = "guided"


@register
class Deconvnet(Rectified):
    """Through each ReLU goes what is positive of the signal, whatever its input: relu(R) (Zeiler & Fergus 2014).

    A max pooling hands it to the places of the maxima, as the paper's switches do. The limit of a ReLU6 does not count.
    """

    name, paper = "deconvnet", "arXiv:1311.2901"
    rule: ClassVar[Rule] = "deconvnet"


@register
class Saliency(OneGradient):
    """How much each pixel would change the score: max_c |∂f/∂x_c| (Simonyan et al. 2014, section 3.1)."""

    name, paper = "saliency", "arXiv:1312.6034"
    channels: Channels = "max"

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """∂f/∂x"""
        return gradient


@register
class InputXGradient(OneGradient):
    """The score as far as it is linear in the input: Σ_c x_c ∂f/∂x_c (Shrikumar et al. 2016)."""

    name, paper = "inputxgradient", "arXiv:1605.01713"

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """X ∂f/∂x"""
        return x * gradient


@register
class GuidedGradCAM(Rectified, AtLayer):
    """Grad-CAM of a layer, linearly enlarged, times guided backpropagation, cell by cell (Selvaraju et al. 2017, section 3.2)."""

    name, paper = "guidedgradcam", "arXiv:1610.02391"
    forwards: ClassVar[str] = "2"
    backwards: ClassVar[str] = "2"
    rule: ClassVar[Rule] = "guided"

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from two forward passes, two backward passes each."""
        cams = self.settled(x, scores[0]).sibling(GradCAM).maps(x, scores)
        signals = super().maps(x, scores)
        chosen = self.told(str(cams[0].layer), scores[0].model)
        return [self._product(x, cam, signal, chosen) for cam, signal in zip(cams, signals, strict=True)]

    def _product(self, x: Tensor, cam: Maps, signal: Maps, chosen: Sequence[str]) -> Maps:
        nothing = [one.zero_gradient for one in (cam, signal) if one.zero_gradient is not None]
        return replace(
            cam,
            heat=enlarged(cam.heat, x)
            * signal.heat,  # no CAM is negative: over the channels before or after is the same
            zero_gradient=nothing[0] | nothing[-1],
            notes=(*chosen, *cam.notes, *signal.notes),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Noisy(PixelExplainer, ManyRuns, Seeded):
    """What gradients say at copies x + σ z of the input, z normal. A method writes `of_moments`.

    `samples`: copies; `sigma`: σ as a share of the way from each input's least number to its largest. Every input is
    given the same z.
    """

    samples: int = 25
    sigma: float = 0.15

    forwards: ClassVar[str] = "1 + samples"
    backwards: ClassVar[str] = "samples"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(samples=self.samples)
        expect_number(low=0, sigma=self.sigma)

    @abstractmethod
    def of_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """(N,C,*S) twice, in float64: of the gradients over the copies -> (N,C,*S)."""

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """See `over_channels`."""
        runs = Runs(self, x, score)
        moments = [self._moments(runs, sample) for sample in range(len(x))]
        mean, variance = (torch.stack(one) for one in zip(*moments, strict=True))
        found = self.of_moments(mean, variance).to(torch.promote_types(x.dtype, torch.float32))
        reached = (mean != 0) | (variance != 0)
        return Maps(self.over_channels(found), zero_gradient=~reached.flatten(1).any(1))

    def _moments(self, runs: Runs, sample: int) -> tuple[Tensor, Tensor]:
        """(C,*S) twice: mean and variance, by way of differences from the first, which cancel nothing."""
        x = full_precision(runs.x[sample])
        spread = self.sigma * (x.amax() - x.amin())
        each = seeds(self.samples, self.drawing())
        first: list[Tensor] = []
        total, squares = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))

        def work(part: slice) -> None:
            noisy = x + spread * normal(each[part], x)
            gradients = runs.gradients(sample, noisy.to(runs.x.dtype))[1].double()
            apart = gradients - (first or gradients)[0]  # the last that takes memory: from here on all of it is added
            first.extend(gradients[:1].clone() if not first else ())
            for one in apart:
                total.add_(one)
                squares.addcmul_(one, one)

        runs.in_turns(sample, self.samples, work, gradients=True)
        shift = total / self.samples
        return first[0] + shift, (squares / self.samples - shift.square()).clamp_(min=0)


@register
class SmoothGrad(Noisy):
    """The mean of noisy copies' gradients: Σ_c |1/n Σ_t ∂f(x + σ z_t)/∂x_c| (Smilkov et al. 2017).

    Their sizes are added over the channels, as the authors draw it; `channels="sum"` keeps the signs.
    """

    name, paper = "smoothgrad", "arXiv:1706.03825"
    channels: Channels = "abs"

    def of_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ g_t"""
        return mean


@register
class SmoothGradSquared(Noisy):
    """The mean of noisy copies' squared gradients: 1/n Σ_t (∂f(x + σ z_t)/∂x)² (Hooker et al. 2019)."""

    name, paper = "smoothgradsquared", "arXiv:1806.10758"

    def of_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ g_t²"""
        return mean.square() + variance


@register
class VarGrad(Noisy):
    """The variance of noisy copies' gradients: 1/n Σ_t (g_t - 1/n Σ g)² (Adebayo et al. 2018).

    0 wherever the score is linear: it says where the gradient changes, not how large it is.
    """

    name, paper = "vargrad", "arXiv:1810.03307"

    def of_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """1/n Σ (g_t - mean)²"""
        return variance
