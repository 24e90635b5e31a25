"""Summary: of each metric and method a mean with its interval, and whether it beats the best map that knows nothing."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import comb, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch.manifest import import_arrow
from camscope.errors import InputError, UndefinedError
from camscope.evaluation.map_agreement import MethodKey
from camscope.metrics import METRICS
from camscope.metrics.statistics import N_RESAMPLES, Estimate, adjust_bonferroni, estimate_difference, estimate_mean

if TYPE_CHECKING:
    import pyarrow as pa

SIGNIFICANCE_LEVEL = 0.05
ValuesByTarget = Mapping[tuple[int, Any], float]  # by row and target; NaN where there is none


@dataclass(frozen=True)
class MethodSummary:
    """What a metric says of a method: `estimate`, and the paired differences to the best control and to the best method.

    `imputation`: under which, of a metric that has one. Differences are counted so that more is better. `n_comparisons`: how many comparisons
    of two methods the interval and p of `difference_to_best` are corrected for. A method that is one of the controls is not compared
    with the best control, nor a method with one whose maps are the same.
    """

    metric: str
    method: str
    layer: str | None
    is_control: bool
    estimate: Estimate | None
    difference_to_control: Estimate | None = None
    difference_to_best: Estimate | None = None
    imputation: str | None = None
    parameters: str | None = None  # the digest of its settings
    n_rows: int = 0  # with a value or without
    n_comparisons: int = 1

    @property
    def key(self) -> MethodKey:
        """Which method, layer and settings."""
        return self.method, self.layer, self.parameters

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        return " · ".join(filter(None, (self.method, self.layer)))

    @property
    def n_values(self) -> int:
        """How many rows have a value."""
        return 0 if self.estimate is None else self.estimate.n_values

    @property
    def n_undefined(self) -> int:
        """How many have none."""
        return self.n_rows - self.n_values

    @property
    def beats_control(self) -> bool:
        """Whether the map says more than any that knows nothing, at 5 %."""
        return (
            is_significant(self.difference_to_control)
            and self.difference_to_control is not None
            and self.difference_to_control.mean > 0
        )

    @property
    def is_worse_than_best(self) -> bool:
        """Whether it is worse than the best method, at 5 %."""
        return (
            is_significant(self.difference_to_best)
            and self.difference_to_best is not None
            and self.difference_to_best.mean < 0
        )


def is_significant(difference: Estimate | None) -> bool:
    """Whether a difference is beyond chance, at 5 %."""
    return difference is not None and difference.p_value is not None and difference.p_value < SIGNIFICANCE_LEVEL


def summarize_values(
    table: "pa.Table",
    group_column: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    equivalent_groups: Sequence[Sequence[MethodKey]] = (),
    correct_multiple_comparisons: bool = True,
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
) -> dict[str, list[MethodSummary]]:
    """Summarize a table of values by metric: [metric], or [`register_metric, fill`], its lines, the best first, controls among them.

    Args:
        to_rich_table: Values in long form, as `EvaluationResult.table` returns them.
        group: A column of patients or scenes. Default: an image is a group, whatever it was explained for.
        metrics: Only these. Differences are corrected for how many of them there are.
        same: Methods whose maps are the same. They are one method: none of them is compared with another.
        corrected: Whether intervals and p of differences hold together over all methods and metrics (Bonferroni): over all
            pairs of methods, since the values also say which is first, and over all comparisons with the best control.
            False: each by itself.
        seed: Seed of the bootstrap of means.
        replicates: Bootstrap resamples of means.

    """
    check_column(table, group_column)
    if "imputation" not in table.column_names:  # as they were before any metric asked the model
        table = table.append_column("imputation", import_arrow().nulls(table.num_rows, import_arrow().string()))
    groups = dict(zip(table["row"].to_pylist(), table[group_column or "row"].to_pylist(), strict=True))
    kept = table.select(["row", "method", "layer", "parameters_digest", "target", "control", "value"])
    made: dict[str, list[MethodSummary]] = {}
    for pair in (
        table.select(["metric", "imputation"])
        .group_by(["metric", "imputation"], use_threads=False)
        .aggregate([])
        .to_pylist()
    ):
        name, fill = pair["metric"], pair["imputation"]  # the rows of one pair at a time, which are dicts for as long
        if metrics is not None and name not in metrics:
            continue
        own = kept.filter(_select_metric_rows(table, name, fill)).to_pylist()
        estimate = partial(_estimate_metric, name, groups=groups, seed=seed, n_resamples=n_resamples)
        made[name if fill is None else f"{name}, {fill}"] = _summarize_metric(
            name, fill, own, estimate, groups, equivalent_groups
        )
    return _correct_multiple_comparisons(made, equivalent_groups) if correct_multiple_comparisons else made


def _correct_multiple_comparisons(
    summaries: dict[str, list[MethodSummary]], equivalent_groups: Sequence[Sequence[MethodKey]]
) -> dict[str, list[MethodSummary]]:
    """All differences corrected for how many there are."""
    first = {key: own[0] for own in equivalent_groups for key in own}
    ranked = [own for own in summaries.values() if METRICS[own[0].metric].higher_is_better is not None]
    every = [{first.get(line.key, line.key) for line in own if not line.is_control and line.estimate} for own in ranked]
    pairs = sum(comb(len(methods), 2) for methods in every)
    over = sum(
        len({first.get(line.key, line.key) for line in own if line.difference_to_control is not None}) for own in ranked
    )

    def corrected(line: MethodSummary) -> MethodSummary:
        gaps = (line.difference_to_best, pairs), (line.difference_to_control, over)
        under, above = (None if gap is None else adjust_bonferroni([gap], count)[0] for gap, count in gaps)
        return replace(line, difference_to_best=under, difference_to_control=above, n_comparisons=pairs)

    return {name: [corrected(line) for line in own] for name, own in summaries.items()}


def check_column(table: "pa.Table", group_column: str | None) -> None:
    """InputError where there is no such column."""
    if group_column is not None and group_column not in table.column_names:
        raise InputError(f"no column {group_column!r} to group by; there are {', '.join(table.column_names)}")


def check_some_ground_truth(table: "pa.Table", summaries: Mapping[str, Sequence[MethodSummary]]) -> None:
    """InputError where no metric that needs to know where the evidence is has any value of a method."""
    asking = {own[0].metric for own in summaries.values() if METRICS[own[0].metric].input_kind == "mask"}
    some = [line for own in summaries.values() for line in own if line.metric in asking and not line.is_control]
    if some and not any(line.estimate for line in some):
        rows = zip(*(table[name].to_pylist() for name in ("metric", "control", "reason")), strict=True)
        raise InputError(
            format_no_ground_truth(
                Counter(why for name, control, why in rows if name == some[0].metric and not control)
            )
        )


def format_no_ground_truth(reasons: Counter[str]) -> str:
    """Why no image has any evidence."""
    return "no image has evidence: " + "; ".join(f"{reason} ({count} x)" for reason, count in reasons.most_common(3))


def _select_metric_rows(table: "pa.Table", metric: str, imputation: str | None) -> Any:
    compute = import_arrow("compute")
    filled = (
        compute.is_null(table["imputation"]) if imputation is None else compute.equal(table["imputation"], imputation)
    )
    return compute.and_(compute.equal(table["metric"], metric), compute.fill_null(filled, False))


def _summarize_metric(
    metric: str,
    imputation: str | None,
    rows: Sequence[Mapping[str, Any]],
    estimate_values: Callable[[ValuesByTarget], Estimate | None],
    groups: Mapping[int, Hashable],
    equivalent_groups: Sequence[Sequence[MethodKey]],
) -> list[MethodSummary]:
    values: dict[tuple[Any, ...], dict[tuple[int, Any], float]] = {}
    for row in rows:
        key = (row["method"], row["layer"], row["parameters_digest"], row["control"])
        values.setdefault(key, {})[row["row"], row["target"]] = np.nan if row["value"] is None else row["value"]
    _assign_failed_images(values)
    lines = {
        key: MethodSummary(
            metric,
            key[0],
            key[1],
            key[3],
            estimate_values(own),
            imputation=imputation,
            parameters=key[2],
            n_rows=len(own),
        )
        for key, own in values.items()
    }
    up = METRICS[metric].higher_is_better
    known = {key: line.estimate.mean for key, line in lines.items() if line.estimate is not None}
    order = sorted(lines, key=lambda key: -known.get(key, -np.inf) * (1 if up else -1) if key in known else np.inf)
    if up is None:
        return [lines[key] for key in order]
    gap = partial(
        _estimate_paired_difference,
        sign=1 if up else -1,
        groups=groups,
        rounding_tolerance=METRICS[metric].rounding_tolerance,
    )
    controls, methods = ([key for key in order if key in known and key[3] is kind] for kind in (True, False))
    whole = {**values, **{key: _broadcast_to_targets(values[key], values) for key in controls[:1]}}
    blind = {key[0] for key in controls}
    over = {key: gap(whole[key], whole[controls[0]]) for key in methods if controls and key[0] not in blind}
    alike = next((own for own in equivalent_groups if methods and methods[0][:3] in own), ())
    under = {key: gap(values[key], values[methods[0]]) for key in methods[1:] if key[:3] not in alike}
    return [
        replace(lines[key], difference_to_control=over.get(key), difference_to_best=under.get(key)) for key in order
    ]


def _assign_failed_images(values: dict[tuple[Any, ...], dict[tuple[int, Any], float]]) -> None:
    """An image that failed has no layer and no settings: it is an undefined row of each of its method's."""
    for nowhere in [key for key in values if key[1] is key[2] is None and not key[3]]:
        others = [key for key in values if key[0] == nowhere[0] and key != nowhere and not key[3]]
        for key in others:
            values[key] |= {place: np.nan for place in values[nowhere] if place not in values[key]}
        if others:
            del values[nowhere]


