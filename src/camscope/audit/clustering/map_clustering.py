"""Spectral relevance analysis (SpRAy): whether maps form several clusters, as if the model used several strategies."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.spectral import (
    EIGENVALUE_DIGITS,
    IntArray,
    PointCloud,
    compute_distances,
    pool_maps,
    sample_reference_points,
    smooth_and_normalize,
)
from camscope.errors import UndefinedError
from camscope.metrics.base import FloatArray
from camscope.metrics.statistics import index_groups
from camscope.optional import require
from camscope.plurals import plural

CLUSTER_COUNTS = (2, 3, 4, 5)
N_NEIGHBORS = 10  # of each map in the graph, and the fewest patients of a cluster
GRID_SIZE = 16  # cells along each axis of a pooled map
BLUR_FRACTION = 1 / 16  # of each side
MIN_EIGENGAP = 7 / 8  # an eigenvalue is eight times the one before; for maps along a line it is four times
N_REPORTED_EIGENVALUES = 32
N_MEDOIDS = 3
MIN_REFERENCE_RESAMPLES = 5  # subsamples of a reference; one alone may happen to be similar


@dataclass(frozen=True)
class ClusterMembers:
    """The rows of a cluster, their number of patients, and the rows of the most typical maps."""

    rows: tuple[int, ...]
    n_patients: int
    medoid_rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Partition:
    """The maps in k clusters, the largest first. `labels` (N,) are -1 for maps without positive attribution.

    `stability` is the mean adjusted Rand index with the clusters of subsamples of four fifths of the patients, and
    `reference_stability` the largest one of references: points from one Gaussian with the covariance of the maps. `eigengap` is
    1 - λ_k / λ_k+1 of the graph, and 1 where it has exactly k connected parts. `is_separate`: it is large and larger than that
    of every reference, and no cluster has too few patients.
    """

    labels: IntArray
    clusters: tuple[ClusterMembers, ...]
    stability: float
    reference_stability: float
    eigengap: float
    is_separate: bool

    @property
    def is_stable(self) -> bool:
        """Whether the clusters are more stable than those of every reference."""
        return self.stability > self.reference_stability


@dataclass(frozen=True, eq=False)
class ClusteringResult:
    """The clusters of `n_maps` maps of `n_patients`. `zero_rows` without positive attribution are left out.

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
    """Cluster maps by their graph of nearest neighbors (Lapuschkin et al. 2019, doi:10.1038/s41467-019-08987-4).

    Clusters can always be computed, and are often stable. They count only if they are more stable than in every reference,
    if each has enough patients, and if hardly any two neighbors are in different clusters: the next eigenvalue is at least
    8 times the k-th. Maps of one finding along a line have eigenvalues such as 1, 4, 9.

    Stability needs `n_resamples` subsamples and `n_references` references. Of more than `max_maps` maps, the others join the
    cluster of the nearest map. UndefinedError if too few patients have maps with positive attribution.
    """
    pooled = pool_maps(maps, GRID_SIZE)
    points, has_heat = smooth_and_normalize(pooled, BLUR_FRACTION)
    rows, patient_index = np.flatnonzero(has_heat), index_groups(groups, len(pooled))[has_heat]
    random = np.random.default_rng(seed)
    subset = np.sort(random.permutation(len(points))[:max_maps])
    counts = _select_feasible_counts(len(np.unique(patient_index[subset])), len(pooled))
    cloud = PointCloud(
        compute_distances(points[subset]), patient_index[subset], counts, N_NEIGHBORS, N_REPORTED_EIGENVALUES
    )
    stability = cloud.compute_stability(n_resamples, random)
    references = [_score_reference(cloud, points[subset], n_resamples, random) for _ in range(n_references)]
    nearest = _find_nearest_in_subset(points, subset)
    partitions = {}
    for k in counts:
        map_labels = _number_by_size(cloud.labels_by_count[k][nearest])
        clusters = _build_clusters(map_labels, rows, patient_index, subset, cloud.distances)
        reference_gap = max(gaps[k] for _, gaps in references)
        has_all_clusters = len(clusters) == k and min(cluster.n_patients for cluster in clusters) >= N_NEIGHBORS
        labels = np.full(len(pooled), -1)
        labels[rows] = map_labels
        partitions[k] = Partition(
            labels,
            clusters,
            stability[k],
            max(stabilities[k] for stabilities, _ in references),
            cloud.eigengap_by_count[k],
            is_separate=has_all_clusters and cloud.eigengap_by_count[k] >= max(MIN_EIGENGAP, reference_gap),
        )
    valid = [k for k, partition in partitions.items() if partition.is_stable and partition.is_separate]
    return ClusteringResult(
        max(valid, key=lambda k: partitions[k].eigengap, default=1),
        partitions,
        tuple(cloud.eigenpairs[0].clip(min=0).round(EIGENVALUE_DIGITS).tolist()),
        len(rows),
        len(np.unique(patient_index)),
        tuple(np.flatnonzero(~has_heat).tolist()),
    )


