"""Sobol and HSIC: how the score under random masks depends on each cell of a grid."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.input_segments import label_grid_cells
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.explainers.perturbation.perturbation_explainer import (
    MaskChunkBuilder,
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    compute_relative_error,
    describe_convergence,
    expand_and_limit_per_axis,
)

KERNEL_ROWS_PER_BLOCK = 512
N_JACKKNIFE_GROUPS = 10  # each left out once for the standard error


class IndexEstimate(NamedTuple):
    """The sensitivity index of each grid cell, and the standard error of each index."""

    indices: Tensor
    standard_error: Tensor


class MaskDesign(NamedTuple):
    """Two functions: one draws masks, and one estimates indices from the scores (n_samples,masks_per_sample) of the masks."""

    masks_per_sample: int
    build_masks: MaskChunkBuilder
    estimate_indices: Callable[[Tensor], IndexEstimate]


@dataclass(kw_only=True, eq=False, repr=False)
class GridSensitivityExplainer(PerturbationExplainer):
    """Base class of methods that measure the sensitivity of the score to grid cells. A subclass implements `build_mask_design`.

    Each pixel has the value of its cell.

    Args:
        grid_size: Cells along each axis.
        n_samples: Number of masks; for Sobol, number of pairs of masks.
        tolerance: Stop as soon as the largest standard error is at most this share of the map's range. Checked after
            every 64 masks, or 8 pairs, whatever the size of a pass. None: use all samples.

    Raises:
        InputError: `n_samples` is 1, and one sample has no variance.

    """

    sample_kind: ClassVar[str]  # what is drawn, as a plural
    samples_per_check: ClassVar[int]
    grid_size: PositiveInteger = 8
    n_samples: PositiveInteger = 32
    tolerance: PositiveNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_samples < 2:
            raise InputError(f"n_samples={self.n_samples}: expected at least 2, because one sample has no variance")

    @abstractmethod
    def build_mask_design(self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int) -> MaskDesign:
        """Define how to draw masks of one sample and estimate indices. `cell_labels` (*S) gives the grid cell of each pixel."""

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute one sensitivity index per grid cell. Each pixel of the map gets the index of its cell."""
        size, n_total = masked_input.x.shape[1:], self.n_samples
        counts = expand_and_limit_per_axis(self.grid_size, size)
        labels = label_grid_cells(size, counts, masked_input.x.device)
        n_masks, build_masks, estimate = self.build_mask_design(masked_input, labels, torch.Size(counts).numel())
        shape = (len(masked_input.baselines), n_total, n_masks)
        scores, n_drawn = torch.empty(shape, dtype=torch.float64, device=labels.device), 0

        def average_indices_over_baselines() -> IndexEstimate:
            indices, errors = zip(*(estimate(rows[:n_drawn]) for rows in scores), strict=True)
            return IndexEstimate(torch.stack(indices).mean(0), torch.stack(errors).mean(0))

        def score_chunk_until_precise_enough(part: slice) -> bool:
            """Score a chunk of masks. Return True to end the sampling if the indices are precise enough."""
            nonlocal n_drawn
            scores.view(len(scores), -1)[:, part] = masked_input.score_masks(build_masks(part))
            while n_drawn < (more := min(n_drawn + self.samples_per_check, n_total)) and more * n_masks <= part.stop:
                n_drawn = more
                if (
                    self.tolerance is not None
                    and compute_relative_error(*average_indices_over_baselines()) <= self.tolerance
                ):
                    return True
            return False

        masked_input.evaluator.process_chunks(masked_input.sample, n_total * n_masks, score_chunk_until_precise_enough)
        indices, errors = average_indices_over_baselines()
        text = describe_convergence(compute_relative_error(indices, errors), self.tolerance, n_drawn, n_total)
        return PerturbationAttribution(indices[labels], errors[labels], (f"{n_drawn} {self.sample_kind}; {text}",))


@register
class Sobol(GridSensitivityExplainer):
    """Total Sobol index of each cell: its share of the variance of the score under random masks (Fel et al. 2021, section 3).

    Jansen's estimator is E[(f(A) - f(A with cell i of B))²] / 2 V[f(A)]. A and B are masks of independent cells, uniform in
    0..1, from a scrambled Sobol sequence. The indices have no sign. If no mask changes the score, they are 0. The standard
    error assumes independent draws, which those of a Sobol sequence are not: see the documentation.

    Use it to see which regions matter, also in combination with others.

    >>> explanation = Sobol(model, grid_size=3, n_samples=4).explain(image, "nodule")
    >>> explanation.grid, explanation.standard_error.shape
    ((128, 128), (128, 128))
    """

    name, title, paper, slow = "sobol", "Sobol", "arXiv:2111.04138", True
    forward_passes: ClassVar[str] = "1 + n_samples x (grid_size**2 + 1)"
    sample_kind, samples_per_check = "pairs of masks", 8

    def build_mask_design(self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int) -> MaskDesign:
        """Draw the masks of one sample from a Sobol sequence, and define how Sobol indices are estimated."""
        points = self._draw_sobol_points(2 * n_cells).to(cell_labels.device)
        first, second = points[:, :n_cells], points[:, n_cells:]

        def build_masks(part: slice) -> Tensor:
            numbers = torch.arange(part.start, part.stop, device=cell_labels.device)
            sample, changed = numbers // (n_cells + 1), numbers % (n_cells + 1)
            cells, rows = first[sample], changed.nonzero()[:, 0]
            cells[rows, changed[rows] - 1] = second[sample[rows], changed[rows] - 1]
            return cells[:, cell_labels.flatten()].view(len(cells), *cell_labels.shape)

        def estimate_indices(scores: Tensor) -> IndexEstimate:
            return compute_total_sobol_indices(
                scores[:, 0], scores[:, 1:], masked_input.evaluator.score.machine_epsilon
            )

        return MaskDesign(n_cells + 1, build_masks, estimate_indices)

    def _draw_sobol_points(self, n_dimensions: int) -> Tensor:
        """Draw points (n_samples,dimensions) in 0..1 from a scrambled Sobol sequence."""
        if n_dimensions > SobolEngine.MAXDIM:
            limit = SobolEngine.MAXDIM
            raise InputError(
                f"grid_size={self.grid_size} needs a Sobol sequence of dimension {n_dimensions}, and the largest is {limit}: "
                f"pass a smaller one"
            )
        engine = SobolEngine(n_dimensions, scramble=True, seed=self.seed % 2**63)
        # PyTorch computes the first point in the default dtype, which may be too coarse for it
        engine._first_point = (engine.quasi.double() / 2**engine.MAXBIT).view(1, -1)
        points: Tensor = engine.draw(self.n_samples, dtype=torch.float64)
        return points


