"""Verdicts of an audit. A fixed rule answers each question, and there is no overall score.

- `supported`: the whole interval lies beyond the margin.
- `not supported`: the whole interval lies on the other side of the margin.
- `not testable`: the interval includes the margin, data are missing, or there are too few patients. The reason says which.
"""

from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.verdicts import maps, model

__all__ = ["derive_verdicts"]


def derive_verdicts(summary: Summary) -> list[Verdict]:
    """Return all verdicts that follow from the summary, in the order of the report."""
    return [
        *model.judge_performance(summary),
        *model.judge_finding_region(summary),
        *model.judge_other_regions(summary),
        *model.judge_masked_organ(summary),
        *maps.judge_localization(summary),
        *maps.judge_attribution_mass(summary),
        *maps.judge_faithfulness(summary),
        *maps.judge_sanity(summary),
        *maps.judge_robustness(summary),
        *model.judge_leakage(summary),
        *maps.judge_whether_maps_form_clusters(summary),
    ]
