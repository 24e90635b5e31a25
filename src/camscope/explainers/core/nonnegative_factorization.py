"""Non-negative matrix factorization (NMF) without random numbers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.principal_component import normalize_columns
from camscope.targets import full_precision

SWEEPS_PER_ERROR_CHECK = 10  # iterations between two checks of the error
MIN_RELATIVE_EIGENVALUE = 1e-13  # a smaller eigenvalue, relative to the largest, is rounding


@dataclass(frozen=True)
class MatrixFactors:
    """A factorization (N,n,K) ≈ maps (N,n,C) @ vectors (N,C,K) into C components with vectors of length 1.

    The components are sorted by the sum of their product. Unused components are 0. `relative_error` (N,) is the norm of
    the residual divided by the norm of the matrix.
    """

    maps: Tensor
    vectors: Tensor
    relative_error: Tensor


def factorize_nonnegative(
    matrix: Tensor, n_components: int, *, n_iterations: int = 200, tolerance: float = 1e-6
) -> MatrixFactors:
    """Factorize non-negative matrices (N,n,K), each into at most `n_components` components.

    The algorithm is hierarchical alternating least squares (Cichocki & Phan 2009). It starts from the larger of the
    positive and negative part of each singular vector (Boutsidis & Gallopoulos 2008), without random numbers. It stops
    if ten iterations lower the relative error by less than `tolerance`, or after `n_iterations`.
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
    """One factor (N,C,m) with preallocated buffers, because allocation dominates the cost for small matrices."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.contiguous().clone()
        self._update_targets = torch.empty_like(self.values)
        self._overlap = values.new_empty(*values.shape[:2], values.shape[1])
        self._self_overlap = self._overlap.diagonal(dim1=1, dim2=2)
        buffers = (self.values, self._update_targets, self._overlap)
        self._row_views = list(zip(*(tensor.split(1, 1) for tensor in buffers), strict=True))

    def update_rows(self, other_factor: Tensor, matrix: Tensor) -> None:
        """Update the rows of this factor one by one, by least squares. The second factor does not change."""
        torch.bmm(other_factor, matrix, out=self._update_targets)
        torch.bmm(other_factor, other_factor.mT, out=self._overlap)
        share = torch.where(self._self_overlap > 0, 1 / self._self_overlap, 0)[..., None]
        self._update_targets.mul_(share)
        self._overlap.mul_(-share)
        self._self_overlap.zero_()
        for row, target, overlaps in self._row_views:
            torch.clamp_min(torch.baddbmm(target, overlaps, self.values), 0, out=row)


class InitialFactors(NamedTuple):
    """Initial maps (N,n,C) and vectors (N,C,K) of a factorization."""

    maps: Tensor
    vectors: Tensor


def _initialize_factors(matrix: Tensor, n_components: int) -> InitialFactors:
    """Compute initial factors from the singular value decomposition of the matrix."""
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
    return InitialFactors(root * normalize_columns(left), (root * normalize_columns(right)).mT)


def _compute_relative_error(matrix: Tensor, maps: Tensor, vectors: Tensor) -> Tensor:
    """Return the norm (N,) of matrix - maps @ vectors, relative to the norm of the matrix."""
    whole = matrix.norm(dim=(1, 2))
    return torch.where(whole > 0, (matrix - maps @ vectors).norm(dim=(1, 2)) / whole, 0)


def _sort_factors(maps: Tensor, vectors: Tensor, relative_error: Tensor) -> MatrixFactors:
    """Scale the vectors to length 1. Sort the components by the share of the matrix that they explain."""
    length = vectors.norm(dim=2)
    maps, vectors = maps * length[:, None], normalize_columns(vectors.mT).mT
    order = (maps.sum(1) * vectors.sum(2)).argsort(dim=1, descending=True, stable=True)
    maps = maps.gather(2, order[:, None].expand_as(maps))
    return MatrixFactors(maps, vectors.gather(1, order[..., None].expand_as(vectors)), relative_error)
