"""Integrated gradients and its relatives.

- Integrated gradients: the gradient's mean on the straight line from a baseline to the input.
- Guided integrated gradients: a path that moves first what the score feels least.
- Expected gradients and GradientSHAP: integrated gradients from many baselines, one drawn point on each path.
- Blur IG: the score followed while the input comes into focus.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.core.base import register
from camscope.explainers.core.baselines import WithBackground, starts
from camscope.explainers.core.batching import normal, seeds
from camscope.explainers.core.evaluation_context import expect_count, expect_number, expect_positive
from camscope.explainers.core.pixel_base import Runs
from camscope.explainers.path.base import Along, BaselinePath, Followed, PathExplainer, difference, straight
from camscope.targets import full_precision


@register
class IntegratedGradients(BaselinePath):
    """(x - x') Σ_j ∂f(x' + (j - ½)/m (x - x'))/∂x / m: the gradient's mean between x' and x (Sundararajan et al. 2017, eq. 3).

    x': the baseline. The authors sum at the steps' ends; the midpoints are exact where the score is a polynomial of degree
    two. `steps`: m. `tolerance`: triple the steps, keeping what was run, until the gap between the map's sum and the
    score's change is at most so large a share of the latter, or 2^14 would not be enough, which a note says.
    """

    name, paper = "integratedgradients", "arXiv:1703.01365"
    forwards: ClassVar[str] = "2 + steps"
    backwards: ClassVar[str] = "steps"
    steps: int = 50
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps)
        expect_positive(None, tolerance=self.tolerance)

    def along(self, runs: Runs, sample: int, start: Tensor, change: Tensor) -> Along:
        """(C,*S), and the steps taken."""
        return straight(runs, sample, start, change, self.steps, self.tolerance)


ROUNDING = {2: 0, 4: 6, 8: 14}  # of their last bits, so many may be rounding
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number: whole ones with as many


@register
class GuidedIG(BaselinePath):
    """Σ_t ½ (∂f(x_t)/∂x + ∂f(x_t+1)/∂x) (x_t+1 - x_t): each step moves the values of least gradient (Kapishnikov et al. 2021).

    Every step takes 1/`steps` of the L1 distance from the baseline to the input: of the values the `fraction` with the
    smallest gradients as far as it may, then the next, but none farther than `reach` from where the straight line has it
    (1: anywhere between baseline and input; 0: the straight line). The steps come one after the other, so no pass has more
    than one row. The authors take the gradient where a step begins; the mean of both ends costs one more, and is exact
    where the score is a polynomial of degree two.
    """

    name, paper = "guidedig", "arXiv:2106.09788"
    forwards: ClassVar[str] = "3 + steps"
    backwards: ClassVar[str] = "1 + steps"
    steps: int = 100
    fraction: float = 0.25
    reach: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps)
        expect_number(low=0, high=1, fraction=self.fraction, reach=self.reach)

    def along(self, runs: Runs, sample: int, start: Tensor, change: Tensor) -> Along:
        """(C,*S), and how many gradients were taken."""
        end = runs.x[sample]
        place = full_precision(start).clone()
        gradient, total = torch.zeros_like(place), torch.zeros_like(place, dtype=torch.float64)

        def work(part: slice) -> None:
            nonlocal place, gradient
            nearer = place if part.start == 0 else self.moved(place, gradient, start, end, part.start)
            new = runs.gradients(sample, nearer[None].to(end.dtype))[1][0]
            total.add_((nearer - place) * (gradient + new) / 2)
            place, gradient = nearer, new

        count = runs.in_turns(sample, 1 + self.steps, work, gradients=True, at_once=1)
        return Along(total.to(place.dtype), count)

    def moved(self, place: Tensor, gradient: Tensor, start: Tensor, end: Tensor, step: int) -> Tensor:
        """(C,*S): where a step leads to, from the gradient at its beginning."""
        if step == self.steps:
            return full_precision(end)
        share, way = step / self.steps, difference(start, end)
        low, high = (start + way * min(max(one, 0.0), 1.0) for one in (share - self.reach, share + self.reach))
        place = torch.where((place - start).abs() < (low - start).abs(), low, place)
        left = (end - place).abs().sum(dtype=torch.float64)
        needed = left - (1 - share) * way.abs().sum(dtype=torch.float64)
        shares = taken((high - place).abs().flatten(), gradient.flatten(), needed, self.fraction)
        return place + (high - place) * shares.view_as(place)


def taken(room: Tensor, gradient: Tensor, needed: Tensor, fraction: float) -> Tensor:
    """(P,) in 0..1: how much of its room each value takes, that all of them together take what is needed.

    Those of the smallest gradients come first, in groups that are a fraction of all values; of one group all take the same.
    Gradients that differ by rounding are equal, and the first comes first: at a constant baseline most of them are.
    """
    sizes = torch.where(room > 0, gradient.abs(), torch.inf)
    dropped = ROUNDING[sizes.itemsize]
    numbers = sizes.view(BITS[sizes.itemsize]) + (1 << dropped >> 1) >> dropped
    order = numbers.argsort(stable=True)  # none is negative: the same order, sorted 10 x as fast
    size = max(1, int(fraction * len(room)))
    groups = torch.arange(len(room), device=room.device) // size
    rooms = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64, device=room.device)
    rooms.index_add_(0, groups, room[order].double())
    before = rooms.cumsum(0) - rooms
    shares = torch.where(rooms > 0, (needed - before) / rooms, 0).clamp(0, 1)
    return torch.zeros_like(room).scatter_(0, order, shares[groups].to(room.dtype))


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


@register
class BlurIG(PathExplainer):
    """Σ_j ∂f((x_j + x_j+1)/2)/∂x (x_j+1 - x_j): from a blurred input x_0 to the input x_m itself (Xu et al. 2020).

    x_j is the input under a Gaussian of `sigma` (1 - j/m)² times its longest axis. Nothing comes in over the borders: it is
    the heat equation with none of them let through, solved by cosines. `steps`: m. The path is followed by chords, so the
    map is complete at any m where the score is a polynomial of degree two.
    """

    name, paper = "blurig", "arXiv:2004.03383"
    forwards: ClassVar[str] = "2 + steps"
    backwards: ClassVar[str] = "steps"
    steps: int = 100
    sigma: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(steps=self.steps)
        expect_positive(sigma=self.sigma)

    def followed(self, runs: Runs, sample: int, starts: Sequence[Tensor]) -> Followed:
        """Chord by chord."""
        x = runs.x[sample]
        blurs = Blurs(x)
        widths = (
            self.sigma
            * max(x.shape[1:])
            * (1 - torch.arange(self.steps + 1, dtype=torch.float64, device="cpu") / self.steps) ** 2
        )
        total = torch.zeros_like(x, dtype=torch.float64)

        def work(part: slice) -> None:
            bells = blurs.bells(widths[part.start : part.stop + 1])
            middles = blurs.of((bells[:-1] + bells[1:]) / 2) + blurs.level
            gradients = runs.gradients(sample, middles.to(x.dtype))[1]
            total.add_((blurs.of(bells.diff(dim=0)) * gradients).sum(0, dtype=torch.float64))

        runs.in_turns(sample, self.steps, work, gradients=True)
        start = blurs.of(blurs.bells(widths[:1])) + blurs.level
        change = runs.values[sample] - runs.scores(sample, start.to(x.dtype))[0]
        return Followed(total.to(start.dtype), change, self.steps, moved=blurs.moves)


class Blurs:
    """An input (C,*S) under Gaussians, which in the space of cosines are factors, one a frequency.

    `level` (C,1,..): a value of each channel, which no blur changes, and which is added at the end: so a constant stays
    exactly what it is.
    """

    def __init__(self, x: Tensor) -> None:
        wide = full_precision(x)
        self.level = wide.flatten(1)[:, 0].view(-1, *[1] * (x.ndim - 1))
        waves = [cosines(cells, x.device) for cells in x.shape[1:]]
        self._spectrum = along_axes((wide - self.level)[None].double(), waves)
        self._back = [wave.T.to(wide.dtype) for wave in waves]
        self.moves = bool(self._spectrum.any())

    def bells(self, widths: Tensor) -> Tensor:
        """(R,), cells -> (R,1,*S), float64: what is left of each frequency."""
        left = torch.zeros([1] * self._spectrum.ndim, dtype=torch.float64, device=self._spectrum.device)
        squares = widths.to(left.device).square().view(-1, *[1] * (left.ndim - 1))
        for axis in range(2, left.ndim):
            cells = self._spectrum.shape[axis]
            frequencies = torch.arange(cells, dtype=torch.float64, device=left.device) * (math.pi / cells)
            left = left - 0.5 * squares * frequencies.square().view(-1, *[1] * (left.ndim - 1 - axis))
        return left.exp()

    def of(self, factors: Tensor) -> Tensor:
        """(R,1,*S) -> (R,C,*S), at least float32: the input's frequencies times these."""
        return along_axes((self._spectrum * factors).to(self._back[0].dtype), self._back)


def cosines(cells: int, device: torch.device) -> Tensor:
    """(cells,cells), float64, orthonormal: row k is a cosine of k half periods, flat at both borders (the DCT-II)."""
    places = (torch.arange(cells, dtype=torch.float64, device=device) + 0.5) * (math.pi / cells)
    waves = (torch.arange(cells, dtype=torch.float64, device=device)[:, None] * places).cos()
    return waves / waves.square().sum(1, keepdim=True).sqrt()


def along_axes(values: Tensor, matrices: list[Tensor]) -> Tensor:
    """(R,C,*S): each spatial axis times its matrix."""
    for axis, matrix in enumerate(matrices, start=2):
        values = (values.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return values
