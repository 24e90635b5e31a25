"""Instruments that test the claim of a map, as pure functions. Floor 4."""

from camscope.metrics.acquisition import Compression, Resampling, Window
from camscope.metrics.base import METRICS, Metric
from camscope.metrics.changes import Change, Noise, Rotation, Shift
from camscope.metrics.complexity import effective_area, entropy, sparseness
from camscope.metrics.fills import Imputation
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
from camscope.metrics.masking import adcc, average_drop, average_gain, average_increase
from camscope.metrics.randomised import Randomised
from camscope.metrics.removal import aopc, curve, deletion, insertion, lerf_morf_gap, necessity, sufficiency
from camscope.metrics.remove_and_debias import road, road_lerf, road_morf
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
from camscope.metrics.sanity import random_logit, randomisation
from camscope.metrics.scores import Scores, scoring
from camscope.metrics.sensitivity import completeness_gap, faithfulness_correlation, infidelity, sensitivity_n
from camscope.metrics.similarity import SIMILARITIES, hog_correlation, jaccard, pearson, spearman, ssim
from camscope.metrics.statistics import Estimate, difference, estimated, holm, least_p
from camscope.metrics.trial import Trial
from camscope.metrics.values import Values
from camscope.metrics.verdicts import Verdict

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
