"""ways: whether the maps of images with a finding fall into several ways of looking, and what each is made of."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from camscope.audit.answers.answered import Answered
from camscope.audit.numbers import rounded
from camscope.audit.schema import Cluster, Stability, Strategies
from camscope.audit.shortcuts.masses import maps_of, share
from camscope.audit.shortcuts.scenes import Scenes
from camscope.audit.subject import Finding, Subject
from camscope.audit.ways.enrichment import averaged, enriched
from camscope.audit.ways.strategies import Partition, strategies
from camscope.audit.ways.strategies import Strategies as Found
from camscope.errors import UndefinedError
from camscope.geometry import Placement
from camscope.wording import plural

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
