"""Spectral relevance analysis (SpRAy): cluster attribution maps to find several strategies of a model."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from camscope.errors import UndefinedError
from camscope.metrics.intervals_and_p_values import index_groups
from camscope.metrics.metric_registry import FloatArray
from camscope.optional_packages import require
from camscope.plurals import plural

IntArray = npt.NDArray[np.int64]
SUBSAMPLE_FRACTION = 0.8  # of the patients, in each subsample
EIGENVALUE_DIGITS = 9  # of eigenvalues; later digits depend on the number of threads
EXPLAINED_VARIANCE_FRACTION = 0.99  # of the variance, in the components of a reference
CLUSTER_COUNTS = (2, 3, 4, 5)
N_NEIGHBORS = 10  # of each map in the graph, and the fewest patients of a cluster
GRID_SIZE = 16  # cells along each axis of a pooled map
BLUR_FRACTION = 1 / 16  # of each side
MIN_EIGENGAP = 7 / 8  # an eigenvalue is eight times the one before; for maps along a line it is four times
N_REPORTED_EIGENVALUES = 32
N_MEDOIDS = 3
MIN_REFERENCE_RESAMPLES = 5  # subsamples of a reference; one alone may happen to be similar


def compute_distances(points: FloatArray) -> FloatArray:
    """Return the Euclidean distances (N,N) between points (N,d). Rounding makes the distances between equal maps equal."""
    squares = (points * points).sum(1)
    squared_distances = squares[:, None] + squares - 2 * points @ points.T
    np.fill_diagonal(squared_distances, 0)
    return np.asarray(np.sqrt(squared_distances.round(12).clip(min=0)))


def compute_laplacian_eigenvalues_and_eigenvectors(
    distances: FloatArray, patient_index: IntArray, n_neighbors: int, n_eigenvalues: int
) -> tuple[FloatArray, FloatArray]:
    """Return the smallest eigenvalues of the normalized graph Laplacian, and their eigenvectors (N,n_eigenvalues).

    The matrix is I - D^-1/2 A D^-1/2. The eigenvalues are in ascending order. A holds half of every edge from a map to its
    nearest maps of other patients, in both directions. Without edges within patients, their similar images do not form a
    cluster.
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
    """Compute cluster labels (N,) from eigenvectors by a pivoted QR decomposition. It is deterministic and needs no seed.

    Damle, Minden and Ying 2019, doi:10.1093/imaiai/iay008.
    """
    vectors = eigenvectors[:, :n_clusters]
    pivots = require("scipy.linalg", extra="audit").qr(vectors.T, mode="economic", pivoting=True)[2][:n_clusters]
    left, _, right = np.linalg.svd(vectors[pivots].T)
    return np.asarray(np.abs(vectors @ (left @ right)).argmax(1))


