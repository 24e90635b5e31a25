"""following: whether the numbers of a summary follow from the tables beside it: made of these again, interval by interval."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.answers.measuring import measures
from camscope.audit.audited import AuditRun
from camscope.audit.checked import Checked
from camscope.audit.lines import PATIENT, summed_up
from camscope.audit.numbers import number
from camscope.audit.ownership import STAGES
from camscope.audit.running import JOBS
from camscope.audit.schema import Answers, Intervention, Line, Number
from camscope.audit.shortcuts.interventions import insertion, removal
from camscope.audit.shortcuts.trying import NO_EFFECT
from camscope.batch.manifest import arrow

if TYPE_CHECKING:
    import pyarrow as pa

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
        left = job.kind.model_validate_json((run.folder / STAGES / f"{name}.json").read_bytes())
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
