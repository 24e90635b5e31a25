"""Linear algebra of maps: principal components and non-negative factorization.

- The first principal component of what several channels say of the same cells, with a sign that means something.
- Non-negative matrices as sums of few non-negative parts; each of a batch by itself, the same bytes every time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.targets import full_precision

SMALL = 200  # rows up to which a full decomposition is quick
BLOCK, POWERS, RESTARTS = 8, 9, 8  # directions at once; multiplications before each restart, and how many of those


def first_component(parts: Tensor) -> Tensor:
    """(N,K,cells) -> (N,cells): each cell's projection on the first right singular vector of its (cells x K) matrix.

    Not centred. Of the vector's two signs the one with which the map agrees with Σ_k parts: their inner product is not
    negative. Zeros for a matrix of zeros, NaN for a sample that is not finite.
    """
    return component_towards(parts, parts.double().sum(1))


def component_towards(parts: Tensor, reference: Tensor) -> Tensor:
    """(N,K,cells), (N,cells) -> (N,cells): as `first_component`, with the sign of any reference map.

    The smaller Gram matrix is decomposed, in float64, of parts that are scaled to 1, so that none is too small or large.
    """
    finite = parts.isfinite().flatten(1).all(1)[:, None]
    matrix, size = _scaled(torch.where(finite[..., None], parts.double(), 0))
    towards = _scaled(torch.where(finite, reference.double(), 0)[:, None])[0][:, 0]
    channels, cells = matrix.shape[1:]
    if cells <= channels:
        axes = top_axes(matrix.mT @ matrix, parts.dtype)
    else:
        directions = top_axes(matrix @ matrix.mT, parts.dtype)
        axes = matrix.mT @ units(directions)
    return torch.where(finite, nearest(axes, towards, parts.dtype) * size[:, 0], torch.nan).to(parts.dtype)


def top_axes(gram: Tensor, precision: torch.dtype = torch.float64) -> Tensor:
    """(N,n,n) symmetric -> (N,n,m): columns that span the space of the largest eigenvalue, its root long; the rest is 0.

    All is 0 where no eigenvalue is positive. Eigenvalues tie that are equal to about two thirds of the digits of
    `precision`, that of the numbers the matrix was made of.
    """
    if gram.shape[1] <= SMALL:
        return _decomposed(gram, precision)
    axes, sure = _krylov(gram, precision)
    if bool(sure.all()):
        return axes
    exact = _decomposed(gram[~sure], precision)
    every = exact.new_zeros(gram.shape)
    every[..., : axes.shape[2]] = axes
    every[~sure] = exact
    return every


def _decomposed(gram: Tensor, precision: torch.dtype) -> Tensor:
    """(N,n,n) -> (N,n,n): the axes by a full decomposition."""
    values, vectors = torch.linalg.eigh(gram)
    return _leading(values, vectors, precision)


def _leading(values: Tensor, vectors: Tensor, precision: torch.dtype) -> Tensor:
    """Eigenvalues (N,m) that rise and their vectors (N,n,m) -> (N,n,m): see `top_axes`."""
    axes: Tensor = vectors * torch.where(_tied(values, precision), values[:, -1:], 0).sqrt()[:, None]
    return axes


def _tied(values: Tensor, precision: torch.dtype) -> Tensor:
    """(N,m) bool: which of eigenvalues that rise are the largest, if that is positive."""
    top = values[:, -1:]
    return (top > 0) & (values >= top * (1 - _loose(precision)))


def _krylov(gram: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N,n,n) symmetric -> the axes (N,n,BLOCK), (N,) bool: whether they are those of a full decomposition.

    Block Lanczos with full reorthogonalisation, restarted from its best vectors. It is sure of them by the residual over
    the gap to the next eigenvalue, which bounds their angle to the true ones; a tie as wide as the block has no gap.
    """
    samples, n = gram.shape[:2]
    start = torch.randn(
        n, BLOCK, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )  # the same always
    found = torch.linalg.qr(start.to(gram))[0].expand(samples, -1, -1)
    axes, sure = torch.zeros_like(found), torch.zeros(samples, dtype=torch.bool, device=gram.device)
    allowed = max(1e-11, torch.finfo(precision).eps / 64)
    for _ in range(RESTARTS):
        values, found, residual = _ritz(gram, found)
        tied = _tied(values, precision)
        missing = torch.where(tied, residual, 0).norm(dim=1)
        gap = values[:, -1] - torch.where(tied, -torch.inf, values).amax(1)
        fresh = ~sure & ((missing <= allowed * gap) & gap.isfinite() | (values[:, -1] <= 0))
        axes = torch.where(fresh[:, None, None], _leading(values, found, precision), axes)
        sure = sure | fresh
        if bool(sure.all()):
            break
    return axes, sure


