"""Spectral clustering of maps: pooled maps as points, their neighbor graph, its Laplacian, and the stability of clusters."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from camscope.metrics.base import FloatArray
from camscope.optional import require

IntArray = npt.NDArray[np.int64]
SUBSAMPLE_FRACTION = 0.8  # of the patients, in each subsample
EIGENVALUE_DIGITS = 9  # of eigenvalues; later digits depend on the number of threads
EXPLAINED_VARIANCE_FRACTION = 0.99  # of the variance, in the components of a reference


def compute_distances(points: FloatArray) -> FloatArray:
    """Return Euclidean distances (N,N) of points (N,d) of sum 1, to 12 digits, so that equal maps have equal distances."""
    squares = (points * points).sum(1)
    squared_distances = squares[:, None] + squares - 2 * points @ points.T
    np.fill_diagonal(squared_distances, 0)
    return np.asarray(np.sqrt(squared_distances.round(12).clip(min=0)))


def compute_laplacian_spectrum(
    distances: FloatArray, patient_index: IntArray, n_neighbors: int, n_eigenvalues: int
) -> tuple[FloatArray, FloatArray]:
    """Return the smallest eigenvalues of I - D^-1/2 A D^-1/2, ascending, and their vectors (N,n_eigenvalues).

    A holds half of every edge from a map to its nearest maps of other patients, in both directions. Without edges within
    patients, their similar images do not form a cluster.
    """
    distances_to_others = np.where(patient_index[:, None] == patient_index, np.inf, distances)
    nearest = np.argsort(distances_to_others, 1, kind="stable")[:, :n_neighbors]
    edges = np.zeros_like(distances)
    is_edge = np.isfinite(np.take_along_axis(distances_to_others, nearest, 1)).astype(np.float64)
    np.put_along_axis(edges, nearest, is_edge, 1)
    adjacency = (edges + edges.T) / 2
    scale, size = 1 / np.sqrt(adjacency.sum(1)), len(adjacency)
    values, vectors = require("scipy.linalg", extra="audit").eigh(
        adjacency * scale[:, None] * scale, subset_by_index=[max(0, size - n_eigenvalues), size - 1], overwrite_a=True
    )
    return 1 - values[::-1], vectors[:, ::-1]


def assign_labels_qr(eigenvectors: FloatArray, n_clusters: int) -> IntArray:
    """Return labels (N,) from eigenvectors (N,≥k) by the pivots of a QR decomposition, which needs no seed.

    Damle, Minden and Ying 2019, doi:10.1093/imaiai/iay008.
    """
    vectors = eigenvectors[:, :n_clusters]
    pivots = require("scipy.linalg", extra="audit").qr(vectors.T, mode="economic", pivoting=True)[2][:n_clusters]
    left, _, right = np.linalg.svd(vectors[pivots].T)
    return np.asarray(np.abs(vectors @ (left @ right)).argmax(1))


@dataclass(frozen=True, eq=False)
class PointCloud:
    """N points by their distances (N,N), with the index (N,) of their patients, cut into each of `cluster_counts` parts."""

    distances: FloatArray
    patient_index: IntArray
    cluster_counts: tuple[int, ...]
    n_neighbors: int
    min_eigenvalues: int = 0

    @cached_property
    def eigenpairs(self) -> tuple[FloatArray, FloatArray]:
        """The eigenvalues and eigenvectors of the graph, `min_eigenvalues` or more."""
        return compute_laplacian_spectrum(
            self.distances, self.patient_index, self.n_neighbors, max(self.cluster_counts[-1] + 1, self.min_eigenvalues)
        )

    @cached_property
    def labels_by_count(self) -> dict[int, IntArray]:
        """Number of clusters k -> the label (N,) of each point, 0..k-1."""
        return {k: assign_labels_qr(self.eigenpairs[1], k) for k in self.cluster_counts}

    @cached_property
    def eigengap_by_count(self) -> dict[int, float]:
        """Number of clusters k -> 1 - λ_k / λ_k+1: 1 where the graph has k connected parts, 0 where it has more."""
        rounding_error = len(self.distances) * np.finfo(np.float64).eps
        values = np.where(self.eigenpairs[0] > rounding_error, self.eigenpairs[0], 0)
        gaps = {k: float(1 - values[k - 1] / values[k]) if values[k] > 0 else 0.0 for k in self.cluster_counts}
        return {k: round(gap, EIGENVALUE_DIGITS) for k, gap in gaps.items()}

    def compute_stability(self, n_resamples: int, rng: np.random.Generator) -> dict[int, float]:
        """Return the mean adjusted Rand index with the clusters of subsamples of the patients, by number of clusters."""
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
    """Draw as many points from one Gaussian with the variances of the points (N,d) along their leading components.

    The shape of a cloud alone can make clusters stable: an elongated cloud is cut across its middle every time (John et al.
    2020, doi:10.1038/s41598-020-58766-1).
    """
    sizes = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = np.cumsum(sizes**2)
    leading = sizes[: int(np.searchsorted(shares, EXPLAINED_VARIANCE_FRACTION * shares[-1])) + 1]
    return np.asarray(rng.normal(size=(len(points), len(leading))) * leading / np.sqrt(len(points)))


def pool_maps(maps: npt.ArrayLike, grid_size: int) -> FloatArray:
    """Return the area means of the positive part of finite maps (N,*s) on a grid. An axis with fewer cells keeps them."""
    values = np.asarray(maps, np.float64)
    weights = [_build_area_weights(size, min(grid_size, size)) for size in values.shape[1:]]
    return _apply_along_axes(values.clip(min=0), weights)


def smooth_and_normalize(pooled_maps: FloatArray, blur_fraction: float) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return pooled maps as points (M,cells) of sum 1, and a mask (N,) of the maps that are not zero.

    Each map is added to its mirror image, so that left and right count as the same place. `blur_fraction` is the width of
    the blur as a share of each side, by which attribution in neighboring cells is similar.
    """
    folded = pooled_maps + pooled_maps[..., ::-1]
    weights = [_build_gaussian_weights(size, blur_fraction * size) for size in folded.shape[1:]]
    smoothed = _apply_along_axes(folded, weights).reshape(len(pooled_maps), -1)
    is_nonzero = smoothed.sum(1) > 0
    return smoothed[is_nonzero] / smoothed[is_nonzero].sum(1, keepdims=True), is_nonzero


def _apply_along_axes(values: FloatArray, weights: list[FloatArray]) -> FloatArray:
    """Multiply each axis of values (N,*s) with its weights (t,s)."""
    for axis, axis_weights in enumerate(weights, 1):
        values = np.moveaxis(np.tensordot(axis_weights, values, (1, axis)), 0, axis)
    return values


def _build_area_weights(size: int, grid_size: int) -> FloatArray:
    """Return the share (grid_size,size) of each of `size` cells in each larger cell. Rows sum to 1."""
    edges, cells = np.linspace(0, size, grid_size + 1), np.arange(size)
    shared = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.asarray(shared.clip(min=0) * grid_size / size)


def _build_gaussian_weights(size: int, sigma: float) -> FloatArray:
    """Return a Gaussian (size,size) around each cell. Rows sum to 1."""
    if sigma <= 0:
        return np.eye(size)
    gaussian = np.exp(-0.5 * (np.subtract.outer(np.arange(size), np.arange(size)) / sigma) ** 2)
    return np.asarray(gaussian / gaussian.sum(1, keepdims=True))
