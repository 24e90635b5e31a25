"""Spectral clustering: a graph of near maps, the eigenvectors of its Laplacian, and the parts into which these fall.

A cloud of points: the parts into which it falls, how far these are apart, and how alike those of most of it are.
Maps as points: pooled to a coarse grid, so that two that are near one another show heat in about the same places.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, MissingExtraError
from camscope.metrics.base import Floats
from camscope.optional import sklearn

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


KEPT = 0.8  # of the patients, in each draw
DIGITS = 9  # of eigenvalues: what comes after is rounding, and other threads round otherwise
LEADING = 0.99  # of the variance, in the components of a reference


@dataclass(frozen=True, eq=False)
class Cloud:
    """N points, by how far `apart` (N,N) they are, of patients (N,), cut into each of `ks` parts."""

    apart: Floats
    patient: Numbers
    ks: tuple[int, ...]
    neighbours: int
    shown: int = 0

    @cached_property
    def spectrum(self) -> tuple[Floats, Floats]:
        """Eigenvalues and vectors of its graph: one more than there are parts, `shown` or more."""
        return spectrum(self.apart, self.patient, self.neighbours, max(self.ks[-1] + 1, self.shown))

    @cached_property
    def parts(self) -> dict[int, Numbers]:
        """Of each k: (N,) 0..k-1."""
        return {k: parted(self.spectrum[1], k) for k in self.ks}

    @cached_property
    def gaps(self) -> dict[int, float]:
        """Of each k: 1 - λ_k / λ_k+1, 1 where the graph falls into k parts and no more, 0 where it falls into more."""
        least = len(self.apart) * np.finfo(np.float64).eps  # what is 0 but for rounding
        values = np.where(self.spectrum[0] > least, self.spectrum[0], 0)
        gaps = {k: float(1 - values[k - 1] / values[k]) if values[k] > 0 else 0.0 for k in self.ks}
        return {k: round(gap, DIGITS) for k, gap in gaps.items()}

    def stability(self, draws: int, random: np.random.Generator) -> dict[int, float]:
        """Of each k: the mean adjusted Rand index with the parts of four fifths of the patients, drawn so often."""
        alike = np.array([self._alike(random) for _ in range(draws)]).mean(0)
        return dict(zip(self.ks, alike.tolist(), strict=True))

    def _alike(self, random: np.random.Generator) -> list[float]:
        patients = np.unique(self.patient)
        kept = random.permutation(patients)[: round(KEPT * len(patients))]
        rows = np.flatnonzero(np.isin(self.patient, kept))
        some = Cloud(self.apart[np.ix_(rows, rows)], self.patient[rows], self.ks, self.neighbours)
        index = sklearn("metrics").adjusted_rand_score
        return [float(index(self.parts[k][rows], some.parts[k])) for k in self.ks]


def reference(points: Floats, random: np.random.Generator) -> Floats:
    """(N,d) -> (N,c): as many points of one Gaussian, along the leading components with the points' own variances.

    After John et al. 2020, doi:10.1038/s41598-020-58766-1: how stable cuts are hangs on the shape of a cloud, too; one that
    is long is cut across its middle every time.
    """
    sizes = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = np.cumsum(sizes**2)
    leading = sizes[: int(np.searchsorted(shares, LEADING * shares[-1])) + 1]
    return np.asarray(random.normal(size=(len(points), len(leading))) * leading / np.sqrt(len(points)))


def cloud_of(points: Floats, patient: Numbers, ks: tuple[int, ...], neighbours: int, shown: int = 0) -> Cloud:
    """(N,d), (N,) -> their cloud."""
    return Cloud(distances(points), patient, ks, neighbours, shown)


Sign = Literal["positive", "both"]


def pooled(maps: npt.ArrayLike, side: int, sign: Sign = "positive") -> Floats:
    """(N,*s) -> (N,*side): area means of the positive part, or of heat and cold alike; an axis of fewer cells keeps its own."""
    heat = np.asarray(maps, np.float64)
    if heat.ndim < 2 or not heat.size:
        raise InputError(f"maps {heat.shape}: expected (N,*s), one or more axes of cells")
    if not np.isfinite(heat).all():
        raise InputError(f"map {int(np.argwhere(~np.isfinite(heat))[0][0])} holds NaN or infinity")
    if sign not in ("positive", "both"):
        raise InputError(f"sign={sign!r}: expected 'positive' or 'both'")
    heat = heat.clip(min=0) if sign == "positive" else np.abs(heat)
    return _along_axes(heat, [_areas(size, min(side, size)) for size in heat.shape[1:]])


def placed(grid: Floats, mirror: bool, blur: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(N,*side) -> (M,cells) of the maps with any heat, each of sum 1, and (N,) which these are.

    `mirror`: heat on the left and on the right is in the same place. `blur`: how far off it is still in about the same
    place, as a share of the picture: heat in neighbouring cells is alike, and noise cancels out.
    """
    folded = grid + grid[..., ::-1] if mirror else grid
    soft = _along_axes(folded, [_soft(size, blur * size) for size in folded.shape[1:]]).reshape(len(grid), -1)
    there = soft.sum(1) > 0
    return soft[there] / soft[there].sum(1, keepdims=True), there


def _along_axes(values: Floats, weights: list[Floats]) -> Floats:
    """(N,*s), for each axis (t,s) -> (N,*t)."""
    for axis, own in enumerate(weights, 1):
        values = np.moveaxis(np.tensordot(own, values, (1, axis)), 0, axis)
    return values


def _areas(size: int, side: int) -> Floats:
    """(side,size): how much of each of `size` cells lies in each of `side` larger ones; rows sum to 1."""
    edges, cells = np.linspace(0, size, side + 1), np.arange(size)
    shared = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.asarray(shared.clip(min=0) * side / size)


def _soft(size: int, width: float) -> Floats:
    """(size,size): a Gaussian around each cell, of sum 1 within the picture."""
    if width <= 0:
        return np.eye(size)
    away = np.subtract.outer(np.arange(size), np.arange(size)) / width
    bell = np.exp(-0.5 * away**2)
    return np.asarray(bell / bell.sum(1, keepdims=True))