@dataclass(frozen=True, eq=False)
class PointCloud:
    """N points by their distances (N,N), with the patient index (N,) and the numbers of clusters to try."""

    distances: FloatArray
    patient_index: IntArray
    cluster_counts: tuple[int, ...]
    min_eigenvalues: int = 0

    @cached_property
    def eigenvalues_and_eigenvectors(self) -> tuple[FloatArray, FloatArray]:
        """The smallest eigenvalues and the eigenvectors of the neighbor graph."""
        n_eigenvalues = max(self.cluster_counts[-1] + 1, self.min_eigenvalues)
        return compute_laplacian_eigenvalues_and_eigenvectors(
            self.distances, self.patient_index, N_NEIGHBORS, n_eigenvalues
        )

    @cached_property
    def labels_by_count(self) -> dict[int, IntArray]:
        """A dict from the number of clusters k to the cluster label of every point (N,). Labels range from 0 to k-1."""
        return {k: assign_labels_qr(self.eigenvalues_and_eigenvectors[1], k) for k in self.cluster_counts}

    @cached_property
    def eigengap_by_count(self) -> dict[int, float]:
        """A dict from the number of clusters k to the eigengap 1 - λ_k / λ_(k+1).

        It is 1 if the graph has k connected parts, and 0 if it has more.
        """
        rounding_error = len(self.distances) * np.finfo(np.float64).eps
        values = np.where(
            self.eigenvalues_and_eigenvectors[0] > rounding_error, self.eigenvalues_and_eigenvectors[0], 0
        )
        gaps = {k: float(1 - values[k - 1] / values[k]) if values[k] > 0 else 0.0 for k in self.cluster_counts}
        return {k: round(gap, EIGENVALUE_DIGITS) for k, gap in gaps.items()}

    def compute_stability(self, n_resamples: int, rng: np.random.Generator) -> dict[int, float]:
        """Return a dict from the number of clusters to the mean stability of this clustering over random subsamples.

        It is the mean adjusted Rand index with clusters of subsamples of the patients.
        """
        similarities = np.array([self._compute_agreements_with_subsample(rng) for _ in range(n_resamples)]).mean(0)
        return dict(zip(self.cluster_counts, similarities.tolist(), strict=True))

    def _compute_agreements_with_subsample(self, rng: np.random.Generator) -> list[float]:
        """Cluster a subsample of patients. Return its agreement with the clusters of all points, per number of clusters."""
        patients = np.unique(self.patient_index)
        sampled = rng.permutation(patients)[: round(SUBSAMPLE_FRACTION * len(patients))]
        rows = np.flatnonzero(np.isin(self.patient_index, sampled))
        subcloud = PointCloud(self.distances[np.ix_(rows, rows)], self.patient_index[rows], self.cluster_counts)
        rand_index = require("sklearn.metrics", extra="audit").adjusted_rand_score
        return [
            float(rand_index(self.labels_by_count[k][rows], subcloud.labels_by_count[k])) for k in self.cluster_counts
        ]


