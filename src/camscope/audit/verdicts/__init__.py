"""Verdicts of an audit. A fixed rule answers each question, and there is no overall score.

- `supported`: the whole interval lies beyond the margin.
- `not supported`: the whole interval lies on the other side of the margin.
- `not decided`: the interval includes the margin, data are missing, or there are too few patients. The reason says which.
"""

import re

from camscope.audit.core.summary_schema import Conclusion, Summary, Verdict
from camscope.audit.verdicts import map_verdicts, model_and_data_verdicts
from camscope.audit.verdicts.patients_needed import add_patients_needed
from camscope.audit.verdicts.verdict_rules import find_topic, join_reasons

__all__ = ["derive_verdicts"]

NO_PERFORMANCE_REASON = (
    "this does not count in favor of the model, because its AUROC is not shown to exceed the minimum"
)


def derive_verdicts(summary: Summary) -> list[Verdict]:
    """Derive all verdicts from the summary, in the order of the report."""
    verdicts = [
        *model_and_data_verdicts.judge_performance(summary),
        *model_and_data_verdicts.judge_finding_region(summary),
        *model_and_data_verdicts.judge_other_regions(summary),
        *model_and_data_verdicts.judge_masked_organ(summary),
        *map_verdicts.judge_localization(summary),
        *map_verdicts.judge_attribution_mass(summary),
        *map_verdicts.judge_faithfulness(summary),
        *map_verdicts.judge_sanity(summary),
        *map_verdicts.judge_robustness(summary),
        *model_and_data_verdicts.judge_leakage(summary),
        *map_verdicts.judge_whether_maps_form_clusters(summary),
    ]
    detected = {verdict.finding: verdict.conclusion for verdict in verdicts if verdict.question == "performance"}
    decided = [
        add_patients_needed(_require_performance(verdict, detected.get(verdict.finding, "supported")), summary)
        for verdict in verdicts
    ]
    return decided if summary.check.has_patient_column else [_count_images(verdict) for verdict in decided]


def _count_images(verdict: Verdict) -> Verdict:
    """In a verdict's reason, replace the word patient by image. This is for data that do not identify patients."""
    return verdict.model_copy(update={"reason": re.sub(r"\bpatient(s?)\b", r"image\1", verdict.reason)})


def _require_performance(verdict: Verdict, performance: Conclusion) -> Verdict:
    """Make a supporting verdict neutral if the audit did not show that the model detects the finding."""
    if performance == "supported" or verdict.direction != "supports" or find_topic(verdict.question) != "model":
        return verdict
    reason = join_reasons(verdict.reason, NO_PERFORMANCE_REASON)
    return verdict.model_copy(update={"direction": "neither", "reason": reason})
