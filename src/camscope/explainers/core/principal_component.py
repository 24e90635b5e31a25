"""First principal component of maps, with a sign that does not depend on the solver."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROWS_FOR_FULL_DECOMPOSITION = 200  # up to which a full decomposition is fast
LANCZOS_BLOCK_SIZE, POWERS_PER_RESTART, MAX_LANCZOS_RESTARTS = 8, 9, 8  # powers: multiplications before each restart


def project_on_first_component(channel_maps: Tensor) -> Tensor:
    """Project maps (N,K,cells) on their first principal component over the channels. Return (N,cells).

    The matrix is not centered. The sign is chosen so that the inner product with the sum over channels is not negative.
    A zero matrix gives zeros. A sample with a value that is not finite gives NaN.
    """
    return project_with_reference_sign(channel_maps, channel_maps.double().sum(1))


def project_with_reference_sign(channel_maps: Tensor, reference: Tensor) -> Tensor:
    """Project the K maps of each image (N,K,cells) on their first principal component. A reference map decides the sign.

    Its sign is chosen to agree with a reference map (N,cells).
    """
    finite = channel_maps.isfinite().flatten(1).all(1)[:, None]
    matrix, size = _scale_to_unit_maximum(torch.where(finite[..., None], channel_maps.double(), 0))
    towards = _scale_to_unit_maximum(torch.where(finite, reference.double(), 0)[:, None])[0][:, 0]
    channels, cells = matrix.shape[1:]
    if cells <= channels:
        axes = compute_leading_axes(matrix.mT @ matrix, channel_maps.dtype)
    else:
        directions = compute_leading_axes(matrix @ matrix.mT, channel_maps.dtype)
        axes = matrix.mT @ normalize_columns(directions)
    return torch.where(
        finite, find_nearest_vector_in_span(axes, towards, channel_maps.dtype) * size[:, 0], torch.nan
    ).to(channel_maps.dtype)


def compute_leading_axes(gram: Tensor, source_dtype: torch.dtype = torch.float64) -> Tensor:
    """For each symmetric matrix (N,n,n), return vectors (N,n,m) that span the eigenspace of its largest eigenvalue.

    The basis vectors have the root of the eigenvalue as their length. All other columns are 0. If no eigenvalue is
    positive, all columns are 0. Eigenvalues count as equal if they agree to two thirds of the digits of `source_dtype`,
    the dtype of the original numbers.
    """
    if gram.shape[1] <= MAX_ROWS_FOR_FULL_DECOMPOSITION:
        values, vectors = torch.linalg.eigh(gram)
        return _scale_leading_eigenvectors_and_zero_others(values, vectors, source_dtype)
    axes, sure = _compute_leading_axes_by_lanczos(gram, source_dtype)
    if bool(sure.all()):
        return axes
    values, vectors = torch.linalg.eigh(gram[~sure])
    exact = _scale_leading_eigenvectors_and_zero_others(values, vectors, source_dtype)
    all_axes = exact.new_zeros(gram.shape)
    all_axes[..., : axes.shape[2]] = axes
    all_axes[~sure] = exact
    return all_axes


def _scale_leading_eigenvectors_and_zero_others(values: Tensor, vectors: Tensor, source_dtype: torch.dtype) -> Tensor:
    """Scale eigenvectors (N,n,m) by the root of the largest eigenvalue. Eigenvectors of smaller eigenvalues become 0."""
    leading = torch.where(_find_tied_eigenvalues(values, source_dtype), values[:, -1:], 0)
    axes: Tensor = vectors * leading.sqrt()[:, None]
    return axes


def _find_tied_eigenvalues(values: Tensor, source_dtype: torch.dtype) -> Tensor:
    """Return a mask (N,m) of the eigenvalues that equal the largest one. If the largest is not positive, all are False."""
    top = values[:, -1:]
    return (top > 0) & (values >= top * (1 - _get_tie_tolerance(source_dtype)))


class LeadingAxes(NamedTuple):
    """Leading axes (N,n,BLOCK) of symmetric matrices, and whether the iteration converged for each matrix (N,)."""

    axes: Tensor
    has_converged: Tensor


def _compute_leading_axes_by_lanczos(gram: Tensor, source_dtype: torch.dtype) -> LeadingAxes:
    """Compute the leading axes of symmetric matrices (N,n,n) by a restarted block Lanczos iteration."""
    samples, n = gram.shape[:2]
    start = torch.randn(
        n, LANCZOS_BLOCK_SIZE, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )  # always the same
    vectors = torch.linalg.qr(start.to(gram))[0].expand(samples, -1, -1)
    axes, sure = torch.zeros_like(vectors), torch.zeros(samples, dtype=torch.bool, device=gram.device)
    allowed = max(1e-11, torch.finfo(source_dtype).eps / 64)
    for _ in range(MAX_LANCZOS_RESTARTS):
        values, vectors, residual = _compute_ritz_pairs(gram, vectors)
        tied = _find_tied_eigenvalues(values, source_dtype)
        missing = torch.where(tied, residual, 0).norm(dim=1)
        gap = values[:, -1] - torch.where(tied, -torch.inf, values).amax(1)
        fresh = ~sure & ((missing <= allowed * gap) & gap.isfinite() | (values[:, -1] <= 0))
        axes = torch.where(
            fresh[:, None, None], _scale_leading_eigenvectors_and_zero_others(values, vectors, source_dtype), axes
        )
        sure = sure | fresh
        if bool(sure.all()):
            break
    return LeadingAxes(axes, sure)


class RitzPairs(NamedTuple):
    """Ritz values (N,BLOCK) of matrices (N,n,n), Ritz vectors (N,n,BLOCK) and norms of the residuals (N,BLOCK)."""

    values: Tensor
    vectors: Tensor
    residual_norms: Tensor


def _compute_ritz_pairs(gram: Tensor, block: Tensor) -> RitzPairs:
    """Compute the largest Ritz values of each matrix (N,n,n). The Krylov space starts from a block of vectors."""
    basis, images = block, gram @ block
    for _ in range(POWERS_PER_RESTART):
        fresh = images[..., -LANCZOS_BLOCK_SIZE:]
        for _ in range(2):  # twice, against rounding
            fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh))[0]
        basis, images = torch.cat([basis, fresh], 2), torch.cat([images, gram @ fresh], 2)
    inner = basis.mT @ images
    values, turns = torch.linalg.eigh((inner + inner.mT) / 2)
    values, turns = values[:, -LANCZOS_BLOCK_SIZE:], turns[..., -LANCZOS_BLOCK_SIZE:]
    vectors = basis @ turns
    return RitzPairs(values, vectors, (images @ turns - vectors * values[:, None]).norm(dim=1))


def find_nearest_vector_in_span(axes: Tensor, reference: Tensor, source_dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the vector (N,cells) nearest to a reference (N,cells) in the span of orthogonal axes (N,cells,n)."""
    weights = (axes.mT @ reference[..., None])[..., 0]
    lengths = axes.norm(dim=1).amax(1, keepdim=True) * reference.norm(dim=1, keepdim=True)
    clear = weights.norm(dim=1, keepdim=True) > _get_tie_tolerance(source_dtype) * lengths
    strongest = axes.square().sum(2).argmax(1)
    weights = torch.where(clear, weights, axes[torch.arange(len(axes), device=axes.device), strongest])
    return (axes @ normalize_columns(weights[..., None]))[..., 0]


def _get_tie_tolerance(source_dtype: torch.dtype) -> float:
    return float(torch.finfo(source_dtype).eps ** (2 / 3))


class ScaledMatrix(NamedTuple):
    """Matrices (N,a,b) divided by their largest absolute value, and this divisor (N,1,1)."""

    matrix: Tensor
    divisor: Tensor


def _scale_to_unit_maximum(matrix: Tensor) -> ScaledMatrix:
    """Divide each matrix (N,a,b) by its largest absolute value."""
    size = matrix.abs().amax((1, 2), keepdim=True)
    return ScaledMatrix(torch.where(size > 0, matrix / size, 0), size)


def normalize_columns(columns: Tensor) -> Tensor:
    """Scale each column of (N,n,m) to length 1. Zero columns stay zero."""
    length = columns.norm(dim=1, keepdim=True)
    return torch.where(length > 0, columns / length, 0)
