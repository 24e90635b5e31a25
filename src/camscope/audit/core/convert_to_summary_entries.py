"""Convert estimates and metric values into entries of the summary, with rounded numbers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.stage_result_schema import EstimateSummary, MetricSummary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_INTERVAL
from camscope.batch.image_manifest import import_arrow
from camscope.errors import UndefinedError
from camscope.evaluation import EvaluationResult
from camscope.evaluation import method_summaries as evaluation_summary
from camscope.metrics import METRICS, Estimate
from camscope.metrics.group_sequential import InterimLook
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa


SIGNIFICANT_DIGITS = 10  # rounding errors in later digits would make equal runs differ


MODALITY_LABELS = {
    "xray": "X-ray images",
    "ct": "CT images",
    "mri": "MR images",
    "dermoscopy": "dermoscopy images",
    "retina": "retinal images",
    "pathology": "pathology images",
}


def describe_images(modality: str, value_counts: Mapping[str, Mapping[str, int]], *, is_volume: bool) -> str:
    """Describe the images as text, such as `X-ray images in PNG files`. `value_counts` comes from the data check."""
    kind = MODALITY_LABELS.get(modality, "")
    if not kind:
        color = next(iter(colors)) if len(colors := value_counts.get("color", {})) == 1 else ""
        kind = " ".join(filter(None, (color, "images")))
    if is_volume:
        kind = kind.replace("images", "volumes")
    formats = sorted(value_counts.get("format", ()))
    return f"{kind} in {' and '.join(formats)} files" if formats else kind


def summarize_estimate(
    estimate: Estimate | None, baseline: float | None = None, baseline_name: str = "", reason: str = ""
) -> EstimateSummary:
    """Convert an estimate into a summary entry. The entry also holds the baseline. A missing estimate has a reason instead.

    With too few patients, or with most images from one patient, it has neither an interval nor a p-value.
    """
    baselines: dict[str, Any] = {"baseline": round_significant(baseline), "baseline_name": baseline_name}
    if estimate is None:
        return EstimateSummary(reason=reason or "there is no value", **baselines)
    has_few_patients = estimate.n_groups < MIN_PATIENTS_FOR_INTERVAL
    has_interval = not (has_few_patients or estimate.is_dominated_by_few_groups)
    low, high = (round_significant(estimate.low), round_significant(estimate.high)) if has_interval else (None, None)
    interval_reason = ""
    if has_few_patients:
        count = format_patient_count(estimate)
        interval_reason = f"too few patients for an interval: {count}, and {MIN_PATIENTS_FOR_INTERVAL} are needed"
    elif not has_interval and not (estimate.n_groups_by_role and reason):  # for insertions, the reason names the role
        interval_reason = estimate.explain_missing_intervals("patient")
    elif has_interval and (low is None or high is None):
        interval_reason = "all values are equal, so that no interval can be estimated"
    return EstimateSummary(
        value=round_significant(estimate.mean),
        low=low,
        high=high,
        n_values=estimate.n_values,
        n_groups=estimate.n_groups,
        n_undefined=estimate.n_undefined,
        p_value=round_significant(estimate.p_value) if has_interval else None,
        reason="; ".join(filter(None, (reason, interval_reason))),
        interval_method="" if low is None or high is None else estimate.interval_method,
        unit="insertions" if estimate.n_groups_by_role else "images",
        n_groups_by_role=estimate.n_groups_by_role,
        **baselines,
    )


def summarize_estimate_or_reason(
    compute: Callable[[], Estimate], baseline: float, baseline_name: str
) -> EstimateSummary:
    """Compute an estimate and convert it into a summary entry. For an undefined estimate, the entry holds the reason."""
    try:
        return summarize_estimate(compute(), baseline, baseline_name)
    except UndefinedError as error:
        return summarize_estimate(None, baseline, baseline_name, str(error))


def format_patient_count(estimate: Estimate | EstimateSummary) -> str:
    """Return the number of patients as text, such as `7`, or the number for each role, such as `9 receivers, 4 donors`.

    For insertions, return the number in each role, such as `92 receivers, 1 donor`.
    """
    counts = [plural(count, role.removesuffix("s")) for role, count in estimate.n_groups_by_role]
    return ", ".join(counts) or str(estimate.n_groups)


def round_significant(value: float | None) -> float | None:
    """Round a number to `SIGNIFICANT_DIGITS` digits. Return None for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(np.format_float_positional(value, SIGNIFICANT_DIGITS, unique=False, fractional=False, trim="-"))


