"""Verdicts of an audit: each question is answered by a fixed rule, and there is no single score.

- `supported`: the whole interval lies beyond the margin.
- `not supported`: the whole interval lies on the other side of the margin.
- `not testable`: the interval includes the margin, data are missing, or there are too few patients. The reason says which.
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
    """Derive all verdicts from the summary, in the order of the report."""
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
