"""What a model answers when a region is removed, kept alone, or pasted into another image; and what that says of the model.

The answers are `log_odds`, the images are made by `changes`, `effects` measures them, and `judging` says what they mean.
"""

from camscope.audit.shortcuts.interventions.changes import Exchange, exchanged, inserted, kept, removed
from camscope.audit.shortcuts.interventions.effects import Effect, insertion, removal, spread, untested
from camscope.audit.shortcuts.interventions.judging import deciding, evidence, reliance, too_few_for_absence
from camscope.audit.shortcuts.interventions.log_odds import LogOdds, asked

__all__ = [
    "Effect",
    "Exchange",
    "LogOdds",
    "asked",
    "deciding",
    "evidence",
    "exchanged",
    "inserted",
    "insertion",
    "kept",
    "reliance",
    "removal",
    "removed",
    "spread",
    "too_few_for_absence",
    "untested",
]
