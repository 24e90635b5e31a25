"""Write sentences about a comparison: methods with the same maps, significant differences, and controls."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.evaluation.map_agreement import MapAgreement, MethodKey
from camscope.evaluation.method_summaries import SIGNIFICANCE_LEVEL, MethodSummary, is_compared_with_controls
from camscope.metrics import METRICS
from camscope.metrics.intervals_and_p_values import MIN_GROUPS_FOR_INTERVAL, compute_min_p_value
from camscope.plurals import plural
from camscope.registry import METHODS

MAX_NAMES_IN_LIST = 6  # names in a list before "and n more"
MethodNames = Mapping[tuple[MethodKey, bool], str]


def iter_statements(
    summaries: Mapping[str, Sequence[MethodSummary]], agreement: MapAgreement, names: MethodNames
) -> Iterator[str]:
    """Yield sentences about the maps, then about all metrics together, then about single metrics and control methods."""
    for group in agreement.equivalent_groups:
        yield f"{join_names([names[key, False] for key in group])}: the same maps here, as they are displayed"
    if reason := explain_missing_intervals([summary for group in summaries.values() for summary in group]):
        yield reason
    summaries = {METRICS.replace_names_by_titles(metric): group for metric, group in summaries.items()}
    rankings = {metric: _MetricRanking(group, names) for metric, group in summaries.items()}
    rankings = {metric: ranking for metric, ranking in rankings.items() if len(ranking.methods) > 1}
    n_groups_needed = {needed for ranking in rankings.values() if (needed := ranking.n_groups_needed)}
    if n_groups_needed:
        largest = max(rankings.values(), key=lambda ranking: ranking.n_groups)
        n_methods = max(len(ranking.methods) for ranking in rankings.values())
        yield (
            f"{largest.group_count_text} cannot tell {plural(n_methods, 'method')} apart in "
            f"{plural(len(rankings), 'metric')}, whatever they show: at least {max(n_groups_needed)} are needed"
        )
    undecided = [
        metric for metric, ranking in rankings.items() if not ranking.worse_methods and not ranking.n_groups_needed
    ]
    if undecided:
        yield f"no method differs significantly from the first in {join_names(undecided)}"
    for metric, ranking in rankings.items():
        if ranking.worse_methods:
            yield f"{metric}: {ranking.text}"
    yield from _iter_control_statements(summaries, names)


def explain_missing_intervals(summaries: Sequence[MethodSummary]) -> str:
    """Say that intervals are missing because a few groups hold most images. For another reason, return ""."""
    all_estimates = [
        estimate
        for line in summaries
        for estimate in (line.estimate, line.difference_to_best, line.difference_to_control)
    ]
    estimates = [estimate for estimate in all_estimates if estimate is not None and estimate.is_dominated_by_few_groups]
    if not estimates:
        return ""
    return min(estimates, key=lambda estimate: estimate.n_effective_groups or 0.0).explain_missing_intervals()


def join_names(names: Sequence[str]) -> str:
    """Join names as `a, b and c`. A long list is shortened, and ends with the number of missing names."""
    if len(names) > MAX_NAMES_IN_LIST + 1:
        return f"{', '.join(names[:MAX_NAMES_IN_LIST])} and {len(names) - MAX_NAMES_IN_LIST} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class _MetricRanking:
    """A ranking of methods by one metric. Methods significantly worse than the best are marked."""

    def __init__(self, summaries: Sequence[MethodSummary], names: MethodNames) -> None:
        is_ranked = METRICS[summaries[0].metric].higher_is_better is not None
        self.methods = [line for line in summaries if is_ranked and not line.is_control and line.estimate is not None]
        self.worse_methods = [line for line in self.methods[1:] if line.is_worse_than_best]
        gaps = [line.difference_to_best for line in self.methods if line.difference_to_best is not None]
        self.n_groups = max((gap.n_groups for gap in gaps), default=0)
        is_by_image = all(gap.n_values <= gap.n_groups for gap in gaps)
        self.group_count_text = plural(self.n_groups, "image" if is_by_image else "group")
        self.n_groups_needed = None  # to tell any two methods apart after correction; None if there are enough
        if gaps:
            pairs = max(line.n_comparisons for line in self.methods)
            counts = range(MIN_GROUPS_FOR_INTERVAL, 1000)
            needed = next(n for n in counts if pairs * compute_min_p_value(n) < SIGNIFICANCE_LEVEL)
            self.n_groups_needed = needed if self.n_groups < needed else None
        best = [names[line.key, line.is_control] for line in self.methods if line not in self.worse_methods]
        self.text = f"{best[0]} is first; no significant difference from {join_names(best[1:])}" if best[1:] else ""
        if len(best) == 1:
            others = "all others" if len(self.methods) > 2 else "the other"
            self.text = f"{best[0]} is first, and better than {others}"


def _iter_control_statements(summaries: Mapping[str, Sequence[MethodSummary]], names: MethodNames) -> Iterator[str]:
    """Yield sentences about methods that do not beat the best control method. They name the metrics of this comparison."""
    metrics_by_control: dict[str, list[str]] = {}
    partial_statements = []
    for metric, group in summaries.items():
        methods = [line for line in group if not line.is_control and line.difference_to_control is not None]
        controls = [
            METHODS.replace_names_by_titles(line.method)
            for line in group
            if line.is_control and line.estimate is not None
        ]
        if not methods or not controls or not is_compared_with_controls(group[0].metric):
            continue
        better = [names[line.key, line.is_control] for line in methods if line.beats_control]
        if not better:
            metrics_by_control.setdefault(controls[0], []).append(metric)
        elif len(better) < len(methods):
            verb = "is" if len(better) == 1 else "are"
            partial_statements.append(
                f"only {join_names(better)} {verb} better than the control {controls[0]} in {metric}"
            )
    for control, metrics in metrics_by_control.items():
        yield f"no method is better than the control {control} in {join_names(metrics)}"
    yield from partial_statements
