"""Linear algebra of maps: principal components and non-negative factorization.

- The first principal component of what several channels say of the same cells, with a sign that means something.
- Non-negative matrices as sums of few non-negative parts; each of a batch by itself, the same bytes every time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.targets import full_precision

MAX_ROWS_FOR_FULL_DECOMPOSITION = 200  # rows up to which a full decomposition is quick
LANCZOS_BLOCK_SIZE, POWERS_PER_RESTART, MAX_LANCZOS_RESTARTS = (
    8,
    9,
    8,
)  # directions at once; multiplications before each restart, and how many of those


def project_on_first_component(channel_maps: Tensor) -> Tensor:
    """(N,K,cells) -> (N,cells): each cell's projection on the first right singular vector of its (cells x K) matrix.

    Not centred. Of the vector's two signs the one with which the map agrees with Σ_k parts: their inner product is not
    negative. Zeros for a matrix of zeros, NaN for a sample that is not finite.
    """
    return project_with_reference_sign(channel_maps, channel_maps.double().sum(1))


def project_with_reference_sign(channel_maps: Tensor, reference: Tensor) -> Tensor:
    """(N,K,cells), (N,cells) -> (N,cells): as `project_on_first_component`, with the sign of any reference map.

    The smaller Gram matrix is decomposed, in float64, of parts that are scaled to 1, so that none is too small or large.
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
    return torch.where(finite, project_on_axes(axes, towards, channel_maps.dtype) * size[:, 0], torch.nan).to(
        channel_maps.dtype
    )


def compute_leading_axes(gram: Tensor, source_dtype: torch.dtype = torch.float64) -> Tensor:
    """(N,n,n) symmetric -> (N,n,m): columns that span the space of the largest eigenvalue, its root long; the rest is 0.

    All is 0 where no eigenvalue is positive. Eigenvalues tie that are equal to about two thirds of the digits of
    `source_dtype`, that of the numbers the matrix was made of.
    """
    if gram.shape[1] <= MAX_ROWS_FOR_FULL_DECOMPOSITION:
        return _decompose_fully(gram, source_dtype)
    axes, sure = _iterate_block_lanczos(gram, source_dtype)
    if bool(sure.all()):
        return axes
    exact = _decompose_fully(gram[~sure], source_dtype)
    every = exact.new_zeros(gram.shape)
    every[..., : axes.shape[2]] = axes
    every[~sure] = exact
    return every


def _decompose_fully(gram: Tensor, source_dtype: torch.dtype) -> Tensor:
    """(N,n,n) -> (N,n,n): the axes by a full decomposition."""
    values, vectors = torch.linalg.eigh(gram)
    return _scale_leading_vectors(values, vectors, source_dtype)


def _scale_leading_vectors(values: Tensor, vectors: Tensor, source_dtype: torch.dtype) -> Tensor:
    """Eigenvalues (N,m) that rise and their vectors (N,n,m) -> (N,n,m): see `compute_leading_axes`."""
    axes: Tensor = (
        vectors * torch.where(_find_tied_eigenvalues(values, source_dtype), values[:, -1:], 0).sqrt()[:, None]
    )
    return axes


def _find_tied_eigenvalues(values: Tensor, source_dtype: torch.dtype) -> Tensor:
    """(N,m) bool: which of eigenvalues that rise are the largest, if that is positive."""
    top = values[:, -1:]
    return (top > 0) & (values >= top * (1 - _tie_tolerance(source_dtype)))


