"""A paired comparison of two audits of the same images: predictions, metrics, interventions, maps and verdicts."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.audit_run import AuditRun
from camscope.audit.comparability import ABSENT_VERDICT, check_comparable
from camscope.audit.core.schema import EstimateSummary, Verdict
from camscope.audit.core.summary_values import summarize_estimate
from camscope.audit.performance.auc import (
    Ranking,
    auroc,
    bootstrap_areas,
    compute_roc_area,
    drop_undefined,
    rank_scores,
)
from camscope.batch.manifest import import_arrow
from camscope.batch.query import RowReader, table_to_dicts
from camscope.errors import UndefinedError
from camscope.metrics import METRICS, Estimate, estimate_mean, spearman
from camscope.metrics.statistics import (
    N_RESAMPLES,
    RELATIVE_PRECISION,
    STUDENT_T_INTERVAL,
    adjust_bonferroni,
    compute_t_interval,
    estimate_difference,
    index_groups,
)
from camscope.untrusted_files import read_parquet

if TYPE_CHECKING:
    import pyarrow as pa


MAX_COMPARED_IMAGES = 500  # drawn by the seed
MAP_COLUMNS = ("id", "method", "target", "grid", "attribution")
MethodFinding = tuple[str, str]  # the method and the finding
MapsById = dict[tuple[MethodFinding, str], Any]  # the second key is the image id


@dataclass(frozen=True)
class CrossModelAgreement:
    """The mean Spearman correlation of a method's maps for two models, with its interval by patient."""

    method: str
    finding: str
    correlation: EstimateSummary


def compute_cross_model_agreements(
    first_run: AuditRun, second_run: AuditRun, patients: Mapping[str, int], seed: int
) -> Iterator[CrossModelAgreement]:
    """Yield the agreement for every method and finding; constant maps and maps of different sizes count as undefined."""
    ids = list(patients)
    sampled_ids = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))[:MAX_COMPARED_IMAGES]]
    values: dict[MethodFinding, dict[str, float]] = {}
    for first, second in _iter_paired_maps(first_run, second_run, sampled_ids):
        for key, name in first:
            if (key, name) in second:
                values.setdefault(key, {})[name] = _compute_map_correlation(first[key, name], second[key, name])
    for (method, finding), correlations in values.items():
        if any(np.isfinite(list(correlations.values()))):
            estimate = estimate_mean(
                list(correlations.values()), [patients[name] for name in correlations], bounds=(-1.0, 1.0)
            )
            yield CrossModelAgreement(method, finding, summarize_estimate(estimate, 0.0, "no correlation"))


def _iter_paired_maps(
    first_run: AuditRun, second_run: AuditRun, ids: Sequence[str]
) -> Iterator[tuple[MapsById, MapsById]]:
    """Yield the maps of the same images in both audits, one file of the first at a time to bound the memory."""
    first_ids, second_ids = (run.maps.table(["id"])["id"] for run in (first_run, second_run))
    reader = RowReader(second_run.maps.dataset)
    for table in RowReader(first_run.maps.dataset).iter_tables(
        _find_positions(first_ids, import_arrow().array(ids)), MAP_COLUMNS
    ):
        paired = reader.take(_find_positions(second_ids, table["id"].combine_chunks()), MAP_COLUMNS)
        yield _collect_maps(first_run, table), _collect_maps(second_run, paired)


def _find_positions(id_column: Any, ids: Any) -> Any:
    return np.flatnonzero(np.asarray(import_arrow("compute").is_in(id_column, value_set=ids)))


def _collect_maps(run: AuditRun, table: Any) -> MapsById:
    """Return the maps by method, finding and image; findings have their names in the summary."""
    names, maps = run.summary.resolve.class_names, dict[tuple[MethodFinding, str], Any]()
    for row in table_to_dicts(table):
        if row["attribution"] is not None:
            finding = names[int(row["target"])] if names else row["target"]
            maps[(row["method"], finding), row["id"]] = row["attribution"].reshape(row["grid"])
    return maps


