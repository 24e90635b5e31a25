"""Spectral relevance analysis: do a model's maps fall into groups, as if it had several strategies, or are they of one kind?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.spectral import DIGITS, Cloud, Numbers, Sign, cloud_of, placed, pooled, reference
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats
from camscope.metrics.statistics import numbered
from camscope.optional import sklearn
from camscope.plurals import plural

GAP = 7 / 8  # an eigenvalue eight times the one before; along a line it is four times
SHOWN = 32  # eigenvalues
MEDOIDS = 3
FEWEST = 5  # draws of a reference, of which one alone may well be like another


@dataclass(frozen=True, eq=False)
class Cluster:
    """Maps of one kind: which rows, of how many patients; `medoids`, the three most typical; their mean map, on the grid."""

    number: int
    members: tuple[int, ...]
    patients: int
    medoids: tuple[int, ...]
    mean: Floats

    @property
    def n(self) -> int:
        """How many maps."""
        return len(self.members)


@dataclass(frozen=True, eq=False)
class Partition:
    """The maps in k clusters, the largest first: `labels` (N,), -1 for a map without heat.

    `stability`: mean adjusted Rand index between these clusters and those of draws of four fifths of the patients.
    `reference`: the same of each of several sets of as many points from one Gaussian with the maps' own covariance, in which
    there is one cluster. `gap`: 1 - λ_k / λ_k+1 of the graph, 1 where it falls into k parts and no more; `gap_reference`: the
    largest of those sets. `stable` and `separate` are what `claimed` needs.
    """

    k: int
    labels: Numbers
    stability: float
    reference: tuple[float, ...]
    gap: float
    gap_reference: float
    stable: bool
    separate: bool
    clusters: tuple[Cluster, ...]


@dataclass(frozen=True, eq=False)
class Strategies:
    """What the maps of a model fall into.

    `claimed`: of the k whose clusters are stable and separate the one with the largest gap, 1 where there is none, with the
    `reason`. `eigenvalues` of the graph's Laplacian, for a plot. `zero`: rows without heat, which are left out of the `rows`;
    `n` maps of `patients` are not.
    """

    claimed: int
    reason: str
    partitions: tuple[Partition, ...]
    eigenvalues: tuple[float, ...]
    n: int
    patients: int
    zero: tuple[int, ...]
    rows: int

    def partition(self, k: int) -> Partition:
        """That into k clusters."""
        found = {one.k: one for one in self.partitions}
        if k not in found:
            raise InputError(f"k={k}: there are {', '.join(map(str, found))}")
        return found[k]

    @property
    def labels(self) -> Numbers:
        """(N,): the cluster of each row in the partition that is claimed, 0 where that is one; -1 for a map without heat."""
        if self.claimed > 1:
            return self.partition(self.claimed).labels
        return np.where(np.isin(np.arange(self.rows), self.zero), -1, 0)


def strategies(
    maps: npt.ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    k: Sequence[int] = (2, 3, 4, 5),
    neighbours: int = 10,
    side: int = 16,
    sign: Sign = "positive",
    mirror: bool = True,
    blur: float = 1 / 16,
    bootstraps: int = 50,
    references: int = 10,
    most: int = 1000,
    seed: int = 0,
) -> Strategies:
    """(N,*s) maps of one target, (N,) patients -> clusters of their graph of nearest neighbours; Lapuschkin et al. 2019.

    After doi:10.1038/s41467-019-08987-4: maps pooled to `side` cells an axis, of sum 1; a graph of `neighbours` nearest, of
    other patients; eigenvectors of its normalised Laplacian. `mirror`: left and right are one place, for a finding in either
    lung is one strategy. `blur`: heat as near as that share of the picture is in about the same place.

    Clusters can always be made, and are often stable. They are `claimed` where they are more stable than in every
    reference, where each has `neighbours` patients or more, and where hardly any two neighbours are in different ones: the
    next eigenvalue is 8 times the k-th. Maps of one finding that wander along a line have eigenvalues as 1, 4, 9, of any
    other shape nearer to one another: they leap, but by 4.

    Left out are k for which there are too few patients. Of more than `most` maps as many are drawn, and the others join the
    cluster of the nearest. UndefinedError where fewer than two clusters' patients show any heat.
    """
    expect_count(neighbours=neighbours, side=side, bootstraps=bootstraps, references=references, most=most)
    ks = sorted(set(k))
    if not ks or ks[0] < 2 or not blur >= 0:
        raise InputError(f"k={tuple(k)}, blur={blur}: expected numbers of clusters, 2 or more, and a width from 0 up")
    grid = pooled(maps, side, sign)
    points, there = placed(grid, mirror, blur)
    patient = numbered(groups, len(grid))[there]
    random = np.random.default_rng(seed)
    chosen = np.sort(random.permutation(len(points))[:most])
    possible = _possible(ks, len(np.unique(patient[chosen])), neighbours, len(grid))
    cloud = cloud_of(points[chosen], patient[chosen], possible, neighbours, SHOWN)
    judged = _judged(cloud, points[chosen], bootstraps, references, random)
    rows = np.flatnonzero(there)
    sort = _Sorter(grid, rows, patient, chosen, cloud.apart, _nearest(points, chosen))
    partitions = tuple(_partition(sort, one, cloud.parts[one], judged[one], neighbours) for one in possible)
    claimed, reason = _claimed(partitions)
    zero = tuple(np.flatnonzero(~there).tolist())
    values = tuple(cloud.spectrum[0].clip(min=0).round(DIGITS).tolist())
    return Strategies(claimed, reason, partitions, values, len(rows), len(np.unique(patient)), zero, len(grid))


@dataclass(frozen=True)
class _Judged:
    """How stable and how far apart the parts of a cloud are, and those of its references."""

    stability: float
    reference: tuple[float, ...]
    gap: float
    gap_reference: float


def _judged(
    cloud: Cloud, points: Floats, bootstraps: int, references: int, random: np.random.Generator
) -> dict[int, _Judged]:
    stable, compared = cloud.stability(bootstraps, random), []
    for _ in range(references):
        null = cloud_of(reference(points, random), cloud.patient, cloud.ks, cloud.neighbours)
        compared.append((null.stability(max(FEWEST, bootstraps // 5), random), null.gaps))
    return {
        k: _Judged(stable[k], tuple(one[k] for one, _ in compared), cloud.gaps[k], max(one[k] for _, one in compared))
        for k in cloud.ks
    }


@dataclass(frozen=True, eq=False)
class _Sorter:
    """What makes clusters of parts: the grids (N,*side) of all maps, and which of them, `rows` (M,), have heat.

    Of those `chosen` (m,) are the cloud's, by number; `nearest` (M,): to which of the chosen each is nearest.
    """

    grid: Floats
    rows: Numbers
    patient: Numbers
    chosen: Numbers
    apart: Floats
    nearest: Numbers

    def labels(self, parts: Numbers) -> Numbers:
        """(m,) 0..k-1 -> (M,): of all maps with heat, the largest cluster first, of equals that with the first map."""
        _, first, every, sizes = np.unique(
            parts[self.nearest], return_index=True, return_inverse=True, return_counts=True
        )
        return np.asarray(np.argsort(np.lexsort((first, -sizes)))[every])

    def cluster(self, number: int, labels: Numbers) -> Cluster:
        """One of the clusters of labels (M,)."""
        own, typical = np.flatnonzero(labels == number), np.flatnonzero(labels[self.chosen] == number)
        far = self.apart[np.ix_(typical, typical)].sum(1)
        medoids = self.rows[self.chosen[typical[np.argsort(far, kind="stable")[:MEDOIDS]]]]
        heat = self.grid[self.rows[own]]
        mean = (heat / heat.sum(tuple(range(1, heat.ndim)), keepdims=True)).mean(0)
        patients = len(np.unique(self.patient[own]))
        return Cluster(number, tuple(self.rows[own].tolist()), patients, tuple(medoids.tolist()), mean)


def _partition(sort: _Sorter, k: int, parts: Numbers, judged: _Judged, least: int) -> Partition:
    known = sort.labels(parts)
    clusters = tuple(sort.cluster(number, known) for number in range(int(known.max()) + 1))
    labels = np.full(len(sort.grid), -1)
    labels[sort.rows] = known
    few = len(clusters) < k or min(one.patients for one in clusters) < least
    return Partition(
        k,
        labels,
        judged.stability,
        judged.reference,
        judged.gap,
        judged.gap_reference,
        stable=judged.stability > max(judged.reference),
        separate=not few and judged.gap >= max(GAP, judged.gap_reference),
        clusters=clusters,
    )


def _claimed(partitions: tuple[Partition, ...]) -> tuple[int, str]:
    found = [one for one in partitions if one.stable and one.separate]
    if found:
        one = max(found, key=lambda each: each.gap)
        words = f"adjusted Rand index {one.stability:.2f}, of one cluster cut so {max(one.reference):.2f} at most"
        return one.k, f"separate (gap {one.gap:.2f}) and stable ({words}): {plural(one.k, 'cluster')}"
    stable, separate = ([str(one.k) for one in partitions if getattr(one, name)] for name in ("stable", "separate"))
    return 1, f"no number of clusters is both stable ({_listed(stable)}) and separate ({_listed(separate)})"


def _listed(ks: list[str]) -> str:
    return f"k = {', '.join(ks)}" if ks else "none is"


def _possible(ks: list[int], patients: int, neighbours: int, rows: int) -> tuple[int, ...]:
    made = tuple(k for k in ks if k * neighbours <= patients)
    if not made:
        raise UndefinedError(
            f"{plural(patients, 'patient has', 'patients have')} maps with heat, of {plural(rows, 'map')}: "
            f"{plural(ks[0], 'cluster')} of {neighbours} would need {ks[0] * neighbours}"
        )
    return made


def _nearest(points: Floats, chosen: Numbers) -> Numbers:
    """(M,): the place in `chosen` of the nearest of those, of the chosen their own."""
    search = sklearn("neighbors").NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points[chosen])
    made = np.asarray(search.kneighbors(points, return_distance=False)[:, 0], np.int64)
    made[chosen] = np.arange(len(chosen))
    return made
