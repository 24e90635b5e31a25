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
from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import EstimateSummary, FindingPerformance, InterventionEffect, MetricSummary
from camscope.audit.core.summary_values import PATIENT_COLUMN, summarize_estimate, summarize_metrics
from camscope.audit.performance.model_outputs import compute_log_odds, compute_logits_and_features
from camscope.audit.performance.performance_summary import compute_performance
from camscope.audit.provenance.file_ownership import STAGES_FOLDER
from camscope.audit.runner import STAGES
from camscope.audit.shortcuts.effect_sizes import estimate_insertion_effect, estimate_removal_effect
from camscope.audit.shortcuts.interventions import NO_EFFECT_BASELINE, InterventionRunner
from camscope.audit.shortcuts.region_samples import load_region_samples
from camscope.audit.stages.map_quality import LOCALIZATION_METRICS as LOCAL
from camscope.batch.manifest import import_arrow
from camscope.batch.query import table_to_dicts
from camscope.data_readers import MAX_JSON_BYTES
from camscope.evaluation.map_metrics import MapMetricEvaluator
from camscope.metrics import METRICS
from camscope.plurals import plural
from camscope.safe_files import read_bytes

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class CheckResult:
    """Whether it is as it was, and in words what was looked at, or what is wrong. `name`: a file, or what is in several."""

    name: str
    is_intact: bool
    message: str

    @classmethod
    def from_problems(cls, name: str, success_message: str, problems: "list[str]") -> "CheckResult":
        """It holds where nothing is wrong; else the first things that are."""
        more = f", and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        return cls(name, not problems, "; ".join(problems[:MAX_PROBLEMS_SHOWN]) + more if problems else success_message)


MAX_PROBLEMS_SHOWN = 3  # things that are wrong, in words

SUMMARY_TOLERANCE = 1e-6  # of a number of the summary, which is rounded
METRIC_STAGES = ("localise", "faithfulness", "robustness")
FIELD_LABELS = {
    "value": "",
    "low": ", lower end,",
    "high": ", upper end,",
    "n": ", images,",
    "undefined": ", images without a value,",
    "groups": ", patients,",
    "p": ", p,",
    "baseline": ", baseline,",
}
Problems = Iterator[str]


def recompute_from_tables(run: AuditRun) -> Iterator[CheckResult]:
    """Parts by what stages left, answers by predictions.parquet, effects by interventions.parquet, metrics by metrics.parquet.

    What of these no number of the summary rests on, as the values of images without the finding, is not looked at.
    """
    for name, find, words in (
        ("parts", _check_stage_files, "{} are what the stages left"),
        ("answers", _check_performance, "{} numbers of them follow from predictions.parquet"),
        ("effects", _check_effects, "{} follow from interventions.parquet"),
        ("means", _check_metric_summaries, "{} and their differences follow from metrics.parquet"),
    ):
        yield _run_check(run, name, find, words)


def _run_check(
    run: AuditRun, name: str, find_problems: Callable[[AuditRun, Counter[str]], Problems], message: str
) -> CheckResult:
    seen = Counter[str]()
    try:
        wrong = list(find_problems(run, seen))
    except Exception as error:  # tables that were changed can be wrong in any way
        return CheckResult(name, False, f"they do not follow from the tables: {type(error).__name__}")
    return CheckResult.from_problems(name, message.format(seen.total()), wrong)


def _check_stage_files(run: AuditRun, tally: Counter[str]) -> Problems:
    for name, job in STAGES.items():
        tally["parts"] += 1
        left = job.result_cls.model_validate_json(
            read_bytes(run.folder / STAGES_FOLDER / f"{name}.json", MAX_JSON_BYTES)
        )
        if left != getattr(run.summary, name):
            yield f"{name} is another one in the summary than in {STAGES_FOLDER}/{name}.json"


def _get_bootstrap_options(run: AuditRun) -> dict[str, int]:
    return {"replicates": run.summary.n_resamples, "seed": run.summary.seed}


def _compare_estimates(recomputed: EstimateSummary, reported: EstimateSummary, name: str, file_name: str) -> Problems:
    """The first part of a number that is another one in the summary."""
    for key, part in FIELD_LABELS.items():
        found, there = getattr(recomputed, key), getattr(reported, key)
        if not _is_close(found, there):
            yield f"{name}{part} is {there} in the summary, and {found} by {file_name}"
            return