def _select_feasible_counts(n_patients: int, n_maps: int) -> tuple[int, ...]:
    feasible = tuple(k for k in CLUSTER_COUNTS if k * N_NEIGHBORS <= n_patients)
    if not feasible:
        raise UndefinedError(
            f"{plural(n_patients, 'patient has', 'patients have')} maps with heat, of {plural(n_maps, 'map')}: "
            f"{plural(CLUSTER_COUNTS[0], 'cluster')} of {N_NEIGHBORS} would need {CLUSTER_COUNTS[0] * N_NEIGHBORS}"
        )
    return feasible


def _score_reference(
    cloud: PointCloud, points: FloatArray, n_resamples: int, rng: np.random.Generator
) -> tuple[dict[int, float], dict[int, float]]:
    """Return stability and eigengap of a reference, by number of clusters."""
    distances = compute_distances(sample_reference_points(points, rng))
    reference = PointCloud(distances, cloud.patient_index, cloud.cluster_counts, cloud.n_neighbors)
    return (
        reference.compute_stability(max(MIN_REFERENCE_RESAMPLES, n_resamples // 5), rng),
        reference.eigengap_by_count,
    )


def _find_nearest_in_subset(points: FloatArray, subset: IntArray) -> IntArray:
    """Return the position (M,) in `subset` of the point that is nearest to each point."""
    search = require("sklearn.neighbors", extra="audit").NearestNeighbors(n_neighbors=1, algorithm="brute")
    nearest = np.asarray(search.fit(points[subset]).kneighbors(points, return_distance=False)[:, 0], np.int64)
    nearest[subset] = np.arange(len(subset))
    return nearest


def _number_by_size(labels: IntArray) -> IntArray:
    """Renumber labels (M,): the largest cluster first, and of equal clusters the one with the first map."""
    _, first, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    return np.asarray(np.argsort(np.lexsort((first, -sizes)))[inverse])


def _build_clusters(
    labels: IntArray, rows: IntArray, patient_index: IntArray, subset: IntArray, distances: FloatArray
) -> tuple[ClusterMembers, ...]:
    """Return the clusters. Medoids come from the subset (m,), whose distances (m,m) are known."""
    clusters = []
    for number in range(int(labels.max()) + 1):
        members, subset_members = np.flatnonzero(labels == number), np.flatnonzero(labels[subset] == number)
        total_distances = distances[np.ix_(subset_members, subset_members)].sum(1)
        medoids = subset[subset_members[np.argsort(total_distances, kind="stable")[:N_MEDOIDS]]]
        n_patients = len(np.unique(patient_index[members]))
        clusters.append(ClusterMembers(tuple(rows[members].tolist()), n_patients, tuple(rows[medoids].tolist())))
    return tuple(clusters)
