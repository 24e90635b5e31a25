"""Instruments that test the claim of a map, as pure functions. Floor 4."""

from camscope.metrics.base import METRICS, Metric
from camscope.metrics.changes import Change, Noise, Rotation, Shift
from camscope.metrics.complexity import effective_area, entropy, sparseness
from camscope.metrics.forgetting import untrained
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
from camscope.metrics.randomised import Randomised
from camscope.metrics.robustness import (
    Agreement,
    agreements,
    average_sensitivity,
    batch_invariance,
    determinism,
    max_sensitivity,
    stability,
)
from camscope.metrics.sanity import random_logit, randomisation
from camscope.metrics.similarity import SIMILARITIES, hog_correlation, jaccard, pearson, spearman, ssim
from camscope.metrics.statistics import Estimate, difference, estimated, holm
from camscope.metrics.verdicts import Verdict

__all__ = [
    "METRICS",
    "SIMILARITIES",
    "Agreement",
    "Change",
    "Estimate",
    "Metric",
    "Noise",
    "Randomised",
    "Rotation",
    "Shift",
    "Verdict",
    "agreements",
    "average_precision",
    "average_sensitivity",
    "batch_invariance",
    "centroid_distance",
    "determinism",
    "difference",
    "effective_area",
    "energy_inside",
    "enrichment",
    "entropy",
    "estimated",
    "hog_correlation",
    "holm",
    "iou",
    "iou_otsu",
    "iou_swept",
    "jaccard",
    "matched_dice",
    "max_sensitivity",
    "peak_distance",
    "pearson",
    "pointing_game",
    "random_logit",
    "randomisation",
    "rank_accuracy",
    "sparseness",
    "spearman",
    "ssim",
    "stability",
    "untrained",
]