def _ritz(gram: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N,n,n), (N,n,BLOCK) -> the largest eigenvalues (N,BLOCK) in its Krylov space, their vectors, and residuals."""
    basis, images = block, gram @ block
    for _ in range(POWERS):
        fresh = images[..., -BLOCK:]
        for _ in range(2):  # once more, for what rounding has left
            fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh))[0]
        basis, images = torch.cat([basis, fresh], 2), torch.cat([images, gram @ fresh], 2)
    inner = basis.mT @ images
    values, turns = torch.linalg.eigh((inner + inner.mT) / 2)
    values, turns = values[:, -BLOCK:], turns[..., -BLOCK:]
    vectors = basis @ turns
    return values, vectors, (images @ turns - vectors * values[:, None]).norm(dim=1)


def nearest(axes: Tensor, towards: Tensor, precision: torch.dtype = torch.float64) -> Tensor:
    """(N,cells,n) columns of one length at right angles, or 0; (N,cells) -> (N,cells): of that length, in their space.

    It is the one nearest to `towards`. That is the sign of a single axis, and settles a tie, where a solver returns
    whatever rounding makes of it. Where all are at right angles to `towards`, the strongest cell is positive.
    """
    weights = (axes.mT @ towards[..., None])[..., 0]
    lengths = axes.norm(dim=1).amax(1, keepdim=True) * towards.norm(dim=1, keepdim=True)
    clear = weights.norm(dim=1, keepdim=True) > _loose(precision) * lengths
    strongest = axes.square().sum(2).argmax(1)
    weights = torch.where(clear, weights, axes[torch.arange(len(axes), device=axes.device), strongest])
    return (axes @ units(weights[..., None]))[..., 0]


def _loose(precision: torch.dtype) -> float:
    return float(torch.finfo(precision).eps ** (2 / 3))


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(N,a,b) -> the same with a largest size of 1, and that size (N,1,1); zeros stay zeros."""
    size = matrix.abs().amax((1, 2), keepdim=True)
    return torch.where(size > 0, matrix / size, 0), size


def units(columns: Tensor) -> Tensor:
    """(N,n,m): each column over its length; zeros stay zeros."""
    length = columns.norm(dim=1, keepdim=True)
    return torch.where(length > 0, columns / length, 0)


EVERY = 10  # sweeps between two looks at the error
NO_ROOT = 1e-13  # an eigenvalue this small beside the largest is rounding


@dataclass(frozen=True)
class Factors:
    """(N,n,K) ≈ maps (N,n,C) @ vectors (N,C,K): vectors of length 1, the part with the largest sum first.

    `error` (N,): length of what is missing over length of the matrix, 0 for one of zeros. A part that is not needed is 0.
    """

    maps: Tensor
    vectors: Tensor
    error: Tensor


