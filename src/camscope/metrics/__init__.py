"""Instruments that test the claim of a map, as pure functions. Floor 4."""

from camscope.metrics.base import METRICS, Metric
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

__all__ = [
    "METRICS",
    "Metric",
    "average_precision",
    "centroid_distance",
    "energy_inside",
    "enrichment",
    "iou",
    "iou_otsu",
    "iou_swept",
    "matched_dice",
    "peak_distance",
    "pointing_game",
    "rank_accuracy",
]