@register
class HSIC(GridSensitivityExplainer):
    """Statistical dependence of the score on the visibility of each cell: tr(K_i H L H) / (n - 1)² (Novello et al. 2022, sec. 3).

    Each cell is visible in a random half of the masks. K_i is 1 where two masks agree in cell i, else 0. L is exp(-(f - f')²
    / 2 σ²) of their scores. H subtracts means. The index is never negative. If the score is independent of the cell, the
    index is 0 except for sampling error. σ is the standard deviation of the scores; the authors use their median, so that a
    constant added to all scores changes the map. The standard error is that of the jackknife.

    Use it as a cheaper Sobol: with default settings it takes a fourth of the passes.

    >>> HSIC(model, grid_size=3, n_samples=32).explain(image, "nodule").method_title
    'HSIC'
    """

    name, title, paper, slow = "hsic", "HSIC", "arXiv:2206.06219", True
    forward_passes: ClassVar[str] = "1 + n_samples"
    sample_kind, samples_per_check = "masks", 64
    n_samples: PositiveInteger = 512

    def build_mask_design(self, masked_input: MaskedInput, cell_labels: Tensor, n_cells: int) -> MaskDesign:
        """Draw the masks of one sample, and define how the HSIC of each cell is estimated."""
        drawn = torch.rand(self.n_samples, n_cells, generator=self.generator(), dtype=torch.float32, device="cpu")
        is_visible = (drawn.argsort(0) < self.n_samples // 2).to(cell_labels.device)

        def build_masks(part: slice) -> Tensor:
            return is_visible[part][:, cell_labels.flatten()].view(-1, *cell_labels.shape)

        def estimate_indices(scores: Tensor) -> IndexEstimate:
            return compute_hsic_with_error(
                is_visible[: len(scores)], scores[:, 0], masked_input.evaluator.score.machine_epsilon
            )

        return MaskDesign(1, build_masks, estimate_indices)


def compute_total_sobol_indices(scores: Tensor, changed_scores: Tensor, machine_epsilon: float = 0.0) -> IndexEstimate:
    """Compute the total Sobol index of each of d cells. Jansen's estimator is Σ_j (a_j - c_ji)² / 2 n V[a].

    `scores` (n,) are a. `changed_scores` (n,d) are c, the scores with one cell changed. The standard error is
    linearized.
    """
    if is_constant_within_rounding(scores, machine_epsilon):
        return IndexEstimate(torch.zeros_like(changed_scores[0]), torch.zeros_like(changed_scores[0]))
    parts, variance = (scores[:, None] - changed_scores).square() / 2, scores.var()
    indices = parts.mean(0) / variance
    apart = parts - indices * (scores - scores.mean()).square()[:, None]
    return IndexEstimate(indices, apart.std(0) / variance / len(parts) ** 0.5)


def compute_hsic(visible: Tensor, scores: Tensor, machine_epsilon: float = 0.0) -> Tensor:
    """Compute the HSIC (d,) between the scores (n,) of n masks and the visibility (n,d) of each cell in these masks."""
    # K is (1 + s s') / 2 for s of ±1, of which H leaves the product: the trace is a quadratic form of the centered s
    signs = visible.to(scores.dtype) * 2 - 1
    signs, total = signs - signs.mean(0), torch.zeros_like(signs[0])
    if is_constant_within_rounding(scores, machine_epsilon):
        return total
    for rows in torch.arange(len(scores), device=scores.device).split(KERNEL_ROWS_PER_BLOCK):
        kernel = (-0.5 * ((scores[rows, None] - scores) / scores.std()).square()).exp()
        total += (signs[rows] * (kernel @ signs)).sum(0)
    return (total / (2 * (len(scores) - 1) ** 2)).clamp(min=0)


def compute_hsic_with_error(visible: Tensor, scores: Tensor, machine_epsilon: float) -> IndexEstimate:
    """Compute the HSIC of each cell. Estimate its standard error by a jackknife over ten groups of masks."""
    whole, groups = compute_hsic(visible, scores, machine_epsilon), min(N_JACKKNIFE_GROUPS, len(scores) // 2)
    if groups < 2:
        return IndexEstimate(whole, whole)
    number = torch.arange(len(scores), device=scores.device) % groups
    parts = [compute_hsic(visible[number != i], scores[number != i], machine_epsilon) for i in range(groups)]
    return IndexEstimate(whole, (torch.stack(parts).var(0, correction=0) * (groups - 1)).sqrt())


def is_constant_within_rounding(scores: Tensor, machine_epsilon: float) -> bool:
    """Whether scores are equal within rounding. `machine_epsilon` is the relative rounding error of the model's dtype."""
    return float(scores.max() - scores.min()) <= 4 * machine_epsilon * float(scores.abs().max())
