"""Summary: of each metric and method a mean with its interval, and whether it beats the best map that knows nothing."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import comb, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch.manifest import arrow
from camscope.errors import InputError, UndefinedError
from camscope.evaluation.map_agreement import Key
from camscope.metrics import METRICS
from camscope.metrics.statistics import REPLICATES, Estimate, difference, estimated, simultaneous

if TYPE_CHECKING:
    import pyarrow as pa

LEVEL = 0.05
Values = Mapping[tuple[int, Any], float]  # by row and target; NaN where there is none


@dataclass(frozen=True)
class Line:
    """What a metric says of a method: `estimate`, and the paired differences to the best control and to the best method.

    `fill`: under which, of a metric that has one. Differences are counted so that more is better. `pairs`: how many comparisons
    of two methods the interval and p of `under_best` are corrected for. A method that is one of the controls is not compared
    with the best control, nor a method with one whose maps are the same.
    """

    metric: str
    method: str
    layer: str | None
    control: bool
    estimate: Estimate | None
    over_control: Estimate | None = None
    under_best: Estimate | None = None
    fill: str | None = None
    parameters: str | None = None  # the digest of its settings
    rows: int = 0  # with a value or without
    pairs: int = 1

    @property
    def key(self) -> Key:
        """Which method, layer and settings."""
        return self.method, self.layer, self.parameters

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        return " · ".join(filter(None, (self.method, self.layer)))

    @property
    def n(self) -> int:
        """How many rows have a value."""
        return 0 if self.estimate is None else self.estimate.n

    @property
    def undefined(self) -> int:
        """How many have none."""
        return self.rows - self.n

    @property
    def beats_control(self) -> bool:
        """Whether the map says more than any that knows nothing, at 5 %."""
        return is_shown(self.over_control) and self.over_control is not None and self.over_control.mean > 0

    @property
    def is_behind(self) -> bool:
        """Whether it is worse than the best method, at 5 %."""
        return is_shown(self.under_best) and self.under_best is not None and self.under_best.mean < 0


def is_shown(gap: Estimate | None) -> bool:
    """Whether a difference is beyond chance, at 5 %."""
    return gap is not None and gap.p is not None and gap.p < LEVEL


def summarised(
    table: "pa.Table",
    group: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    same: Sequence[Sequence[Key]] = (),
    corrected: bool = True,
    seed: int = 0,
    replicates: int = REPLICATES,
) -> dict[str, list[Line]]:
    """Summarize a table of values by metric: [metric], or [`metric, fill`], its lines, the best first, controls among them.

    Args:
        table: Values in long form, as `Measures.table` returns them.
        group: A column of patients or scenes. Default: an image is a group, whatever it was explained for.
        metrics: Only these. Differences are corrected for how many of them there are.
        same: Methods whose maps are the same. They are one method: none of them is compared with another.
        corrected: Whether intervals and p of differences hold together over all methods and metrics (Bonferroni): over all
            pairs of methods, since the values also say which is first, and over all comparisons with the best control.
            False: each by itself.
        seed: Seed of the bootstrap of means.
        replicates: Bootstrap resamples of means.

    """
    expect_column(table, group)
    if "fill" not in table.column_names:  # as they were before any metric asked the model
        table = table.append_column("fill", arrow().nulls(table.num_rows, arrow().string()))
    groups = dict(zip(table["row"].to_pylist(), table[group or "row"].to_pylist(), strict=True))
    kept = table.select(["row", "method", "layer", "parameters", "target", "control", "value"])
    made: dict[str, list[Line]] = {}
    for pair in (
        table.select(["metric", "fill"]).group_by(["metric", "fill"], use_threads=False).aggregate([]).to_pylist()
    ):
        name, fill = pair["metric"], pair["fill"]  # the rows of one pair at a time, which are dicts for as long
        if metrics is not None and name not in metrics:
            continue
        own = kept.filter(_where(table, name, fill)).to_pylist()
        estimate = partial(_estimate, name, groups=groups, seed=seed, replicates=replicates)
        made[name if fill is None else f"{name}, {fill}"] = _of_metric(name, fill, own, estimate, groups, same)
    return _held_together(made, same) if corrected else made


def _held_together(made: dict[str, list[Line]], same: Sequence[Sequence[Key]]) -> dict[str, list[Line]]:
    """All differences corrected for how many there are."""
    first = {key: own[0] for own in same for key in own}
    ranked = [own for own in made.values() if METRICS[own[0].metric].higher_is_better is not None]
    every = [{first.get(line.key, line.key) for line in own if not line.control and line.estimate} for own in ranked]
    pairs = sum(comb(len(methods), 2) for methods in every)
    over = sum(len({first.get(line.key, line.key) for line in own if line.over_control is not None}) for own in ranked)

    def corrected(line: Line) -> Line:
        gaps = (line.under_best, pairs), (line.over_control, over)
        under, above = (None if gap is None else simultaneous([gap], count)[0] for gap, count in gaps)
        return replace(line, under_best=under, over_control=above, pairs=pairs)

    return {name: [corrected(line) for line in own] for name, own in made.items()}


def expect_column(table: "pa.Table", group: str | None) -> None:
    """InputError where there is no such column."""
    if group is not None and group not in table.column_names:
        raise InputError(f"no column {group!r} to group by; there are {', '.join(table.column_names)}")


def expect_some_evidence(table: "pa.Table", lines: Mapping[str, Sequence[Line]]) -> None:
    """InputError where no metric that needs to know where the evidence is has any value of a method."""
    asking = {own[0].metric for own in lines.values() if METRICS[own[0].metric].needs == "mask"}
    some = [line for own in lines.values() for line in own if line.metric in asking and not line.control]
    if some and not any(line.estimate for line in some):
        rows = zip(*(table[name].to_pylist() for name in ("metric", "control", "reason")), strict=True)
        raise InputError(
            none_known(Counter(why for name, control, why in rows if name == some[0].metric and not control))
        )


def none_known(reasons: Counter[str]) -> str:
    """Why no image has any evidence."""
    return "no image has evidence: " + "; ".join(f"{reason} ({count} x)" for reason, count in reasons.most_common(3))


def _where(table: "pa.Table", name: str, fill: str | None) -> Any:
    compute = arrow("compute")
    filled = compute.is_null(table["fill"]) if fill is None else compute.equal(table["fill"], fill)
    return compute.and_(compute.equal(table["metric"], name), compute.fill_null(filled, False))


def _of_metric(
    name: str,
    fill: str | None,
    rows: Sequence[Mapping[str, Any]],
    estimate: Callable[[Values], Estimate | None],
    groups: Mapping[int, Hashable],
    same: Sequence[Sequence[Key]],
) -> list[Line]:
    values: dict[tuple[Any, ...], dict[tuple[int, Any], float]] = {}
    for row in rows:
        key = (row["method"], row["layer"], row["parameters"], row["control"])
        values.setdefault(key, {})[row["row"], row["target"]] = np.nan if row["value"] is None else row["value"]
    _hand_on_what_failed(values)
    lines = {
        key: Line(name, key[0], key[1], key[3], estimate(own), fill=fill, parameters=key[2], rows=len(own))
        for key, own in values.items()
    }
    up = METRICS[name].higher_is_better
    known = {key: line.estimate.mean for key, line in lines.items() if line.estimate is not None}
    order = sorted(lines, key=lambda key: -known.get(key, -np.inf) * (1 if up else -1) if key in known else np.inf)
    if up is None:
        return [lines[key] for key in order]
    gap = partial(_gap, sign=1 if up else -1, groups=groups, precision=METRICS[name].precision)
    controls, methods = ([key for key in order if key in known and key[3] is kind] for kind in (True, False))
    whole = {**values, **{key: _of_all_targets(values[key], values) for key in controls[:1]}}
    blind = {key[0] for key in controls}
    over = {key: gap(whole[key], whole[controls[0]]) for key in methods if controls and key[0] not in blind}
    alike = next((own for own in same if methods and methods[0][:3] in own), ())
    under = {key: gap(values[key], values[methods[0]]) for key in methods[1:] if key[:3] not in alike}
    return [replace(lines[key], over_control=over.get(key), under_best=under.get(key)) for key in order]


def _hand_on_what_failed(values: dict[tuple[Any, ...], dict[tuple[int, Any], float]]) -> None:
    """An image that failed has no layer and no settings: it is an undefined row of each of its method's."""
    for nowhere in [key for key in values if key[1] is key[2] is None and not key[3]]:
        others = [key for key in values if key[0] == nowhere[0] and key != nowhere and not key[3]]
        for key in others:
            values[key] |= {place: np.nan for place in values[nowhere] if place not in values[key]}
        if others:
            del values[nowhere]


