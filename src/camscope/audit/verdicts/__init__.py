"""Verdicts of an audit. A fixed rule answers each question, and there is no overall score.

- `supported`: the whole interval lies beyond the margin.
- `not supported`: the whole interval lies on the other side of the margin.
- `not testable`: the interval includes the margin, data are missing, or there are too few patients. The reason says which.
"""

from camscope.audit.core.summary_schema import Conclusion, Summary, Verdict
from camscope.audit.verdicts import maps, model
from camscope.audit.verdicts.rules import find_topic, join_reasons
from camscope.audit.verdicts.sample_size import add_patients_needed

__all__ = ["derive_verdicts"]

NO_PERFORMANCE_REASON = "it does not count for the model, whose AUROC does not show that it detects the finding"


def derive_verdicts(summary: Summary) -> list[Verdict]:
    """Return all verdicts that follow from the summary, in the order of the report."""
    verdicts = [
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
    detected = {verdict.finding: verdict.conclusion for verdict in verdicts if verdict.question == "performance"}
    return [
        add_patients_needed(_require_performance(verdict, detected.get(verdict.finding, "supported")), summary)
        for verdict in verdicts
    ]


def _require_performance(verdict: Verdict, performance: Conclusion) -> Verdict:
    """Return a verdict that supports the model only if the model was shown to detect the finding."""
    if performance == "supported" or verdict.direction != "supports" or find_topic(verdict.question) != "model":
        return verdict
    reason = join_reasons(verdict.reason, NO_PERFORMANCE_REASON)
    return verdict.model_copy(update={"direction": "neither", "reason": reason})
