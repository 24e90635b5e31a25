"""The linear model of LIME and KernelSHAP, fitted in float64 to what captum drew."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from camscope.wording import plural


@dataclass
class Fitted:
    """What each cell counts, (M,) in float64, and what is to be said of the fit, in words and in numbers."""

    cells: Tensor
    note: str
    measures: dict[str, float] = field(default_factory=dict)


class Fit:
    """The interpretable model that captum fits: it hands over what was drawn, and how it weighs; the fit is in float64."""

    scores: Tensor
    fitted: Fitted

    def __init__(self, fit: Callable[[Tensor, Tensor, Tensor], Fitted]) -> None:
        self._fit = fit

    def fit(self, train_data: Any) -> None:
        """Of captum's DataLoader the tensors: to go through it would draw a random number."""
        masks, _, weights = train_data.dataset.tensors
        self.fitted = self._fit(masks.cpu().double(), self.scores, weights.cpu().double())

    def representation(self) -> Tensor:
        """(M,)"""
        return self.fitted.cells


def least_squares(rows: Tensor, y: Tensor, weights: Tensor, alpha: float) -> tuple[Tensor, int]:
    """(S,M), (S,), (S,) -> argmin Σ w (y - rows·φ)² + α |φ|², the least of several, and the rank of the rows."""
    count = rows.shape[1]
    if not len(rows):
        return rows.new_zeros(count), 0
    left, right = rows * weights.sqrt()[:, None], y * weights.sqrt()
    rank = int(torch.linalg.matrix_rank(left))
    if alpha:
        left = torch.cat([left, alpha**0.5 * torch.eye(count, dtype=rows.dtype, device="cpu")])
        right = torch.cat([right, right.new_zeros(count)])
    return torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0], rank


def explained(samples: int, cells: int, left: Tensor, y: Tensor, shares: Tensor, *, determined: bool) -> str:
    """How much of the score's variance over the versions the linear model has."""
    variance, missed = float(shares @ y.square()), float(shares @ left.square())
    share = f"{1 - missed / variance:.1%} of its variance" if variance else "a score that does not vary"
    few = "" if determined else "; they do not determine the cells: raise samples, or lower cells"
    return f"a linear model of {plural(cells, 'cell')} explains {share} over {plural(samples, 'version')}{few}"
