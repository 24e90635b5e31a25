"""Clusters of maps: whether there are several, and what each is made of.

- ways: whether the maps of images with a finding fall into several ways of looking, and what each is made of.
- What the clusters of maps are made of: sites, scanners and classes that one holds more of, and means of any number.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.clusters import Partition, strategies
from camscope.audit.clustering.clusters import Strategies as Found
from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Cluster, Stability, Strategies
from camscope.audit.core.subgroup_levels import levels_of
from camscope.audit.core.summary_values import rounded
from camscope.audit.shortcuts.region_attribution import maps_of, share
from camscope.audit.shortcuts.region_samples import Scenes
from camscope.errors import InputError, MissingExtraError, UndefinedError
from camscope.geometry import Placement
from camscope.metrics.base import Mask
from camscope.metrics.statistics import Estimate, estimated, holm, numbered
from camscope.plurals import plural

CHANCE = 0.05


def ways(subject: Subject, tool: Any, finding: Finding, seen: Scenes, answered: Answered) -> Strategies:
    """Of a method's maps. Where no number of clusters is claimed the two are shown that would be first."""
    truths = subject.truths(finding)
    heats = maps_of(subject, tool.title, finding, [one.row for one in seen.each if truths[one.row]])
    shapes = {heat.shape for heat in heats.values()}
    rows = sorted(heats)
    try:
        if len(shapes) != 1:
            raise UndefinedError(f"the maps have {plural(len(shapes), 'size')}")
        found = strategies(
            np.stack([heats[row] for row in rows]), [subject.numbers[row] for row in rows], seed=subject.config.seed
        )
    except UndefinedError as error:
        return Strategies(
            finding=finding.name, method=tool.title, claimed=1, maps=len(rows), left_out=0, reason=str(error)
        )
    return Strategies(
        finding=finding.name,
        method=tool.title,
        claimed=found.claimed,
        maps=found.n,
        left_out=len(found.zero),
        patients=found.patients,
        eigenvalues=tuple(rounded(one) or 0.0 for one in found.eigenvalues),
        trials=tuple(_trial(one) for one in found.partitions),
        clusters=tuple(_clusters(subject, found, rows, heats, seen, answered, finding)),
        reason="" if found.partitions else found.reason,
    )


def _trial(one: Partition) -> Stability:
    return Stability(
        k=one.k,
        stability=rounded(one.stability) or 0.0,
        null=rounded(max(one.reference)) if one.reference else None,
        separation=rounded(one.gap),
    )


def _clusters(
    subject: Subject, found: Found, rows: Sequence[int], heats: Any, seen: Scenes, answered: Answered, finding: Finding
) -> Iterator[Cluster]:
    if not found.partitions:
        return
    known = {one.k: one for one in found.partitions}
    partition = known.get(found.claimed) or known[min(known)]
    masses = dict(_masses(subject, partition, rows, heats, seen))
    odds = answered.of(finding.name)
    for one in partition.clusters:
        missed = float(np.mean([odds[rows[i]] < 0 for i in one.members]))
        mass = {name: value for name, each in masses.items() if (value := each.get(one.number)) is not None}
        yield Cluster(
            number=one.number,
            images=one.n,
            prototypes=tuple(subject.ids[rows[i]] for i in one.medoids),
            mass=mass,
            missed=rounded(missed),
            columns=tuple(_columns(subject, partition, rows, one.number)),
        )


def _masses(
    subject: Subject, partition: Partition, rows: Sequence[int], heats: Any, seen: Scenes
) -> Iterator[tuple[str, dict[int, float]]]:
    """Region -> cluster -> the mean share of its maps there."""
    scene = {one.row: one for one in seen.each}
    for name in seen.names:
        values = []
        for row in rows:
            one = scene[row]
            heat = np.asarray(Placement.identity(tuple(one.x.shape[1:])).project(heats[row])[0], np.float64)
            values.append(share(heat, one.regions[name]) if name in one.regions else np.nan)
        means = averaged(partition.labels, values, [subject.numbers[row] for row in rows], seed=subject.config.seed)
        yield name, {n: made for n, own in means.items() if own and (made := rounded(own.mean)) is not None}


