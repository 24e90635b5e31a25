"""Targets: what an explanation explains. Each target computes one number per sample from a model's output.

    from camscope import targets

    cam.explain("street.jpg", targets.Box(10, 20, 50, 60))

A class index, a class name, None (the top class) and any callable output -> (N,) are targets too.
"""

from camscope.targets.base import ImageContext, Target
from camscope.targets.best_box import BestBox
from camscope.targets.class_targets import Class, Classes, Difference, LogProbability, TargetLike
from camscope.targets.detection_box import Box
from camscope.targets.detector_rows_before_nms import DetectionRows
from camscope.targets.embedding_similarity import Similarity, TextSimilarity, image_embedding
from camscope.targets.find_class_scores import class_scores, full_precision
from camscope.targets.output_part import OutputPart
from camscope.targets.point_similarity import Point
from camscope.targets.score_per_sample import AllClassScores, Score
from camscope.targets.segmentation_region import Region
from camscope.targets.token_and_answer import Answer, Token

__all__ = [
    "AllClassScores",
    "Answer",
    "BestBox",
    "Box",
    "Class",
    "Classes",
    "DetectionRows",
    "Difference",
    "ImageContext",
    "LogProbability",
    "OutputPart",
    "Point",
    "Region",
    "Score",
    "Similarity",
    "Target",
    "TargetLike",
    "TextSimilarity",
    "Token",
    "class_scores",
    "full_precision",
    "image_embedding",
]