def _estimate_metric(
    metric: str, values_by_target: ValuesByTarget, groups: Mapping[int, Hashable], seed: int, n_resamples: int
) -> Estimate | None:
    values, bounds = list(values_by_target.values()), METRICS[metric].bounds
    if bounds is not None and not all(isnan(one) or bounds[0] <= one <= bounds[1] for one in values):
        bounds = None  # of a score that is no probability
    try:
        return estimate_mean(
            values, [groups[row] for row, _ in values_by_target], bounds=bounds, n_resamples=n_resamples, seed=seed
        )
    except UndefinedError:
        return None


def _broadcast_to_targets(
    control_values: ValuesByTarget, values_by_method: Mapping[Any, ValuesByTarget]
) -> ValuesByTarget:
    """A control's value of an image stands for all its targets, whichever it was written for."""
    by_row = {row: value for (row, _), value in control_values.items()}
    return {
        place: control_values.get(place, by_row.get(place[0], np.nan))
        for every in values_by_method.values()
        for place in every
    }


def _estimate_paired_difference(
    first: ValuesByTarget,
    second: ValuesByTarget,
    *,
    sign: int,
    groups: Mapping[int, Hashable],
    rounding_tolerance: float,
) -> Estimate | None:
    """Paired by image and target."""
    there = [(key, second.get(key, np.nan)) for key in first]
    try:
        mine = [sign * first[key] for key, _ in there]
        theirs, drawn_whole = [sign * value for _, value in there], [groups[key[0]] for key, _ in there]
        return estimate_difference(mine, theirs, drawn_whole, rounding_tolerance=rounding_tolerance)
    except UndefinedError:
        return None
