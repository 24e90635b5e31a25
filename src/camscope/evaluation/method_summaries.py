"""Summarize metric values for each method: mean with interval, difference from the best method and from the best control."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import comb, isnan
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from camscope.batch.image_manifest import import_arrow
from camscope.errors import InputError, UndefinedError
from camscope.evaluation.map_agreement import MethodKey
from camscope.metrics import METRICS
from camscope.metrics.group_sequential import InterimLook, adjust_difference_for_looks
from camscope.metrics.mean_estimates import N_RESAMPLES, Estimate, adjust_bonferroni, estimate_difference, estimate_mean
from camscope.registry import METHODS

if TYPE_CHECKING:
    import pyarrow as pa

SIGNIFICANCE_LEVEL = 0.05
MAX_BOOTSTRAP_LEVEL = 0.951  # at higher levels, an interval is that of Student's t: a bootstrap has too few resamples
SUMMARIZED_COLUMNS = ["row", "method", "layer", "parameters_digest", "target", "control", "value"]
ValuesByTarget = Mapping[tuple[int, Any], float]  # by row and target; NaN if undefined


@dataclass(frozen=True)
class MethodSummary:
    """The mean of one metric for one method, and its paired differences. A positive difference means better."""

    metric: str
    method: str
    layer: str | None
    is_control: bool
    estimate: Estimate | None  # None if no value is defined
    difference_to_control: Estimate | None = None  # to the best one, None for a control
    difference_to_best: Estimate | None = None  # None for methods with the same maps
    imputation: str | None = None
    parameters: str | None = None  # the digest of the method's settings
    n_rows: int = 0  # with and without a value
    n_comparisons: int = 1  # for which `difference_to_best` is corrected

    @property
    def key(self) -> MethodKey:
        """The key that identifies the method: name, layer and digest of settings."""
        return self.method, self.layer, self.parameters

    @property
    def title(self) -> str:
        """The method and layer as text, such as `Grad-CAM · layer4`."""
        return METHODS.replace_names_by_titles(" · ".join(filter(None, (self.method, self.layer))))

    @property
    def n_values(self) -> int:
        """The number of maps for which the metric is defined."""
        return 0 if self.estimate is None else self.estimate.n_values

    @property
    def n_undefined(self) -> int:
        """The number of maps for which the metric is undefined."""
        return self.n_rows - self.n_values

    @property
    def beats_control(self) -> bool:
        """Whether the method is significantly better than the best control method, at the 5 % level."""
        return is_significant(self.difference_to_control) and self.difference_to_control.mean > 0

    @property
    def advantage_over_control(self) -> Estimate | None:
        """The difference to the best control method. The value is `None` if the metric is not compared with control methods."""
        return self.difference_to_control if is_compared_with_controls(self.metric) else None

    @property
    def is_worse_than_best(self) -> bool:
        """Whether the method is significantly worse than the best method, at the 5 % level."""
        return is_significant(self.difference_to_best) and self.difference_to_best.mean < 0


def is_compared_with_controls(metric: str) -> bool:
    """Return whether control methods are a baseline for a metric.
    A metric that only needs a map or an explainer has no baseline.
    """
    return METRICS[metric].input_kind not in ("map", "explainer")


def is_significant(difference: Estimate | None) -> TypeGuard[Estimate]:
    """Return whether a difference is significant at the 5 % level."""
    return difference is not None and difference.p_value is not None and difference.p_value < SIGNIFICANCE_LEVEL


def summarize_values(
    table: "pa.Table",
    group_column: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    equivalent_groups: Sequence[Sequence[MethodKey]] = (),
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
    look: InterimLook | None = None,
    n_methods: int | None = None,
) -> dict[str, list[MethodSummary]]:
    """Summarize a table of metric values by metric. For each metric, methods are sorted from best to worst.

    The key of a metric with imputation is `metric, imputation`. Differences are corrected for all pairs of methods and all
    metrics (Bonferroni), since the same values select the best method. Methods in one of `equivalent_groups` have the same
    maps. They count as one method. `look`: the intervals are those of this look at a growing sample. `n_methods`: the number
    of methods for which differences to the control are corrected, if the table has only some of them.
    """
    check_group_column(table, group_column)
    if "imputation" not in table.column_names:  # written before metrics that need the model existed
        table = table.append_column("imputation", import_arrow().nulls(table.num_rows, import_arrow().string()))
    groups = dict(zip(table["row"].to_pylist(), table[group_column or "row"].to_pylist(), strict=True))
    field = import_arrow("compute").field
    summaries: dict[str, list[MethodSummary]] = {}
    pairs = table.select(["metric", "imputation"]).group_by(["metric", "imputation"], use_threads=False).aggregate([])
    for pair in pairs.to_pylist():  # one pair at a time, to limit the rows held as dicts
        name, imputation = pair["metric"], pair["imputation"]
        if metrics is not None and name not in metrics:
            continue
        same_imputation = field("imputation").is_null() if imputation is None else field("imputation") == imputation
        rows = table.filter((field("metric") == name) & same_imputation).select(SUMMARIZED_COLUMNS).to_pylist()
        estimate = partial(_estimate_metric_mean, name, groups=groups, seed=seed, n_resamples=n_resamples, look=look)
        summaries[name if imputation is None else f"{name}, {imputation}"] = _summarize_metric(
            name, imputation, rows, estimate, groups, equivalent_groups
        )
    return _correct_multiple_comparisons(summaries, equivalent_groups, look, n_methods)


def _correct_multiple_comparisons(
    summaries: dict[str, list[MethodSummary]],
    equivalent_groups: Sequence[Sequence[MethodKey]],
    look: InterimLook | None,
    n_methods: int | None,
) -> dict[str, list[MethodSummary]]:
    """Correct all differences for the number of comparisons (Bonferroni), and for repeated looks at a growing sample."""
    first = {key: group[0] for group in equivalent_groups for key in group}
    ranked = [lines for lines in summaries.values() if METRICS[lines[0].metric].higher_is_better is not None]
    method_sets = [
        {first.get(line.key, line.key) for line in lines if not line.is_control and line.estimate} for lines in ranked
    ]
    n_pairs = sum(comb(len(methods), 2) for methods in method_sets)
    n_control_comparisons = sum(
        len({first.get(line.key, line.key) for line in lines if line.difference_to_control is not None})
        for lines in ranked
    )
    if n_methods is not None and method_sets:
        n_control_comparisons = n_control_comparisons * n_methods // max(1, *map(len, method_sets))

    def adjust(difference: Estimate | None, n_comparisons: int) -> Estimate | None:
        if difference is None:
            return None
        if look is not None:
            return adjust_difference_for_looks(difference, look, n_comparisons)
        return adjust_bonferroni([difference], n_comparisons)[0]

    return {
        name: [
            replace(
                line,
                difference_to_best=adjust(line.difference_to_best, n_pairs),
                difference_to_control=adjust(line.difference_to_control, n_control_comparisons),
                n_comparisons=n_pairs,
            )
            for line in lines
        ]
        for name, lines in summaries.items()
    }


def check_group_column(table: "pa.Table", group_column: str | None) -> None:
    """Raise an InputError if the table does not have the column `group_column`."""
    if group_column is not None and group_column not in table.column_names:
        raise InputError(
            f"there is no column {group_column!r} to group by; expected one of {', '.join(table.column_names)}"
        )


def require_some_ground_truth(table: "pa.Table") -> None:
    """Raise an InputError if all metrics that need ground truth lack a value."""
    columns = zip(*(table[name].to_pylist() for name in ("metric", "control", "value", "reason")), strict=True)
    rows = [row for row in columns if METRICS[row[0]].input_kind == "mask" and not row[1]]
    if rows and all(value is None for _, _, value, _ in rows):
        raise InputError(format_missing_ground_truth_error(Counter(row[3] for row in rows if row[0] == rows[0][0])))


def format_missing_ground_truth_error(reasons: Counter[str]) -> str:
    """Write the error message for runs without ground truth, with the three most frequent reasons."""
    return "no image has ground truth: " + "; ".join(
        f"{reason} ({count} x)" for reason, count in reasons.most_common(3)
    )


def _summarize_metric(
    metric: str,
    imputation: str | None,
    rows: Sequence[Mapping[str, Any]],
    estimate_values: Callable[[ValuesByTarget], Estimate | None],
    groups: Mapping[int, Hashable],
    equivalent_groups: Sequence[Sequence[MethodKey]],
) -> list[MethodSummary]:
    """Summarize one metric for all methods, with their differences to the best method and to the best control."""
    values: dict[tuple[Any, ...], dict[tuple[int, Any], float]] = {}
    for row in rows:
        key = (row["method"], row["layer"], row["parameters_digest"], row["control"])
        values.setdefault(key, {})[row["row"], row["target"]] = np.nan if row["value"] is None else row["value"]
    _count_failed_images_as_undefined(values)
    lines = {
        key: MethodSummary(
            metric,
            key[0],
            key[1],
            key[3],
            estimate_values(numbers),
            None,
            None,
            imputation,
            key[2],
            n_rows=len(numbers),
        )
        for key, numbers in values.items()
    }
    sign = {True: 1, False: -1, None: -1}[METRICS[metric].higher_is_better]
    means = {key: line.estimate.mean for key, line in lines.items() if line.estimate is not None}
    order = sorted(lines, key=lambda key: -sign * means[key] if key in means else np.inf)
    if METRICS[metric].higher_is_better is None:
        return [lines[key] for key in order]
    compute_difference = partial(
        _estimate_paired_difference, sign=sign, groups=groups, rounding_tolerance=METRICS[metric].rounding_tolerance
    )
    controls, methods = ([key for key in order if key in means and key[3] is kind] for kind in (True, False))
    to_control, to_best = {}, {}
    if controls:
        by_row = {row: value for (row, _), value in values[controls[0]].items()}  # of any target of the image
        control_methods = {key[0] for key in controls}
        for key in methods:
            if key[0] not in control_methods:
                control = {place: values[controls[0]].get(place, by_row.get(place[0], np.nan)) for place in values[key]}
                to_control[key] = compute_difference(values[key], control)
    same_as_best = next((group for group in equivalent_groups if methods and methods[0][:3] in group), ())
    for key in methods[1:]:
        if key[:3] not in same_as_best:
            to_best[key] = compute_difference(values[key], values[methods[0]])
    return [
        replace(lines[key], difference_to_control=to_control.get(key), difference_to_best=to_best.get(key))
        for key in order
    ]


def _count_failed_images_as_undefined(values: dict[tuple[Any, ...], dict[tuple[int, Any], float]]) -> None:
    """Add an undefined value for each failed image, to every layer of the method that failed."""
    for failed in [key for key in values if key[1] is key[2] is None and not key[3]]:
        successful = [key for key in values if key[0] == failed[0] and key != failed and not key[3]]
        for key in successful:
            values[key] |= {place: np.nan for place in values[failed] if place not in values[key]}
        if successful:
            del values[failed]


def _estimate_metric_mean(
    metric: str,
    values_by_target: ValuesByTarget,
    groups: Mapping[int, Hashable],
    seed: int,
    n_resamples: int,
    look: InterimLook | None = None,
) -> Estimate | None:
    """Estimate the mean of a metric with its interval. Return None if it is undefined."""
    values, bounds = list(values_by_target.values()), METRICS[metric].bounds
    if bounds is not None and not all(isnan(value) or bounds[0] <= value <= bounds[1] for value in values):
        bounds = None  # the output is a score, not a probability
    level = 0.95 if look is None else look.confidence_level
    patients = [groups[row] for row, _ in values_by_target]
    try:
        if look is not None and bounds is None and level > MAX_BOOTSTRAP_LEVEL:
            difference = adjust_difference_for_looks(
                estimate_difference(values, np.zeros(len(values)), patients), look, 1
            )
            return replace(difference, p_value=None)
        return estimate_mean(
            values, patients, bounds=bounds, n_resamples=n_resamples, seed=seed, confidence_level=level
        )
    except UndefinedError:
        return None


def _estimate_paired_difference(
    first: ValuesByTarget,
    second: ValuesByTarget,
    *,
    sign: int,
    groups: Mapping[int, Hashable],
    rounding_tolerance: float,
) -> Estimate | None:
    """Estimate the mean difference between two methods. Values with the same image and target are paired."""
    try:
        return estimate_difference(
            [sign * value for value in first.values()],
            [sign * second.get(place, np.nan) for place in first],
            [groups[row] for row, _ in first],
            rounding_tolerance=rounding_tolerance,
        )
    except UndefinedError:
        return None
