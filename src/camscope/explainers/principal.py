"""The first principal component of what several channels say of the same cells, with a sign that means something."""

import torch
from torch import Tensor


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
        axes = matrix.mT @ _units(directions)
    return torch.where(finite, nearest(axes, towards, parts.dtype) * size[:, 0], torch.nan).to(parts.dtype)


def top_axes(gram: Tensor, precision: torch.dtype = torch.float64) -> Tensor:
    """(N,n,n) symmetric -> (N,n,n): columns that span the space of the largest eigenvalue, its root long; the rest is 0.

    All is 0 where no eigenvalue is positive. Eigenvalues tie that are equal to about two thirds of the digits of
    `precision`, that of the numbers the matrix was made of.
    """
    values, vectors = torch.linalg.eigh(gram)
    top = values[:, -1:]
    tied = (top > 0) & (values >= top * (1 - _loose(precision)))
    axes: Tensor = vectors * torch.where(tied, top, 0).sqrt()[:, None]
    return axes


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
    return (axes @ _units(weights[..., None]))[..., 0]


def _loose(precision: torch.dtype) -> float:
    return float(torch.finfo(precision).eps ** (2 / 3))


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(N,a,b) -> the same with a largest size of 1, and that size (N,1,1); zeros stay zeros."""
    size = matrix.abs().amax((1, 2), keepdim=True)
    return torch.where(size > 0, matrix / size, 0), size


def _units(columns: Tensor) -> Tensor:
    """(N,n,m): each column over its length; zeros stay zeros."""
    length = columns.norm(dim=1, keepdim=True)
    return torch.where(length > 0, columns / length, 0)
