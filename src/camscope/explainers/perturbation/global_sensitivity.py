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
from camscope.explainers.core.evaluation_context import check_positive_integer, check_positive_number
from camscope.explainers.core.segmentation import label_grid_cells
from camscope.explainers.perturbation.base import (
    MaskChunkBuilder,
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    compute_relative_error,
    describe_convergence,
    expand_per_axis,
)
from camscope.plurals import plural

KERNEL_ROWS_PER_BLOCK = 512  # of L at a time
N_JACKKNIFE_GROUPS = 10  # of masks, each left out once for the standard error
IndexEstimator = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # scores (n,turns) of the first samples -> (count,), and its errors


@dataclass(kw_only=True, eq=False, repr=False)
class GridSensitivityExplainer(PerturbationExplainer):
    """A number a cell of a grid of masks: what the spread of the score under the masks has to do with it.

    `grid_size`: along each axis. `n_samples`: masks, for Sobol pairs of them. A pixel has its cell's number. `tolerance`: stop as
    soon as the largest standard error is at most so large a share of the map's range; looked at after every 64 masks, or 8
    pairs, however many run at a time.
    """

    sample_kind: ClassVar[str]  # is drawn
    samples_per_check: ClassVar[int]  # so many between two looks at the standard error
    grid_size: int = 8
    n_samples: int = 32
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(grid_size=self.grid_size, n_samples=self.n_samples)
        check_positive_number(None, tolerance=self.tolerance)
        if self.n_samples < 2:
            raise InputError(
                f"n_samples={self.n_samples}: expected a whole number, 2 or more, as one sample has no spread"
            )

    @abstractmethod
    def build_design(
        self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int
    ) -> tuple[int, MaskChunkBuilder, IndexEstimator]:
        """How many masks a sample has, what makes them, and what their scores say of so many cells.

        `cell_labels` (*S) says which pixels a cell has.
        """

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """(*S)"""
        size = masked_input.x.shape[1:]
        counts = expand_per_axis(self.grid_size, size)
        labels = label_grid_cells(size, counts, masked_input.x.device)
        turns, masks, estimate = self.build_design(masked_input, labels, torch.Size(counts).numel())
        scores = torch.empty(
            len(masked_input.baseline_tensors), self.n_samples, turns, dtype=torch.float64, device=labels.device
        )
        drawn = 0

        def estimated() -> tuple[Tensor, Tensor]:
            each = [estimate(sample_scores[:drawn]) for sample_scores in scores]
            return torch.stack([sample_scores for sample_scores, _ in each]).mean(0), torch.stack(
                [error for _, error in each]
            ).mean(0)

        def work(part: slice) -> bool:
            nonlocal drawn
            scores.view(len(scores), -1)[:, part] = masked_input.score_masks(masks(part))
            while drawn < (more := min(drawn + self.samples_per_check, self.n_samples)) and more * turns <= part.stop:
                drawn = more
                if self.tolerance is not None and compute_relative_error(*estimated()) <= self.tolerance:
                    return True
            return False

        masked_input.evaluator.process_chunks(masked_input.sample, self.n_samples * turns, work)
        heat, error = estimated()
        words = describe_convergence(
            compute_relative_error(heat, error), self.tolerance, drawn < self.n_samples, self.n_samples
        )
        return PerturbationAttribution(heat[labels], error[labels], (f"{drawn} {self.sample_kind}; {words}",))


@register
class Sobol(GridSensitivityExplainer):
    """E[(f(A) - f(A with cell i of B))²] / 2 V[f(A)]: total Sobol indices, Jansen's estimator (Fel et al. 2021, section 3).

    A, B: two masks of independent cells, each evenly between 0 and 1, from a scrambled Sobol sequence. The index of a
    cell is the share of the score's variance that is lost when that cell stands still, whatever the others do: it has no
    sign. A score that no mask changes has indices of 0. The variance is that of all A; the standard error is that of a
    ratio of means of independent draws, which a Sobol sequence's are not: see the documents.
    """

    name, title, paper = "sobol", "Sobol", "arXiv:2111.04138"
    slow: ClassVar[bool] = True
    forward_passes: ClassVar[str] = "1 + n_samples x (grid_size**2 + 1)"
    sample_kind: ClassVar[str] = "pairs of masks"
    samples_per_check: ClassVar[int] = 8

    def build_design(
        self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int
    ) -> tuple[int, MaskChunkBuilder, IndexEstimator]:
        """See `GridSensitivityExplainer`."""
        points = self.draw_sobol_points(2 * n_cells, cell_labels)
        first, second = points[:, :n_cells], points[:, n_cells:]

        def masks(part: slice) -> Tensor:
            turns = torch.arange(part.start, part.stop, device=cell_labels.device)
            design, changed = turns // (n_cells + 1), turns % (n_cells + 1)
            cells = first[design]
            rows = changed.nonzero()[:, 0]
            changed_cells = changed[rows] - 1
            cells[rows, changed_cells] = second[design[rows], changed_cells]
            return cells[:, cell_labels.flatten()].view(len(cells), *cell_labels.shape)

        return (
            n_cells + 1,
            masks,
            lambda scores: compute_total_sobol_indices(scores[:, 0], scores[:, 1:], masked_input.machine_epsilon),
        )

    def draw_sobol_points(self, n_dimensions: int, template: Tensor) -> Tensor:
        """(samples,dimensions) in 0..1: spread more evenly than at random. Nothing is drawn from a shared generator."""
        most = SobolEngine.MAXDIM
        if n_dimensions > most:
            raise InputError(
                f"grid_size={self.grid_size}: a Sobol sequence has {plural(most, 'dimension')}, {n_dimensions} are needed"
            )
        engine = SobolEngine(n_dimensions, scramble=True, seed=self.seed % 2**63)
        # PyTorch works out the first point in the default type, which may be too coarse for it
        engine._first_point = (engine.quasi.double() / 2**engine.MAXBIT).view(1, -1)
        drawn: Tensor = engine.draw(self.n_samples, dtype=torch.float64)
        return drawn.to(template.device)