def _iterate_block_lanczos(gram: Tensor, source_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N,n,n) symmetric -> the axes (N,n,BLOCK), (N,) bool: whether they are those of a full decomposition.

    Block Lanczos with full reorthogonalisation, restarted from its best vectors. It is sure of them by the residual over
    the gap to the next eigenvalue, which bounds their angle to the true ones; a tie as wide as the block has no gap.
    """
    samples, n = gram.shape[:2]
    start = torch.randn(
        n, LANCZOS_BLOCK_SIZE, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )  # the same always
    found = torch.linalg.qr(start.to(gram))[0].expand(samples, -1, -1)
    axes, sure = torch.zeros_like(found), torch.zeros(samples, dtype=torch.bool, device=gram.device)
    allowed = max(1e-11, torch.finfo(source_dtype).eps / 64)
    for _ in range(MAX_LANCZOS_RESTARTS):
        values, found, residual = _compute_ritz_pairs(gram, found)
        tied = _find_tied_eigenvalues(values, source_dtype)
        missing = torch.where(tied, residual, 0).norm(dim=1)
        gap = values[:, -1] - torch.where(tied, -torch.inf, values).amax(1)
        fresh = ~sure & ((missing <= allowed * gap) & gap.isfinite() | (values[:, -1] <= 0))
        axes = torch.where(fresh[:, None, None], _scale_leading_vectors(values, found, source_dtype), axes)
        sure = sure | fresh
        if bool(sure.all()):
            break
    return axes, sure


def _compute_ritz_pairs(gram: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N,n,n), (N,n,BLOCK) -> the largest eigenvalues (N,BLOCK) in its Krylov space, their vectors, and residuals."""
    basis, images = block, gram @ block
    for _ in range(POWERS_PER_RESTART):
        fresh = images[..., -LANCZOS_BLOCK_SIZE:]
        for _ in range(2):  # once more, for what rounding has left
            fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh))[0]
        basis, images = torch.cat([basis, fresh], 2), torch.cat([images, gram @ fresh], 2)
    inner = basis.mT @ images
    values, turns = torch.linalg.eigh((inner + inner.mT) / 2)
    values, turns = values[:, -LANCZOS_BLOCK_SIZE:], turns[..., -LANCZOS_BLOCK_SIZE:]
    vectors = basis @ turns
    return values, vectors, (images @ turns - vectors * values[:, None]).norm(dim=1)


def project_on_axes(axes: Tensor, reference: Tensor, source_dtype: torch.dtype = torch.float64) -> Tensor:
    """(N,cells,n) columns of one length at right angles, or 0; (N,cells) -> (N,cells): of that length, in their space.

    It is the one nearest to `reference`. That is the sign of a single axis, and settles a tie, where a solver returns
    whatever rounding makes of it. Where all are at right angles to `reference`, the strongest cell is positive.
    """
    weights = (axes.mT @ reference[..., None])[..., 0]
    lengths = axes.norm(dim=1).amax(1, keepdim=True) * reference.norm(dim=1, keepdim=True)
    clear = weights.norm(dim=1, keepdim=True) > _tie_tolerance(source_dtype) * lengths
    strongest = axes.square().sum(2).argmax(1)
    weights = torch.where(clear, weights, axes[torch.arange(len(axes), device=axes.device), strongest])
    return (axes @ normalize_columns(weights[..., None]))[..., 0]


def _tie_tolerance(source_dtype: torch.dtype) -> float:
    return float(torch.finfo(source_dtype).eps ** (2 / 3))