PATIENT_COLUMN = "patient of the audit"
BetterDirection = Literal["more", "less", "neither"]
BETTER_DIRECTIONS: dict[bool | None, BetterDirection] = {True: "more", False: "less", None: "neither"}


def summarize_finding_metrics(cohort: Cohort, evaluation: EvaluationResult, finding: Finding) -> list[MetricSummary]:
    """Summarize the metrics of all methods for one finding. Only images with the finding count."""
    values = select_metric_values_of_finding(cohort, add_patient_column(cohort, evaluation.table()), finding, True)
    bootstrap_options: dict[str, Any] = dict(cohort.config.bootstrap_options)
    return summarize_metrics(values, finding.name, **bootstrap_options)


def collect_formulas(metric_summaries: Iterable[MetricSummary]) -> dict[str, str]:
    """Return a dict from metric name to formula as text."""
    return {name: METRICS[name].formula for name in dict.fromkeys(line.metric for line in metric_summaries)}


def summarize_metrics(
    table: "pa.Table",
    finding: str,
    *,
    n_resamples: int,
    seed: int,
    look: InterimLook | None = None,
    n_methods: int | None = None,
) -> list[MetricSummary]:
    """Summarize the metric values of one finding. All values of a patient count as one unit.

    The table needs the column that `add_patient_column` adds. See `summarize_values` for `look` and `n_methods`.
    """
    if not table.num_rows:
        return []
    summaries = evaluation_summary.summarize_values(
        table, PATIENT_COLUMN, seed=seed, n_resamples=n_resamples, look=look, n_methods=n_methods
    )
    metric_summaries = []
    for lines in summaries.values():  # sorted, the best first
        control = next((line for line in lines if line.is_control and line.estimate is not None), None)
        metric_summaries += [_build_metric_summary(line, finding, control, table) for line in lines]
    return metric_summaries


def add_patient_column(cohort: Cohort, table: "pa.Table") -> "pa.Table":
    """Return the table with an additional column of patient numbers."""
    numbers = [cohort.patient_number_by_row[row] for row in table["row"].to_pylist()]
    return table.append_column(PATIENT_COLUMN, import_arrow().array(numbers, import_arrow().int64()))


def select_metric_values_of_finding(
    cohort: Cohort, table: "pa.Table", finding: Finding, has_finding: bool | None = None
) -> "pa.Table":
    """Select the metric values of a finding. Optionally select only images with the finding, or only images without the finding.

    Control maps without a class count for every finding.
    """
    pa, compute = import_arrow(), import_arrow("compute")
    has_target = compute.fill_null(compute.equal(table["target"], str(finding.class_index)), True)
    is_control = table["control"]
    own_controls = compute.and_(is_control, has_target)
    controls = own_controls if compute.any(own_controls).as_py() else is_control
    selected = table.filter(compute.or_(compute.and_(has_target, compute.invert(is_control)), controls))
    if has_finding is None:
        return selected
    truths = cohort.get_truth_by_row(finding)
    return selected.filter(pa.array([truths[row] is has_finding for row in selected["row"].to_pylist()], pa.bool_()))


def _build_metric_summary(
    line: evaluation_summary.MethodSummary,
    finding: str,
    control: evaluation_summary.MethodSummary | None,
    table: "pa.Table",
) -> MetricSummary:
    """Convert the result of one method to an entry of the summary. Its baseline is the best control, if there is one."""
    best = None if control is None or control.estimate is None else control.estimate.mean
    name = "" if control is None or best is None else control.method
    difference = line.difference_to_control
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
        difference_to_control=None if difference is None else summarize_estimate(difference, 0.0, "no difference"),
    )


def _find_most_common_reason(line: evaluation_summary.MethodSummary, table: "pa.Table") -> str:
    """Return the most common reason why a metric of a method has no value."""
    names = ("metric", "method", "layer", "imputation")
    key = tuple(getattr(line, name) for name in names)
    rows = zip(*(table[name].to_pylist() for name in ("reason", *names)), strict=True)
    reasons = Counter(reason for reason, *row_key in rows if tuple(row_key) == key and reason)
    return f"no map has a value: {reasons.most_common(1)[0][0]}" if reasons else "no map has a value"


def get_metric_values(table: "pa.Table", metric: str, method: str, layer: str | None) -> dict[int, float]:
    """Return a dict from row number to metric value, for the maps of one method and layer."""
    columns = (table[name].to_pylist() for name in ("row", "value", "metric", "method", "layer"))
    rows = zip(*columns, strict=True)
    return {row: value for row, value, *key in rows if value is not None and key == [metric, method, layer]}
