"""Metrics of attribution maps as pure functions, and statistics of their values over images."""

from camscope.metrics.average_drop_and_gain import adcc, arcc, average_drop, average_gain, average_increase
from camscope.metrics.deletion_insertion import (
    aopc,
    deletion,
    insertion,
    lerf_morf_gap,
    necessity,
    removal_curve,
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
from camscope.metrics.imputation import NoisyLinearImputation
from camscope.metrics.input_transforms import (
    GaussianNoise,
    InputTransform,
    IntensityWindow,
    JPEGCompression,
    Resampling,
    Rotation,
    Shift,
)
from camscope.metrics.intervals_and_p_values import adjust_holm, compute_min_p_value
from camscope.metrics.localization import (
    average_precision,
    centroid_distance,
    dice_at_mask_area,
    energy_inside,
    enrichment,
    iou,
    iou_otsu,
    iou_over_thresholds,
    peak_distance,
    pointing_game,
    rank_accuracy,
)
from camscope.metrics.map_complexity import effective_area, entropy, sparseness
from camscope.metrics.map_similarity import SIMILARITIES, hog_correlation, jaccard, pearson, spearman, ssim
from camscope.metrics.mean_estimates import Estimate, estimate_difference, estimate_mean
from camscope.metrics.metric_registry import METRICS, Metric, MetricValues
from camscope.metrics.model_scorer import ModelScorer, scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.metrics.randomization_result import RandomizationResult, RandomizationVerdict
from camscope.metrics.randomization_tests import random_logit, run_randomization_test
from camscope.metrics.sensitivity_to_noise import average_sensitivity, max_sensitivity
from camscope.metrics.stability_under_transforms import (
    TransformAgreement,
    acquisition_stability,
    compare_under_transforms,
    stability,
)
from camscope.metrics.stability_when_repeated_or_batched import batch_invariance, determinism
from camscope.metrics.weight_randomization import randomize_weights

__all__ = [
    "METRICS",
    "SIMILARITIES",
    "Estimate",
    "GaussianNoise",
    "InputTransform",
    "IntensityWindow",
    "JPEGCompression",
    "Metric",
    "MetricValues",
    "ModelScorer",
    "NoisyLinearImputation",
    "PerturbationTest",
    "RandomizationResult",
    "RandomizationVerdict",
    "Resampling",
    "Rotation",
    "Shift",
    "TransformAgreement",
    "acquisition_stability",
    "adcc",
    "adjust_holm",
    "aopc",
    "arcc",
    "average_drop",
    "average_gain",
    "average_increase",
    "average_precision",
    "average_sensitivity",
    "batch_invariance",
    "centroid_distance",
    "compare_under_transforms",
    "completeness_gap",
    "compute_min_p_value",
    "deletion",
    "determinism",
    "dice_at_mask_area",
    "effective_area",
    "energy_inside",
    "enrichment",
    "entropy",
    "estimate_difference",
    "estimate_mean",
    "faithfulness_correlation",
    "hog_correlation",
    "infidelity",
    "insertion",
    "iou",
    "iou_otsu",
    "iou_over_thresholds",
    "jaccard",
    "lerf_morf_gap",
    "max_sensitivity",
    "necessity",
    "peak_distance",
    "pearson",
    "pointing_game",
    "random_logit",
    "randomize_weights",
    "rank_accuracy",
    "removal_curve",
    "road",
    "road_lerf",
    "road_morf",
    "run_randomization_test",
    "scoring_scope",
    "sensitivity_n",
    "sparseness",
    "spearman",
    "ssim",
    "stability",
    "sufficiency",
]