def factorised(matrix: Tensor, parts: int, *, sweeps: int = 200, tolerance: float = 1e-6) -> Factors:
    """(N,n,K), not negative -> its factors, at most as many as n or K, in at least float32.

    Hierarchical alternating least squares (Cichocki & Phan 2009): the best of one row of one factor at a time. It begins
    at the singular vectors' larger halves (Boutsidis & Gallopoulos 2008), so nothing is random. A matrix is done when ten
    sweeps lower its relative error by less than `tolerance`, or after so many sweeps.
    """
    full = full_precision(matrix).contiguous()
    size = full.amax((1, 2), keepdim=True)
    full = torch.where(size > 0, full / size, 0)
    maps, vectors = (one.to(full) for one in _halves(full.double(), min(parts, *full.shape[1:])))
    error = _missing(full, maps, vectors)
    going = torch.arange(len(full), device=full.device)
    part, turned = full, full.mT.contiguous()
    for _ in range(0, sweeps, EVERY):
        rows, columns = _Rows(vectors[going]), _Rows(maps[going].mT)
        for _ in range(EVERY):  # each map, then each vector, is the best one there is while all others stay
            columns.improve(rows.values, turned)
            rows.improve(columns.values, part)
        maps[going], vectors[going] = columns.values.mT, rows.values
        left = _missing(part, maps[going], vectors[going])
        more = error[going] - left >= tolerance
        error[going] = left
        if not bool(more.all()):
            going, part, turned = going[more], part[more], turned[more]
        if len(going) == 0:
            break
    return _ordered(maps * size, vectors, error)


class _Rows:
    """One factor (N,C,m), and the room in which it is made better: matrices this small cost their allocation."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.contiguous().clone()
        self._wanted, overlap = torch.empty_like(self.values), values.new_empty(*values.shape[:2], values.shape[1])
        self._overlap, self._own = overlap, overlap.diagonal(dim1=1, dim2=2)
        self._parts = list(zip(*(one.split(1, 1) for one in (self.values, self._wanted, overlap)), strict=True))

    def improve(self, other: Tensor, full: Tensor) -> None:
        """One row after the other: relu(wanted - overlap with the other rows), over its overlap with itself."""
        torch.bmm(other, full, out=self._wanted)
        torch.bmm(other, other.mT, out=self._overlap)
        share = torch.where(self._own > 0, 1 / self._own, 0)[..., None]
        self._wanted.mul_(share)
        self._overlap.mul_(-share)
        self._own.zero_()
        for row, wanted, others in self._parts:
            torch.clamp_min(torch.baddbmm(wanted, others, self.values), 0, out=row)


def _halves(full: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(N,n,C), (N,C,K): of each singular pair the positive or the negative halves, whichever are larger together."""
    wide = full.shape[1] <= full.shape[2]
    roots, vectors = torch.linalg.eigh(full @ full.mT if wide else full.mT @ full)
    roots, vectors = roots.flip(1)[:, None, :parts], vectors.flip(2)[..., :parts]
    other = (full.mT if wide else full) @ vectors
    live = roots > NO_ROOT * roots[..., :1]
    left, right = (vectors, other) if wide else (other, vectors)
    left, right = torch.where(live, left, 0), torch.where(live, right, 0)
    plus, minus = (left.relu(), right.relu()), ((-left).relu(), (-right).relu())
    larger = _length(plus[0]) * _length(plus[1]) >= _length(minus[0]) * _length(minus[1])
    left, right = (torch.where(larger, up, down) for up, down in zip(plus, minus, strict=True))
    root = (_length(left) * _length(right)).sqrt()  # of the pair's weight: each factor carries half of it
    return root * units(left), (root * units(right)).mT


def _missing(full: Tensor, maps: Tensor, vectors: Tensor) -> Tensor:
    """(N,): relative error."""
    whole = full.norm(dim=(1, 2))
    return torch.where(whole > 0, (full - maps @ vectors).norm(dim=(1, 2)) / whole, 0)


def _ordered(maps: Tensor, vectors: Tensor, error: Tensor) -> Factors:
    """Lengths go into the maps; the part that holds most of the matrix comes first."""
    length = vectors.norm(dim=2)
    maps, vectors = maps * length[:, None], units(vectors.mT).mT
    order = (maps.sum(1) * vectors.sum(2)).argsort(dim=1, descending=True, stable=True)
    maps = maps.gather(2, order[:, None].expand_as(maps))
    return Factors(maps, vectors.gather(1, order[..., None].expand_as(vectors)), error)


def _length(columns: Tensor) -> Tensor:
    length: Tensor = columns.norm(dim=1, keepdim=True)
    return length
