"""Expected gradients and GradientSHAP: integrated gradients from many baselines, one drawn point on each path."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.baselines import Baseline, filled, several
from camscope.explainers.paths.base import Followed, PathExplainer, difference
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_number, expect_whole
from camscope.targets import full_precision

NOTHING: tuple[Baseline, ...] = ("zero", "mean", "blur", "noise")  # where no background is given


@dataclass(frozen=True)
class Draws:
    """What is drawn for one sample: of each turn the baseline's number, how far on the way, and its noise's own seed."""

    picks: Tensor
    shares: Tensor
    seeds: Tensor

    @classmethod
    def of(cls, samples: int, baselines: int, seed: int) -> "Draws":
        """A point in each of equal steps, and in every so many steps each baseline once, in an order of its own.

        As draws that know nothing of one another, but nearer to what they are the mean of.
        """
        drawn = torch.Generator().manual_seed(seed)
        rounds = [torch.randperm(baselines, generator=drawn) for _ in range(-(-samples // baselines))]
        places = torch.arange(samples) + torch.rand(samples, generator=drawn, dtype=torch.float64)
        seeds = torch.randint(2**62, (samples,), generator=drawn)
        return cls(torch.cat(rounds)[:samples], places / samples, seeds)

    def noise(self, part: slice, x: Tensor) -> Tensor:
        """(R,C,*S): each turn's own, however many are run at a time."""
        each = [torch.Generator().manual_seed(int(seed)) for seed in self.seeds[part]]
        return torch.stack([torch.randn(x.shape, generator=one, dtype=torch.float32) for one in each]).to(x)


@register
class ExpectedGradients(PathExplainer):
    """E[(x - x') ∂f(x' + a (x - x'))/∂x] over baselines x' of a background and a in 0..1 (Erion et al. 2021).

    `background`: inputs as the model takes them (M,C,*S), or a list of images, tensors and names of baselines (see
    `baselines.filled`); without one "zero", "mean", "blur" and "noise", which the result notes. `samples`: draws, spread
    evenly over baselines and a, which leaves the expectation as it is. `seed`: of the draws.
    """

    name, paper = "expectedgradients", "arXiv:1906.10670"
    forwards: ClassVar[str] = "1 + references + samples"
    backwards: ClassVar[str] = "samples"
    background: Tensor | Sequence[Baseline] | None = None
    samples: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(samples=self.samples)
        expect_whole(seed=self.seed)
        if isinstance(self.background, str) or (isinstance(self.background, Tensor) and self.background.ndim < 3):
            raise InputError(f"background={_shown(self.background)}: expected inputs (M,C,H,W), or a list of images")
        if len(self._background()) == 0:
            raise InputError("background holds nothing: expected one input at least")
        self.references: int = min(len(self._background()), self.samples)  # how many of them are looked at

    def followed(self, runs: Runs, sample: int) -> Followed:
        """The mean over all draws."""
        x, draws = runs.x[sample], Draws.of(self.samples, len(self._background()), self.seed)
        used, picks = draws.picks.unique(return_inverse=True)
        baselines = torch.stack([self._baseline(int(which), x) for which in used])
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            starts = baselines[picks[part].to(x.device)]
            ends = self.ends(x, draws, part)
            shares = draws.shares[part].to(x).view(-1, *[1] * x.ndim)
            gradients = runs.gradients(sample, starts + (ends - starts) * shares)[1]
            total.add_((difference(starts, ends) * gradients).sum(0, dtype=torch.float64))

        runs.in_turns(sample, self.samples, work, gradients=True)
        often = picks.bincount().to(runs.values) / self.samples
        change = runs.values[sample] - (often * self._scores(runs, sample, baselines)).sum()
        said = () if self.background is not None else (f"no background was given: {', '.join(NOTHING)} instead",)
        moved = not all(torch.equal(one, x) for one in baselines)
        return Followed((total / self.samples).to(full_precision(x).dtype), change, self.samples, moved, said)

    def ends(self, x: Tensor, draws: Draws, part: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): where the drawn paths end."""
        return x.expand(part.stop - part.start, *x.shape)

    def _background(self) -> Tensor | Sequence[Baseline]:
        if self.background is None or isinstance(self.background, Tensor):
            return NOTHING if self.background is None else self.background
        return several(list(self.background)) if len(self.background) else ()

    def _baseline(self, which: int, x: Tensor) -> Tensor:
        """(C,*S)"""
        return filled(self._background()[which], x[None], self, self.seed ^ which)[0]

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

    `noise`: its standard deviation, as a share of the span between the sample's least and largest value. Without noise
    these are expected gradients; with it the map is complete on the average only as far as the score does not see it.
    """

    name, paper = "gradientshap", "arXiv:1705.07874"
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_number(low=0, noise=self.noise)

    def ends(self, x: Tensor, draws: Draws, part: slice) -> Tensor:
        """(C,*S) -> (R,C,*S): noisy copies."""
        return x + draws.noise(part, x) * (self.noise * (x.amax() - x.amin()))


def _shown(background: object) -> str:
    return repr(background) if isinstance(background, str) else f"a tensor {tuple(getattr(background, 'shape', ()))}"
