"""The first principal component of what several channels say of the same cells, with a sign that means something."""

import torch
from torch import Tensor

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
