"""Targets: the question that is asked of a model, and the number per sample that answers it."""

from camscope.targets.box import Box
from camscope.targets.named import Output
from camscope.targets.outputs import class_scores
from camscope.targets.questions import Class, Difference, Question
from camscope.targets.region import Region
from camscope.targets.score import EveryClass, Score
from camscope.targets.several import Classes, Probability
from camscope.targets.similarity import Similarity, Text, embedding_of
from camscope.targets.target import Scene, Target

__all__ = [
    "Box",
    "Class",
    "Classes",
    "Difference",
    "EveryClass",
    "Output",
    "Probability",
    "Question",
    "Region",
    "Scene",
    "Score",
    "Similarity",
    "Target",
    "Text",
    "class_scores",
    "embedding_of",
]
