"""PathExplainer: what every method shares that follows the score from a baseline to the input."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from camscope.explainers.baselines import Baseline, filled, several
from camscope.explainers.maps import Maps
from camscope.explainers.pixels import PixelExplainer
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_whole
from camscope.targets import Score, full_precision


@dataclass(eq=False, repr=False)
class PathExplainer(PixelExplainer):
    """A map that adds up to the score less the baseline's. A method writes `along`.

    `baseline`: see `baselines.filled`; of several the map is the mean. `seed`: of what is drawn.
    """

    _: KW_ONLY
    baseline: Baseline | Sequence[Baseline] = "zero"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        several(self.baseline)
        expect_whole(seed=self.seed)

    @abstractmethod
    def along(self, runs: Runs, sample: int, start: Tensor) -> tuple[Tensor, int]:
        """From the baseline `start` (C,*S) of one sample to its input -> (C,*S), at least float32, and the steps taken."""

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The mean over the baselines; the completeness gap of each sample is in its notes."""
        runs = Runs(self, x, score)
        starts = [filled(one, x, self, self.seed) for one in several(self.baseline)]
        made, notes = [], []
        for sample in range(len(x)):
            parts, said = [], []
            for start in starts:
                part, steps = self.along(runs, sample, start[sample])
                parts.append(part)
                change = float(runs.values[sample] - runs.scores(sample, start[sample, None]))
                said.append(gap_in_words(float(part.sum()), change, steps))
            made.append(torch.stack(parts).mean(0))
            notes.append(tuple(said))
        values = torch.stack(made)
        return Maps(self.over_channels(values), zero_gradient=~values.flatten(1).any(1), own=tuple(notes))


def gap_in_words(total: float, change: float, steps: int) -> str:
    """How far the map is from adding up to the score less the baseline's."""
    share = f" ({abs(total - change) / abs(change):.2%})" if change else ""
    return (
        f"completeness: the map adds up to {total:.4g}, the score less the baseline's is {change:.4g}; the gap is "
        f"{total - change:+.2g}{share} after {steps} steps"
    )


def between(start: Tensor, end: Tensor, shares: Tensor) -> Tensor:
    """(C,*S) twice, (R,) -> (R,C,*S): so far from the one to the other."""
    return start + (end - start) * shares.to(end).view(-1, *[1] * end.ndim)


def difference(start: Tensor, end: Tensor) -> Tensor:
    """(C,*S), at least float32."""
    return full_precision(end) - full_precision(start)
