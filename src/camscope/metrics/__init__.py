"""Instruments that test the claim of a map, as pure functions. Floor 4."""

from camscope.metrics.base import METRICS, Metric
from camscope.metrics.debias import road, road_lerf, road_morf
from camscope.metrics.fills import Imputation
from camscope.metrics.localisation import (
    average_precision,
    centroid_distance,
    energy_inside,
    enrichment,
    iou,
    iou_otsu,
    iou_swept,
    matched_dice,
    peak_distance,
    pointing_game,
    rank_accuracy,
)
from camscope.metrics.masking import adcc, average_drop, average_gain, average_increase
from camscope.metrics.removal import aopc, curve, deletion, insertion, lerf_morf_gap, necessity, sufficiency
from camscope.metrics.scores import Scores, scoring
from camscope.metrics.sensitivity import completeness_gap, faithfulness_correlation, infidelity, sensitivity_n
from camscope.metrics.trial import Trial
from camscope.metrics.values import Values

__all__ = [
    "METRICS",
    "Imputation",
    "Metric",
    "Scores",
    "Trial",
    "Values",
    "adcc",
    "aopc",
    "average_drop",
    "average_gain",
    "average_increase",
    "average_precision",
    "centroid_distance",
    "completeness_gap",
    "curve",
    "deletion",
    "energy_inside",
    "enrichment",
    "faithfulness_correlation",
    "infidelity",
    "insertion",
    "iou",
    "iou_otsu",
    "iou_swept",
    "lerf_morf_gap",
    "matched_dice",
    "necessity",
    "peak_distance",
    "pointing_game",
    "rank_accuracy",
    "road",
    "road_lerf",
    "road_morf",
    "scoring",
    "sensitivity_n",
    "sufficiency",
]