def _estimate(metric: str, own: Values, groups: Mapping[int, Hashable], seed: int, replicates: int) -> Estimate | None:
    values, bounds = list(own.values()), METRICS[metric].bounds
    if bounds is not None and not all(isnan(one) or bounds[0] <= one <= bounds[1] for one in values):
        bounds = None  # of a score that is no probability
    try:
        return estimated(values, [groups[row] for row, _ in own], bounds=bounds, replicates=replicates, seed=seed)
    except UndefinedError:
        return None


def _of_all_targets(own: Values, values: Mapping[Any, Values]) -> Values:
    """A control's value of an image stands for all its targets, whichever it was written for."""
    by_row = {row: value for (row, _), value in own.items()}
    return {place: own.get(place, by_row.get(place[0], np.nan)) for every in values.values() for place in every}


def _gap(one: Values, other: Values, *, sign: int, groups: Mapping[int, Hashable], precision: float) -> Estimate | None:
    """Paired by image and target."""
    there = [(key, other.get(key, np.nan)) for key in one]
    try:
        mine = [sign * one[key] for key, _ in there]
        theirs, drawn_whole = [sign * value for _, value in there], [groups[key[0]] for key, _ in there]
        return difference(mine, theirs, drawn_whole, precision=precision)
    except UndefinedError:
        return None