def _compute_map_correlation(first: Any, second: Any) -> float:
    try:
        return float(spearman(first, second)) if first.shape == second.shape else float("nan")
    except UndefinedError:
        return float("nan")


COMPARED_METRICS = (
    "enrichment",
    "energy-inside",
    "pointing-game",
    "lerf-morf-gap",
    "stability",
    "acquisition-stability",
    "max-sensitivity",
)
SIGNIFICANCE_LEVEL = 0.05
UncorrectedDifference = tuple[
    str, str, EstimateSummary, EstimateSummary, Estimate
]  # name, finding, the number of either, second - first before any correction


@dataclass(frozen=True)
class PairedDifference:
    """A number of both audits and its paired difference, second minus first, with Bonferroni correction over all tests."""

    name: str
    finding: str
    first: EstimateSummary
    second: EstimateSummary
    difference: EstimateSummary

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p-value is below 5 %."""
        return self.difference.p_value is not None and self.difference.p_value < SIGNIFICANCE_LEVEL


@dataclass(frozen=True)
class VerdictChange:
    """A claim with different conclusions; "absent" where only one audit has it."""

    claim: str
    first: str
    second: str
    finding: str = ""


@dataclass(frozen=True)
class AuditComparison:
    """The differences of two audits. `notes`: other possible causes than the model."""

    weights_digests: tuple[str, str]
    differences: tuple[PairedDifference, ...]
    verdict_changes: tuple[VerdictChange, ...]
    notes: tuple[str, ...] = ()
    cross_model_agreements: tuple[CrossModelAgreement, ...] = ()

    def to_json(self) -> str:
        """Return the comparison as sorted JSON without NaN."""
        document = {
            "schema_version": "camscope/audit-comparison/2",
            "weights_digests": list(self.weights_digests),
            "differences": [
                {
                    "name": one.name,
                    "finding": one.finding,
                    "first": one.first.model_dump(mode="json"),
                    "second": one.second.model_dump(mode="json"),
                    "difference": one.difference.model_dump(mode="json"),
                    "is_significant": one.is_significant,
                }
                for one in self.differences
            ],
            "cross_model_agreements": [
                {
                    "method": one.method,
                    "finding": one.finding,
                    "correlation": one.correlation.model_dump(mode="json"),
                }
                for one in self.cross_model_agreements
            ],
            "verdict_changes": [asdict(one) for one in self.verdict_changes],
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def compare_audits(
    first: AuditRun | str | os.PathLike[str], second: AuditRun | str | os.PathLike[str], *, seed: int = 0
) -> AuditComparison:
    """Compare two audits of the same images; InputError where more than the model differs: see `check_comparable`."""
    first_run, second_run = (run if isinstance(run, AuditRun) else AuditRun(run) for run in (first, second))
    notes, findings = check_comparable(first_run, second_run), first_run.summary.resolve.findings
    patients = _read_patient_numbers(first_run)
    differences = [
        raw for finding in findings for raw in _compare_finding(first_run, second_run, finding, patients, seed)
    ]
    digests = (first_run.summary.resolve.weights_digest, second_run.summary.resolve.weights_digest)
    return AuditComparison(
        digests,
        tuple(_correct_for_multiplicity(differences)),
        tuple(find_verdict_changes(first_run.summary.verdicts, second_run.summary.verdicts)),
        notes,
        tuple(compute_cross_model_agreements(first_run, second_run, patients, seed)),
    )


def _correct_for_multiplicity(uncorrected: Sequence[UncorrectedDifference]) -> Iterator[PairedDifference]:
    """Correct for the number of distinct tests; removing the organ and keeping its outside are the same test."""
    tests = {
        (finding, first, second, difference)
        for _, finding, first, second, difference in uncorrected
        if difference.p_value is not None
    }
    for name, finding, first, second, difference in uncorrected:
        (corrected,) = adjust_bonferroni([difference], len(tests))
        yield PairedDifference(name, finding, first, second, summarize_estimate(corrected, 0.0, "no difference"))


def find_verdict_changes(first: Iterable[Verdict], second: Iterable[Verdict]) -> Iterator[VerdictChange]:
    """Yield changed verdicts in the order of the second audit, then those that only the first audit has."""
    remaining = {_get_verdict_key(verdict): verdict for verdict in first}
    for verdict in second:
        previous = remaining.pop(_get_verdict_key(verdict), None)
        conclusion = ABSENT_VERDICT if previous is None else previous.conclusion
        if conclusion != verdict.conclusion:
            yield VerdictChange(verdict.claim, conclusion, verdict.conclusion, verdict.finding)
    for verdict in remaining.values():
        yield VerdictChange(verdict.claim, verdict.conclusion, ABSENT_VERDICT, verdict.finding)


def _get_verdict_key(verdict: Verdict) -> tuple[str, str, str, str]:
    return verdict.question, verdict.claim, verdict.finding, verdict.qualifier


def _read_patient_numbers(run: AuditRun) -> dict[str, int]:
    table = run.predictions()
    return dict(zip(table["id"].to_pylist(), table["patient"].to_pylist(), strict=True))


def _compare_finding(
    first_run: AuditRun, second_run: AuditRun, finding: str, patients: Mapping[str, int], seed: int
) -> Iterator[UncorrectedDifference]:
    yield from _compare_aurocs(first_run, second_run, finding, patients, seed)
    tables = [run.metrics().filter(_build_finding_filter(run, finding)) for run in (first_run, second_run)]
    for name in COMPARED_METRICS:
        for method in _list_methods(tables[0], name):
            values = [_compute_mean_values(table, name, method) for table in tables]
            yield from _compare_means(
                f"{name} of {method}", finding, values, patients, METRICS[name].rounding_tolerance
            )
    moves = [_compute_intervention_effects(run, finding) for run in (first_run, second_run)]
    for key in moves[0]:
        if key in moves[1]:
            yield from _compare_means(key, finding, [move[key] for move in moves], patients, RELATIVE_PRECISION)


def _compare_aurocs(
    first_run: AuditRun, second_run: AuditRun, finding: str, patients: Mapping[str, int], seed: int
) -> Iterator[UncorrectedDifference]:
    predictions = [_read_truth_and_log_odds(run, finding) for run in (first_run, second_run)]
    ids = [name for name in predictions[0] if name in predictions[1]]
    truth = np.array([predictions[0][name][0] for name in ids], np.bool_)
    scores = [np.array([each[name][1] for name in ids]) for each in predictions]
    groups = [patients[name] for name in ids]
    try:
        estimates = [summarize_estimate(auroc(truth, each, groups, seed=seed), 0.5, "chance") for each in scores]
        yield (
            "AUROC",
            finding,
            estimates[0],
            estimates[1],
            _compute_auroc_difference(truth, scores[0], scores[1], groups, seed),
        )
    except UndefinedError:
        return


def _compute_auroc_difference(
    truth: Any, first_scores: Any, second_scores: Any, groups: Sequence[int], seed: int
) -> Estimate:
    """Return the AUROC of the second scores minus that of the first, from the same bootstrap resamples of patients.

    Scores that differ only by rounding count as equal.
    """
    second_scores = np.where(
        np.isclose(first_scores, second_scores, rtol=RELATIVE_PRECISION, atol=RELATIVE_PRECISION),
        first_scores,
        second_scores,
    )
    rankings = _rank_both(truth, (first_scores, second_scores), groups)
    difference = rankings[1].compute_area(compute_roc_area) - rankings[0].compute_area(compute_roc_area)
    areas = [bootstrap_areas(ranking, compute_roc_area, N_RESAMPLES, seed) for ranking in rankings]
    fewest = min(rankings[0].n_groups_per_class)
    spread = float(drop_undefined(areas[1] - areas[0], rankings[0].describe_counts()).std())
    few = min(fewest, rankings[0].n_effective_groups)
    error = 0.0 if spread <= RELATIVE_PRECISION else spread * sqrt(few / max(1, few - 1))
    effective = min(float(fewest), rankings[0].n_effective_groups)
    estimate = Estimate(
        difference,
        np.nan,
        np.nan,
        len(truth),
        len(set(groups)),
        n_limiting_groups=fewest,
        interval_method=STUDENT_T_INTERVAL,
        n_effective_groups=effective,
        largest_group_share=rankings[0].largest_group_share,
        dof=max(1.0, effective - 1),
    )
    if estimate.is_dominated_by_few_groups:
        return estimate
    low, high, p = compute_t_interval(difference, error, fewest, estimate.dof)
    return replace(estimate, low=low, high=high, p_value=p)


def _rank_both(truth: Any, scores: Sequence[Any], groups: Sequence[int]) -> list[Ranking]:
    """One of each model's answers; patients have the same numbers in all, whatever the order that the answers put them in."""
    group = index_groups(groups, len(truth))
    rankings = [rank_scores(truth, answer, None) for answer in scores]
    return [
        replace(ranking, group_index=group[ranking.row_index], n_resampled_groups=len(np.unique(group)))
        for ranking in rankings
    ]


