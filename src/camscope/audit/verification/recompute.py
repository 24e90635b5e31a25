"""Verification by recomputing: the summary from its tables, and rows from their images.

- Checked: one thing of an audit that was looked at.
- following: whether the numbers of a summary follow from the tables beside it: made of these again, interval by
  interval.
- recomputing: some rows of an audit made again from their images: answers, maps, places of maps, regions taken away.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.audit_run import AuditRun
from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Answers, Intervention, Line, Number
from camscope.audit.core.summary_values import PATIENT, number, summed_up
from camscope.audit.performance.model_outputs import logits_of, odds_of
from camscope.audit.performance.performance_summary import measures
from camscope.audit.provenance.file_ownership import STAGES
from camscope.audit.runner import JOBS
from camscope.audit.shortcuts.effect_sizes import insertion, removal
from camscope.audit.shortcuts.interventions import NO_EFFECT, Trying
from camscope.audit.shortcuts.region_samples import scenes
from camscope.audit.stages.map_quality import LOCALIZATION_METRICS as LOCAL
from camscope.batch.manifest import arrow
from camscope.batch.query import as_dicts
from camscope.data_readers import MAX_JSON
from camscope.evaluation.map_metrics import Measuring
from camscope.metrics import METRICS
from camscope.plurals import plural
from camscope.safe_files import read_bytes

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Checked:
    """Whether it is as it was, and in words what was looked at, or what is wrong. `name`: a file, or what is in several."""

    name: str
    holds: bool
    said: str

    @classmethod
    def of(cls, name: str, right: str, wrong: "list[str]") -> "Checked":
        """It holds where nothing is wrong; else the first things that are."""
        more = f", and {len(wrong) - FEW} more" if len(wrong) > FEW else ""
        return cls(name, not wrong, "; ".join(wrong[:FEW]) + more if wrong else right)


FEW = 3  # things that are wrong, in words

NEAR = 1e-6  # of a number of the summary, which is rounded
MEASURED = ("localise", "faithfulness", "robustness")
PARTS = {
    "value": "",
    "low": ", lower end,",
    "high": ", upper end,",
    "n": ", images,",
    "undefined": ", images without a value,",
    "groups": ", patients,",
    "p": ", p,",
    "baseline": ", baseline,",
}
Wrong = Iterator[str]


def following(run: AuditRun) -> Iterator[Checked]:
    """Parts by what stages left, answers by predictions.parquet, effects by interventions.parquet, metrics by metrics.parquet.

    What of these no number of the summary rests on, as the values of images without the finding, is not looked at.
    """
    for name, find, words in (
        ("parts", _parts, "{} are what the stages left"),
        ("answers", _answers, "{} numbers of them follow from predictions.parquet"),
        ("effects", _effects, "{} follow from interventions.parquet"),
        ("means", _means, "{} and their differences follow from metrics.parquet"),
    ):
        yield _checked(run, name, find, words)


def _checked(run: AuditRun, name: str, find: Callable[[AuditRun, Counter[str]], Wrong], words: str) -> Checked:
    seen = Counter[str]()
    try:
        wrong = list(find(run, seen))
    except Exception as error:  # tables that were changed can be wrong in any way
        return Checked(name, False, f"they do not follow from the tables: {type(error).__name__}")
    return Checked.of(name, words.format(seen.total()), wrong)


def _parts(run: AuditRun, seen: Counter[str]) -> Wrong:
    for name, job in JOBS.items():
        seen["parts"] += 1
        left = job.kind.model_validate_json(read_bytes(run.folder / STAGES / f"{name}.json", MAX_JSON))
        if left != getattr(run.summary, name):
            yield f"{name} is another one in the summary than in {STAGES}/{name}.json"


def _how(run: AuditRun) -> dict[str, int]:
    return {"replicates": run.summary.replicates, "seed": run.summary.seed}


def _off(made: Number, said: Number, name: str, table: str) -> Wrong:
    """The first part of a number that is another one in the summary."""
    for key, part in PARTS.items():
        found, there = getattr(made, key), getattr(said, key)
        if not _near(found, there):
            yield f"{name}{part} is {there} in the summary, and {found} by {table}"
            return


def _answers(run: AuditRun, seen: Counter[str]) -> Wrong:
    table = run.predictions()
    for one in run.summary.predict.findings:
        rows = [row for row in _answered(table, one.finding) if row[1] is not None]
        truth, odds = np.array([bool(row[1]) for row in rows]), np.array([row[2] for row in rows], np.float64)
        made = measures(truth, odds, [row[3] for row in rows], **_how(run))[0]
        counts = {
            "positives": int(truth.sum()),
            "negatives": int((~truth).sum()),
            "spread": _spread(table, one.finding),
        }
        yield from _of_finding(one, made, counts, seen)


def _of_finding(one: Answers, made: Mapping[str, Number], counts: Mapping[str, float], seen: Counter[str]) -> Wrong:
    for name, found in made.items():
        seen["numbers"] += 1
        yield from _off(found, getattr(one, name), f"{name} of {one.finding}", "predictions.parquet")
    for name, count in counts.items():
        seen["numbers"] += 1
        if not _near(count, getattr(one, name)):
            yield f"{name} of {one.finding} is {getattr(one, name)} in the summary, and {count} by predictions.parquet"


def _answered(table: "pa.Table", finding: str) -> list[tuple[int, bool | None, float, int]]:
    """Row, truth, log odds and patient of each image that has an answer."""
    names = ("row", f"truth {finding}", f"log odds {finding}", "patient")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return [row for row in rows if row[2] is not None]


def _spread(table: "pa.Table", finding: str) -> float:
    return float(np.std([row[2] for row in _answered(table, finding)]))


def _effects(run: AuditRun, seen: Counter[str]) -> Wrong:
    table, trials = run.predictions(), dict[tuple[Any, ...], list[dict[str, Any]]]()
    spread = {one.finding: _spread(table, one.finding) for one in run.summary.predict.findings}
    patients = dict(zip(*(table[name].to_pylist() for name in ("row", "patient")), strict=True))
    for row in run.interventions().to_pylist():
        trials.setdefault((row["finding"], row["region"], row["kind"], row["fill"]), []).append(row)
    for one in run.summary.shortcut.interventions:
        seen["effects"] += 1
        own = trials.pop((one.finding, one.region, one.kind, one.fill), [])
        where = f"{one.kind} {one.region} ({one.fill})" if one.fill else f"{one.kind} {one.region}"
        yield from _off(
            _effect(run, one, own, spread[one.finding], patients), one.effect, where, "interventions.parquet"
        )
    yield from (f"{key[2]} {key[1]} is in interventions.parquet, and not in the summary" for key in trials)


def _effect(
    run: AuditRun, one: Intervention, own: Sequence[Mapping[str, Any]], spread: float, patients: Mapping[int, int]
) -> Number:
    without, with_it = (np.array([row[name] for row in own], np.float64) for name in ("without", "with_it"))
    whose, donors, others = ([patients.get(row[name]) for row in own] for name in ("row", "donor", "other"))
    if spread <= 0:
        return number(None, *NO_EFFECT)
    if one.kind == "insert":
        pasted = insertion(one.region, without, with_it, spread, whose, donors=donors, others=others, **_how(run))
        return number(pasted.estimate, *NO_EFFECT)
    alone = removal(one.region, one.fill or "", with_it, without, spread, whose, **_how(run))
    return number(alone.estimate, *NO_EFFECT)


def _means(run: AuditRun, seen: Counter[str]) -> Wrong:
    for stage in MEASURED:
        part = getattr(run.summary, stage)
        for finding in run.summary.resolve.findings if part.tested else ():
            own = _values(run, stage, finding)
            made = {_key(one): one for one in summed_up(own, finding, **_how(run))}
            said = {_key(one): one for one in part.lines if one.finding == finding}
            seen["means"] += len(said)
            for key in {**made, **said}:
                yield from _of_line(made.get(key), said.get(key), f"{key[0]} of {key[1]}, {stage},")


def _of_line(made: Line | None, said: Line | None, name: str) -> Wrong:
    if made is None or said is None:
        yield f"{name} is {'not in metrics.parquet' if made is None else 'not in the summary'}"
        return
    table = "metrics.parquet"
    yield from _off(made.value, said.value, name, table)
    yield from _off(made.over or Number(), said.over or Number(), f"{name} over {made.value.baseline_name}", table)


def _key(one: Line) -> tuple[Any, ...]:
    return one.metric, one.method, one.layer, one.control, one.fill


def _values(run: AuditRun, stage: str, finding: str) -> "pa.Table":
    """Of images with the finding, by patient."""
    pa, compute, table = arrow(), arrow("compute"), run.metrics()
    names = ("row", f"truth {finding}", "patient")
    rows = zip(*(run.predictions()[name].to_pylist() for name in names), strict=True)
    whose = {row: patient for row, truth, patient in rows if truth}
    having = compute.is_in(table["row"], value_set=pa.array(list(whose), pa.int64()))
    for name, value in (("finding", finding), ("stage", stage)):
        having = compute.and_(having, compute.equal(table[name], value))
    own = table.filter(having)
    nothing = pa.nulls(own.num_rows, pa.string())  # one question, and each method with one kind of settings
    patients = pa.array([whose[row] for row in own["row"].to_pylist()], pa.int64())
    return own.append_column("target", nothing).append_column("parameters", nothing).append_column(PATIENT, patients)


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isclose(one, other, rel_tol=NEAR, abs_tol=NEAR**2)


CLOSE = 1e-5  # of a map's largest value: other companions in a pass, another order of sums
NEAR_LOG_ODDS = 1e-4  # of log odds
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
        if not _near_log_odds(odds, before):
            yield Checked(f"row {name}", False, "its answer is another one")
            continue
        made = subject.worker.rows(subject.worker.collated([one]))
        off = max(_map_gap(again, maps[row, again["method"], again["target"]]) for again in made)
        yield Checked(
            f"row {name}", off <= CLOSE, f"{plural(len(made), 'map')}, largest difference {off:.1e} of the maximum"
        )


def _near_log_odds(odds: Any, before: Any) -> bool:
    return bool(np.allclose(odds, before, rtol=NEAR_LOG_ODDS, atol=NEAR_LOG_ODDS))


def _maps(subject: Subject, rows: Sequence[int]) -> list[dict[str, Any]]:
    table = subject.maps.table(filter=arrow("dataset").field("row").isin(list(rows)))
    return sorted(as_dicts(table), key=lambda row: row["row"])


def _map_gap(again: Any, then: Any) -> float:
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
        if place not in made or place not in known or not _near_log_odds(made[place], known[place])
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