def _scale_to_unit_maximum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(N,a,b) -> the same with a largest size of 1, and that size (N,1,1); zeros stay zeros."""
    size = matrix.abs().amax((1, 2), keepdim=True)
    return torch.where(size > 0, matrix / size, 0), size


def normalize_columns(columns: Tensor) -> Tensor:
    """(N,n,m): each column over its length; zeros stay zeros."""
    length = columns.norm(dim=1, keepdim=True)
    return torch.where(length > 0, columns / length, 0)


SWEEPS_PER_ERROR_CHECK = 10  # sweeps between two looks at the error
MIN_RELATIVE_EIGENVALUE = 1e-13  # an eigenvalue this small beside the largest is rounding


@dataclass(frozen=True)
class MatrixFactors:
    """(N,n,K) ≈ maps (N,n,C) @ vectors (N,C,K): vectors of length 1, the part with the largest sum first.

    `relative_error` (N,): length of what is missing over length of the matrix, 0 for one of zeros. A part that is not needed is 0.
    """

    maps: Tensor
    vectors: Tensor
    relative_error: Tensor


def factorize_nonnegative(
    matrix: Tensor, n_components: int, *, n_iterations: int = 200, tolerance: float = 1e-6
) -> MatrixFactors:
    """(N,n,K), not negative -> its factors, at most as many as n or K, in at least float32.

    Hierarchical alternating least squares (Cichocki & Phan 2009): the best of one row of one factor at a time. It begins
    at the singular vectors' larger halves (Boutsidis & Gallopoulos 2008), so nothing is random. A matrix is done when ten
    sweeps lower its relative error by less than `tolerance`, or after so many sweeps.
    """
    full = full_precision(matrix).contiguous()
    size = full.amax((1, 2), keepdim=True)
    full = torch.where(size > 0, full / size, 0)
    maps, vectors = (one.to(full) for one in _initialize_factors(full.double(), min(n_components, *full.shape[1:])))
    error = _compute_relative_error(full, maps, vectors)
    going = torch.arange(len(full), device=full.device)
    part, turned = full, full.mT.contiguous()
    for _ in range(0, n_iterations, SWEEPS_PER_ERROR_CHECK):
        rows, columns = _FactorRows(vectors[going]), _FactorRows(maps[going].mT)
        for _ in range(
            SWEEPS_PER_ERROR_CHECK
        ):  # each map, then each vector, is the best one there is while all others stay
            columns.update_rows(rows.values, turned)
            rows.update_rows(columns.values, part)
        maps[going], vectors[going] = columns.values.mT, rows.values
        left = _compute_relative_error(part, maps[going], vectors[going])
        more = error[going] - left >= tolerance
        error[going] = left
        if not bool(more.all()):
            going, part, turned = going[more], part[more], turned[more]
        if len(going) == 0:
            break
    return _sort_factors(maps * size, vectors, error)


class _FactorRows:
    """One factor (N,C,m), and the room in which it is made better: matrices this small cost their allocation."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.contiguous().clone()
        self._update_targets, overlap = (
            torch.empty_like(self.values),
            values.new_empty(*values.shape[:2], values.shape[1]),
        )
        self._overlap, self._self_overlap = overlap, overlap.diagonal(dim1=1, dim2=2)
        self._row_views = list(
            zip(*(one.split(1, 1) for one in (self.values, self._update_targets, overlap)), strict=True)
        )

    def update_rows(self, other_factor: Tensor, matrix: Tensor) -> None:
        """One row after the other: relu(wanted - overlap with the other rows), over its overlap with itself."""
        torch.bmm(other_factor, matrix, out=self._update_targets)
        torch.bmm(other_factor, other_factor.mT, out=self._overlap)
        share = torch.where(self._self_overlap > 0, 1 / self._self_overlap, 0)[..., None]
        self._update_targets.mul_(share)
        self._overlap.mul_(-share)
        self._self_overlap.zero_()
        for row, wanted, others in self._row_views:
            torch.clamp_min(torch.baddbmm(wanted, others, self.values), 0, out=row)


def _initialize_factors(matrix: Tensor, n_components: int) -> tuple[Tensor, Tensor]:
    """(N,n,C), (N,C,K): of each singular pair the positive or the negative halves, whichever are larger together."""
    wide = matrix.shape[1] <= matrix.shape[2]
    roots, vectors = torch.linalg.eigh(matrix @ matrix.mT if wide else matrix.mT @ matrix)
    roots, vectors = roots.flip(1)[:, None, :n_components], vectors.flip(2)[..., :n_components]
    other = (matrix.mT if wide else matrix) @ vectors
    live = roots > MIN_RELATIVE_EIGENVALUE * roots[..., :1]
    left, right = (vectors, other) if wide else (other, vectors)
    left, right = torch.where(live, left, 0), torch.where(live, right, 0)
    plus, minus = (left.relu(), right.relu()), ((-left).relu(), (-right).relu())
    larger = _compute_column_lengths(plus[0]) * _compute_column_lengths(plus[1]) >= _compute_column_lengths(
        minus[0]
    ) * _compute_column_lengths(minus[1])
    left, right = (torch.where(larger, up, down) for up, down in zip(plus, minus, strict=True))
    root = (
        _compute_column_lengths(left) * _compute_column_lengths(right)
    ).sqrt()  # of the pair's weight: each factor carries half of it
    return root * normalize_columns(left), (root * normalize_columns(right)).mT


def _compute_relative_error(matrix: Tensor, maps: Tensor, vectors: Tensor) -> Tensor:
    """(N,): relative error."""
    whole = matrix.norm(dim=(1, 2))
    return torch.where(whole > 0, (matrix - maps @ vectors).norm(dim=(1, 2)) / whole, 0)


def _sort_factors(maps: Tensor, vectors: Tensor, relative_error: Tensor) -> MatrixFactors:
    """Lengths go into the maps; the part that holds most of the matrix comes first."""
    length = vectors.norm(dim=2)
    maps, vectors = maps * length[:, None], normalize_columns(vectors.mT).mT
    order = (maps.sum(1) * vectors.sum(2)).argsort(dim=1, descending=True, stable=True)
    maps = maps.gather(2, order[:, None].expand_as(maps))
    return MatrixFactors(maps, vectors.gather(1, order[..., None].expand_as(vectors)), relative_error)


def _compute_column_lengths(columns: Tensor) -> Tensor:
    length: Tensor = columns.norm(dim=1, keepdim=True)
    return length
