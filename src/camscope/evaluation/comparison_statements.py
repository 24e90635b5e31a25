"""What a comparison says in words: which maps are one, which methods cannot be told apart, and which beat no control."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.evaluation.map_agreement import MapAgreement, MethodKey
from camscope.evaluation.summary import SIGNIFICANCE_LEVEL, MethodSummary
from camscope.metrics import METRICS
from camscope.metrics.statistics import MIN_GROUPS_FOR_INTERVAL, compute_min_p_value
from camscope.plurals import plural

MAX_NAMES_IN_LIST = 6  # names in a list; of more it says how many
MethodNames = Mapping[tuple[MethodKey, bool], str]


def iter_statements(
    summaries: Mapping[str, Sequence[MethodSummary]], agreement: MapAgreement, names: MethodNames
) -> Iterator[str]:
    """First of the maps, then of all metrics of which the same holds, then of each by itself."""
    for group in agreement.equivalent_groups:
        yield f"{join_names([names[key, False] for key in group])}: the same maps here, as they are displayed"
    if reason := describe_dominance([line for own in summaries.values() for line in own]):
        yield reason
    known = {metric: one for metric, own in summaries.items() if len((one := _MetricRanking(own, names)).methods) > 1}
    few = {needed for one in known.values() if (needed := one.n_groups_needed)}
    if few:
        there = max(known.values(), key=lambda one: one.n_groups)
        yield (
            f"{there.group_count_text} cannot tell {plural(max(len(one.methods) for one in known.values()), 'method')} apart in "
            f"{plural(len(known), 'metric')}, whatever they show: at least {max(few)} are needed"
        )
    alike = [metric for metric, one in known.items() if not one.worse_methods and not one.n_groups_needed]
    if alike:
        yield f"no method can be told from the first in {join_names(alike)}"
    for metric, one in known.items():
        if one.worse_methods:
            yield f"{metric}: {one.text}"
    yield from _iter_control_statements(summaries, names)


def has_controls(summary: MethodSummary) -> bool:
    """Whether maps that know nothing are held against its method.

    How a map spreads is no merit to be beaten in, nor is how still it holds: a map that does not look holds still.
    """
    return METRICS[summary.metric].input_kind not in ("map", "explainer")


def describe_dominance(summaries: Sequence[MethodSummary]) -> str:
    """Why there are no intervals, where one group has most of the images; "" where none of the lines lacks one for that."""
    every = [
        estimate
        for line in summaries
        for estimate in (line.estimate, line.difference_to_best, line.difference_to_control)
    ]
    estimates = [estimate for estimate in every if estimate is not None and estimate.is_dominated_by_few_groups]
    return (
        min(estimates, key=lambda estimate: estimate.n_effective_groups or 0.0).describe_dominance()
        if estimates
        else ""
    )


def join_names(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of many the first, and how many more there are."""
    if len(names) > MAX_NAMES_IN_LIST + 1:
        return f"{', '.join(names[:MAX_NAMES_IN_LIST])} and {len(names) - MAX_NAMES_IN_LIST} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class _MetricRanking:
    """Of one metric the first method, those that cannot be told from it, and those behind."""

    def __init__(self, summaries: Sequence[MethodSummary], names: MethodNames) -> None:
        ranked = METRICS[summaries[0].metric].higher_is_better is not None
        self.methods = (
            [line for line in summaries if not line.is_control and line.estimate is not None] if ranked else []
        )
        self.worse_methods = [line for line in self.methods[1:] if line.is_worse_than_best]
        self._names = names

    @property
    def n_groups(self) -> int:
        """How many images, or groups of them, the differences rest on."""
        return max(
            (line.difference_to_best.n_groups for line in self.methods if line.difference_to_best is not None),
            default=0,
        )

    @property
    def group_count_text(self) -> str:
        """The same in words."""
        estimates = [line.difference_to_best for line in self.methods if line.difference_to_best is not None]
        word = "image" if all(one.n_values <= one.n_groups for one in estimates) else "group"
        return plural(self.n_groups, word)

    @property
    def n_groups_needed(self) -> int | None:
        """How many it takes to tell any two methods apart, corrected for all comparisons; None where there are enough."""
        gaps = [line for line in self.methods if line.difference_to_best is not None]
        if not gaps:
            return None
        pairs = max(line.n_comparisons for line in gaps)
        needed = next(
            n for n in range(MIN_GROUPS_FOR_INTERVAL, 1000) if pairs * compute_min_p_value(n) < SIGNIFICANCE_LEVEL
        )
        return needed if self.n_groups < needed else None

    @property
    def text(self) -> str:
        """Who is first, and who cannot be told from it."""
        first, *rest = [_get_method_name(line, self._names) for line in self.methods if line not in self.worse_methods]
        if not rest:
            return f"{first} is first, and told from {'all others' if len(self.methods) > 2 else 'the other'}"
        return f"{first} is first; {join_names(rest)} cannot be told from it"


def _iter_control_statements(summaries: Mapping[str, Sequence[MethodSummary]], names: MethodNames) -> Iterator[str]:
    """Where no method, or not every one, is better than the best map that knows nothing."""
    none: dict[str, list[str]] = {}
    some = []
    for metric, own in summaries.items():
        methods = [line for line in own if not line.is_control and line.difference_to_control is not None]
        controls = [line.method for line in own if line.is_control and line.estimate is not None]
        if not methods or not controls or not has_controls(own[0]):
            continue
        better = [_get_method_name(line, names) for line in methods if line.beats_control]
        if not better:
            none.setdefault(controls[0], []).append(metric)
        elif len(better) < len(methods):
            verb = "is" if len(better) == 1 else "are"
            some.append(f"only {join_names(better)} {verb} better than the control {controls[0]} in {metric}")
    for control, metrics in none.items():
        yield f"no method is better than the control {control} in {join_names(metrics)}"
    yield from some


def _get_method_name(summary: MethodSummary, names: MethodNames) -> str:
    return names[(summary.method, summary.layer, summary.parameters), summary.is_control]
