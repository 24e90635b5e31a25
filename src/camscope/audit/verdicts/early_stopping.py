"""Whether the verdict on a method is reached at an interim look, or can no longer be reached."""

from collections.abc import Sequence
from typing import NamedTuple

from camscope.audit.core.stage_result_schema import EstimateSummary, MetricSummary
from camscope.audit.verdicts.map_verdicts import ROBUSTNESS_CONDITIONS, combine_metrics_and_find_weakest
from camscope.audit.verdicts.verdict_rules import EMPTY_ESTIMATE, FAITHFULNESS_VERDICT_METRICS, decide_above_margin
from camscope.metrics.group_sequential import ERROR_RATE, InterimLook, compute_chances_above_and_below_margin
from camscope.metrics.intervals_and_p_values import compute_t_quantile


class Chances(NamedTuple):
    """The probabilities that an estimate will be above or below a margin at the last look."""

    above: float
    below: float


class VerdictForecast(NamedTuple):
    """Whether the verdict on a method is reached at a look, and the chance that it will be at the last look."""

    is_decided: bool
    chance_at_last_look: float


def forecast_robustness_verdict(margin: float, lines: Sequence[MetricSummary], look: InterimLook) -> VerdictForecast:
    """Return whether a method's stability is decided. Also return how likely the last look at the data decides it."""
    judged = [line for line in lines if line.metric in ROBUSTNESS_CONDITIONS]
    is_open = [decide_above_margin(line.value, margin)[0] == "not decided" for line in judged]
    chances = [min(1.0, sum(estimate_chances_beyond_margin(line.value, margin, look))) for line in judged]
    open_chances = [chance for chance, undecided in zip(chances, is_open, strict=True) if undecided]
    return VerdictForecast(bool(judged) and not any(is_open), max(open_chances, default=0.0))


def forecast_faithfulness_verdict(n_methods: int, lines: Sequence[MetricSummary], look: InterimLook) -> VerdictForecast:
    """Return whether a method's faithfulness is decided. Also return how likely the last look at the data decides it.

    The chance is an upper bound: each metric could decide the verdict with the others on its side. The intervals of
    `n_methods` methods are corrected together.
    """
    judged = [line for line in lines if line.metric in FAITHFULNESS_VERDICT_METRICS]
    if not judged:
        return VerdictForecast(is_decided=True, chance_at_last_look=0.0)
    is_decided = combine_metrics_and_find_weakest(judged)[0][0] != "not decided"
    n_comparisons = n_methods * sum(line.difference_to_control is not None for line in lines)
    differences = [line.difference_to_control or EMPTY_ESTIMATE for line in judged]
    chances = [estimate_chances_beyond_margin(difference, 0.0, look, n_comparisons) for difference in differences]
    chance_supported = min(above for above, _ in chances)
    names = [line.metric for line in judged]
    worse_by_metric = [
        min(below for metric, (_, below) in zip(names, chances, strict=True) if metric == name)
        for name in dict.fromkeys(names)
    ]
    chance_none_better = min(1.0 if above == 1 else 1 - above for above, _ in chances)
    return VerdictForecast(is_decided, chance_supported + min(sum(worse_by_metric), chance_none_better))


def estimate_chances_beyond_margin(
    estimate: EstimateSummary, margin: float, look: InterimLook, n_comparisons: int = 1
) -> Chances:
    """Return the chances that the interval lies above, or below, a margin at the last look. Without an interval, both are 1."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None or low is None or high is None or estimate.n_groups < 2:
        return Chances(1.0, 1.0)
    half = value - low if value > margin else high - value
    alpha = look.compute_alpha(ERROR_RATE / max(1, n_comparisons))
    error = half / compute_t_quantile(estimate.n_groups - 1, alpha / 2)
    return Chances(*compute_chances_above_and_below_margin(value, error, margin, look, max(1, n_comparisons)))
