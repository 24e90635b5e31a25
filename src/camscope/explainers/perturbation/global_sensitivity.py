"""Sobol and HSIC attribution: how the score's spread depends on each cell of a grid of random masks."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.evaluation_context import expect_count, expect_positive
from camscope.explainers.core.segmentation import parts_of_grid
from camscope.explainers.perturbation.base import Found, Masks, PerturbationExplainer, Veiled, doubt, extents, settling
from camscope.plurals import plural

ROWS = 512  # of L at a time
GROUPS = 10  # of masks, each left out once for the standard error
Estimate = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # scores (n,turns) of the first samples -> (count,), and its errors


@dataclass(kw_only=True, eq=False, repr=False)
class GridSensitivity(PerturbationExplainer):
    """A number a cell of a grid of masks: what the spread of the score under the masks has to do with it.

    `cells`: along each axis. `samples`: masks, for Sobol pairs of them. A pixel has its cell's number. `until`: stop as
    soon as the largest standard error is at most so large a share of the map's range; looked at after every 64 masks, or 8
    pairs, however many run at a time.
    """

    what: ClassVar[str]  # is drawn
    looked: ClassVar[int]  # so many between two looks at the standard error
    cells: int = 8
    samples: int = 32
    until: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(cells=self.cells, samples=self.samples)
        expect_positive(None, until=self.until)
        if self.samples < 2:
            raise InputError(f"samples={self.samples}: expected a whole number, 2 or more, as one sample has no spread")

    @abstractmethod
    def design(self, veiled: Veiled, labels: Tensor, count: int) -> tuple[int, Masks, Estimate]:
        """How many masks a sample has, what makes them, and what their scores say of so many cells.

        `labels` (*S) says which pixels a cell has.
        """

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        size = veiled.x.shape[1:]
        counts = extents(self.cells, size)
        labels = parts_of_grid(size, counts, veiled.x.device)
        turns, masks, estimate = self.design(veiled, labels, torch.Size(counts).numel())
        scores = torch.empty(len(veiled.fills), self.samples, turns, dtype=torch.float64, device=labels.device)
        drawn = 0

        def estimated() -> tuple[Tensor, Tensor]:
            each = [estimate(one[:drawn]) for one in scores]
            return torch.stack([one for one, _ in each]).mean(0), torch.stack([error for _, error in each]).mean(0)

        def work(part: slice) -> bool:
            nonlocal drawn
            scores.view(len(scores), -1)[:, part] = veiled.scores(masks(part))
            while drawn < (more := min(drawn + self.looked, self.samples)) and more * turns <= part.stop:
                drawn = more
                if self.until is not None and doubt(*estimated()) <= self.until:
                    return True
            return False

        veiled.runs.in_turns(veiled.sample, self.samples * turns, work)
        heat, error = estimated()
        words = settling(doubt(heat, error), self.until, drawn < self.samples, self.samples)
        return Found(heat[labels], error[labels], (f"{drawn} {self.what}; {words}",))


@register
class Sobol(GridSensitivity):
    """E[(f(A) - f(A with cell i of B))²] / 2 V[f(A)]: total Sobol indices, Jansen's estimator (Fel et al. 2021, section 3).

    A, B: two masks of independent cells, each evenly between 0 and 1, from a scrambled Sobol sequence. The index of a
    cell is the share of the score's variance that is lost when that cell stands still, whatever the others do: it has no
    sign. A score that no mask changes has indices of 0. The variance is that of all A; the standard error is that of a
    ratio of means of independent draws, which a Sobol sequence's are not: see the documents.
    """

    name, paper = "sobol", "arXiv:2111.04138"
    slow: ClassVar[bool] = True
    forwards: ClassVar[str] = "1 + samples x (cells**2 + 1)"
    what: ClassVar[str] = "pairs of masks"
    looked: ClassVar[int] = 8

    def design(self, veiled: Veiled, labels: Tensor, count: int) -> tuple[int, Masks, Estimate]:
        """See `GridSensitivity`."""
        points = self.points(2 * count, labels)
        first, second = points[:, :count], points[:, count:]

        def masks(part: slice) -> Tensor:
            turns = torch.arange(part.start, part.stop, device=labels.device)
            design, changed = turns // (count + 1), turns % (count + 1)
            cells = first[design]
            rows = changed.nonzero()[:, 0]
            own = changed[rows] - 1
            cells[rows, own] = second[design[rows], own]
            return cells[:, labels.flatten()].view(len(cells), *labels.shape)

        return count + 1, masks, lambda scores: total_indices(scores[:, 0], scores[:, 1:], veiled.precision)

    def points(self, dimensions: int, like: Tensor) -> Tensor:
        """(samples,dimensions) in 0..1: spread more evenly than at random. Nothing is drawn from a shared generator."""
        most = SobolEngine.MAXDIM
        if dimensions > most:
            raise InputError(
                f"cells={self.cells}: a Sobol sequence has {plural(most, 'dimension')}, {dimensions} are needed"
            )
        engine = SobolEngine(dimensions, scramble=True, seed=self.seed % 2**63)
        # PyTorch works out the first point in the default type, which may be too coarse for it
        engine._first_point = (engine.quasi.double() / 2**engine.MAXBIT).view(1, -1)
        drawn: Tensor = engine.draw(self.samples, dtype=torch.float64)
        return drawn.to(like.device)


@register
class HSIC(GridSensitivity):
    """tr(K_i H L H) / (n - 1)²: how far the score depends on whether cell i is seen (Novello et al. 2022, section 3).

    Of the masks one half shows a cell and the other half hides it, drawn for each cell by itself; K_i is 1 where two
    masks agree in cell i, else 0; L is exp(-(f - f')² / 2 σ²) of their scores; H takes off means. Never negative; 0 for
    what is independent, up to sampling. σ is the scores' standard deviation: with the authors' median score a constant
    added to all would change the map. The standard error is the jackknife's.
    """

    name, paper = "hsic", "arXiv:2206.06219"
    slow: ClassVar[bool] = True
    forwards: ClassVar[str] = "1 + samples"
    what: ClassVar[str] = "masks"
    looked: ClassVar[int] = 64
    samples: int = 512

    def design(self, veiled: Veiled, labels: Tensor, count: int) -> tuple[int, Masks, Estimate]:
        """See `GridSensitivity`."""
        drawn = torch.rand(self.samples, count, generator=self.drawing(), dtype=torch.float32, device="cpu")
        shown = (drawn.argsort(0) < self.samples // 2).to(labels.device)
        flat, precision = labels.flatten(), veiled.precision

        def masks(part: slice) -> Tensor:
            return shown[part][:, flat].view(-1, *labels.shape)

        return 1, masks, lambda scores: left_out(shown[: len(scores)], scores[:, 0], precision)


def total_indices(scores: Tensor, changed: Tensor, precision: float = 0.0) -> tuple[Tensor, Tensor]:
    """(n,), (n,d) -> (d,) twice: Jansen's Σ_j (a_j - c_ji)² / 2 n V[a], and its standard error, that of a ratio of means.

    It is linearised, for draws that know nothing of one another.
    """
    if are_one(scores, precision):
        return torch.zeros_like(changed[0]), torch.zeros_like(changed[0])
    parts, variance = (scores[:, None] - changed).square() / 2, scores.var()
    indices = parts.mean(0) / variance
    apart = parts - indices * (scores - scores.mean()).square()[:, None]
    return indices, apart.std(0) / variance / len(parts) ** 0.5


def dependence(shown: Tensor, scores: Tensor, precision: float = 0.0) -> Tensor:
    """(n,d) bool, (n,) -> (d,): HSIC of each column and the scores.

    K is (1 + s s') / 2 for s of plus and minus one, of which H leaves the product: the trace is a quadratic form of
    the centred s, for which a part of L at a time will do.
    """
    signs = shown.to(scores.dtype) * 2 - 1
    signs, total = signs - signs.mean(0), torch.zeros_like(signs[0])
    if are_one(scores, precision):
        return total
    for rows in torch.arange(len(scores), device=scores.device).split(ROWS):
        kernel = (-0.5 * ((scores[rows, None] - scores) / scores.std()).square()).exp()
        total += (signs[rows] * (kernel @ signs)).sum(0)
    return (total / (2 * (len(scores) - 1) ** 2)).clamp(min=0)


def left_out(shown: Tensor, scores: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """(n,d) bool, (n,) -> (d,) twice: HSIC of all masks, and its standard error by leaving out a tenth of them in turn."""
    whole, groups = dependence(shown, scores, precision), min(GROUPS, len(scores) // 2)
    if groups < 2:
        return whole, whole
    number = torch.arange(len(scores), device=scores.device) % groups
    parts = [dependence(shown[number != one], scores[number != one], precision) for one in range(groups)]
    return whole, (torch.stack(parts).var(0, correction=0) * (groups - 1)).sqrt()


def are_one(scores: Tensor, precision: float) -> bool:
    """Whether scores differ by no more than a model's rounding makes them: `precision` is that of one operation."""
    return float(scores.max() - scores.min()) <= 4 * precision * float(scores.abs().max())
