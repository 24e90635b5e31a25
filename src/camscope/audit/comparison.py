"""Two audits of the same images, compared image by image.

- comparing: two audits of the same images held against one another, image by image, patients drawn whole.
- repeating: how alike the maps of two checkpoints are on the same images: what replicates do not share, none of them
  shows.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.audit_run import AuditRun
from camscope.audit.comparability import ABSENT, expect_alike
from camscope.audit.core.schema import Number, Verdict
from camscope.audit.core.summary_values import number
from camscope.audit.performance.auc import Ranking, auroc, kept, ranked, redrawn, under_roc
from camscope.batch.manifest import arrow
from camscope.batch.query import Pieces, as_dicts
from camscope.data_readers import read_parquet
from camscope.errors import UndefinedError
from camscope.metrics import METRICS, Estimate, estimated, spearman
from camscope.metrics.statistics import PRECISION, REPLICATES, STUDENT, difference, numbered, simultaneous, student

if TYPE_CHECKING:
    import pyarrow as pa


MOST = 500  # images, drawn by the seed
COLUMNS = ("id", "method", "target", "grid", "heat")
Key = tuple[str, str]  # method, finding
Maps = dict[tuple[Key, str], Any]  # by the image's id, too


@dataclass(frozen=True)
class Agreement:
    """Spearman's correlation of a method's maps of the same images, by two models: its mean, with the interval by patient."""

    method: str
    finding: str
    correlation: Number


def agreements(one: AuditRun, other: AuditRun, patients: Mapping[str, int], seed: int) -> Iterator[Agreement]:
    """Of every method and finding. Maps without an order, and of other sizes, are undefined rows."""
    ids = list(patients)
    some = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))[:MOST]]
    values: dict[Key, dict[str, float]] = {}
    for first, second in _in_parts(one, other, some):
        for key, name in first:
            if (key, name) in second:
                values.setdefault(key, {})[name] = _correlation(first[key, name], second[key, name])
    for (method, finding), own in values.items():
        if any(np.isfinite(list(own.values()))):
            found = estimated(list(own.values()), [patients[name] for name in own], bounds=(-1.0, 1.0))
            yield Agreement(method, finding, number(found, 0.0, "nothing in common"))


def _in_parts(one: AuditRun, other: AuditRun, ids: Sequence[str]) -> Iterator[tuple[Maps, Maps]]:
    """The maps of the same images in both, those of a part of the first at a time: all of them may be gigabytes."""
    wanted, theirs = (run.maps.table(["id"])["id"] for run in (one, other))
    pieces = Pieces(other.maps.dataset)
    for table in Pieces(one.maps.dataset).in_turn(_places(wanted, arrow().array(ids)), COLUMNS):
        same = pieces.take(_places(theirs, table["id"].combine_chunks()), COLUMNS)
        yield _maps(one, table), _maps(other, same)


def _places(column: Any, ids: Any) -> Any:
    return np.flatnonzero(np.asarray(arrow("compute").is_in(column, value_set=ids)))


def _maps(run: AuditRun, table: Any) -> Maps:
    """Findings are called what they are in the summary, as in all else that is compared."""
    names, found = run.summary.resolve.categories, dict[tuple[Key, str], Any]()
    for row in as_dicts(table):
        if row["heat"] is not None:
            finding = names[int(row["target"])] if names else row["target"]
            found[(row["method"], finding), row["id"]] = row["heat"].reshape(row["grid"])
    return found


def _correlation(one: Any, other: Any) -> float:
    try:
        return float(spearman(one, other)) if one.shape == other.shape else float("nan")
    except UndefinedError:
        return float("nan")


SHOWN = (
    "enrichment",
    "energy-inside",
    "pointing-game",
    "lerf-morf-gap",
    "stability",
    "acquisition-stability",
    "max-sensitivity",
)
AT = 0.05
Raw = tuple[
    str, str, Number, Number, Estimate
]  # name, finding, the number of either, second - first before any correction


@dataclass(frozen=True)
class Difference:
    """A number of both audits, and second - first, paired: interval and `p` corrected over all differences (Bonferroni)."""

    name: str
    finding: str
    first: Number
    second: Number
    difference: Number

    @property
    def significant(self) -> bool:
        """At 5 %."""
        return self.difference.p is not None and self.difference.p < AT


@dataclass(frozen=True)
class Change:
    """A verdict that is another one; `first`, `second`: "not there" where only the other audit has it."""

    claim: str
    first: str
    second: str
    finding: str = ""


@dataclass(frozen=True)
class Comparison:
    """What differs between two audits. `notes`: what of it may not be the model's doing."""

    runs: tuple[str, str]
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    agreements: tuple[Agreement, ...] = ()

    def json(self) -> str:
        """Sorted, without NaN."""
        plain = {
            "schema_version": "camscope/audit-comparison/1",
            "models": list(self.runs),
            "differences": [
                {
                    "name": one.name,
                    "finding": one.finding,
                    "first": one.first.model_dump(mode="json"),
                    "second": one.second.model_dump(mode="json"),
                    "difference": one.difference.model_dump(mode="json"),
                    "significant": one.significant,
                }
                for one in self.differences
            ],
            "agreements": [
                {
                    "method": one.method,
                    "finding": one.finding,
                    "correlation": one.correlation.model_dump(mode="json"),
                }
                for one in self.agreements
            ],
            "changes": [asdict(one) for one in self.changes],
            "notes": list(self.notes),
        }
        return json.dumps(plain, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def compared(
    first: AuditRun | str | os.PathLike[str], second: AuditRun | str | os.PathLike[str], *, seed: int = 0
) -> Comparison:
    """Answers, maps and interventions of the same images; InputError where more than the model differs: see `expect_alike`."""
    one, other = (run if isinstance(run, AuditRun) else AuditRun(run) for run in (first, second))
    notes, findings = expect_alike(one, other), one.summary.resolve.findings
    patients = _patients(one)
    made = [raw for finding in findings for raw in _of(one, other, finding, patients, seed)]
    digests = (one.summary.resolve.digest, other.summary.resolve.digest)
    return Comparison(
        digests,
        tuple(_corrected(made)),
        tuple(changes(one.summary.verdicts, other.summary.verdicts)),
        notes,
        tuple(agreements(one, other, patients, seed)),
    )


def _corrected(made: Sequence[Raw]) -> Iterator[Difference]:
    """Over all that are not one another's: removing the organ is keeping what lies outside it, and no second test."""
    tests = {(finding, first, second, gap) for _, finding, first, second, gap in made if gap.p is not None}
    for name, finding, first, second, gap in made:
        (corrected,) = simultaneous([gap], len(tests))
        yield Difference(name, finding, first, second, number(corrected, 0.0, "no difference"))


def changes(first: Iterable[Verdict], second: Iterable[Verdict]) -> Iterator[Change]:
    """Verdicts that are another one, in the order of the second, then those that only the first has.

    Claims of two findings may be worded alike.
    """
    words = {_key(verdict): verdict for verdict in first}
    for verdict in second:
        before = words.pop(_key(verdict), None)
        word = ABSENT if before is None else before.word
        if word != verdict.word:
            yield Change(verdict.claim, word, verdict.word, verdict.finding)
    for verdict in words.values():
        yield Change(verdict.claim, verdict.word, ABSENT, verdict.finding)


def _key(verdict: Verdict) -> tuple[str, str, str, str]:
    return verdict.question, verdict.claim, verdict.finding, verdict.subject


def _patients(run: AuditRun) -> dict[str, int]:
    table = run.predictions()
    return dict(zip(table["id"].to_pylist(), table["patient"].to_pylist(), strict=True))


def _of(one: AuditRun, other: AuditRun, finding: str, patients: Mapping[str, int], seed: int) -> Iterator[Raw]:
    yield from _answers(one, other, finding, patients, seed)
    tables = [run.metrics().filter(_is_own(run, finding)) for run in (one, other)]
    for name in SHOWN:
        for method in _methods(tables[0], name):
            values = [_values(table, name, method) for table in tables]
            yield from _paired(f"{name} of {method}", finding, values, patients, METRICS[name].precision)
    moves = [_moves(run, finding) for run in (one, other)]
    for key in moves[0]:
        if key in moves[1]:
            yield from _paired(key, finding, [move[key] for move in moves], patients, PRECISION)


def _answers(one: AuditRun, other: AuditRun, finding: str, patients: Mapping[str, int], seed: int) -> Iterator[Raw]:
    known = [_predicted(run, finding) for run in (one, other)]
    ids = [name for name in known[0] if name in known[1]]
    truth = np.array([known[0][name][0] for name in ids], np.bool_)
    answers = [np.array([each[name][1] for name in ids]) for each in known]
    groups = [patients[name] for name in ids]
    try:
        own = [number(auroc(truth, each, groups, seed=seed), 0.5, "chance") for each in answers]
        yield "AUROC", finding, own[0], own[1], _gap(truth, answers[0], answers[1], groups, seed)
    except UndefinedError:
        return


def _gap(truth: Any, first: Any, second: Any, groups: Sequence[int], seed: int) -> Estimate:
    """AUROC of the second answers less that of the first; both from the same draws of patients.

    Answers that differ by no more than rounding are the same.
    """
    second = np.where(np.isclose(first, second, rtol=PRECISION, atol=PRECISION), first, second)
    rankings = _rankings(truth, (first, second), groups)
    gap = rankings[1].point(under_roc) - rankings[0].point(under_roc)
    drawn = [redrawn(one, under_roc, REPLICATES, seed) for one in rankings]
    fewest = min(rankings[0].witnesses)
    spread = float(kept(drawn[1] - drawn[0], rankings[0].words()).std())
    few = min(fewest, rankings[0].effective)
    error = 0.0 if spread <= PRECISION else spread * sqrt(few / max(1, few - 1))
    effective = min(float(fewest), rankings[0].effective)
    made = Estimate(
        gap,
        np.nan,
        np.nan,
        len(truth),
        len(set(groups)),
        witnesses=fewest,
        method=STUDENT,
        effective=effective,
        largest=rankings[0].largest,
        freedom=max(1.0, effective - 1),
    )
    if made.is_dominated:
        return made
    low, high, p = student(gap, error, fewest, made.freedom)
    return replace(made, low=low, high=high, p=p)


def _rankings(truth: Any, answers: Sequence[Any], groups: Sequence[int]) -> list[Ranking]:
    """One of each model's answers; patients have the same numbers in all, whatever the order that the answers put them in."""
    group = numbered(groups, len(truth))
    made = [ranked(truth, answer, None) for answer in answers]
    return [replace(one, group=group[one.order], groups=len(np.unique(group))) for one in made]


def _predicted(run: AuditRun, finding: str) -> dict[str, tuple[bool, float]]:
    table = run.predictions()
    columns = (table[name].to_pylist() for name in ("id", f"truth {finding}", f"log odds {finding}"))
    return {
        name: (truth, odds)
        for name, truth, odds in zip(*columns, strict=True)
        if truth is not None and odds is not None
    }


def _is_own(run: AuditRun, finding: str) -> Any:
    compute, table = arrow("compute"), run.metrics()
    return compute.and_(compute.equal(table["finding"], finding), compute.invert(table["control"]))


def _methods(table: "pa.Table", metric: str) -> list[str]:
    own = table.filter(arrow("compute").equal(table["metric"], metric))
    return list(dict.fromkeys(own["method"].to_pylist()))


def _values(table: "pa.Table", metric: str, method: str) -> dict[str, float]:
    """Id -> the mean over fills."""
    compute = arrow("compute")
    own = table.filter(compute.and_(compute.equal(table["metric"], metric), compute.equal(table["method"], method)))
    found: dict[str, list[float]] = {}
    for name, value in zip(own["id"].to_pylist(), own["value"].to_pylist(), strict=True):
        if value is not None:
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(each)) for name, each in found.items()}


