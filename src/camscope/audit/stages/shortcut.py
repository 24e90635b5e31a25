"""The stage of shortcuts, and the images to look at.

- shortcut: what travels with the finding: regions that the maps lie on, and that the answer relies on.
- reading: the images that somebody should look at, and why: where the model is wrong, unsure, or moved by a marker.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from camscope.audit.clustering.cluster_analysis import ways
from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Level, Mass, Reading, Shortcut, Step, Strategies
from camscope.audit.performance.leakage import leaks
from camscope.audit.performance.subgroups import levels
from camscope.audit.shortcuts import interventions as trials
from camscope.audit.shortcuts.interventions import Trying
from camscope.audit.shortcuts.region_attribution import masses, overlaps
from camscope.audit.shortcuts.region_samples import FINDING, ORGAN, Scenes, scenes


def shortcut(subject: Subject) -> Shortcut:
    """Masses and interventions of images drawn by the seed; what each intervention did is in `interventions.parquet`."""
    config, answered = subject.config, Answered.read(subject.folder, features=True)
    seen = scenes(subject, subject.sampled_of_all(config.sizes.regions, 4))
    few = _fewer(seen, subject.sampled_of_all(min(config.sizes.interventions, config.sizes.regions), 4))
    tried = [
        Trying(subject, few.of(one.name), one, answered.of(one.name), answered.spread(one.name), answered.probabilities)
        for one in subject.findings
    ]
    interventions = [found for one in tried for found in one.interventions()]
    blanked = [found for one in tried for found in one.blanked()]
    trials.write(subject.folder, [trial for one in tried for trial in one.trials], subject.ids)
    strategies = [
        ways(subject, tool, finding, seen.of(finding.name), answered)
        for finding in subject.findings
        for tool in subject.tools
    ]
    named = {one.name: seen.of(one.name) for one in subject.findings}
    names = dict.fromkeys(name for own in named.values() for name in own.names)
    return Shortcut(
        regions={name: max(len(own.with_region(name)) for own in named.values()) for name in names},
        markers={finding: _markers(own) for finding, own in named.items()},
        missing=tuple(_missing(seen)),
        overlaps=tuple(one for finding in subject.findings for one in overlaps(seen.of(finding.name), finding.name)),
        masses=tuple(_masses(subject, seen)),
        interventions=tuple(interventions),
        blanked=tuple(blanked),
        levels=tuple(_levels(subject, tried)),
        leaks=tuple(leaks(subject, answered)),
        strategies=tuple(strategies),
        reading=tuple(reading(subject, answered, tried, strategies)),
    )


def _markers(seen: Scenes) -> tuple[str, ...]:
    """The regions that some of the images lack."""
    return tuple(name for name in seen.names if len(seen.with_region(name)) < len(seen.each))


def _fewer(seen: Scenes, rows: list[int]) -> Scenes:
    there = set(rows)
    return Scenes([one for one in seen.each if one.row in there], seen.missing, seen.left_out)


def _missing(seen: Scenes) -> Iterator[Step]:
    for name, reasons in seen.missing.items():
        for why, count in reasons.most_common(3):
            yield Step(name=name, rows=count, reason=why)
    for why, count in seen.left_out.items():
        yield Step(name="the image", rows=count, reason=why)


def _masses(subject: Subject, seen: Scenes) -> Iterator[Mass]:
    for tool in subject.tools if seen.each else ():
        stride = max(subject.about(tool)["stride"])
        for finding in subject.findings:
            yield from masses(subject, seen.of(finding.name), tool, finding, stride)


def _levels(subject: Subject, tried: list[Trying]) -> Iterator[Level]:
    """Whether a marker speaks for the finding at one site more than at another: what removing it takes away, 0 without it."""
    for one in tried:
        for region in subject.config.regions.columns:
            gaps: dict[int, list[float]] = {row: [] for row, truth in one.truth.items() if truth is True}
            for trial in one.trials:
                if trial.region == region and trial.kind == "remove" and one.spread > 0:
                    gaps[trial.row].append((trial.with_it - trial.without) / one.spread)
            if any(gaps.values()):
                values = {row: float(np.mean(own)) if own else 0.0 for row, own in gaps.items()}
                yield from levels(subject, one.finding, values, subject.config.margins.effect, region=region)


EACH = 4  # images for each reason


def reading(
    subject: Subject, answered: Answered, tried: Sequence[Trying], strategies: Sequence[Strategies]
) -> Iterator[Reading]:
    """The list, reason by reason; an image may stand in it for several."""
    for finding, one in zip(subject.findings, tried, strict=True):
        yield from _wrong(subject, answered, finding)
        yield from _moved(subject, one)
    for one_way in strategies:
        if one_way.claimed > 1:
            for cluster in one_way.clusters:
                for name in cluster.prototypes[:1]:
                    yield Reading(
                        id=name, finding=one_way.finding, why=f"typical of a way of looking (cluster {cluster.number})"
                    )


def _wrong(subject: Subject, answered: Answered, finding: Finding) -> Iterator[Reading]:
    truths, odds = subject.truths(finding), answered.of(finding.name)
    missed = sorted((row for row in odds if truths[row] is True and odds[row] < 0), key=lambda row: odds[row])
    alarms = sorted((row for row in odds if truths[row] is False and odds[row] > 0), key=lambda row: -odds[row])
    unsure = sorted((row for row in odds if truths[row] is not None), key=lambda row: abs(odds[row]))
    for rows, why in (
        (missed, "missed, with one of the lowest probabilities"),
        (alarms, "false alarm, with one of the highest probabilities"),
        (unsure, "among the probabilities nearest to a half"),
    ):
        for row in rows[:EACH]:
            yield Reading(id=subject.ids[row], finding=finding.name, why=why)


def _moved(subject: Subject, one: Trying) -> Iterator[Reading]:
    """Whose answer a region moves the most."""
    for region in one.seen.names:
        if region in (FINDING, ORGAN):
            continue
        gaps: dict[int, float] = {}
        for trial in one.trials:
            if trial.region == region and trial.kind != "keep only":
                gaps[trial.row] = max(gaps.get(trial.row, 0.0), abs(trial.with_it - trial.without))
        for row in sorted(gaps, key=lambda row: (-gaps[row], row))[:EACH]:
            if one.spread > 0 and gaps[row] > one.spread * subject.config.margins.effect:
                yield Reading(id=subject.ids[row], finding=one.finding.name, why=f"moved most by {region}")
