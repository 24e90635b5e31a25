"""Spectral relevance analysis (SpRAy): whether maps form several clusters, as if the model used several strategies."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.spectral import (
    EIGENVALUE_DIGITS,
    AttributionSign,
    IntArray,
    PointCloud,
    build_point_cloud,
    pool_maps,
    sample_reference_points,
    smooth_and_normalize,
)
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import FloatArray
from camscope.metrics.statistics import index_groups
from camscope.optional import require
from camscope.plurals import plural

MIN_EIGENGAP = 7 / 8  # an eigenvalue eight times the one before; along a line it is four times
N_REPORTED_EIGENVALUES = 32  # eigenvalues
N_MEDOIDS = 3
MIN_REFERENCE_RESAMPLES = 5  # draws of a reference, of which one alone may well be like another


@dataclass(frozen=True, eq=False)
class ClusterMembers:
    """Maps of one kind: which rows, of how many patients; `medoid_rows`, the three most typical; their mean map, on the grid."""

    number: int
    rows: tuple[int, ...]
    n_patients: int
    medoid_rows: tuple[int, ...]
    mean_map: FloatArray

    @property
    def n_maps(self) -> int:
        """How many maps."""
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Partition:
    """The maps in k clusters, the largest first: `labels` (N,), -1 for a map without heat.

    `stability`: mean adjusted Rand index between these clusters and those of draws of four fifths of the patients.
    `reference_stabilities`: the same of each of several sets of as many points from one Gaussian with the maps' own
    covariance, in which
    there is one cluster. `eigengap`: 1 - λ_k / λ_k+1 of the graph, 1 where it falls into k parts and no more;
    `reference_eigengap`: the
    largest of those sets. `is_stable` and `is_separate` are what `n_clusters` needs.
    """

    n_clusters: int
    labels: IntArray
    stability: float
    reference_stabilities: tuple[float, ...]
    eigengap: float
    reference_eigengap: float
    is_stable: bool
    is_separate: bool
    clusters: tuple[ClusterMembers, ...]


@dataclass(frozen=True, eq=False)
class ClusteringResult:
    """What the maps of a model fall into.

    `n_clusters`: of the k whose clusters are stable and separate the one with the largest gap, 1 where there is none, with the
    `reason`. `eigenvalues` of the graph's Laplacian, for a plot. `zero_rows`: rows without heat, which are left out
    of the `n_rows`;
    `n_maps` maps of `n_patients` are not.
    """

    n_clusters: int
    reason: str
    partitions: tuple[Partition, ...]
    eigenvalues: tuple[float, ...]
    n_maps: int
    n_patients: int
    zero_rows: tuple[int, ...]
    n_rows: int

    def get_partition(self, n_clusters: int) -> Partition:
        """That into k clusters."""
        partitions = {partition.n_clusters: partition for partition in self.partitions}
        if n_clusters not in partitions:
            raise InputError(f"n_clusters={n_clusters}: there are {', '.join(map(str, partitions))}")
        return partitions[n_clusters]

    @property
    def labels(self) -> IntArray:
        """(N,): the cluster of each row in the partition that is claimed, 0 where that is one; -1 for a map without heat."""
        if self.n_clusters > 1:
            return self.get_partition(self.n_clusters).labels
        return np.where(np.isin(np.arange(self.n_rows), self.zero_rows), -1, 0)


def cluster_maps(
    maps: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    cluster_counts: Sequence[int] = (2, 3, 4, 5),
    n_neighbors: int = 10,
    grid_size: int = 16,
    sign: AttributionSign = "positive",
    merge_left_right: bool = True,
    blur_fraction: float = 1 / 16,
    n_resamples: int = 50,
    n_references: int = 10,
    max_maps: int = 1000,
    seed: int = 0,
) -> ClusteringResult:
    """(N,*s) maps of one target, (N,) patients -> clusters of their graph of nearest neighbors; Lapuschkin et al. 2019.

    After doi:10.1038/s41467-019-08987-4: maps pooled to `grid_size` cells an axis, of sum 1; a graph of `n_neighbors` nearest, of
    other patients; eigenvectors of its normalized Laplacian. `merge_left_right`: left and right are one place, for a
    finding in either
    lung is one strategy. `blur_fraction`: heat as near as that share of the picture is in about the same place.

    Clusters can always be made, and are often stable. They are `claimed` where they are more stable than in every
    reference, where each has `n_neighbors` patients or more, and where hardly any two neighbors are in different ones: the
    next eigenvalue is 8 times the k-th. Maps of one finding that wander along a line have eigenvalues as 1, 4, 9, of any
    other shape nearer to one another: they leap, but by 4.

    Left out are k for which there are too few patients. Of more than `max_maps` maps as many are drawn, and the others join the
    cluster of the nearest. UndefinedError where fewer than two clusters' patients show any heat.
    """
    check_positive_integer(
        n_neighbors=n_neighbors,
        grid_size=grid_size,
        n_resamples=n_resamples,
        n_references=n_references,
        max_maps=max_maps,
    )
    counts = sorted(set(cluster_counts))
    if not counts or counts[0] < 2 or not blur_fraction >= 0:
        raise InputError(
            f"cluster_counts={tuple(cluster_counts)}, blur_fraction={blur_fraction}: "
            "expected numbers of clusters, 2 or more, and a width from 0 up"
        )
    pooled = pool_maps(maps, grid_size, sign)
    points, has_heat = smooth_and_normalize(pooled, merge_left_right, blur_fraction)
    patient_index = index_groups(groups, len(pooled))[has_heat]
    random = np.random.default_rng(seed)
    subset_index = np.sort(random.permutation(len(points))[:max_maps])
    feasible_counts = _select_feasible_counts(
        counts, len(np.unique(patient_index[subset_index])), n_neighbors, len(pooled)
    )
    cloud = build_point_cloud(
        points[subset_index], patient_index[subset_index], feasible_counts, n_neighbors, N_REPORTED_EIGENVALUES
    )
    scores = _score_partitions(cloud, points[subset_index], n_resamples, n_references, random)
    rows = np.flatnonzero(has_heat)
    builder = _ClusterBuilder(
        pooled, rows, patient_index, subset_index, cloud.distances, _find_nearest_in_subset(points, subset_index)
    )
    partitions = tuple(
        _build_partition(builder, one, cloud.labels_by_count[one], scores[one], n_neighbors) for one in feasible_counts
    )
    n_clusters, reason = _choose_n_clusters(partitions)
    zero_rows = tuple(np.flatnonzero(~has_heat).tolist())
    values = tuple(cloud.eigenpairs[0].clip(min=0).round(EIGENVALUE_DIGITS).tolist())
    return ClusteringResult(
        n_clusters, reason, partitions, values, len(rows), len(np.unique(patient_index)), zero_rows, len(pooled)
    )


@dataclass(frozen=True)
class _StabilityScores:
    """How stable and how far apart the parts of a cloud are, and those of its references."""

    stability: float
    reference_stabilities: tuple[float, ...]
    eigengap: float
    reference_eigengap: float


def _score_partitions(
    cloud: PointCloud, points: FloatArray, n_resamples: int, n_references: int, rng: np.random.Generator
) -> dict[int, _StabilityScores]:
    stable, reference_scores = cloud.compute_stability(n_resamples, rng), []
    for _ in range(n_references):
        null = build_point_cloud(
            sample_reference_points(points, rng), cloud.patient_index, cloud.cluster_counts, cloud.n_neighbors
        )
        reference_scores.append(
            (null.compute_stability(max(MIN_REFERENCE_RESAMPLES, n_resamples // 5), rng), null.eigengap_by_count)
        )
    return {
        k: _StabilityScores(
            stable[k],
            tuple(scores[k] for scores, _ in reference_scores),
            cloud.eigengap_by_count[k],
            max(scores[k] for _, scores in reference_scores),
        )
        for k in cloud.cluster_counts
    }


@dataclass(frozen=True, eq=False)
class _ClusterBuilder:
    """What makes clusters of parts: the grids (N,*side) of all maps, and which of them, `nonzero_rows` (M,), have heat.

    Of those `subset_index` (m,) are the cloud's, by number; `nearest_in_subset` (M,): to which of the chosen each is nearest.
    """

    pooled_maps: FloatArray
    nonzero_rows: IntArray
    patient_index: IntArray
    subset_index: IntArray
    distances: FloatArray
    nearest_in_subset: IntArray

    def extend_labels(self, subset_labels: IntArray) -> IntArray:
        """(m,) 0..k-1 -> (M,): of all maps with heat, the largest cluster first, of equals that with the first map."""
        _, first, every, sizes = np.unique(
            subset_labels[self.nearest_in_subset], return_index=True, return_inverse=True, return_counts=True
        )
        return np.asarray(np.argsort(np.lexsort((first, -sizes)))[every])

    def build_cluster(self, number: int, labels: IntArray) -> ClusterMembers:
        """One of the clusters of labels (M,)."""
        members, subset_members = np.flatnonzero(labels == number), np.flatnonzero(labels[self.subset_index] == number)
        total_distances = self.distances[np.ix_(subset_members, subset_members)].sum(1)
        medoids = self.nonzero_rows[
            self.subset_index[subset_members[np.argsort(total_distances, kind="stable")[:N_MEDOIDS]]]
        ]
        maps = self.pooled_maps[self.nonzero_rows[members]]
        mean = (maps / maps.sum(tuple(range(1, maps.ndim)), keepdims=True)).mean(0)
        n_patients = len(np.unique(self.patient_index[members]))
        return ClusterMembers(
            number, tuple(self.nonzero_rows[members].tolist()), n_patients, tuple(medoids.tolist()), mean
        )


def _build_partition(
    builder: _ClusterBuilder, n_clusters: int, subset_labels: IntArray, scores: _StabilityScores, min_patients: int
) -> Partition:
    extended_labels = builder.extend_labels(subset_labels)
    clusters = tuple(builder.build_cluster(number, extended_labels) for number in range(int(extended_labels.max()) + 1))
    labels = np.full(len(builder.pooled_maps), -1)
    labels[builder.nonzero_rows] = extended_labels
    has_small_cluster = len(clusters) < n_clusters or min(cluster.n_patients for cluster in clusters) < min_patients
    return Partition(
        n_clusters,
        labels,
        scores.stability,
        scores.reference_stabilities,
        scores.eigengap,
        scores.reference_eigengap,
        is_stable=scores.stability > max(scores.reference_stabilities),
        is_separate=not has_small_cluster and scores.eigengap >= max(MIN_EIGENGAP, scores.reference_eigengap),
        clusters=clusters,
    )


def _choose_n_clusters(partitions: tuple[Partition, ...]) -> tuple[int, str]:
    valid = [one for one in partitions if one.is_stable and one.is_separate]
    if valid:
        one = max(valid, key=lambda each: each.eigengap)
        stability = f"adjusted Rand index {one.stability:.2f}, of one cluster cut so {max(one.reference_stabilities):.2f} at most"
        return (
            one.n_clusters,
            f"separate (gap {one.eigengap:.2f}) and stable ({stability}): {plural(one.n_clusters, 'cluster')}",
        )
    stable, separate = (
        [str(one.n_clusters) for one in partitions if getattr(one, name)] for name in ("is_stable", "is_separate")
    )
    return (
        1,
        f"no number of clusters is both stable ({_format_cluster_counts(stable)}) and "
        f"separate ({_format_cluster_counts(separate)})",
    )


def _format_cluster_counts(cluster_counts: list[str]) -> str:
    return f"k = {', '.join(cluster_counts)}" if cluster_counts else "none is"


def _select_feasible_counts(
    cluster_counts: list[int], n_patients: int, n_neighbors: int, n_maps: int
) -> tuple[int, ...]:
    feasible = tuple(k for k in cluster_counts if k * n_neighbors <= n_patients)
    if not feasible:
        raise UndefinedError(
            f"{plural(n_patients, 'patient has', 'patients have')} maps with heat, of {plural(n_maps, 'map')}: "
            f"{plural(cluster_counts[0], 'cluster')} of {n_neighbors} would need {cluster_counts[0] * n_neighbors}"
        )
    return feasible


def _find_nearest_in_subset(points: FloatArray, subset_index: IntArray) -> IntArray:
    """(M,): the place in `subset_index` of the nearest of those, of the chosen their own."""
    search = (
        require("sklearn.neighbors", extra="audit")
        .NearestNeighbors(n_neighbors=1, algorithm="brute")
        .fit(points[subset_index])
    )
    nearest = np.asarray(search.kneighbors(points, return_distance=False)[:, 0], np.int64)
    nearest[subset_index] = np.arange(len(subset_index))
    return nearest