def _check_performance(run: AuditRun, tally: Counter[str]) -> Problems:
    table = run.predictions()
    for one in run.summary.predict.performance:
        rows = [row for row in _list_predictions(table, one.finding) if row[1] is not None]
        truth, odds = np.array([bool(row[1]) for row in rows]), np.array([row[2] for row in rows], np.float64)
        made = compute_performance(truth, odds, [row[3] for row in rows], **_get_bootstrap_options(run))[0]
        counts = {
            "positives": int(truth.sum()),
            "negatives": int((~truth).sum()),
            "spread": _compute_log_odds_std(table, one.finding),
        }
        yield from _compare_performance(one, made, counts, tally)


def _compare_performance(
    reported: FindingPerformance,
    recomputed: Mapping[str, EstimateSummary],
    counts: Mapping[str, float],
    tally: Counter[str],
) -> Problems:
    for name, found in recomputed.items():
        tally["numbers"] += 1
        yield from _compare_estimates(
            found, getattr(reported, name), f"{name} of {reported.finding}", "predictions.parquet"
        )
    for name, count in counts.items():
        tally["numbers"] += 1
        if not _is_close(count, getattr(reported, name)):
            yield f"{name} of {reported.finding} is {getattr(reported, name)} in the summary, and {count} by predictions.parquet"


def _list_predictions(table: "pa.Table", finding: str) -> list[tuple[int, bool | None, float, int]]:
    """Row, truth, log odds and patient of each image that has an answer."""
    names = ("row", f"truth {finding}", f"log odds {finding}", "patient")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return [row for row in rows if row[2] is not None]


def _compute_log_odds_std(table: "pa.Table", finding: str) -> float:
    return float(np.std([row[2] for row in _list_predictions(table, finding)]))


def _check_effects(run: AuditRun, tally: Counter[str]) -> Problems:
    table, trials = run.predictions(), dict[tuple[Any, ...], list[dict[str, Any]]]()
    spread = {one.finding: _compute_log_odds_std(table, one.finding) for one in run.summary.predict.performance}
    patients = dict(zip(*(table[name].to_pylist() for name in ("row", "patient")), strict=True))
    for row in run.interventions().to_pylist():
        trials.setdefault((row["finding"], row["region"], row["kind"], row["fill"]), []).append(row)
    for one in run.summary.shortcut.interventions:
        tally["effects"] += 1
        own = trials.pop((one.finding, one.region, one.kind, one.imputation), [])
        where = f"{one.kind} {one.region} ({one.imputation})" if one.imputation else f"{one.kind} {one.region}"
        yield from _compare_estimates(
            _recompute_effect(run, one, own, spread[one.finding], patients), one.effect, where, "interventions.parquet"
        )
    yield from (f"{key[2]} {key[1]} is in interventions.parquet, and not in the summary" for key in trials)


def _recompute_effect(
    run: AuditRun,
    effect: InterventionEffect,
    records: Sequence[Mapping[str, Any]],
    log_odds_std: float,
    patients: Mapping[int, int],
) -> EstimateSummary:
    without, with_it = (np.array([row[name] for row in records], np.float64) for name in ("without", "with_it"))
    whose, donors, others = ([patients.get(row[name]) for row in records] for name in ("row", "donor", "other"))
    if log_odds_std <= 0:
        return summarize_estimate(None, *NO_EFFECT_BASELINE)
    if effect.kind == "insert":
        pasted = estimate_insertion_effect(
            effect.region,
            without,
            with_it,
            log_odds_std,
            whose,
            donors=donors,
            controls=others,
            **_get_bootstrap_options(run),
        )
        return summarize_estimate(pasted.estimate, *NO_EFFECT_BASELINE)
    alone = estimate_removal_effect(
        effect.region, effect.imputation or "", with_it, without, log_odds_std, whose, **_get_bootstrap_options(run)
    )
    return summarize_estimate(alone.estimate, *NO_EFFECT_BASELINE)


def _check_metric_summaries(run: AuditRun, tally: Counter[str]) -> Problems:
    for stage in METRIC_STAGES:
        part = getattr(run.summary, stage)
        for finding in run.summary.resolve.findings if part.tested else ():
            own = _select_metric_rows(run, stage, finding)
            made = {_get_metric_key(one): one for one in summarize_metrics(own, finding, **_get_bootstrap_options(run))}
            said = {_get_metric_key(one): one for one in part.lines if one.finding == finding}
            tally["means"] += len(said)
            for key in {**made, **said}:
                yield from _compare_metric_summaries(made.get(key), said.get(key), f"{key[0]} of {key[1]}, {stage},")


