"""Recompute sampled rows of an audit from their images: predictions, maps, localization and removals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.audit.audit_run import AuditRun
from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.audit.performance.model_outputs import compute_log_odds, compute_logits_and_features
from camscope.audit.shortcuts.interventions import InterventionRunner
from camscope.audit.shortcuts.region_samples import load_region_samples
from camscope.audit.stages.map_quality import LOCALIZATION_METRICS as LOCAL
from camscope.batch.manifest import import_arrow
from camscope.batch.query import table_to_dicts
from camscope.evaluation.map_metrics import MapMetricEvaluator
from camscope.metrics import METRICS
from camscope.plurals import plural

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `name` is a file or a part of the audit, `message` says what was checked or what is wrong."""

    name: str
    is_intact: bool
    message: str

    @classmethod
    def from_problems(cls, name: str, success_message: str, problems: "list[str]") -> "CheckResult":
        """Create the result from a list of problems; it is intact if the list is empty."""
        more = f", and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        return cls(name, not problems, "; ".join(problems[:MAX_PROBLEMS_SHOWN]) + more if problems else success_message)


MAX_PROBLEMS_SHOWN = 3


RELATIVE_MAP_TOLERANCE = 1e-5  # relative to the maximum of a map; batches of other sizes differ by rounding
LOG_ODDS_TOLERANCE = 1e-4
NOT_RECOMPUTED = (
    "insertions, which need all images",
    "masked organs",
    "feature leakage",
    "attribution clusters",
    "faithfulness",
    "sanity",
    "robustness",
)
RowSampler = Callable[[Sequence[int]], list[int]]  # selects the rows to recompute


def recompute_rows(context: AuditContext, run: AuditRun, n_rows: int, seed: int) -> Iterator[CheckResult]:
    """Recompute `n_rows` rows of each kind, sampled by the seed, and compare them with the stored values."""

    def sample_rows(rows: Sequence[int]) -> list[int]:
        unique_rows = sorted(set(rows))
        return sorted(
            unique_rows[n] for n in np.random.default_rng(seed).permutation(len(unique_rows))[:n_rows].tolist()
        )

    predictions = Predictions.read(context.folder)
    yield from _check_rows(context, predictions, sample_rows(predictions.rows))
    yield _check_localization(context, run, sample_rows)
    yield _check_interventions(context, run, predictions, sample_rows)


def _check_rows(context: AuditContext, predictions: Predictions, sampled_rows: list[int]) -> Iterator[CheckResult]:
    """Compare images, predictions and maps of the sampled rows with the stored values."""
    maps = {(row["row"], row["method"], row["target"]): row for row in _read_map_rows(context, sampled_rows)}
    for image in context.load_images(sampled_rows):
        row, name = image.row["row"], context.cohort.ids[image.row["row"]]
        own_rows = [map_row for (number, _, _), map_row in maps.items() if number == row]
        if image.item is None or any(image.sha256 != map_row["sha256"] for map_row in own_rows):
            yield CheckResult(f"row {name}", False, "the image differs")
            continue
        logits, _ = compute_logits_and_features(context, image.item.x[None])
        log_odds = compute_log_odds(
            context, logits, context.findings, outputs_are_probabilities=predictions.outputs_are_probabilities
        ).numpy()[0]
        reference = predictions.log_odds[predictions.rows.index(row)]
        if not _is_close_log_odds(log_odds, reference):
            yield CheckResult(f"row {name}", False, "the prediction differs")
            continue
        map_rows = context.worker.compute_rows(context.worker.collate([image]))
        difference = max(
            _compute_map_difference(map_row, maps[row, map_row["method"], map_row["target"]]) for map_row in map_rows
        )
        yield CheckResult(
            f"row {name}",
            difference <= RELATIVE_MAP_TOLERANCE,
            f"{plural(len(map_rows), 'map')}, largest difference {difference:.1e} of the maximum",
        )


def _is_close_log_odds(log_odds: Any, reference: Any) -> bool:
    return bool(np.allclose(log_odds, reference, rtol=LOG_ODDS_TOLERANCE, atol=LOG_ODDS_TOLERANCE))


def _read_map_rows(context: AuditContext, rows: Sequence[int]) -> list[dict[str, Any]]:
    table = context.maps.table(filter=import_arrow("dataset").field("row").isin(list(rows)))
    return sorted(table_to_dicts(table), key=lambda row: row["row"])


