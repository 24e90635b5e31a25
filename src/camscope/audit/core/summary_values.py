"""Values of the summary: rounded numbers, and lines of metrics.

- Numbers: estimates as the summary holds them.
- Lines: what metrics say of methods, finding by finding, with intervals by patient.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.schema import EstimateSummary, MetricSummary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_INTERVAL
from camscope.batch.manifest import import_arrow
from camscope.evaluation import EvaluationResult
from camscope.evaluation import summary as told
from camscope.metrics import METRICS, Estimate
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa


SIGNIFICANT_DIGITS = 10  # significant ones: what rounding does to the last bits is no difference between two runs


def summarize_estimate(
    estimate: Estimate | None, baseline: float | None = None, baseline_name: str = "", reason: str = ""
) -> EstimateSummary:
    """An estimate and its baseline; without an estimate, why there is none.

    With few patients, or with most images from one of them, it has no interval and no p.
    """
    if estimate is None:
        return EstimateSummary(
            reason=reason or "there is no value", baseline=round_significant(baseline), baseline_name=baseline_name
        )
    few = estimate.n_groups < MIN_PATIENTS_FOR_INTERVAL
    none = few or estimate.is_dominated_by_few_groups
    low, high = (None, None) if none else (round_significant(estimate.low), round_significant(estimate.high))
    why = (
        f"too few patients for an interval: {format_patient_count(estimate)}, and {MIN_PATIENTS_FOR_INTERVAL} are needed"
        if few
        else ""
    )
    if estimate.is_dominated_by_few_groups and not (
        estimate.n_groups_by_role and reason
    ):  # of insertions the reason says whose they are
        why = estimate.describe_dominance("patient")
    if not none and (low is None or high is None):
        why = "nothing varies from which an interval could be estimated"
    return EstimateSummary(
        value=round_significant(estimate.mean),
        low=low,
        high=high,
        n_values=estimate.n_values,
        n_groups=estimate.n_groups,
        n_undefined=estimate.n_undefined,
        p_value=None if none else round_significant(estimate.p_value),
        baseline=round_significant(baseline),
        baseline_name=baseline_name,
        reason="; ".join(filter(None, (reason, why))),
        interval_method="" if low is None or high is None else estimate.interval_method,
        unit="insertions" if estimate.n_groups_by_role else "images",
        n_groups_by_role=estimate.n_groups_by_role,
    )


def format_patient_count(estimate: Estimate | EstimateSummary) -> str:
    """How many there are: `7`; of insertions of each kind: `92 receivers, 1 donor`."""
    return ", ".join(plural(count, role.removesuffix("s")) for role, count in estimate.n_groups_by_role) or str(
        estimate.n_groups
    )


def round_significant(value: float | None) -> float | None:
    """To so many digits; None for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.format_float_positional(value, SIGNIFICANT_DIGITS, unique=False, fractional=False, trim="-"))


PATIENT_COLUMN = "patient of the audit"
BetterDirection = Literal["more", "less", "neither"]
BETTER_DIRECTIONS: dict[bool | None, BetterDirection] = {True: "more", False: "less", None: "neither"}


def summarize_finding_metrics(cohort: Cohort, evaluation: EvaluationResult, finding: Finding) -> list[MetricSummary]:
    """Of every metric and method, of images with a finding."""
    own = filter_finding(cohort, add_patient_column(cohort, evaluation.table()), finding, True)
    return summarize_metrics(own, finding.name, **cohort.config.bootstrap_options)


def collect_formulas(metric_summaries: Iterable[MetricSummary]) -> dict[str, str]:
    """What each of the metrics is, in words, with what it depends on."""
    return {name: METRICS[name].formula for name in dict.fromkeys(one.metric for one in metric_summaries)}


def summarize_metrics(table: "pa.Table", finding: str, *, n_resamples: int, seed: int) -> list[MetricSummary]:
    """The same of a table of one finding, `add_patient_column` by patient."""
    if not table.num_rows:
        return []
    found = told.summarize_values(table, PATIENT_COLUMN, seed=seed, n_resamples=n_resamples)
    return [
        _build_metric_summary(one, finding, _select_best_control(every), table)
        for every in found.values()
        for one in every
    ]


def add_patient_column(cohort: Cohort, table: "pa.Table") -> "pa.Table":
    """With the patient of each row, by a number."""
    whose = [cohort.patient_numbers[row] for row in table["row"].to_pylist()]
    return table.append_column(PATIENT_COLUMN, import_arrow().array(whose, import_arrow().int64()))


def filter_finding(cohort: Cohort, table: "pa.Table", finding: Finding, has_finding: bool | None = None) -> "pa.Table":
    """The rows of one question; of maps that know nothing those of the image, whatever was asked of it."""
    compute, asked = import_arrow("compute"), str(finding.class_index)
    own = compute.fill_null(compute.equal(table["target"], asked), True)
    controls = (
        compute.and_(table["control"], own)
        if compute.any(compute.and_(table["control"], own)).as_py()
        else table["control"]
    )
    kept = table.filter(compute.or_(compute.and_(own, compute.invert(table["control"])), controls))
    if has_finding is None:
        return kept
    truths = cohort.get_truth(finding)
    return kept.filter(
        import_arrow().array([truths[row] is has_finding for row in kept["row"].to_pylist()], import_arrow().bool_())
    )


def _select_best_control(lines: list[told.MethodSummary]) -> told.MethodSummary | None:
    """The best of the maps that know nothing."""
    return next((one for one in lines if one.is_control and one.estimate is not None), None)


def _build_metric_summary(
    line: told.MethodSummary, finding: str, control: told.MethodSummary | None, table: "pa.Table"
) -> MetricSummary:
    best = None if control is None or control.estimate is None else control.estimate.mean
    name = "" if control is None or best is None else control.method
    over: EstimateSummary | None = (
        None
        if line.difference_to_control is None
        else summarize_estimate(line.difference_to_control, 0.0, "no difference")
    )
    return MetricSummary(
        metric=line.metric,
        method=line.method,
        layer=line.layer,
        finding=finding,
        control=line.is_control,
        better_direction=BETTER_DIRECTIONS[METRICS[line.metric].higher_is_better],
        imputation=line.imputation,
        value=summarize_estimate(
            line.estimate, best, name, reason="" if line.estimate else _find_most_common_reason(line, table)
        ),
        difference_to_control=over,
    )


def _find_most_common_reason(line: told.MethodSummary, table: "pa.Table") -> str:
    """What is said of most of the rows of a metric and method without a value."""
    names = ("metric", "method", "layer", "imputation")
    wanted = tuple(getattr(line, name) for name in names)
    rows = zip(*(table[name].to_pylist() for name in ("reason", *names)), strict=True)
    said = Counter(reason for reason, *about in rows if tuple(about) == wanted and reason)
    return f"no map has a value: {said.most_common(1)[0][0]}" if said else "no map has a value"


def get_metric_values(table: "pa.Table", metric: str, method: str, layer: str | None) -> dict[int, float]:
    """Row -> what a metric says of a method's map."""
    rows: list[Mapping[str, Any]] = table.select(["row", "metric", "method", "layer", "value"]).to_pylist()
    return {
        one["row"]: one["value"]
        for one in rows
        if one["value"] is not None and (one["metric"], one["method"], one["layer"]) == (metric, method, layer)
    }
