"""PerturbationExplainer: what every method shares that hides parts of the input and watches the score."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.baselines import WithBaseline
from camscope.explainers.core.batching import in_turns
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import ManyRuns, Runs
from camscope.targets import Score, full_precision

Masks = Callable[[slice], Tensor]  # some of a method's masks (R,*S): 1 shows the input, 0 the fill


class Found(NamedTuple):
    """The map (*S) of one sample, in float64; the standard error of each cell, of a mean; what else is to be said."""

    heat: Tensor
    error: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Veiled:
    """One sample of a call, which is shown to the model through masks, and the fills (C,*S) that show where they hide it."""

    runs: Runs
    sample: int
    fills: Sequence[Tensor]

    @property
    def x(self) -> Tensor:
        """(C,*S)"""
        return self.runs.x[self.sample]

    @property
    def value(self) -> Tensor:
        """(): the score with nothing hidden."""
        return self.runs.values[self.sample].double()

    @property
    def precision(self) -> float:
        """Of the model's scores: the least step from 1."""
        return torch.finfo(self.runs.score.dtype).eps

    def through(self, masks: Tensor, fill: Tensor) -> Tensor:
        """(R,*S) -> (R,C,*S): x m + fill (1 - m), the one or the other to the bit where m is 1 or 0."""
        return torch.lerp(fill, self.x, masks[:, None].to(self.x.dtype))

    def scores(self, masks: Tensor, *, chance: bool = False) -> Tensor:
        """(R,*S) -> (F,R), float64: the score, or the probability, under each fill."""
        each = [self.runs.scores(self.sample, self.through(masks, fill), chance=chance) for fill in self.fills]
        return torch.stack(each).double()

    def all_scores(self, turns: int, masks: Masks, *, chance: bool = False) -> Tensor:
        """(F,turns), float64: the scores, or probabilities, under so many masks, in passes that fit into memory."""
        found = torch.empty(len(self.fills), turns, dtype=torch.float64, device=self.x.device)

        def work(part: slice) -> None:
            found[:, part] = self.scores(masks(part), chance=chance)

        self.runs.in_turns(self.sample, turns, work)
        return found

    def slopes(self, masks: Tensor, *, chance: bool = False) -> tuple[Tensor, Tensor]:
        """(R,*S) -> (R,), (R,*S): the score, or the probability, and its gradient at the masks; means over the fills."""
        values, slopes = (torch.zeros_like(one, dtype=torch.float64) for one in (masks.flatten(1)[:, 0], masks))

        def work(part: slice) -> None:
            each = [
                self.runs.gradients(self.sample, self.through(masks[part], fill), chance=chance) for fill in self.fills
            ]
            for (value, gradient), fill in zip(each, self.fills, strict=True):
                values[part] += value
                slopes[part] += (gradient * (full_precision(self.x) - full_precision(fill))).sum(1)

        in_turns(len(masks), self.runs.at_once(gradients=True), work)
        return values / len(self.fills), (slopes / len(self.fills)).to(masks.dtype)


class PerturbationExplainer(WithBaseline, ManyRuns):
    """A map of what the score loses, or keeps, when parts of the input are hidden. A method writes `found`.

    What is seen where the input is hidden is the `baseline`.
    """

    @abstractmethod
    def found(self, veiled: Veiled) -> Found:
        """The map of one sample."""

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The map (N,*S), and its standard error where it is a mean over masks."""
        runs, fills = Runs(self, x, score), self.starts(x)
        each = [self.found(Veiled(runs, i, [fill[i] for fill in fills])) for i in range(len(x))]
        kind = torch.promote_types(x.dtype, torch.float32)
        errors = [one.error for one in each if one.error is not None]
        return Maps(
            torch.stack([one.heat for one in each]).to(kind),
            own=tuple(one.notes for one in each),
            error=torch.stack(errors).to(kind) if errors else None,
        )


def doubt(mean: Tensor, error: Tensor) -> float:
    """The largest standard error, as a share of the way from the mean's least cell to its largest."""
    most, span = float(error.max()), float(mean.max() - mean.min())
    return most / span if span > 0 else float(most > 0)


def settling(left: float, until: float | None, early: bool, most: int) -> str:
    """What a map says of its doubt, and of whether it stopped before `most` were drawn."""
    words = f"the largest standard error is {left:.2%} of the map's range"
    if early:
        return f"{words}: settled to until={until:g} before all {most}"
    return f"{words}: not settled to until={until:g}" if until is not None and left > until else words


def extents(given: int | Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """One number for every axis of a size: at most that axis's own."""
    each = [given] * len(size) if isinstance(given, int) else given
    return tuple(min(int(own), length) for own, length in zip(each, size, strict=True))
