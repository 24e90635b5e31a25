"""PathExplainer: what every method shares that follows the score along paths that end at the input.

The straight line from a baseline to the input, and the gradient's mean on it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.baselines import WithBaseline
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import ManyRuns, PixelExplainer, Runs, gap_in_words
from camscope.plurals import plural
from camscope.targets import Score, full_precision


@dataclass(frozen=True)
class Followed:
    """What the paths to one sample gave.

    `values` (C,*S), at least float32, add up to `change` (), the score less that of the paths' beginnings, but for the
    steps' error. `gradients`: how many were taken. `moved`: whether a path led anywhere.
    """

    values: Tensor
    change: Tensor
    gradients: int
    moved: bool = True
    said: tuple[str, ...] = ()


class Along(NamedTuple):
    """What one path gave: values (C,*S), at least float32, how many gradients were taken, what is to be said of it."""

    values: Tensor
    gradients: int
    said: tuple[str, ...] = ()


class PathExplainer(PixelExplainer, ManyRuns):
    """A map that adds up to the score's change along a path to the input. A method writes `followed`.

    How far it is from doing so is in the result's `measures`: `completeness_gap`, what the map adds up to less
    `score_change`, before `channels` takes the signs; and `gradients`, how many were taken.
    """

    @abstractmethod
    def followed(self, runs: Runs, sample: int, starts: Sequence[Tensor]) -> Followed:
        """The path, or the mean over paths, to one sample, from `starts` (C,*S) of its own."""

    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) -> as many tensors of that shape as there are beginnings."""
        return []

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The map (N,*S), and how far it is from being complete."""
        runs = Runs(self, x, score)
        starts = self.starts(x)
        found = [self.followed(runs, sample, [start[sample] for start in starts]) for sample in range(len(x))]
        values = torch.stack([one.values for one in found])
        changes = torch.stack([one.change.double() for one in found])
        totals = values.double().flatten(1).sum(1)
        moved = torch.tensor([one.moved for one in found], device=x.device)
        return Maps(
            self.over_pixels(runs, values),
            zero_gradient=moved & ~values.flatten(1).any(1),
            own=tuple(
                (*one.said, self.completeness(float(total), float(one.change), one.gradients))
                for one, total in zip(found, totals, strict=True)
            ),
            measures={
                "completeness_gap": totals - changes,
                "score_change": changes,
                "gradients": torch.tensor([one.gradients for one in found], device="cpu"),
            },
        )

    def completeness(self, total: float, change: float, gradients: int) -> str:
        """How far a map is from adding up to the score's change, in words."""
        words = gap_in_words(self.parts(), total, "the score changes by", change)
        return f"completeness: {words}, after {plural(gradients, 'gradient')}"

    def over_pixels(self, runs: Runs, values: Tensor) -> Tensor:
        """(N,C,*S), which the paths gave -> (N,*S)."""
        return self.over_channels(values)


class BaselinePath(WithBaseline, PathExplainer):
    """A map that adds up to the score less a baseline's. A method writes `along`."""

    @abstractmethod
    def along(self, runs: Runs, sample: int, start: Tensor, change: Tensor) -> Along:
        """From the baseline `start` (C,*S) to one sample.

        `change` (): the score less the baseline's.
        """

    def followed(self, runs: Runs, sample: int, starts: Sequence[Tensor]) -> Followed:
        """The mean over the baselines."""
        changes = torch.stack([runs.values[sample] - runs.scores(sample, start[None])[0] for start in starts])
        parts = [self.along(runs, sample, start, change) for start, change in zip(starts, changes, strict=True)]
        moved = any(not torch.equal(start, runs.x[sample]) for start in starts)
        still = () if moved else ("the input is the baseline itself: there is nothing to explain",)
        values = torch.stack([part.values for part in parts]).mean(0)
        said = dict.fromkeys((*still, *(words for part in parts for words in part.said)))
        return Followed(values, changes.mean(), sum(part.gradients for part in parts), moved, tuple(said))


def between(start: Tensor, end: Tensor, shares: Tensor) -> Tensor:
    """(C,*S) twice, (R,) -> (R,C,*S): so far from the one to the other."""
    return start + (end - start) * shares.to(end).view(-1, *[1] * end.ndim)


def difference(start: Tensor, end: Tensor) -> Tensor:
    """(C,*S), at least float32."""
    return full_precision(end) - full_precision(start)


MOST = 2**14  # steps


def straight(runs: Runs, sample: int, start: Tensor, change: Tensor, steps: int, tolerance: float | None) -> Along:
    """(C,*S): (x - x') times the gradient's mean over the middles of equal steps from x' to x; and how many steps.

    `tolerance`: see IntegratedGradients. Three times as many steps have the old ones' middles among theirs, which are not
    run again.
    """
    way = difference(start, runs.x[sample])
    total = gradients_at(runs, sample, start, middles(steps))

    def wanting() -> bool:
        gap = (way.double() * total).sum() / steps - change
        return tolerance is not None and not bool(gap.abs() <= tolerance * change.abs())

    while 3 * steps <= MOST and wanting():
        steps *= 3
        total += gradients_at(runs, sample, start, middles(steps, new=True))
    said = (
        (f"not within tolerance={tolerance:g} after {plural(steps, 'step')}, the most that are taken",)
        if wanting()
        else ()
    )
    return Along(way * (total / steps).to(way.dtype), steps, said)


def middles(steps: int, *, new: bool = False) -> Tensor:
    """(steps,) in 0..1: the middles of equal steps; `new`: without those of a third as many steps."""
    places = torch.arange(steps, dtype=torch.float64, device="cpu")
    return ((places[places % 3 != 1] if new else places) + 0.5) / steps


def gradients_at(runs: Runs, sample: int, start: Tensor, shares: Tensor) -> Tensor:
    """(R,) -> (C,*S), float64: the sum of the gradients so far on the way."""
    total = torch.zeros_like(start, dtype=torch.float64)

    def work(part: slice) -> None:
        versions = between(start, runs.x[sample], shares[part].to(start.device))
        total.add_(runs.gradients(sample, versions)[1].sum(0, dtype=torch.float64))

    runs.in_turns(sample, len(shares), work, gradients=True)
    return total