def sample_reference_points(points: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw points that form a single cluster, from a Gaussian with the principal variances of the given points (N,d).

    The shape of a cloud alone can make clusters stable: an elongated cloud is cut across its middle every time (John et al.
    2020, doi:10.1038/s41598-020-58766-1).
    """
    sizes = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = np.cumsum(sizes**2)
    leading = sizes[: int(np.searchsorted(shares, EXPLAINED_VARIANCE_FRACTION * shares[-1])) + 1]
    return np.asarray(rng.normal(size=(len(points), len(leading))) * leading / np.sqrt(len(points)))


def pool_maps(maps: npt.ArrayLike, grid_size: int) -> FloatArray:
    """Average the positive part of each map over the cells of a coarse grid. Axes shorter than the grid keep their length."""
    values = np.asarray(maps, np.float64)
    weights = [_build_area_weights(size, min(grid_size, size)) for size in values.shape[1:]]
    return _multiply_along_axes(values.clip(min=0), weights)


def smooth_maps_and_find_nonzero(
    pooled_maps: FloatArray, blur_fraction: float
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Blur pooled maps, drop maps that are zero, and scale the others to sum 1. Also return a mask (N,) of the maps that stay.

    Each map is added to its mirror image, so that left and right count as the same place. `blur_fraction` is the width of
    the blur as a share of each side, by which attribution in neighboring cells is similar.
    """
    folded = pooled_maps + pooled_maps[..., ::-1]
    weights = [_build_gaussian_weights(size, blur_fraction * size) for size in folded.shape[1:]]
    smoothed = _multiply_along_axes(folded, weights).reshape(len(pooled_maps), -1)
    is_nonzero = smoothed.sum(1) > 0
    return smoothed[is_nonzero] / smoothed[is_nonzero].sum(1, keepdims=True), is_nonzero


def _multiply_along_axes(values: FloatArray, weights: list[FloatArray]) -> FloatArray:
    """Multiply every spatial axis of the maps by the weight matrix of that axis."""
    for axis, axis_weights in enumerate(weights, 1):
        values = np.moveaxis(np.tensordot(axis_weights, values, (1, axis)), 0, axis)
    return values


def _build_area_weights(size: int, grid_size: int) -> FloatArray:
    """Return the weights (grid_size,size) that average `size` pixels of an axis to `grid_size` larger cells."""
    edges, cells = np.linspace(0, size, grid_size + 1), np.arange(size)
    shared = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return np.asarray(shared.clip(min=0) * grid_size / size)


def _build_gaussian_weights(size: int, sigma: float) -> FloatArray:
    """Return a matrix (size,size) that blurs an axis with a Gaussian. Each row sums to 1."""
    if sigma <= 0:
        return np.eye(size)
    gaussian = np.exp(-0.5 * (np.subtract.outer(np.arange(size), np.arange(size)) / sigma) ** 2)
    return np.asarray(gaussian / gaussian.sum(1, keepdims=True))


@dataclass(frozen=True)
class ClusterMembers:
    """The rows of a cluster, its number of patients, and the rows of its most typical maps."""

    rows: tuple[int, ...]
    n_patients: int
    medoid_rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Partition:
    """The maps divided into k clusters, the largest first. Maps without positive attribution have the label -1.

    `stability` is the mean adjusted Rand index with the clusters of subsamples of four fifths of the patients.
    `reference_stability` is the largest stability of reference points, which are drawn from one Gaussian with the
    covariance of the maps. `eigengap` is 1 - λ_k / λ_k+1 of the graph, and 1 if the graph has exactly k connected
    parts. `is_separate`: the eigengap is large and exceeds that of every reference, and no cluster has too few
    patients.
    """

    labels: IntArray
    clusters: tuple[ClusterMembers, ...]
    stability: float
    reference_stability: float
    eigengap: float
    is_separate: bool

    @property
    def is_stable(self) -> bool:
        """Whether clusters of the maps are more stable than clusters of random points."""
        return self.stability > self.reference_stability


@dataclass(frozen=True, eq=False)
class ClusteringResult:
    """The clusters of a set of maps. Maps without positive attribution (`zero_rows`) are left out.

    `n_clusters` is the number that is stable and separate with the largest eigengap, or 1. `partitions`: number of clusters
    -> the clusters. `eigenvalues`: the smallest ones of the graph's Laplacian.
    """

    n_clusters: int
    partitions: dict[int, Partition]
    eigenvalues: tuple[float, ...]
    n_maps: int
    n_patients: int
    zero_rows: tuple[int, ...]


def cluster_maps(
    maps: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    n_resamples: int = 50,
    n_references: int = 10,
    max_maps: int = 1000,
    seed: int = 0,
) -> ClusteringResult:
    """Cluster maps by their nearest-neighbor graph (Lapuschkin et al. 2019, doi:10.1038/s41467-019-08987-4).

    Clusters can always be computed, and are often stable. They count only if they are more stable than in every reference,
    if each has enough patients, and if hardly any two neighbors are in different clusters: the next eigenvalue is at least
    8 times the k-th. Maps of one finding along a line have eigenvalues such as 1, 4, 9. Of more than `max_maps` maps, the others
    join the cluster of the nearest map. UndefinedError if too few patients have maps with positive attribution.
    """
    pooled = pool_maps(maps, GRID_SIZE)
    points, has_heat = smooth_maps_and_find_nonzero(pooled, BLUR_FRACTION)
    rows, patient_index = np.flatnonzero(has_heat), index_groups(groups, len(pooled))[has_heat]
    random = np.random.default_rng(seed)
    subset = np.sort(random.permutation(len(points))[:max_maps])
    counts = _select_feasible_cluster_counts(len(np.unique(patient_index[subset])), len(pooled))
    cloud = PointCloud(compute_distances(points[subset]), patient_index[subset], counts, N_REPORTED_EIGENVALUES)
    stability = cloud.compute_stability(n_resamples, random)
    references = [
        _measure_stability_and_eigengap_of_random_points(cloud, points[subset], n_resamples, random)
        for _ in range(n_references)
    ]
    nearest = _find_nearest_in_subset(points, subset)
    partitions = {}
    for k in counts:
        map_labels, eigengap = _renumber_clusters_by_size(cloud.labels_by_count[k][nearest]), cloud.eigengap_by_count[k]
        clusters = _build_clusters(map_labels, rows, patient_index, subset, cloud.distances)
        has_all_clusters = len(clusters) == k and min(cluster.n_patients for cluster in clusters) >= N_NEIGHBORS
        is_separate = has_all_clusters and eigengap >= max(MIN_EIGENGAP, *(gaps[k] for _, gaps in references))
        labels = np.full(len(pooled), -1)
        labels[rows] = map_labels
        null_stability = max(stabilities[k] for stabilities, _ in references)
        partitions[k] = Partition(labels, clusters, stability[k], null_stability, eigengap, is_separate)
    valid = [k for k, partition in partitions.items() if partition.is_stable and partition.is_separate]
    return ClusteringResult(
        max(valid, key=lambda k: partitions[k].eigengap, default=1),
        partitions,
        tuple(cloud.eigenvalues_and_eigenvectors[0].clip(min=0).round(EIGENVALUE_DIGITS).tolist()),
        len(rows),
        len(np.unique(patient_index)),
        tuple(np.flatnonzero(~has_heat).tolist()),
    )


def _select_feasible_cluster_counts(n_patients: int, n_maps: int) -> tuple[int, ...]:
    """Return the numbers of clusters for which there are enough patients. Raise an UndefinedError without such a number."""
    feasible = tuple(k for k in CLUSTER_COUNTS if k * N_NEIGHBORS <= n_patients)
    if not feasible:
        raise UndefinedError(
            f"{plural(n_patients, 'patient has', 'patients have')} maps with positive values, of {plural(n_maps, 'map')}; "
            f"clusters need at least {plural(CLUSTER_COUNTS[0] * N_NEIGHBORS, 'patient')}"
        )
    return feasible


def _measure_stability_and_eigengap_of_random_points(
    cloud: PointCloud, points: FloatArray, n_resamples: int, rng: np.random.Generator
) -> tuple[dict[int, float], dict[int, float]]:
    """Draw random points without clusters. Return their stability and eigengap for each number of clusters."""
    distances = compute_distances(sample_reference_points(points, rng))
    reference = PointCloud(distances, cloud.patient_index, cloud.cluster_counts)
    stability = reference.compute_stability(max(MIN_REFERENCE_RESAMPLES, n_resamples // 5), rng)
    return stability, reference.eigengap_by_count


def _find_nearest_in_subset(points: FloatArray, subset: IntArray) -> IntArray:
    """Find, for every point, the nearest point of a subset. Return its position in `subset`."""
    search = require("sklearn.neighbors", extra="audit").NearestNeighbors(n_neighbors=1, algorithm="brute")
    nearest = np.asarray(search.fit(points[subset]).kneighbors(points, return_distance=False)[:, 0], np.int64)
    nearest[subset] = np.arange(len(subset))
    return nearest


def _renumber_clusters_by_size(labels: IntArray) -> IntArray:
    """Renumber cluster labels (M,) by size. Cluster 0 is the largest. Equally large clusters keep the order of the maps."""
    _, first, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    return np.asarray(np.argsort(np.lexsort((first, -sizes)))[inverse])


def _build_clusters(
    labels: IntArray, rows: IntArray, patient_index: IntArray, subset: IntArray, distances: FloatArray
) -> tuple[ClusterMembers, ...]:
    """Return the members of each cluster, and its most typical maps, which are chosen from the subset alone."""
    clusters = []
    for number in range(int(labels.max()) + 1):
        members, subset_members = np.flatnonzero(labels == number), np.flatnonzero(labels[subset] == number)
        total_distances = distances[np.ix_(subset_members, subset_members)].sum(1)
        medoids = subset[subset_members[np.argsort(total_distances, kind="stable")[:N_MEDOIDS]]]
        n_patients = len(np.unique(patient_index[members]))
        clusters.append(ClusterMembers(tuple(rows[members].tolist()), n_patients, tuple(rows[medoids].tolist())))
    return tuple(clusters)