def _compare_metric_summaries(recomputed: MetricSummary | None, reported: MetricSummary | None, name: str) -> Problems:
    if recomputed is None or reported is None:
        yield f"{name} is {'not in metrics.parquet' if recomputed is None else 'not in the summary'}"
        return
    table = "metrics.parquet"
    yield from _compare_estimates(recomputed.value, reported.value, name, table)
    yield from _compare_estimates(
        recomputed.difference_to_control or EstimateSummary(),
        reported.difference_to_control or EstimateSummary(),
        f"{name} over {recomputed.value.baseline_name}",
        table,
    )


def _get_metric_key(metric_summary: MetricSummary) -> tuple[Any, ...]:
    return (
        metric_summary.metric,
        metric_summary.method,
        metric_summary.layer,
        metric_summary.control,
        metric_summary.imputation,
    )


def _select_metric_rows(run: AuditRun, stage: str, finding: str) -> "pa.Table":
    """Of images with the finding, by patient."""
    pa, compute, table = import_arrow(), import_arrow("compute"), run.metrics()
    names = ("row", f"truth {finding}", "patient")
    rows = zip(*(run.predictions()[name].to_pylist() for name in names), strict=True)
    whose = {row: patient for row, truth, patient in rows if truth}
    having = compute.is_in(table["row"], value_set=pa.array(list(whose), pa.int64()))
    for name, value in (("finding", finding), ("stage", stage)):
        having = compute.and_(having, compute.equal(table[name], value))
    own = table.filter(having)
    nothing = pa.nulls(own.num_rows, pa.string())  # one question, and each method with one kind of settings
    patients = pa.array([whose[row] for row in own["row"].to_pylist()], pa.int64())
    return (
        own.append_column("target", nothing)
        .append_column("parameters", nothing)
        .append_column(PATIENT_COLUMN, patients)
    )


def _is_close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return isclose(first, second, rel_tol=SUMMARY_TOLERANCE, abs_tol=SUMMARY_TOLERANCE**2)


RELATIVE_MAP_TOLERANCE = 1e-5  # of a map's largest value: other companions in a pass, another order of sums
LOG_ODDS_TOLERANCE = 1e-4  # of log odds
NOT_RECOMPUTED = (
    "insertions, which need all images",
    "blanked organs",
    "leaks",
    "ways of looking",
    "faithfulness",
    "sanity",
    "robustness",
)
RowSampler = Callable[[Sequence[int]], list[int]]  # of some rows those that are made again


def recompute_rows(context: AuditContext, run: AuditRun, n_rows: int, seed: int) -> Iterator[CheckResult]:
    """So many rows, drawn by the seed; of those of each kind that there are."""

    def drawn(rows: Sequence[int]) -> list[int]:
        known = sorted(set(rows))
        return sorted(known[n] for n in np.random.default_rng(seed).permutation(len(known))[:n_rows].tolist())

    then = Predictions.read(context.folder)
    yield from _check_rows(context, then, drawn(then.rows))
    yield _check_localization(context, run, drawn)
    yield _check_interventions(context, run, then, drawn)


def _check_rows(context: AuditContext, predictions: Predictions, sampled_rows: list[int]) -> Iterator[CheckResult]:
    """Images, answers and maps, from the files."""
    maps = {(row["row"], row["method"], row["target"]): row for row in _read_map_rows(context, sampled_rows)}
    for one in context.load_images(sampled_rows):
        row, name = one.row["row"], context.cohort.ids[one.row["row"]]
        own = [known for (number, _, _), known in maps.items() if number == row]
        if one.item is None or any(one.sha256 != known["sha256"] for known in own):
            yield CheckResult(f"row {name}", False, "its image is another one")
            continue
        logits, _ = compute_logits_and_features(context, one.item.x[None])
        odds = compute_log_odds(
            context, logits, context.findings, outputs_are_probabilities=predictions.outputs_are_probabilities
        ).numpy()[0]
        before = predictions.log_odds[predictions.rows.index(row)]
        if not _is_close_log_odds(odds, before):
            yield CheckResult(f"row {name}", False, "its answer is another one")
            continue
        made = context.worker.compute_rows(context.worker.collate([one]))
        off = max(_compute_map_difference(again, maps[row, again["method"], again["target"]]) for again in made)
        yield CheckResult(
            f"row {name}",
            off <= RELATIVE_MAP_TOLERANCE,
            f"{plural(len(made), 'map')}, largest difference {off:.1e} of the maximum",
        )


