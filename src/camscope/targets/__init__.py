"""Targets: the question that is asked of a model, and the number per sample that answers it."""

from camscope.targets.base import Scene, Target
from camscope.targets.box import Box
from camscope.targets.class_sets import Classes, Probability
from camscope.targets.classes import Class, Difference, Question
from camscope.targets.embedding import Similarity, Text, embedding_of
from camscope.targets.output_part import Output
from camscope.targets.outputs import class_scores, full_precision
from camscope.targets.region import Region
from camscope.targets.score import EveryClass, Score

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
    "full_precision",
]
