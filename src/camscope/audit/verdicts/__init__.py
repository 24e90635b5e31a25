"""Verdicts: what the numbers say of each question, by rules that were declared before. There is no single score.

"supported": the interval lies wholly beyond the margin. "not supported": it lies wholly on the other side. "not testable":
it holds the margin, or there is nothing, or there are too few patients, to test it with; the reason says which.
"""

from camscope.audit.core.schema import Summary, Verdict
from camscope.audit.verdicts.maps import judge_faithfulness, judge_localization, judge_robustness, judge_sanity
from camscope.audit.verdicts.model import (
    judge_attribution_mass,
    judge_clusters,
    judge_ground_truth_reliance,
    judge_leakage,
    judge_masked_organ,
    judge_performance,
    judge_region_reliance,
)

__all__ = ["derive_verdicts"]


def derive_verdicts(summary: Summary) -> list[Verdict]:
    """Of everything that was found, the questions in the order of the report."""
    return [
        *judge_performance(summary),
        *judge_ground_truth_reliance(summary),
        *judge_region_reliance(summary),
        *judge_masked_organ(summary),
        *judge_localization(summary),
        *judge_attribution_mass(summary),
        *judge_faithfulness(summary),
        *judge_sanity(summary),
        *judge_robustness(summary),
        *judge_leakage(summary),
        *judge_clusters(summary),
    ]