def _read_truth_and_log_odds(run: AuditRun, finding: str) -> dict[str, tuple[bool, float]]:
    table = run.predictions()
    columns = (table[name].to_pylist() for name in ("id", f"truth {finding}", f"log odds {finding}"))
    return {
        name: (truth, odds)
        for name, truth, odds in zip(*columns, strict=True)
        if truth is not None and odds is not None
    }


def _build_finding_filter(run: AuditRun, finding: str) -> Any:
    compute, table = import_arrow("compute"), run.metrics()
    return compute.and_(compute.equal(table["finding"], finding), compute.invert(table["control"]))


def _list_methods(table: "pa.Table", metric: str) -> list[str]:
    rows = table.filter(import_arrow("compute").equal(table["metric"], metric))
    return list(dict.fromkeys(rows["method"].to_pylist()))


def _compute_mean_values(table: "pa.Table", metric: str, method: str) -> dict[str, float]:
    """Return image id -> the mean value over the imputations."""
    compute = import_arrow("compute")
    rows = table.filter(compute.and_(compute.equal(table["metric"], metric), compute.equal(table["method"], method)))
    values: dict[str, list[float]] = {}
    for name, value in zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True):
        if value is not None:
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(each)) for name, each in values.items()}


def _compute_intervention_effects(run: AuditRun, finding: str) -> dict[str, dict[str, float]]:
    """Return intervention -> image id -> its effect in standard deviations of the log odds."""
    path = run.folder / "interventions.parquet"
    if not path.is_file():
        return {}
    log_odds_std = next(
        performance.log_odds_std for performance in run.summary.predict.performance if performance.finding == finding
    )
    effects: dict[str, dict[str, list[float]]] = {}
    for row in read_parquet(path).to_pylist():
        if row["finding"] == finding and log_odds_std > 0:
            effect = (row["log_odds_with"] - row["log_odds_without"]) / log_odds_std
            name = f"{row['kind']} {row['region']}"
            effects.setdefault(name, {}).setdefault(row["id"], []).append(effect)
    return {name: {key: float(np.mean(gaps)) for key, gaps in each.items()} for name, each in effects.items()}


def _compare_means(
    name: str,
    finding: str,
    values: Sequence[Mapping[str, float]],
    patients: Mapping[str, int],
    precision: float,
) -> Iterator[UncorrectedDifference]:
    ids = [key for key in values[0] if key in values[1]]
    groups = [patients[key] for key in ids]
    first, second = ([each[key] for key in ids] for each in values)
    try:
        difference = estimate_difference(second, first, groups, rounding_tolerance=precision)
    except UndefinedError:
        return
    estimates = [
        EstimateSummary(value=float(np.mean(each)), n_values=len(each), n_groups=len(set(groups)))
        for each in (first, second)
    ]
    yield name, finding, estimates[0], estimates[1], difference
