"""recomputing: some rows of an audit made again from their images: answers, maps, places of maps, regions taken away."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from camscope.audit.answers.answered import Answered
from camscope.audit.answers.asking import logits_of, odds_of
from camscope.audit.audited import AuditRun
from camscope.audit.checked import Checked
from camscope.audit.shortcuts.scenes import scenes
from camscope.audit.shortcuts.trying import Trying
from camscope.audit.stages.localise import METRICS as LOCAL
from camscope.audit.subject import Finding, Subject
from camscope.batch.manifest import arrow
from camscope.batch.query import as_dicts
from camscope.measure.measuring import Measuring
from camscope.metrics import METRICS
from camscope.wording import plural

CLOSE = 1e-5  # of a map's largest value: other companions in a pass, another order of sums
NEAR = 1e-4  # of log odds
LEFT = (
    "insertions, which need all images",
    "blanked organs",
    "leaks",
    "ways of looking",
    "faithfulness",
    "sanity",
    "robustness",
)
Draw = Callable[[Sequence[int]], list[int]]  # of some rows those that are made again


def recomputed(subject: Subject, run: AuditRun, count: int, seed: int) -> Iterator[Checked]:
    """So many rows, drawn by the seed; of those of each kind that there are."""

    def drawn(rows: Sequence[int]) -> list[int]:
        known = sorted(set(rows))
        return sorted(known[n] for n in np.random.default_rng(seed).permutation(len(known))[:count].tolist())

    then = Answered.read(subject.folder)
    yield from _rows(subject, then, drawn(then.rows))
    yield _places(subject, run, drawn)
    yield _regions(subject, run, then, drawn)


def _rows(subject: Subject, then: Answered, drawn: list[int]) -> Iterator[Checked]:
    """Images, answers and maps, from the files."""
    maps = {(row["row"], row["method"], row["target"]): row for row in _maps(subject, drawn)}
    for one in subject.loaded(drawn):
        row, name = one.row["row"], subject.ids[one.row["row"]]
        own = [known for (number, _, _), known in maps.items() if number == row]
        if one.item is None or any(one.sha256 != known["sha256"] for known in own):
            yield Checked(f"row {name}", False, "its image is another one")
            continue
        logits, _ = logits_of(subject, one.item.x[None])
        odds = odds_of(subject, logits, subject.findings, probabilities=then.probabilities).numpy()[0]
        before = then.odds[then.rows.index(row)]
        if not _near(odds, before):
            yield Checked(f"row {name}", False, "its answer is another one")
            continue
        made = subject.worker.rows(subject.worker.collated([one]))
        off = max(_off(again, maps[row, again["method"], again["target"]]) for again in made)
        yield Checked(
            f"row {name}", off <= CLOSE, f"{plural(len(made), 'map')}, largest difference {off:.1e} of the maximum"
        )


def _near(odds: Any, before: Any) -> bool:
    return bool(np.allclose(odds, before, rtol=NEAR, atol=NEAR))


def _maps(subject: Subject, rows: Sequence[int]) -> list[dict[str, Any]]:
    table = subject.maps.table(filter=arrow("dataset").field("row").isin(list(rows)))
    return sorted(as_dicts(table), key=lambda row: row["row"])


def _off(again: Any, then: Any) -> float:
    if again.get("heat") is None or then["heat"] is None:
        return 0.0 if again.get("heat") is None and then["heat"] is None else float("inf")
    one, other = np.asarray(again["heat"], np.float64), np.asarray(then["heat"], np.float64)
    if one.shape != other.shape:
        return float("inf")
    largest = float(np.abs(other).max())
    gap = float(np.abs(one - other).max())
    return gap / largest if largest > 0 else gap


def _places(subject: Subject, run: AuditRun, drawn: Draw) -> Checked:
    """Where maps lie, by the maps that are stored and the masks."""
    wrong, seen = [], 0
    for finding in subject.findings if run.summary.localise.tested else ():
        if finding.name not in subject.evidence:
            continue
        known = _known(run, finding)
        rows = drawn([row for row, *_ in known])
        made = dict(_places_of(subject, finding, rows))
        seen += len(made)
        for place in {**{one: 0 for one in known if one[0] in rows}, **made}:
            value = made.get(place, np.nan)
            if not abs(known.get(place, np.nan) - value) <= CLOSE * max(1.0, abs(value)):
                wrong.append(
                    f"{place[3]} of {place[1]}, image {subject.ids[place[0]]}, is {value:.6g} and not {known.get(place)}"
                )
    return Checked.of("places of maps", f"{plural(seen, 'value')} computed again" if seen else "there are none", wrong)


def _known(run: AuditRun, finding: Finding) -> dict[tuple[Any, ...], float]:
    """Row, method, layer and metric of what `localise` measured of a finding -> its value."""
    names = ("row", "method", "layer", "metric", "value", "stage", "finding")
    table = run.metrics()
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return {row[:4]: row[4] for row in rows if row[5:] == ("localise", finding.name) and row[4] is not None}


def _places_of(subject: Subject, finding: Finding, rows: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], float]]:
    evidence = subject.evidence[finding.name]
    measuring = Measuring(subject.maps, [METRICS[name] for name in LOCAL], evidence, strict=False)
    asked = [row for row in _maps(subject, rows) if row["target"] == str(finding.index)]
    for _, own in groupby(asked, key=lambda row: row["row"]):
        for one in measuring.of_image(list(own)):
            if one["value"] is not None:
                yield (one["row"], one["method"], one["layer"], one["metric"]), one["value"]


def _regions(subject: Subject, run: AuditRun, then: Answered, drawn: Draw) -> Checked:
    """What is answered without a region, and with nothing but it."""
    known = {
        (one["row"], one["finding"], one["region"], one["kind"], one["fill"]): one["without"]
        for one in run.interventions().to_pylist()
        if one["kind"] != "insert"
    }
    rows = drawn([row for row, *_ in known])
    made = dict(_without(subject, then, rows)) if rows else {}
    wrong = [
        f"{place[3]} {place[2]}, image {subject.ids[place[0]]}"
        for place in {**{one: 0 for one in known if one[0] in rows}, **made}
        if place not in made or place not in known or not _near(made[place], known[place])
    ]
    return Checked.of(
        "regions taken away", f"{plural(len(made), 'answer')} computed again" if made else "there are none", wrong
    )


def _without(subject: Subject, then: Answered, rows: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], float]]:
    seen = scenes(subject, rows)
    for finding in subject.findings:
        name = finding.name
        one = Trying(subject, seen.of(name), finding, then.of(name), then.spread(name), then.probabilities)
        for region in one.seen.names:
            list(one.alone(region))
        yield from (((each.row, name, each.region, each.kind, each.fill), each.without) for each in one.trials)