def _is_close_log_odds(log_odds: Any, reference: Any) -> bool:
    return bool(np.allclose(log_odds, reference, rtol=LOG_ODDS_TOLERANCE, atol=LOG_ODDS_TOLERANCE))


def _read_map_rows(context: AuditContext, rows: Sequence[int]) -> list[dict[str, Any]]:
    table = context.maps.table(filter=import_arrow("dataset").field("row").isin(list(rows)))
    return sorted(table_to_dicts(table), key=lambda row: row["row"])


def _compute_map_difference(first_row: Any, second_row: Any) -> float:
    if first_row.get("attribution") is None or second_row["attribution"] is None:
        return 0.0 if first_row.get("attribution") is None and second_row["attribution"] is None else float("inf")
    one, other = np.asarray(first_row["attribution"], np.float64), np.asarray(second_row["attribution"], np.float64)
    if one.shape != other.shape:
        return float("inf")
    largest = float(np.abs(other).max())
    gap = float(np.abs(one - other).max())
    return gap / largest if largest > 0 else gap


def _check_localization(context: AuditContext, run: AuditRun, sample_rows: RowSampler) -> CheckResult:
    """Where maps lie, by the maps that are stored and the masks."""
    wrong, seen = [], 0
    for finding in context.findings if run.summary.localization.tested else ():
        if finding.name not in context.ground_truth:
            continue
        known = _read_localization_values(run, finding)
        rows = sample_rows([row for row, *_ in known])
        made = dict(_recompute_localization(context, finding, rows))
        seen += len(made)
        for place in {**{one: 0 for one in known if one[0] in rows}, **made}:
            value = made.get(place, np.nan)
            if not abs(known.get(place, np.nan) - value) <= RELATIVE_MAP_TOLERANCE * max(1.0, abs(value)):
                wrong.append(
                    f"{place[3]} of {place[1]}, image {context.cohort.ids[place[0]]}, is {value:.6g} and not {known.get(place)}"
                )
    return CheckResult.from_problems(
        "places of maps", f"{plural(seen, 'value')} computed again" if seen else "there are none", wrong
    )


def _read_localization_values(run: AuditRun, finding: Finding) -> dict[tuple[Any, ...], float]:
    """Row, method, layer and metric of what `localization` measured of a finding -> its value."""
    names = ("row", "method", "layer", "metric", "value", "stage", "finding")
    table = run.metrics()
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return {row[:4]: row[4] for row in rows if row[5:] == ("localise", finding.name) and row[4] is not None}


def _recompute_localization(
    context: AuditContext, finding: Finding, rows: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    evidence = context.ground_truth[finding.name]
    measuring = MapMetricEvaluator(context.maps, [METRICS[name] for name in LOCAL], evidence, strict=False)
    asked = [row for row in _read_map_rows(context, rows) if row["target"] == str(finding.class_index)]
    for _, own in groupby(asked, key=lambda row: row["row"]):
        for one in measuring.evaluate_image(list(own)):
            if one["value"] is not None:
                yield (one["row"], one["method"], one["layer"], one["metric"]), one["value"]


def _check_interventions(
    context: AuditContext, run: AuditRun, predictions: Predictions, sample_rows: RowSampler
) -> CheckResult:
    """What is answered without a region, and with nothing but it."""
    known = {
        (one["row"], one["finding"], one["region"], one["kind"], one["fill"]): one["without"]
        for one in run.interventions().to_pylist()
        if one["kind"] != "insert"
    }
    rows = sample_rows([row for row, *_ in known])
    made = dict(_recompute_interventions(context, predictions, rows)) if rows else {}
    wrong = [
        f"{place[3]} {place[2]}, image {context.cohort.ids[place[0]]}"
        for place in {**{one: 0 for one in known if one[0] in rows}, **made}
        if place not in made or place not in known or not _is_close_log_odds(made[place], known[place])
    ]
    return CheckResult.from_problems(
        "regions taken away", f"{plural(len(made), 'answer')} computed again" if made else "there are none", wrong
    )


def _recompute_interventions(
    context: AuditContext, predictions: Predictions, rows: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    seen = load_region_samples(context, rows)
    for finding in context.findings:
        name = finding.name
        one = InterventionRunner(
            context,
            seen.for_finding(name),
            finding,
            predictions.log_odds_by_row(name),
            predictions.log_odds_std(name),
            predictions.outputs_are_probabilities,
        )
        for region in one.samples.region_names:
            list(one.run_removals(region))
        yield from (
            ((each.row, name, each.region, each.kind, each.imputation), each.log_odds_without) for each in one.records
        )