@register
class HSIC(GridSensitivityExplainer):
    """tr(K_i H L H) / (n - 1)²: how far the score depends on whether cell i is seen (Novello et al. 2022, section 3).

    Of the masks one half shows a cell and the other half hides it, drawn for each cell by itself; K_i is 1 where two
    masks agree in cell i, else 0; L is exp(-(f - f')² / 2 σ²) of their scores; H takes off means. Never negative; 0 for
    what is independent, up to sampling. σ is the scores' standard deviation: with the authors' median score a constant
    added to all would change the map. The standard error is the jackknife's.
    """

    name, title, paper = "hsic", "HSIC", "arXiv:2206.06219"
    slow: ClassVar[bool] = True
    forward_passes: ClassVar[str] = "1 + n_samples"
    sample_kind: ClassVar[str] = "masks"
    samples_per_check: ClassVar[int] = 64
    n_samples: int = 512

    def build_design(
        self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int
    ) -> tuple[int, MaskChunkBuilder, IndexEstimator]:
        """See `GridSensitivityExplainer`."""
        drawn = torch.rand(self.n_samples, n_cells, generator=self.generator(), dtype=torch.float32, device="cpu")
        is_visible = (drawn.argsort(0) < self.n_samples // 2).to(cell_labels.device)
        flat, precision = cell_labels.flatten(), masked_input.machine_epsilon

        def masks(part: slice) -> Tensor:
            return is_visible[part][:, flat].view(-1, *cell_labels.shape)

        return 1, masks, lambda scores: compute_hsic_with_error(is_visible[: len(scores)], scores[:, 0], precision)


def compute_total_sobol_indices(
    scores: Tensor, changed_scores: Tensor, machine_epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(n,), (n,d) -> (d,) twice: Jansen's Σ_j (a_j - c_ji)² / 2 n V[a], and its standard error, that of a ratio of means.

    It is linearised, for draws that know nothing of one another.
    """
    if are_equal_within_rounding(scores, machine_epsilon):
        return torch.zeros_like(changed_scores[0]), torch.zeros_like(changed_scores[0])
    parts, variance = (scores[:, None] - changed_scores).square() / 2, scores.var()
    indices = parts.mean(0) / variance
    apart = parts - indices * (scores - scores.mean()).square()[:, None]
    return indices, apart.std(0) / variance / len(parts) ** 0.5


def compute_hsic(visible: Tensor, scores: Tensor, machine_epsilon: float = 0.0) -> Tensor:
    """(n,d) bool, (n,) -> (d,): HSIC of each column and the scores.

    K is (1 + s s') / 2 for s of plus and minus one, of which H leaves the product: the trace is a quadratic form of
    the centered s, for which a part of L at a time will do.
    """
    signs = visible.to(scores.dtype) * 2 - 1
    signs, total = signs - signs.mean(0), torch.zeros_like(signs[0])
    if are_equal_within_rounding(scores, machine_epsilon):
        return total
    for rows in torch.arange(len(scores), device=scores.device).split(KERNEL_ROWS_PER_BLOCK):
        kernel = (-0.5 * ((scores[rows, None] - scores) / scores.std()).square()).exp()
        total += (signs[rows] * (kernel @ signs)).sum(0)
    return (total / (2 * (len(scores) - 1) ** 2)).clamp(min=0)


def compute_hsic_with_error(visible: Tensor, scores: Tensor, machine_epsilon: float) -> tuple[Tensor, Tensor]:
    """(n,d) bool, (n,) -> (d,) twice: HSIC of all masks, and its standard error by leaving out a tenth of them in turn."""
    whole, groups = compute_hsic(visible, scores, machine_epsilon), min(N_JACKKNIFE_GROUPS, len(scores) // 2)
    if groups < 2:
        return whole, whole
    number = torch.arange(len(scores), device=scores.device) % groups
    parts = [
        compute_hsic(visible[number != left_out], scores[number != left_out], machine_epsilon)
        for left_out in range(groups)
    ]
    return whole, (torch.stack(parts).var(0, correction=0) * (groups - 1)).sqrt()


def are_equal_within_rounding(scores: Tensor, machine_epsilon: float) -> bool:
    """Whether scores differ by no more than a model's rounding makes them: `machine_epsilon` is that of one operation."""
    return float(scores.max() - scores.min()) <= 4 * machine_epsilon * float(scores.abs().max())
