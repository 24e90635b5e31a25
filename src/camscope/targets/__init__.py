"""Targets: the question that is asked of a model, and the number per sample that answers it."""

from camscope.targets.outputs import class_scores
from camscope.targets.questions import Difference, Question
from camscope.targets.score import EveryClass, Score

__all__ = ["Difference", "EveryClass", "Question", "Score", "class_scores"]
