"""Spectral clustering: a graph of near maps, the eigenvectors of its Laplacian, and the parts into which these fall."""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import MissingExtraError
from camscope.metrics.base import Floats

Numbers = npt.NDArray[np.int64]


def distances(x: Floats) -> Floats:
    """(N,d) of sum 1 -> (N,N), Euclidean; to 12 digits, so that equal maps are equally near whatever rounds their products."""
    squares = (x * x).sum(1)
    apart = squares[:, None] + squares - 2 * x @ x.T
    np.fill_diagonal(apart, 0)
    return np.asarray(np.sqrt(apart.round(12).clip(min=0)))


def spectrum(apart: Floats, patient: Numbers, neighbours: int, count: int) -> tuple[Floats, Floats]:
    """(N,N), (N,) -> the `count` smallest eigenvalues of I - D^-1/2 A D^-1/2, ascending, and their vectors (N,count).

    A: half of every edge to one of a map's nearest maps of other patients, from either side.
    """
    near = _near(apart, patient, neighbours)
    scale = 1 / np.sqrt(near.sum(1))
    size = len(near)
    values, vectors = _linalg().eigh(
        near * scale[:, None] * scale, subset_by_index=[max(0, size - count), size - 1], overwrite_a=True
    )
    return 1 - values[::-1], vectors[:, ::-1]


def parted(vectors: Floats, k: int) -> Numbers:
    """(N,≥k) -> (N,) 0..k-1: by the pivots of a QR decomposition, which need neither a start nor a seed.

    Damle, Minden and Ying 2019, doi:10.1093/imaiai/iay008.
    """
    own = vectors[:, :k]
    pivots = _linalg().qr(own.T, mode="economic", pivoting=True)[2][:k]
    left, _, right = np.linalg.svd(own[pivots].T)
    return np.asarray(np.abs(own @ (left @ right)).argmax(1))


def _near(apart: Floats, patient: Numbers, neighbours: int) -> Floats:
    """Images of one patient are alike, whatever the model does: among themselves they would be a part of their own."""
    others = np.where(patient[:, None] == patient, np.inf, apart)
    nearest = np.argsort(others, 1, kind="stable")[:, :neighbours]
    edges = np.zeros_like(apart)
    np.put_along_axis(edges, nearest, np.isfinite(np.take_along_axis(others, nearest, 1)).astype(np.float64), 1)
    return np.asarray((edges + edges.T) / 2)


def _linalg() -> Any:
    try:
        return import_module("scipy.linalg")
    except ImportError as error:
        raise MissingExtraError("scipy", "audit") from error
