"""Guided integrated gradients: a path that moves first what the score feels least."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.paths.base import Along, BaselinePath, difference
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_number
from camscope.targets import full_precision

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
    """
    sizes = torch.where(room > 0, gradient.abs(), torch.inf)
    order = sizes.view(BITS[sizes.itemsize]).argsort(
        stable=True
    )  # none is negative: the same order, sorted 10 x as fast
    size = max(1, int(fraction * len(room)))
    groups = torch.arange(len(room), device=room.device) // size
    rooms = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64, device=room.device)
    rooms.index_add_(0, groups, room[order].double())
    before = rooms.cumsum(0) - rooms
    shares = torch.where(rooms > 0, (needed - before) / rooms, 0).clamp(0, 1)
    return torch.zeros_like(room).scatter_(0, order, shares[groups].to(room.dtype))
