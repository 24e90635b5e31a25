"""Values of the summary: rounded numbers, and lines of metrics.

- Numbers: estimates as the summary holds them.
- Lines: what metrics say of methods, finding by finding, with intervals by patient.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.schema import Line, Number
from camscope.audit.core.subgroup_levels import FOR_AN_INTERVAL
from camscope.batch.manifest import arrow
from camscope.evaluation import Measures
from camscope.evaluation import summary as told
from camscope.metrics import METRICS, Estimate
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa


DIGITS = 10  # significant ones: what rounding does to the last bits is no difference between two runs


def number(found: Estimate | None, baseline: float | None = None, name: str = "", reason: str = "") -> Number:
    """An estimate and its baseline; without an estimate, why there is none.

    With few patients, or with most images from one of them, it has no interval and no p.
    """
    if found is None:
        return Number(reason=reason or "there is no value", baseline=rounded(baseline), baseline_name=name)
    few = found.groups < FOR_AN_INTERVAL
    none = few or found.is_dominated
    low, high = (None, None) if none else (rounded(found.low), rounded(found.high))
    why = f"too few patients for an interval: {patients(found)}, and {FOR_AN_INTERVAL} are needed" if few else ""
    if found.is_dominated and not (found.roles and reason):  # of insertions the reason says whose they are
        why = found.dominance("patient")
    if not none and (low is None or high is None):
        why = "nothing varies from which an interval could be estimated"
    return Number(
        value=rounded(found.mean),
        low=low,
        high=high,
        n=found.n,
        groups=found.groups,
        undefined=found.undefined,
        p=None if none else rounded(found.p),
        baseline=rounded(baseline),
        baseline_name=name,
        reason="; ".join(filter(None, (reason, why))),
        interval="" if low is None or high is None else found.method,
        unit="insertions" if found.roles else "images",
        roles=found.roles,
    )


def patients(found: Estimate | Number) -> str:
    """How many there are: `7`; of insertions of each kind: `92 receivers, 1 donor`."""
    return ", ".join(plural(count, role.removesuffix("s")) for role, count in found.roles) or str(found.groups)


def rounded(value: float | None) -> float | None:
    """To so many digits; None for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.format_float_positional(value, DIGITS, unique=False, fractional=False, trim="-"))


PATIENT = "patient of the audit"
Better = Literal["more", "less", "neither"]
WORDS: dict[bool | None, Better] = {True: "more", False: "less", None: "neither"}


def lines(subject: Subject, measures: Measures, finding: Finding) -> list[Line]:
    """Of every metric and method, of images with a finding."""
    own = of_finding(subject, grouped(subject, measures.table()), finding, True)
    return summed_up(own, finding.name, **subject.how)


def formulas(found: Iterable[Line]) -> dict[str, str]:
    """What each of the metrics is, in words, with what it depends on."""
    return {name: METRICS[name].formula for name in dict.fromkeys(one.metric for one in found)}


def summed_up(own: "pa.Table", finding: str, *, replicates: int, seed: int) -> list[Line]:
    """The same of a table of one finding, `grouped` by patient."""
    if not own.num_rows:
        return []
    found = told.summarised(own, PATIENT, seed=seed, replicates=replicates)
    return [_line(one, finding, _floor(every), own) for every in found.values() for one in every]


def grouped(subject: Subject, table: "pa.Table") -> "pa.Table":
    """With the patient of each row, by a number."""
    whose = [subject.numbers[row] for row in table["row"].to_pylist()]
    return table.append_column(PATIENT, arrow().array(whose, arrow().int64()))


def of_finding(subject: Subject, table: "pa.Table", finding: Finding, only: bool | None = None) -> "pa.Table":
    """The rows of one question; of maps that know nothing those of the image, whatever was asked of it."""
    compute, asked = arrow("compute"), str(finding.index)
    own = compute.fill_null(compute.equal(table["target"], asked), True)
    controls = (
        compute.and_(table["control"], own)
        if compute.any(compute.and_(table["control"], own)).as_py()
        else table["control"]
    )
    kept = table.filter(compute.or_(compute.and_(own, compute.invert(table["control"])), controls))
    if only is None:
        return kept
    truths = subject.truths(finding)
    return kept.filter(arrow().array([truths[row] is only for row in kept["row"].to_pylist()], arrow().bool_()))


def _floor(every: list[told.Line]) -> told.Line | None:
    """The best of the maps that know nothing."""
    return next((one for one in every if one.control and one.estimate is not None), None)


def _line(one: told.Line, finding: str, floor: told.Line | None, table: "pa.Table") -> Line:
    best = None if floor is None or floor.estimate is None else floor.estimate.mean
    name = "" if floor is None or best is None else floor.method
    over: Number | None = None if one.over_control is None else number(one.over_control, 0.0, "no difference")
    return Line(
        metric=one.metric,
        method=one.method,
        layer=one.layer,
        finding=finding,
        control=one.control,
        better=WORDS[METRICS[one.metric].higher_is_better],
        fill=one.fill,
        value=number(one.estimate, best, name, reason="" if one.estimate else _why(one, table)),
        over=over,
    )


def _why(one: told.Line, table: "pa.Table") -> str:
    """What is said of most of the rows of a metric and method without a value."""
    names = ("metric", "method", "layer", "fill")
    wanted = tuple(getattr(one, name) for name in names)
    rows = zip(*(table[name].to_pylist() for name in ("reason", *names)), strict=True)
    said = Counter(reason for reason, *about in rows if tuple(about) == wanted and reason)
    return f"no map has a value: {said.most_common(1)[0][0]}" if said else "no map has a value"


def values(table: "pa.Table", metric: str, method: str, layer: str | None) -> dict[int, float]:
    """Row -> what a metric says of a method's map."""
    rows: list[Mapping[str, Any]] = table.select(["row", "metric", "method", "layer", "value"]).to_pylist()
    return {
        one["row"]: one["value"]
        for one in rows
        if one["value"] is not None and (one["metric"], one["method"], one["layer"]) == (metric, method, layer)
    }
