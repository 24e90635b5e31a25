"""Instruments that test the claim of a map, as pure functions. Floor 4."""

from camscope.metrics.base import METRICS, Metric, Values
from camscope.metrics.complexity import effective_area, entropy, sparseness
from camscope.metrics.confidence_drop import adcc, average_drop, average_gain, average_increase
from camscope.metrics.deletion_insertion import (
    aopc,
    curve,
    deletion,
    insertion,
    lerf_morf_gap,
    necessity,
    road,
    road_lerf,
    road_morf,
    sufficiency,
)
from camscope.metrics.faithfulness_correlation import (
    completeness_gap,
    faithfulness_correlation,
    infidelity,
    sensitivity_n,
)
from camscope.metrics.imputation import Imputation
from camscope.metrics.input_transforms import Change, Compression, Noise, Resampling, Rotation, Shift, Window
from camscope.metrics.localization import (
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
from camscope.metrics.model_scorer import Scores, scoring
from camscope.metrics.perturbation_test import Trial
from camscope.metrics.randomization_result import Randomised, Verdict
from camscope.metrics.randomization_tests import random_logit, randomisation
from camscope.metrics.robustness import (
    Agreement,
    acquisition_stability,
    agreements,
    average_sensitivity,
    batch_invariance,
    determinism,
    max_sensitivity,
    stability,
)
from camscope.metrics.similarity import SIMILARITIES, hog_correlation, jaccard, pearson, spearman, ssim
from camscope.metrics.statistics import Estimate, difference, estimated, holm, least_p
from camscope.metrics.weight_randomization import untrained

__all__ = [
    "METRICS",
    "SIMILARITIES",
    "Agreement",
    "Change",
    "Compression",
    "Estimate",
    "Imputation",
    "Metric",
    "Noise",
    "Randomised",
    "Resampling",
    "Rotation",
    "Scores",
    "Shift",
    "Trial",
    "Values",
    "Verdict",
    "Window",
    "acquisition_stability",
    "adcc",
    "agreements",
    "aopc",
    "average_drop",
    "average_gain",
    "average_increase",
    "average_precision",
    "average_sensitivity",
    "batch_invariance",
    "centroid_distance",
    "completeness_gap",
    "curve",
    "deletion",
    "determinism",
    "difference",
    "effective_area",
    "energy_inside",
    "enrichment",
    "entropy",
    "estimated",
    "faithfulness_correlation",
    "hog_correlation",
    "holm",
    "infidelity",
    "insertion",
    "iou",
    "iou_otsu",
    "iou_swept",
    "jaccard",
    "least_p",
    "lerf_morf_gap",
    "matched_dice",
    "max_sensitivity",
    "necessity",
    "peak_distance",
    "pearson",
    "pointing_game",
    "random_logit",
    "randomisation",
    "rank_accuracy",
    "road",
    "road_lerf",
    "road_morf",
    "scoring",
    "sensitivity_n",
    "sparseness",
    "spearman",
    "ssim",
    "stability",
    "sufficiency",
    "untrained",
]
