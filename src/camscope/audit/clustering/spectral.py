"""Spectral clustering of maps: pooled maps as points, their neighbor graph, its Laplacian, and the stability of clusters."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.metrics.base import FloatArray
from camscope.optional import require

IntArray = npt.NDArray[np.int64]


def compute_distances(points: FloatArray) -> FloatArray:
    """(N,d) of sum 1 -> (N,N), Euclidean; to 12 digits, so that equal maps are equally near whatever rounds their products."""
    squares = (points * points).sum(1)
    apart = squares[:, None] + squares - 2 * points @ points.T
    np.fill_diagonal(apart, 0)
    return np.asarray(np.sqrt(apart.round(12).clip(min=0)))


def compute_laplacian_spectrum(
    distances: FloatArray, patient_index: IntArray, n_neighbors: int, n_eigenvalues: int
) -> tuple[FloatArray, FloatArray]:
    """(N,N), (N,) -> the `n_eigenvalues` smallest eigenvalues of I - D^-1/2 A D^-1/2, ascending, and their vectors (N,count).

    A: half of every edge to one of a map's nearest maps of other patients, from either side.
    """
    near = _build_neighbor_graph(distances, patient_index, n_neighbors)
    scale = 1 / np.sqrt(near.sum(1))
    size = len(near)
    values, vectors = _import_scipy_linalg().eigh(
        near * scale[:, None] * scale, subset_by_index=[max(0, size - n_eigenvalues), size - 1], overwrite_a=True
    )
    return 1 - values[::-1], vectors[:, ::-1]


def assign_labels_qr(eigenvectors: FloatArray, n_clusters: int) -> IntArray:
    """(N,≥k) -> (N,) 0..k-1: by the pivots of a QR decomposition, which need neither a start nor a seed.

    Damle, Minden and Ying 2019, doi:10.1093/imaiai/iay008.
    """
    vectors = eigenvectors[:, :n_clusters]
    pivots = _import_scipy_linalg().qr(vectors.T, mode="economic", pivoting=True)[2][:n_clusters]
    left, _, right = np.linalg.svd(vectors[pivots].T)
    return np.asarray(np.abs(vectors @ (left @ right)).argmax(1))


def _build_neighbor_graph(distances: FloatArray, patient_index: IntArray, n_neighbors: int) -> FloatArray:
    """Images of one patient are alike, whatever the model does: among themselves they would be a part of their own."""
    distances_to_others = np.where(patient_index[:, None] == patient_index, np.inf, distances)
    nearest = np.argsort(distances_to_others, 1, kind="stable")[:, :n_neighbors]
    edges = np.zeros_like(distances)
    np.put_along_axis(
        edges, nearest, np.isfinite(np.take_along_axis(distances_to_others, nearest, 1)).astype(np.float64), 1
    )
    return np.asarray((edges + edges.T) / 2)


def _import_scipy_linalg() -> Any:
    return require("scipy.linalg", extra="audit")


SUBSAMPLE_FRACTION = 0.8  # of the patients, in each draw
EIGENVALUE_DIGITS = 9  # of eigenvalues: what comes after is rounding, and other threads round otherwise
EXPLAINED_VARIANCE_FRACTION = 0.99  # of the variance, in the components of a reference


@dataclass(frozen=True, eq=False)
class PointCloud:
    """N points, by how far `distances` (N,N) they are, of patients (N,), cut into each of `cluster_counts` parts."""

    distances: FloatArray
    patient_index: IntArray
    cluster_counts: tuple[int, ...]
    n_neighbors: int
    min_eigenvalues: int = 0

    @cached_property
    def eigenpairs(self) -> tuple[FloatArray, FloatArray]:
        """Eigenvalues and vectors of its graph: one more than there are parts, `min_eigenvalues` or more."""
        return compute_laplacian_spectrum(
            self.distances, self.patient_index, self.n_neighbors, max(self.cluster_counts[-1] + 1, self.min_eigenvalues)
        )

    @cached_property
    def labels_by_count(self) -> dict[int, IntArray]:
        """Of each k: (N,) 0..k-1."""
        return {k: assign_labels_qr(self.eigenpairs[1], k) for k in self.cluster_counts}

    @cached_property
    def eigengap_by_count(self) -> dict[int, float]:
        """Of each k: 1 - λ_k / λ_k+1, 1 where the graph falls into k parts and no more, 0 where it falls into more."""
        least = len(self.distances) * np.finfo(np.float64).eps  # what is 0 but for rounding
        values = np.where(self.eigenpairs[0] > least, self.eigenpairs[0], 0)
        gaps = {k: float(1 - values[k - 1] / values[k]) if values[k] > 0 else 0.0 for k in self.cluster_counts}
        return {k: round(gap, EIGENVALUE_DIGITS) for k, gap in gaps.items()}

    def compute_stability(self, n_resamples: int, rng: np.random.Generator) -> dict[int, float]:
        """Of each k: the mean adjusted Rand index with the parts of four fifths of the patients, drawn so often."""
        similarities = np.array([self._compare_with_subsample(rng) for _ in range(n_resamples)]).mean(0)
        return dict(zip(self.cluster_counts, similarities.tolist(), strict=True))

    def _compare_with_subsample(self, rng: np.random.Generator) -> list[float]:
        patients = np.unique(self.patient_index)
        sampled = rng.permutation(patients)[: round(SUBSAMPLE_FRACTION * len(patients))]
        rows = np.flatnonzero(np.isin(self.patient_index, sampled))
        subcloud = PointCloud(
            self.distances[np.ix_(rows, rows)], self.patient_index[rows], self.cluster_counts, self.n_neighbors
        )
        rand_index = require("sklearn.metrics", extra="audit").adjusted_rand_score
        return [
            float(rand_index(self.labels_by_count[k][rows], subcloud.labels_by_count[k])) for k in self.cluster_counts
        ]


def sample_reference_points(points: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(N,d) -> (N,c): as many points of one Gaussian, along the leading components with the points' own variances.

    After John et al. 2020, doi:10.1038/s41598-020-58766-1: how stable cuts are hangs on the shape of a cloud, too; one that
    is long is cut across its middle every time.
    """
    sizes = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = np.cumsum(sizes**2)
    leading = sizes[: int(np.searchsorted(shares, EXPLAINED_VARIANCE_FRACTION * shares[-1])) + 1]
    return np.asarray(rng.normal(size=(len(points), len(leading))) * leading / np.sqrt(len(points)))