def _moves(run: AuditRun, finding: str) -> dict[str, dict[str, float]]:
    """Intervention -> id -> its effect, in the run's own standard deviations."""
    place = run.folder / "interventions.parquet"
    if not place.is_file():
        return {}
    spread = next(one.spread for one in run.summary.predict.findings if one.finding == finding)
    found: dict[str, dict[str, list[float]]] = {}
    for row in read_parquet(place).to_pylist():
        if row["finding"] == finding and spread > 0:
            gap = (row["with_it"] - row["without"]) / spread
            name = f"{row['kind']} {row['region']}"
            found.setdefault(name, {}).setdefault(row["id"], []).append(gap)
    return {name: {key: float(np.mean(gaps)) for key, gaps in each.items()} for name, each in found.items()}


def _paired(
    name: str,
    finding: str,
    values: Sequence[Mapping[str, float]],
    patients: Mapping[str, int],
    precision: float,
) -> Iterator[Raw]:
    ids = [key for key in values[0] if key in values[1]]
    groups = [patients[key] for key in ids]
    first, second = ([each[key] for key in ids] for each in values)
    try:
        gap = difference(second, first, groups, precision=precision)
    except UndefinedError:
        return
    own = [Number(value=float(np.mean(each)), n=len(each), groups=len(set(groups))) for each in (first, second)]
    yield name, finding, own[0], own[1], gap
