"""following: whether the numbers of a summary follow from the tables beside it: those that a few sums give again."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.answers.performance import auroc, average_precision
from camscope.audit.audited import AuditRun
from camscope.audit.checked import Checked
from camscope.audit.numbers import number
from camscope.audit.running import JOBS, STAGES
from camscope.audit.schema import Answers, Line
from camscope.batch.manifest import arrow

if TYPE_CHECKING:
    import pyarrow as pa

NEAR = 1e-6  # of a number of the summary, which is rounded
MEASURED = ("localise", "faithfulness", "robustness")
KEYS = ("stage", "metric", "method", "layer", "control", "fill")
Wrong = Iterator[str]


def following(run: AuditRun) -> Iterator[Checked]:
    """Parts by what stages left, answers by predictions.parquet, effects by interventions.parquet, means by metrics.parquet."""
    for name, find, words in (
        ("parts", _parts, "{} are what the stages left"),
        ("answers", _answers, "AUROC, average precision and counts follow from predictions.parquet"),
        ("effects", _effects, "{} follow from interventions.parquet"),
        ("means", _means, "{} follow from metrics.parquet"),
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


def _answers(run: AuditRun, seen: Counter[str]) -> Wrong:
    table = run.predictions()
    for one in run.summary.predict.findings:
        for name, value, said in _of_finding(run, table, one):
            seen["answers"] += 1
            if not _near(value, said):
                yield f"{name} of {one.finding} is {said} in the summary, and {value} by predictions.parquet"


def _of_finding(run: AuditRun, table: "pa.Table", one: Answers) -> Iterator[tuple[str, Any, Any]]:
    """Each number with what the summary says."""
    rows = [row for row in _answered(table, one.finding) if row[1] is not None]
    truth, odds = np.array([bool(row[1]) for row in rows]), np.array([row[2] for row in rows], np.float64)
    patients, how = [row[3] for row in rows], {"replicates": run.summary.replicates, "seed": run.summary.seed}
    for name, find, said in (
        ("AUROC", auroc, one.auroc),
        ("average precision", average_precision, one.average_precision),
    ):
        if said.value is not None:
            found = number(find(truth, odds, patients, **how))
            yield from ((f"{name}{part}", getattr(found, key), getattr(said, key)) for key, part in PARTS.items())
    yield "positives", int(truth.sum()), one.positives
    yield "negatives", int((~truth).sum()), one.negatives
    yield "spread", _spread(table, one.finding), one.spread


PARTS = {"value": "", "low": ", lower end,", "high": ", upper end,", "n": ", images,"}


def _answered(table: "pa.Table", finding: str) -> list[tuple[int, bool | None, float, int]]:
    """Row, truth, log odds and patient of each image that has an answer."""
    names = ("row", f"truth {finding}", f"log odds {finding}", "patient")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return [row for row in rows if row[2] is not None]


def _spread(table: "pa.Table", finding: str) -> float:
    return float(np.std([row[2] for row in _answered(table, finding)]))


def _effects(run: AuditRun, seen: Counter[str]) -> Wrong:
    table = run.predictions()
    spread = {one.finding: _spread(table, one.finding) for one in run.summary.predict.findings}
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for row in run.interventions().to_pylist():
        key = row["finding"], row["region"], row["kind"], row["fill"]
        gaps.setdefault(key, []).append(row["with_it"] - row["without"])
    for one in run.summary.shortcut.interventions:
        own, said = gaps.get((one.finding, one.region, one.kind, one.fill), []), one.effect
        if said.value is None:
            continue
        seen["effects"] += 1
        found = float(np.mean(own)) / spread[one.finding] if own else None
        if not (_near(found, said.value) and len(own) == said.n):
            where = f"{one.kind} {one.region} ({one.fill})" if one.fill else f"{one.kind} {one.region}"
            yield f"{where} is {said.value} in the summary, and {found} by interventions.parquet"


def _means(run: AuditRun, seen: Counter[str]) -> Wrong:
    known = {finding: _by_key(run, finding) for finding in run.summary.resolve.findings}
    for stage in MEASURED:
        for one in getattr(run.summary, stage).lines:
            if one.value.value is None:
                continue
            seen["means"] += 1
            found, count = known[one.finding].get(_key(stage, one), (None, 0))
            if not (_near(found, one.value.value) and count == one.value.n):
                where = f"{one.metric} of {one.method}, {stage},"
                yield f"{where} is {one.value.value} in the summary, and {found} by metrics.parquet"


def _key(stage: str, one: Line) -> tuple[Any, ...]:
    return stage, one.metric, one.method, one.layer, one.control, one.fill


def _by_key(run: AuditRun, finding: str) -> Mapping[tuple[Any, ...], tuple[float, int]]:
    """Of images with the finding: of each metric and method the mean, and how many values there are."""
    compute, table = arrow("compute"), run.metrics()
    positive = [row for row, truth, _, _ in _answered(run.predictions(), finding) if truth]
    having = compute.is_in(table["row"], value_set=arrow().array(positive, arrow().int64()))
    own = table.filter(compute.and_(compute.equal(table["finding"], finding), having))
    made = own.group_by(list(KEYS)).aggregate([("value", "mean"), ("value", "count")]).to_pylist()
    return {tuple(one[name] for name in KEYS): (one["value_mean"], one["value_count"]) for one in made}


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isclose(one, other, rel_tol=NEAR, abs_tol=NEAR**2)
