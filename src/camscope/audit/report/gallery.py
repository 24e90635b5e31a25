"""Gallery: which images a report shows: first those that the seed draws, then those that a reader should see."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Summary
from camscope.audit.report.gallery_schema import Case, Frame, Pictures, Shelf
from camscope.audit.report.thumbnails import shots
from camscope.batch import Run

SALT = 11  # of the draw, so that it is not that of another stage
LEAST = 4  # images of a shelf of the worst
MOST = 24  # images that are to be read
TYPICAL = 4  # of each cluster


def cases(answered: Answered, truths: Mapping[str, Mapping[int, bool | None]], ids: Mapping[int, str]) -> list[Case]:
    """Of all images that were answered, in their order. `truths`: finding -> row -> whether it is there."""
    odds = {name: answered.of(name) for name in answered.findings}
    return [
        Case(
            row,
            ids[row],
            {name: each[row] for name, each in odds.items()},
            {name: each.get(row) for name, each in truths.items()},
        )
        for row in answered.rows
    ]


def gallery(
    run: Run,
    summary: Summary,
    known: Sequence[Case],
    targets: Mapping[str, str],
    *,
    count: int = 12,
    height: int = 224,
    allow_pixels: bool = False,
) -> Pictures:
    """The pictures of a report: `count` that the seed draws, half as many of each other kind, each with a map a method.

    `targets`: finding -> what it was asked for as, in the run's column `target`. `allow_pixels`: pictures that may have text
    in them are shown too.
    """
    frames = {
        shelf: own for shelf in _shelves(summary, known, count) if (own := list(_chosen(shelf, summary, known, count)))
    }
    drawn = shots(run, frames, {case.row: case for case in known}, targets, height, allow_pixels=allow_pixels)
    return Pictures(tuple(Shelf(kind, finding, drawn[kind, finding]) for kind, finding in frames))


def _shelves(summary: Summary, known: Sequence[Case], count: int) -> Iterator[tuple[str, str]]:
    yield "random", ""
    for finding in summary.resolve.findings:
        for kind in ("missed", "alarms", "borderline", "clearest"):
            yield kind, finding
    yield "reading", ""
    for finding in summary.resolve.findings:
        yield "prototypes", finding


def _chosen(shelf: tuple[str, str], summary: Summary, known: Sequence[Case], count: int) -> Iterator[Frame]:
    kind, finding = shelf
    if kind == "random":
        order = np.random.default_rng((summary.seed, SALT)).permutation(len(known))[:count].tolist()
        yield from (Frame(known[n].row, _asked(known[n])) for n in order)
    elif kind == "reading":
        yield from _to_be_read(summary, known)
    elif kind == "prototypes":
        yield from _prototypes(summary, known, finding)
    else:
        yield from (Frame(one.row, finding) for one in extremes(kind, finding, known, max(LEAST, count // 2)))


def extremes(kind: str, finding: str, known: Sequence[Case], count: int) -> list[Case]:
    """Of a finding the images that are missed, falsely seen, least sure or surest; those first that are it most."""
    judged = [one for one in known if one.truths.get(finding) is not None]
    wanted = {
        "missed": [one for one in judged if one.truths[finding] and one.odds[finding] < 0],
        "alarms": [one for one in judged if not one.truths[finding] and one.odds[finding] > 0],
        "borderline": list(known),
        "clearest": [one for one in judged if one.truths[finding] and one.odds[finding] > 0],
    }[kind]
    sign = {"missed": 1.0, "alarms": -1.0, "borderline": 0.0, "clearest": -1.0}[kind]
    return sorted(wanted, key=lambda one: sign * one.odds[finding] if sign else abs(one.odds[finding]))[:count]


def _asked(case: Case) -> str:
    """Of an image by itself: the finding it has, of several the one that the model is surest of."""
    own = [name for name, truth in case.truths.items() if truth] or list(case.odds)
    return max(own, key=lambda name: case.odds[name])


def _to_be_read(summary: Summary, known: Sequence[Case]) -> Iterator[Frame]:
    rows = {one.id: one.row for one in known}
    for one in summary.shortcut.reading[:MOST]:
        if one.id in rows:
            yield Frame(rows[one.id], one.finding, one.why)


def _prototypes(summary: Summary, known: Sequence[Case], finding: str) -> Iterator[Frame]:
    rows = {one.id: one.row for one in known}
    for strategies in summary.shortcut.strategies:
        if strategies.finding == finding:
            for cluster in strategies.clusters:
                for one in cluster.prototypes[:TYPICAL]:
                    if one in rows:
                        yield Frame(rows[one], finding, cluster=cluster.number, method=strategies.method)
