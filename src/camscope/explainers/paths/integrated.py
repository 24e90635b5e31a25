"""Integrated gradients: the gradient's mean on the straight line from a baseline to the input."""

from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.paths.base import PathExplainer, between, difference
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_positive

MOST = 2**14  # steps


@register
class IntegratedGradients(PathExplainer):
    """(x - x') Σ_j ∂f(x' + (j - ½)/m (x - x'))/∂x / m: the gradient's mean between x' and x (Sundararajan et al. 2017, eq. 3).

    x': the baseline. The authors sum at the steps' ends; the midpoints are exact where the score is a polynomial of degree
    two. `steps`: m. `tolerance`: double the steps until the gap between the map's sum and the score's change is at most so
    large a share of the latter, or 2^14 are not enough, which a note tells.
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

    def along(self, runs: Runs, sample: int, start: Tensor) -> tuple[Tensor, int]:
        """(C,*S), and the steps taken."""
        way, steps = difference(start, runs.x[sample]), self.steps
        found = way * self._mean_gradient(runs, sample, start, steps)
        if self.tolerance is None:
            return found, steps
        change = runs.values[sample] - runs.scores(sample, start[None])[0]
        while steps < MOST and bool((found.sum() - change).abs() > self.tolerance * change.abs()):
            steps *= 2
            found = way * self._mean_gradient(runs, sample, start, steps)
        return found, steps

    def _mean_gradient(self, runs: Runs, sample: int, start: Tensor, steps: int) -> Tensor:
        """(C,*S): over the middles of so many equal steps."""
        total = torch.zeros_like(difference(start, start), dtype=torch.float64)

        def work(part: slice) -> None:
            shares = (torch.arange(part.start, part.stop, dtype=torch.float64, device=start.device) + 0.5) / steps
            gradients = runs.gradients(sample, between(start, runs.x[sample], shares))[1]
            total.add_(gradients.double().sum(0))

        runs.in_turns(sample, steps, work, gradients=True)
        return (total / steps).to(torch.promote_types(start.dtype, torch.float32))
