"""Non-negative matrix factorization (NMF) without random numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.explainers.core.principal_component import normalize_columns
from camscope.targets import full_precision

SWEEPS_PER_ERROR_CHECK = 10  # iterations between two checks of the error
MIN_RELATIVE_EIGENVALUE = 1e-13  # a smaller eigenvalue, relative to the largest, is rounding


@dataclass(frozen=True)
class MatrixFactors:
    """A factorization (N,n,K) ≈ maps (N,n,C) @ vectors (N,C,K) with unit vectors, sorted by the sum of their part.

    `relative_error` (N,): norm of the residual over the norm of the matrix, 0 for a zero matrix. An unused part is 0.
    """

    maps: Tensor
    vectors: Tensor
    relative_error: Tensor


def factorize_nonnegative(
    matrix: Tensor, n_components: int, *, n_iterations: int = 200, tolerance: float = 1e-6
) -> MatrixFactors:
    """Factorize a non-negative matrix (N,n,K) into at most `n_components` components.

    The algorithm is hierarchical alternating least squares (Cichocki & Phan 2009). It starts at the larger halves of the
    singular vectors (Boutsidis & Gallopoulos 2008) and uses no random numbers. A matrix is done when ten iterations lower its
    relative error by less than `tolerance`, or after `n_iterations`.
    """
    full = full_precision(matrix).contiguous()
    size = full.amax((1, 2), keepdim=True)
    full = torch.where(size > 0, full / size, 0)
    initial_factors = _initialize_factors(full.double(), min(n_components, *full.shape[1:]))
    maps, vectors = (factor.to(full) for factor in initial_factors)
    error = _compute_relative_error(full, maps, vectors)
    active = torch.arange(len(full), device=full.device)
    active_matrix, active_transposed = full, full.mT.contiguous()
    for _ in range(0, n_iterations, SWEEPS_PER_ERROR_CHECK):
        rows, columns = _FactorRows(vectors[active]), _FactorRows(maps[active].mT)
        for _ in range(SWEEPS_PER_ERROR_CHECK):  # each map, then each vector, is optimal while all others stay
            columns.update_rows(rows.values, active_transposed)
            rows.update_rows(columns.values, active_matrix)
        maps[active], vectors[active] = columns.values.mT, rows.values
        new_error = _compute_relative_error(active_matrix, maps[active], vectors[active])
        improving = error[active] - new_error >= tolerance
        error[active] = new_error
        if not bool(improving.all()):
            active = active[improving]
            active_matrix, active_transposed = active_matrix[improving], active_transposed[improving]
        if len(active) == 0:
            break
    return _sort_factors(maps * size, vectors, error)


class _FactorRows:
    """One factor (N,C,m) with preallocated buffers: for matrices this small, allocation dominates the cost."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.contiguous().clone()
        self._update_targets = torch.empty_like(self.values)
        self._overlap = values.new_empty(*values.shape[:2], values.shape[1])
        self._self_overlap = self._overlap.diagonal(dim1=1, dim2=2)
        buffers = (self.values, self._update_targets, self._overlap)
        self._row_views = list(zip(*(tensor.split(1, 1) for tensor in buffers), strict=True))

    def update_rows(self, other_factor: Tensor, matrix: Tensor) -> None:
        """Update the rows of this factor one after another, with the other factor fixed."""
        torch.bmm(other_factor, matrix, out=self._update_targets)
        torch.bmm(other_factor, other_factor.mT, out=self._overlap)
        share = torch.where(self._self_overlap > 0, 1 / self._self_overlap, 0)[..., None]
        self._update_targets.mul_(share)
        self._overlap.mul_(-share)
        self._self_overlap.zero_()
        for row, target, overlaps in self._row_views:
            torch.clamp_min(torch.baddbmm(target, overlaps, self.values), 0, out=row)


def _initialize_factors(matrix: Tensor, n_components: int) -> tuple[Tensor, Tensor]:
    """Return initial factors (N,n,C) and (N,C,K) from the singular value decomposition of the matrix."""
    wide = matrix.shape[1] <= matrix.shape[2]
    roots, vectors = torch.linalg.eigh(matrix @ matrix.mT if wide else matrix.mT @ matrix)
    roots, vectors = roots.flip(1)[:, None, :n_components], vectors.flip(2)[..., :n_components]
    other = (matrix.mT if wide else matrix) @ vectors
    live = roots > MIN_RELATIVE_EIGENVALUE * roots[..., :1]
    left, right = (vectors, other) if wide else (other, vectors)
    left, right = torch.where(live, left, 0), torch.where(live, right, 0)
    plus, minus = (left.relu(), right.relu()), ((-left).relu(), (-right).relu())
    weights = [left.norm(dim=1, keepdim=True) * right.norm(dim=1, keepdim=True) for left, right in (plus, minus)]
    left, right = (torch.where(weights[0] >= weights[1], up, down) for up, down in zip(plus, minus, strict=True))
    root = torch.maximum(*weights).sqrt()  # each factor carries the root of the pair's weight
    return root * normalize_columns(left), (root * normalize_columns(right)).mT


def _compute_relative_error(matrix: Tensor, maps: Tensor, vectors: Tensor) -> Tensor:
    """Return the relative reconstruction error (N,) of the factorization."""
    whole = matrix.norm(dim=(1, 2))
    return torch.where(whole > 0, (matrix - maps @ vectors).norm(dim=(1, 2)) / whole, 0)


def _sort_factors(maps: Tensor, vectors: Tensor, relative_error: Tensor) -> MatrixFactors:
    """Normalize the vectors, and sort the components by their share of the matrix."""
    length = vectors.norm(dim=2)
    maps, vectors = maps * length[:, None], normalize_columns(vectors.mT).mT
    order = (maps.sum(1) * vectors.sum(2)).argsort(dim=1, descending=True, stable=True)
    maps = maps.gather(2, order[:, None].expand_as(maps))
    return MatrixFactors(maps, vectors.gather(1, order[..., None].expand_as(vectors)), relative_error)