def _columns(subject: Subject, partition: Partition, rows: Sequence[int], cluster: int) -> Iterator[str]:
    """`site B: 80 % here, 41 % elsewhere`, of columns that may be told."""
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        try:
            found = enriched(partition.labels, [said[row] for row in rows], [subject.numbers[row] for row in rows])
        except UndefinedError:
            continue
        for one in found:
            if one.cluster == cluster and one.corrected < CHANCE:
                yield f"{column} {one.level}: {one.share:.0%} here, {one.elsewhere:.0%} elsewhere"


@dataclass(frozen=True)
class Enrichment:
    """How much more of a level is in a cluster than elsewhere: `n` patients (or images) of `size` in it, `others` of `rest`.

    `p`: Fisher's exact test, two-sided; `corrected`: Holm's over all that were asked.
    """

    cluster: int
    level: Hashable
    n: int
    size: int
    others: int
    rest: int
    p: float
    corrected: float = 1.0

    @property
    def share(self) -> float:
        """Of those in the cluster."""
        return self.n / self.size

    @property
    def elsewhere(self) -> float:
        """Of all the others."""
        return self.others / self.rest


def enriched(
    labels: npt.ArrayLike, column: Sequence[Hashable], groups: Sequence[Hashable] | None = None
) -> tuple[Enrichment, ...]:
    """(N,) clusters, (N,) levels -> each cluster's share of each level beside that elsewhere, the least likely first.

    Of `groups` each counts once, by its first row: two images of a patient are no independent witnesses. Rows in no cluster
    (-1) or without a level are left out. Two clusters, or two levels, are one question: it is asked of the last.
    """
    known = _labels(labels, len(column))
    levels = levels_of(column)
    there = np.logical_or.reduce([*levels.values(), np.zeros(len(known), np.bool_)]) & (known >= 0)
    rows = _first(np.flatnonzero(there), numbered(groups, len(known)))
    parts = {int(one): known[rows] == one for one in np.unique(known[rows])}
    inside = {level: own[rows] for level, own in levels.items() if own[rows].any()}
    if len(parts) < 2 or len(inside) < 2:
        raise UndefinedError(
            f"{plural(len(parts), 'cluster')} and {plural(len(inside), 'level')}: there is nothing to compare"
        )
    made = [_enrichment(cluster, level, part, own)
            for cluster, part in _asked(parts).items() for level, own in _asked(inside).items()]  # fmt: skip
    corrected = holm([one.p for one in made])
    found = [replace(one, corrected=p) for one, p in zip(made, corrected, strict=True)]
    return tuple(sorted(found, key=lambda one: one.p))


def averaged(
    labels: npt.ArrayLike, values: npt.ArrayLike, groups: Sequence[Hashable] | None = None, *, seed: int = 0
) -> dict[int, Estimate | None]:
    """(N,) clusters, (N,) a number of each image -> each cluster's mean with its interval; None where no row has a value."""
    given = np.asarray(values, np.float64)
    known, names = _labels(labels, len(given)), list(groups) if groups is not None else list(range(len(given)))
    made: dict[int, Estimate | None] = {}
    for one in np.unique(known[known >= 0]):
        rows = np.flatnonzero(known == one)
        some = not np.isnan(given[rows]).all()
        made[int(one)] = estimated(given[rows], [names[int(i)] for i in rows], seed=seed) if some else None
    return made


def _labels(labels: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    known = np.asarray(labels)
    if known.shape != (rows,) or not np.issubdtype(known.dtype, np.integer):
        raise InputError(
            f"labels {known.dtype} {known.shape} of {plural(rows, 'row')}: expected (N,) numbers of clusters"
        )
    return known.astype(np.int64)


def _first(rows: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of each group the first of some rows."""
    return np.asarray(rows[np.sort(np.unique(group[rows], return_index=True)[1])])


def _asked(masks: Mapping[Any, Mask]) -> dict[Any, Mask]:
    """Of two the last: the other one is what it is not."""
    return dict(list(masks.items())[-1:] if len(masks) == 2 else masks)


def _enrichment(cluster: int, level: Hashable, part: Mask, own: Mask) -> Enrichment:
    n, others = int((part & own).sum()), int((~part & own).sum())
    size, rest = int(part.sum()), int((~part).sum())
    p = float(_stats().fisher_exact([[n, size - n], [others, rest - others]])[1])
    return Enrichment(cluster, level, n, size, others, rest, min(1.0, p))


def _stats() -> Any:
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtraError("scipy", "audit") from error
