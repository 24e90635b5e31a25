"""Integrated gradients: the gradient's mean on the straight line from a baseline to the input."""

from typing import ClassVar

from torch import Tensor

from camscope.explainers.base import register
from camscope.explainers.paths.base import Along, BaselinePath
from camscope.explainers.paths.straight import straight
from camscope.explainers.runs import Runs
from camscope.explainers.scope import expect_count, expect_positive


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
