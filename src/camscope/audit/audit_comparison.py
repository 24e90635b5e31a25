"""Compare two audits of the same images: predictions, metrics, interventions, maps and verdicts."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from camscope.audit.check_audits_comparable import check_comparable_and_list_notes
from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.summary_schema import Verdict
from camscope.audit.finished_audit import AuditRun
from camscope.audit.performance.auc import auroc, bootstrap_areas, compute_roc_area, drop_undefined_areas, rank_scores
from camscope.audit.shortcuts.region_names import name_region
from camscope.batch.image_manifest import import_arrow
from camscope.batch.sql_query import RowReader, table_to_dicts
from camscope.errors import UndefinedError
from camscope.metrics import METRICS, Estimate, estimate_mean, spearman
from camscope.metrics.intervals_and_p_values import compute_t_interval, index_groups
from camscope.metrics.mean_estimates import (
    N_RESAMPLES,
    RELATIVE_PRECISION,
    STUDENT_T_INTERVAL,
    adjust_bonferroni,
    estimate_difference,
)

if TYPE_CHECKING:
    import pyarrow as pa

ABSENT_VERDICT = "absent"
COMPARED_METRICS = (
    "enrichment", "energy-inside", "pointing-game", "lerf-morf-gap", "stability", "acquisition-stability",
    "max-sensitivity",
)  # fmt: skip
SIGNIFICANCE_LEVEL = 0.05
MAX_COMPARED_IMAGES = 500  # drawn by the seed
MAP_COLUMNS = ("id", "method", "target", "grid", "attribution")
ValuesById = Mapping[str, float]
MapsById = dict[tuple[str, str, str], Any]  # by method, finding and image id
# name, finding, the number of either, second - first before any correction
UncorrectedDifference = tuple[str, str, EstimateSummary, EstimateSummary, Estimate]


@dataclass(frozen=True)
class CrossModelAgreement:
    """The mean Spearman correlation between the maps of two models, with a confidence interval by patient."""

    method: str
    finding: str
    correlation: EstimateSummary


@dataclass(frozen=True)
class PairedDifference:
    """The values of a quantity in both audits and their paired difference, with Bonferroni correction."""

    name: str
    finding: str
    first: EstimateSummary
    second: EstimateSummary
    difference: EstimateSummary

    @property
    def is_significant(self) -> bool:
        """Whether the p-value, corrected for multiple tests, is below 0.05."""
        return self.difference.p_value is not None and self.difference.p_value < SIGNIFICANCE_LEVEL


@dataclass(frozen=True)
class VerdictChange:
    """A claim with different conclusions in two audits. The conclusion "absent" means that an audit lacks the claim."""

    claim: str
    first: str
    second: str
    finding: str = ""


@dataclass(frozen=True)
class AuditComparison:
    """The differences between two audits. `notes` list possible causes in addition to the model."""

    weights_digests: tuple[str, str]
    differences: tuple[PairedDifference, ...]
    verdict_changes: tuple[VerdictChange, ...]
    notes: tuple[str, ...] = ()
    cross_model_agreements: tuple[CrossModelAgreement, ...] = ()

    def to_json(self) -> str:
        """Return the comparison as JSON with sorted keys and without NaN."""
        document = {
            "schema_version": "camscope/audit-comparison/2",
            **vars(self),
            "differences": [vars(row) | {"is_significant": row.is_significant} for row in self.differences],
        }
        text = json.dumps(
            document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False, default=_to_json_fields
        )
        return text + "\n"


def _to_json_fields(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, EstimateSummary) else vars(value)


def compare_audits(
    first: AuditRun | str | os.PathLike[str], second: AuditRun | str | os.PathLike[str], *, seed: int = 0
) -> AuditComparison:
    """Compare two audits of the same images. Raise an InputError if any setting differs that does not describe the model."""
    runs = first_run, second_run = [run if isinstance(run, AuditRun) else AuditRun(run) for run in (first, second)]
    notes = check_comparable_and_list_notes(first_run, second_run)
    predictions = first_run.predictions()
    patients = dict(zip(predictions["id"].to_pylist(), predictions["patient"].to_pylist(), strict=True))
    findings = first_run.summary.resolve.findings
    differences = [raw for finding in findings for raw in _compare_finding(runs, finding, patients, seed)]
    return AuditComparison(
        (first_run.summary.resolve.weights_digest, second_run.summary.resolve.weights_digest),
        tuple(_correct_for_multiplicity(differences)),
        tuple(find_verdict_changes(first_run.summary.verdicts, second_run.summary.verdicts)),
        notes,
        tuple(compute_cross_model_agreements(first_run, second_run, patients, seed)),
    )


def _correct_for_multiplicity(uncorrected: Sequence[UncorrectedDifference]) -> Iterator[PairedDifference]:
    """Correct p-values and intervals for the number of distinct tests by the Bonferroni method.

    Removing the organ and keeping its outside are the same test.
    """
    n_tests = len({row[1:] for row in uncorrected if row[4].p_value is not None})
    for name, finding, first, second, difference in uncorrected:
        (corrected,) = adjust_bonferroni([difference], n_tests)
        yield PairedDifference(name, finding, first, second, summarize_estimate(corrected, 0.0, "no difference"))


def find_verdict_changes(first: Iterable[Verdict], second: Iterable[Verdict]) -> Iterator[VerdictChange]:
    """Yield the claims whose conclusion differs between two audits. Claims that only the first audit contains come last.

    Claims are matched by question, finding, region or method, and metric, because another version may word them differently.
    """
    remaining = _index_verdicts(first)
    for key, verdict in _index_verdicts(second).items():
        previous = remaining.pop(key, None)
        conclusion = ABSENT_VERDICT if previous is None else previous.conclusion
        if conclusion != verdict.conclusion:
            yield VerdictChange(verdict.claim, conclusion, verdict.conclusion, verdict.finding)
    for verdict in remaining.values():
        yield VerdictChange(verdict.claim, verdict.conclusion, ABSENT_VERDICT, verdict.finding)


def _index_verdicts(verdicts: Iterable[Verdict]) -> dict[tuple[str, ...], Verdict]:
    """Index verdicts by question, finding, qualifier and metric. Verdicts that are equal in all four are numbered."""
    get_key, counts = attrgetter("question", "finding", "qualifier", "metric"), Counter[tuple[str, ...]]()
    indexed: dict[tuple[str, ...], Verdict] = {}
    for verdict in verdicts:
        key = get_key(verdict)
        indexed[*key, str(counts[key])] = verdict
        counts[key] += 1
    return indexed


def _compare_finding(
    runs: Sequence[AuditRun], finding: str, patients: Mapping[str, int], seed: int
) -> Iterator[UncorrectedDifference]:
    """Yield the differences between two audits for one finding: AUROC, metrics and effects of interventions."""
    yield from _compare_aurocs(runs, finding, patients, seed)
    tables = [_read_metric_values(run, finding) for run in runs]
    for metric, method in sorted(tables[0], key=lambda key: COMPARED_METRICS.index(key[0])):
        tolerance = METRICS[metric].rounding_tolerance
        values = [table.get((metric, method), {}) for table in tables]
        yield from _compare_means(f"{metric} of {method}", finding, values, patients, tolerance)
    effects = [_compute_intervention_effects(run, finding) for run in runs]
    for name in effects[0]:
        if name in effects[1]:
            values = [table[name] for table in effects]
            yield from _compare_means(name, finding, values, patients, RELATIVE_PRECISION)


def _compare_aurocs(
    runs: Sequence[AuditRun], finding: str, patients: Mapping[str, int], seed: int
) -> Iterator[UncorrectedDifference]:
    """Yield the difference of the AUROC on the images that both audits share, unless it is undefined."""
    predictions = [_read_truth_and_log_odds(run, finding) for run in runs]
    ids = [name for name in predictions[0] if name in predictions[1]]
    truth = np.array([predictions[0][name][0] for name in ids], np.bool_)
    scores = [np.array([table[name][1] for name in ids]) for table in predictions]
    groups = [patients[name] for name in ids]
    try:
        first, second = (summarize_estimate(auroc(truth, each, groups, seed=seed), 0.5, "chance") for each in scores)
        yield "AUROC", finding, first, second, _compute_auroc_difference(truth, scores[0], scores[1], groups, seed)
    except UndefinedError:
        return


def _compute_auroc_difference(
    truth: Any, first_scores: Any, second_scores: Any, groups: Sequence[int], seed: int
) -> Estimate:
    """Return the AUROC of the second model minus the AUROC of the first, with a paired bootstrap interval by patient.

    Scores that differ only by rounding count as equal.
    """
    is_equal = np.isclose(first_scores, second_scores, rtol=RELATIVE_PRECISION, atol=RELATIVE_PRECISION)
    group = index_groups(groups, len(truth))  # the same patient numbers for both, whatever the order of the scores
    rankings = []
    for scores in (first_scores, np.where(is_equal, first_scores, second_scores)):
        ranking = rank_scores(truth, scores, None)
        n_groups = len(np.unique(group))
        rankings.append(replace(ranking, group_index=group[ranking.row_index], n_resampled_groups=n_groups))
    first, second = rankings
    difference = second.compute_area(compute_roc_area) - first.compute_area(compute_roc_area)
    areas = [bootstrap_areas(ranking, compute_roc_area, N_RESAMPLES, seed) for ranking in rankings]
    spread = float(drop_undefined_areas(areas[1] - areas[0], first.describe_counts()).std())
    fewest = min(first.n_positive_and_negative_groups)
    effective = min(fewest, first.n_effective_groups)
    error = 0.0 if spread <= RELATIVE_PRECISION else spread * sqrt(effective / max(1, effective - 1))
    estimate = Estimate(
        difference,
        np.nan,
        np.nan,
        len(truth),
        len(set(groups)),
        n_limiting_groups=fewest,
        interval_method=STUDENT_T_INTERVAL,
        n_effective_groups=float(effective),
        largest_group_share=first.largest_group_share,
        dof=max(1.0, effective - 1),
    )
    if estimate.is_dominated_by_few_groups:
        return estimate
    low, high, p = compute_t_interval(difference, error, fewest, estimate.dof)
    return replace(estimate, low=low, high=high, p_value=p)


def _read_truth_and_log_odds(run: AuditRun, finding: str) -> dict[str, tuple[bool, float]]:
    table = run.predictions()
    columns = (table[name].to_pylist() for name in ("id", f"truth {finding}", f"log odds {finding}"))
    rows = zip(*columns, strict=True)
    return {name: (truth, odds) for name, truth, odds in rows if truth is not None and odds is not None}


def _read_metric_values(run: AuditRun, finding: str) -> dict[tuple[str, str], ValuesById]:
    """Average the metric values of each image over the imputations. Return (metric, method) -> image id -> mean."""
    field = import_arrow("compute").field
    is_selected = (field("finding") == finding) & ~field("control") & field("metric").isin(COMPARED_METRICS)
    rows = run.metrics().filter(is_selected).to_pylist()
    return _average_by_id(((row["metric"], row["method"]), row["id"], row["value"]) for row in rows)


def _compute_intervention_effects(run: AuditRun, finding: str) -> dict[str, ValuesById]:
    """Return nested dicts: intervention, then image id, then the effect of the intervention on the log odds.
    The unit is the standard deviation of the log odds.
    """
    performances = run.summary.predict.performance
    log_odds_std = next(
        (performance.log_odds_std for performance in performances if performance.finding == finding), 0.0
    )
    rows = [row for row in run.interventions().to_pylist() if row["finding"] == finding and log_odds_std > 0]
    return _average_by_id(
        (
            f"{row['kind']} {name_region(row['region'])}",
            row["id"],
            (row["log_odds_with"] - row["log_odds_without"]) / log_odds_std,
        )
        for row in rows
    )


def _average_by_id(rows: Iterable[tuple[Any, str, float | None]]) -> dict[Any, ValuesById]:
    """Average the values of each key and image. Ignore missing values. Return nested dicts: key, then image id, then mean."""
    values: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, name, value in rows:
        by_id = values[key]
        if value is not None:
            by_id[name].append(value)
    return {key: {name: float(np.mean(each)) for name, each in by_id.items()} for key, by_id in values.items()}


def _compare_means(
    name: str, finding: str, values: Sequence[ValuesById], patients: Mapping[str, int], tolerance: float
) -> Iterator[UncorrectedDifference]:
    """Yield the paired difference of a mean on the images that both audits share, unless it is undefined."""
    ids = [key for key in values[0] if key in values[1]]
    groups = [patients[key] for key in ids]
    first, second = ([each[key] for key in ids] for each in values)
    try:
        difference = estimate_difference(second, first, groups, rounding_tolerance=tolerance)
    except UndefinedError:
        return
    summaries = [
        EstimateSummary(value=float(np.mean(each)), n_values=len(each), n_groups=len(set(groups)))
        for each in (first, second)
    ]
    yield name, finding, summaries[0], summaries[1], difference


def compute_cross_model_agreements(
    first_run: AuditRun, second_run: AuditRun, patients: Mapping[str, int], seed: int
) -> Iterator[CrossModelAgreement]:
    """Yield how well the maps of two models agree, for each method and finding.

    Constant maps and maps of different sizes count as undefined.
    """
    ids = list(patients)
    sampled_ids = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))[:MAX_COMPARED_IMAGES]]
    correlations: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for first, second in _iter_paired_maps(first_run, second_run, sampled_ids):
        for key in (key for key in first if key in second):
            correlations[key[:2]][key[2]] = _compute_map_correlation(first[key], second[key])
    for (method, finding), by_id in correlations.items():
        if any(np.isfinite(list(by_id.values()))):
            estimate = estimate_mean(list(by_id.values()), [patients[name] for name in by_id], bounds=(-1.0, 1.0))
            yield CrossModelAgreement(method, finding, summarize_estimate(estimate, 0.0, "no correlation"))


def _iter_paired_maps(
    first_run: AuditRun, second_run: AuditRun, ids: Sequence[str]
) -> Iterator[tuple[MapsById, MapsById]]:
    """Yield the maps of the same images from two audits. To limit the memory, only one file is loaded at a time."""
    first_ids, second_ids = (run.maps.table(["id"])["id"] for run in (first_run, second_run))
    reader = RowReader(second_run.maps.dataset)
    positions = _find_positions_of_ids(first_ids, import_arrow().array(ids))
    for table in RowReader(first_run.maps.dataset).iter_tables(positions, MAP_COLUMNS):
        paired = reader.read_rows_at(_find_positions_of_ids(second_ids, table["id"].combine_chunks()), MAP_COLUMNS)
        yield _collect_maps(first_run, table), _collect_maps(second_run, paired)


def _find_positions_of_ids(id_column: Any, ids: Any) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.asarray(import_arrow("compute").is_in(id_column, value_set=ids)))


def _collect_maps(run: AuditRun, table: "pa.Table") -> MapsById:
    """Return a dict from (method, finding, image id) to map. A finding is named as in the summary of the audit."""
    names, maps = run.summary.resolve.class_names, {}
    for row in table_to_dicts(table):
        if row["attribution"] is not None:
            finding = names[int(row["target"])] if names else row["target"]
            maps[row["method"], finding, row["id"]] = row["attribution"].reshape(row["grid"])
    return maps


def _compute_map_correlation(first: Any, second: Any) -> float:
    try:
        return float(spearman(first, second)) if first.shape == second.shape else float("nan")
    except UndefinedError:
        return float("nan")
