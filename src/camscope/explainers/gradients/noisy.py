"""Gradients at noisy copies of the input: their mean, the mean of their squares, their variance."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.draws import Seeded, normal, seeds
from camscope.explainers.maps import Maps
from camscope.explainers.pixels import Channels, PixelExplainer
from camscope.explainers.runs import ManyRuns, Runs
from camscope.explainers.scope import expect_count, expect_number
from camscope.targets import Score, full_precision


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
