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

    def drawn(rows: Sequence[int]) -> list[int]:
        known = sorted(set(rows))
        return sorted(known[n] for n in np.random.default_rng(seed).permutation(len(known))[:n_rows].tolist())

    then = Predictions.read(context.folder)
    yield from _check_rows(context, then, drawn(then.rows))
    yield _check_localization(context, run, drawn)
    yield _check_interventions(context, run, then, drawn)


def _check_rows(context: AuditContext, predictions: Predictions, sampled_rows: list[int]) -> Iterator[CheckResult]:
    """Compare images, predictions and maps of the sampled rows with the stored values."""
    maps = {(row["row"], row["method"], row["target"]): row for row in _read_map_rows(context, sampled_rows)}
    for one in context.load_images(sampled_rows):
        row, name = one.row["row"], context.cohort.ids[one.row["row"]]
        own = [known for (number, _, _), known in maps.items() if number == row]
        if one.item is None or any(one.sha256 != known["sha256"] for known in own):
            yield CheckResult(f"row {name}", False, "the image differs")
            continue
        logits, _ = compute_logits_and_features(context, one.item.x[None])
        odds = compute_log_odds(
            context, logits, context.findings, outputs_are_probabilities=predictions.outputs_are_probabilities
        ).numpy()[0]
        before = predictions.log_odds[predictions.rows.index(row)]
        if not _is_close_log_odds(odds, before):
            yield CheckResult(f"row {name}", False, "the prediction differs")
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
    """Compare recomputed localization metrics of the stored maps with the stored values."""
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
                    f"{place[3]} of {place[1]}, image {context.cohort.ids[place[0]]}, is {value:.6g}; the table has "
                    f"{known.get(place)}"
                )
    return CheckResult.from_problems(
        "localization", f"{plural(seen, 'value')} recomputed" if seen else "no values to recompute", wrong
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
    """Compare recomputed log odds of removed and kept regions with the stored values."""
    known = {
        (one["row"], one["finding"], one["region"], one["kind"], one["imputation"]): one["log_odds_without"]
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
        "removals", f"{plural(len(made), 'prediction')} recomputed" if made else "no values to recompute", wrong
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
