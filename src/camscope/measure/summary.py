"""Summary: of each metric and method a mean with its interval, and whether it beats the best map that knows nothing."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch.manifest import arrow
from camscope.errors import InputError, UndefinedError
from camscope.metrics import METRICS
from camscope.metrics.statistics import REPLICATES as MEANS
from camscope.metrics.statistics import Estimate, difference, estimated, holm

if TYPE_CHECKING:
    import pyarrow as pa

REPLICATES = 20_000  # of a difference: fewer leave nothing to see once dozens of methods are corrected for
Values = Mapping[tuple[int, Any], float]  # by row and target; NaN where there is none


@dataclass(frozen=True)
class Line:
    """What a metric says of a method: `estimate`, and the paired differences to the best control and to the best method.

    `fill`: under which, of a metric that has one. Differences are counted so that more is better; `p` in them is corrected
    for how many methods there are (Holm). A method that is one of the controls is held against none: what tells it from its
    like is on which pixels the two were made.
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
        return self.over_control is not None and self.over_control.mean > 0 and (self.over_control.p or 0) < 0.05


def summarised(
    table: "pa.Table", group: str | None = None, *, seed: int = 0, replicates: int = MEANS
) -> dict[str, list[Line]]:
    """[metric], or [`metric, fill`] of one that has fills: its lines, the best first, controls among them.

    `group`: a column; its groups are drawn whole. Without it an image is a group, whatever it was asked. `replicates`: of the
    bootstrap of means; differences have more.
    """
    if group is not None and group not in table.column_names:
        raise InputError(f"no column {group!r} to group by; there are {', '.join(table.column_names)}")
    if "fill" not in table.column_names:  # as they were before any metric asked the model
        table = table.append_column("fill", arrow().nulls(table.num_rows, arrow().string()))
    groups = dict(zip(table["row"].to_pylist(), table[group or "row"].to_pylist(), strict=True))
    kept = table.select(["row", "method", "layer", "parameters", "target", "control", "value"])
    made = {}
    for pair in (
        table.select(["metric", "fill"]).group_by(["metric", "fill"], use_threads=False).aggregate([]).to_pylist()
    ):
        name, fill = pair["metric"], pair["fill"]  # the rows of one pair at a time, which are dicts for as long
        own = kept.filter(_where(table, name, fill)).to_pylist()
        made[name if fill is None else f"{name}, {fill}"] = _of_metric(
            name, fill, own, partial(_estimate, groups=groups, seed=seed, replicates=replicates), groups
        )
    return made


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
    sign = 1 if up else -1
    controls, methods = ([key for key in order if key in known and key[3] is kind] for kind in (True, False))
    whole = {**values, **{key: _of_all_targets(values[key], values) for key in controls[:1]}}
    blind = {key[0] for key in controls}
    over = _compared(whole, [key for key in methods if key[0] not in blind], controls[:1], sign, groups)
    under = _compared(values, methods[1:], methods[:1], sign, groups)
    return [replace(lines[key], over_control=over.get(key), under_best=under.get(key)) for key in order]


def _hand_on_what_failed(values: dict[tuple[Any, ...], dict[tuple[int, Any], float]]) -> None:
    """An image that failed has no layer and no settings: it is an undefined row of each of its method's."""
    for nowhere in [key for key in values if key[1] is key[2] is None and not key[3]]:
        others = [key for key in values if key[0] == nowhere[0] and key != nowhere and not key[3]]
        for key in others:
            values[key] |= {place: np.nan for place in values[nowhere] if place not in values[key]}
        if others:
            del values[nowhere]


def _compared(
    values: Mapping[Any, Values],
    methods: Sequence[Any],
    against: Sequence[Any],
    sign: int,
    groups: Mapping[int, Hashable],
) -> dict[Any, Estimate]:
    """The paired difference of each of some methods to one other, corrected for how many there are."""
    found = {
        key: gap for key in methods for other in against if (gap := _gap(values[key], values[other], sign, groups))
    }
    adjusted = holm([1.0 if gap.p is None else gap.p for gap in found.values()])
    return {key: replace(gap, p=p) for (key, gap), p in zip(found.items(), adjusted, strict=True)}


def _estimate(own: Values, groups: Mapping[int, Hashable], seed: int, replicates: int) -> Estimate | None:
    try:
        return estimated(list(own.values()), [groups[row] for row, _ in own], replicates=replicates, seed=seed)
    except UndefinedError:
        return None


def _of_all_targets(own: Values, values: Mapping[Any, Values]) -> Values:
    """A control's value of an image stands for all its targets, whichever it was written for."""
    by_row = {row: value for (row, _), value in own.items()}
    return {place: own.get(place, by_row.get(place[0], np.nan)) for every in values.values() for place in every}


def _gap(one: Values, other: Values, sign: int, groups: Mapping[int, Hashable]) -> Estimate | None:
    """Paired by image and target."""
    there = [(key, other.get(key, np.nan)) for key in one]
    try:
        mine = [sign * one[key] for key, _ in there]
        theirs, drawn_whole = [sign * value for _, value in there], [groups[key[0]] for key, _ in there]
        return difference(mine, theirs, drawn_whole, replicates=REPLICATES)
    except UndefinedError:
        return None
