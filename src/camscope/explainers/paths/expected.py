"""Expected gradients and GradientSHAP: integrated gradients from many baselines, one drawn point on each path."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.baselines import WithBackground, starts
from camscope.explainers.draws import normal, seeds
from camscope.explainers.paths.base import Followed, PathExplainer, difference
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_number
from camscope.targets import full_precision


@dataclass(frozen=True)
class Draws:
    """What is drawn for one sample: of each turn the baseline's number, how far on the way, and its noise's own seed."""

    picks: Tensor
    shares: Tensor
    seeds: Sequence[int]

    @classmethod
    def of(cls, samples: int, baselines: int, drawn: torch.Generator) -> "Draws":
        """A point in each of equal steps, and in every so many steps each baseline once, in an order of its own.

        As draws that know nothing of one another, but nearer to what they are the mean of.
        """
        rounds = [torch.randperm(baselines, generator=drawn, device="cpu") for _ in range(-(-samples // baselines))]
        places = torch.arange(samples, device="cpu") + torch.rand(
            samples, generator=drawn, dtype=torch.float64, device="cpu"
        )
        return cls(torch.cat(rounds)[:samples], places / samples, seeds(samples, drawn))


@register
class ExpectedGradients(WithBackground, PathExplainer):
    """E[(x - x') ∂f(x' + a (x - x'))/∂x] over baselines x' of a background and a in 0..1 (Erion et al. 2021).

    `samples`: draws, spread evenly over the background and a, which leaves the expectation as it is.
    """

    name, paper = "expectedgradients", "arXiv:1906.10670"
    forwards: ClassVar[str] = "1 + references + samples"
    backwards: ClassVar[str] = "samples"
    samples: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(samples=self.samples)
        self.references: int = min(len(self.baselines()), self.samples)  # how many of them are looked at

    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) for each of the background that is drawn at all."""
        return starts(self.baselines(), x, self, self._draws().picks.unique().tolist())

    def followed(self, runs: Runs, sample: int, starts: Sequence[Tensor]) -> Followed:
        """The mean over all draws."""
        x, draws, baselines = runs.x[sample], self._draws(), torch.stack(list(starts))
        picks = draws.picks.unique(return_inverse=True)[1]
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            begins = baselines[picks[part].to(x.device)]
            ends = self.ends(x, draws, part)
            shares = draws.shares[part].to(x).view(-1, *[1] * x.ndim)
            gradients = runs.gradients(sample, begins + (ends - begins) * shares)[1]
            total.add_((difference(begins, ends) * gradients).sum(0, dtype=torch.float64))

        runs.in_turns(sample, self.samples, work, gradients=True)
        often = picks.bincount().to(runs.values) / self.samples
        change = runs.values[sample] - (often * self._scores(runs, sample, baselines)).sum()
        moved = not all(torch.equal(one, x) for one in baselines)
        return Followed((total / self.samples).to(full_precision(x).dtype), change, self.samples, moved, self.said)

    def _draws(self) -> Draws:
        return Draws.of(self.samples, len(self.baselines()), self.drawing())

    def ends(self, x: Tensor, draws: Draws, part: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): where the drawn paths end."""
        return x.expand(part.stop - part.start, *x.shape)

    def _scores(self, runs: Runs, sample: int, baselines: Tensor) -> Tensor:
        """(M,): those of the baselines."""
        found = torch.empty(len(baselines), dtype=runs.values.dtype, device=baselines.device)

        def work(part: slice) -> None:
            found[part] = runs.scores(sample, baselines[part])

        runs.in_turns(sample, len(baselines), work)
        return found


@register
class GradientSHAP(ExpectedGradients):
    """E[(z - x') ∂f(x' + a (z - x'))/∂x], z = x + noise: expected gradients of noisy copies (Lundberg & Lee 2017).

    `sigma`: its standard deviation, as a share of the span between the sample's least and largest value. Without noise
    these are expected gradients; with it the map is complete on the average only as far as the score does not see it.
    """

    name, paper = "gradientshap", "arXiv:1705.07874"
    sigma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_number(low=0, sigma=self.sigma)

    def ends(self, x: Tensor, draws: Draws, part: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): noisy copies."""
        return x + normal(draws.seeds[part], x) * (self.sigma * (x.amax() - x.amin()))