def build_point_cloud(
    points: FloatArray,
    patient_index: IntArray,
    cluster_counts: tuple[int, ...],
    n_neighbors: int,
    min_eigenvalues: int = 0,
) -> PointCloud:
    """(N,d), (N,) -> their cloud."""
    return PointCloud(compute_distances(points), patient_index, cluster_counts, n_neighbors, min_eigenvalues)


AttributionSign = Literal["positive", "both"]


def pool_maps(maps: npt.ArrayLike, grid_size: int, sign: AttributionSign = "positive") -> FloatArray:
    """(N,*s) -> (N,*side): area means of the positive part, or of heat and cold alike; an axis of fewer cells keeps its own."""
    heat = np.asarray(maps, np.float64)
    if heat.ndim < 2 or not heat.size:
        raise InputError(f"maps {heat.shape}: expected (N,*s), one or more axes of cells")
    if not np.isfinite(heat).all():
        raise InputError(f"map {int(np.argwhere(~np.isfinite(heat))[0][0])} holds NaN or infinity")
    if sign not in ("positive", "both"):
        raise InputError(f"sign={sign!r}: expected 'positive' or 'both'")
    heat = heat.clip(min=0) if sign == "positive" else np.abs(heat)
    return _apply_along_axes(heat, [_build_area_weights(size, min(grid_size, size)) for size in heat.shape[1:]])


def smooth_and_normalize(
    pooled_maps: FloatArray, merge_left_right: bool, blur_fraction: float
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """(N,*side) -> (M,cells) of the maps with any heat, each of sum 1, and (N,) which these are.

    `merge_left_right`: heat on the left and on the right is in the same place. `blur_fraction`: how far off it is
    still in about the same
    place, as a share of the picture: heat in neighboring cells is alike, and noise cancels out.
    """
    folded = pooled_maps + pooled_maps[..., ::-1] if merge_left_right else pooled_maps
    soft = _apply_along_axes(
        folded, [_build_gaussian_weights(size, blur_fraction * size) for size in folded.shape[1:]]
    ).reshape(len(pooled_maps), -1)
    there = soft.sum(1) > 0
    return soft[there] / soft[there].sum(1, keepdims=True), there


def _apply_along_axes(values: FloatArray, weights: list[FloatArray]) -> FloatArray:
    """(N,*s), for each axis (t,s) -> (N,*t)."""
    for axis, own in enumerate(weights, 1):
        values = np.moveaxis(np.tensordot(own, values, (1, axis)), 0, axis)
    return values


def _build_area_weights(size: int, grid_size: int) -> FloatArray:
    """(side,size): how much of each of `size` cells lies in each of `grid_size` larger ones; rows sum to 1."""
    edges, cells = np.linspace(0, size, grid_size + 1), np.arange(size)
    shared = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.asarray(shared.clip(min=0) * grid_size / size)


def _build_gaussian_weights(size: int, sigma: float) -> FloatArray:
    """(size,size): a Gaussian around each cell, of sum 1 within the picture."""
    if sigma <= 0:
        return np.eye(size)
    away = np.subtract.outer(np.arange(size), np.arange(size)) / sigma
    bell = np.exp(-0.5 * away**2)
    return np.asarray(bell / bell.sum(1, keepdims=True))