def _compute_map_difference(first_row: Any, second_row: Any) -> float:
    if first_row.get("attribution") is None or second_row["attribution"] is None:
        return 0.0 if first_row.get("attribution") is None and second_row["attribution"] is None else float("inf")
    first, second = np.asarray(first_row["attribution"], np.float64), np.asarray(second_row["attribution"], np.float64)
    if first.shape != second.shape:
        return float("inf")
    largest = float(np.abs(second).max())
    difference = float(np.abs(first - second).max())
    return difference / largest if largest > 0 else difference


def _check_localization(context: AuditContext, run: AuditRun, sample_rows: RowSampler) -> CheckResult:
    """Compare recomputed localization metrics of the stored maps with the stored values."""
    problems, n_values = [], 0
    for finding in context.findings if run.summary.localization.tested else ():
        if finding.name not in context.ground_truth:
            continue
        stored = _read_localization_values(run, finding)
        rows = sample_rows([row for row, *_ in stored])
        recomputed = dict(_recompute_localization(context, finding, rows))
        n_values += len(recomputed)
        for key in {**{stored_key: 0 for stored_key in stored if stored_key[0] in rows}, **recomputed}:
            value = recomputed.get(key, np.nan)
            if not abs(stored.get(key, np.nan) - value) <= RELATIVE_MAP_TOLERANCE * max(1.0, abs(value)):
                problems.append(
                    f"{key[3]} of {key[1]}, image {context.cohort.ids[key[0]]}, is {value:.6g}; the table has "
                    f"{stored.get(key)}"
                )
    return CheckResult.from_problems(
        "localization", f"{plural(n_values, 'value')} recomputed" if n_values else "no values to recompute", problems
    )


def _read_localization_values(run: AuditRun, finding: Finding) -> dict[tuple[Any, ...], float]:
    """Read the localization metrics of a finding: (row, method, layer, metric) -> value."""
    names = ("row", "method", "layer", "metric", "value", "stage", "finding")
    table = run.metrics()
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return {row[:4]: row[4] for row in rows if row[5:] == ("localization", finding.name) and row[4] is not None}


def _recompute_localization(
    context: AuditContext, finding: Finding, rows: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    ground_truth = context.ground_truth[finding.name]
    evaluator = MapMetricEvaluator(context.maps, [METRICS[name] for name in LOCAL], ground_truth, strict=False)
    map_rows = [row for row in _read_map_rows(context, rows) if row["target"] == str(finding.class_index)]
    for _, image_rows in groupby(map_rows, key=lambda row: row["row"]):
        for metric_row in evaluator.evaluate_image(list(image_rows)):
            if metric_row["value"] is not None:
                yield (
                    (metric_row["row"], metric_row["method"], metric_row["layer"], metric_row["metric"]),
                    metric_row["value"],
                )


def _check_interventions(
    context: AuditContext, run: AuditRun, predictions: Predictions, sample_rows: RowSampler
) -> CheckResult:
    """Compare recomputed log odds of removed and kept regions with the stored values."""
    stored = {
        (record["row"], record["finding"], record["region"], record["kind"], record["imputation"]): record[
            "log_odds_without"
        ]
        for record in run.interventions().to_pylist()
        if record["kind"] != "insert"
    }
    rows = sample_rows([row for row, *_ in stored])
    recomputed = dict(_recompute_interventions(context, predictions, rows)) if rows else {}
    problems = [
        f"{key_of_row[3]} {key_of_row[2]}, image {context.cohort.ids[key_of_row[0]]}"
        for key_of_row in {**{key: 0 for key in stored if key[0] in rows}, **recomputed}
        if key_of_row not in recomputed
        or key_of_row not in stored
        or not _is_close_log_odds(recomputed[key_of_row], stored[key_of_row])
    ]
    return CheckResult.from_problems(
        "removals",
        f"{plural(len(recomputed), 'prediction')} recomputed" if recomputed else "no values to recompute",
        problems,
    )


def _recompute_interventions(
    context: AuditContext, predictions: Predictions, rows: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    samples = load_region_samples(context, rows)
    for finding in context.findings:
        name = finding.name
        runner = InterventionRunner(
            context,
            samples.for_finding(name),
            finding,
            predictions.log_odds_by_row(name),
            predictions.log_odds_std(name),
            predictions.outputs_are_probabilities,
        )
        for region in runner.samples.region_names:
            list(runner.run_removals(region))
        yield from (
            ((record.row, name, record.region, record.kind, record.imputation), record.log_odds_without)
            for record in runner.records
        )
