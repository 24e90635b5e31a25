"""Verdicts: what the numbers say of each question, by rules that were declared before. There is no single score.

"supported": the interval lies wholly beyond the margin. "not supported": it lies wholly on the other side. "not testable":
it holds the margin, or there is nothing, or there are too few patients, to test it with; the reason says which.
"""

from camscope.audit.core.schema import Summary, Verdict
from camscope.audit.verdicts.maps import faithful, localised, robust, sane
from camscope.audit.verdicts.model import answering, blanked, evident, leaking, masses, relying, several_ways

__all__ = ["verdicts"]


def verdicts(summary: Summary) -> list[Verdict]:
    """Of everything that was found, the questions in the order of the report."""
    return [
        *answering(summary),
        *evident(summary),
        *relying(summary),
        *blanked(summary),
        *localised(summary),
        *masses(summary),
        *faithful(summary),
        *sane(summary),
        *robust(summary),
        *leaking(summary),
        *several_ways(summary),
    ]
