"""reading: the images that somebody should look at, and why: where the model is wrong, unsure, or moved by a marker."""

from collections.abc import Iterator, Sequence

from camscope.audit.answers.answered import Answered
from camscope.audit.schema import Reading, Strategies
from camscope.audit.shortcuts.scenes import FINDING, ORGAN
from camscope.audit.shortcuts.trying import Trying
from camscope.audit.subject import Finding, Subject

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
