"""Metrics over the maps of a run: long-form Parquet, and the statements that follow. Level 5½. Needs the extra `n_metrics`.

- `generate_maps` makes the maps that are missing, and `ground_truth` says where the answer is known to be.
- `evaluate` writes the values: those of maps alone (`map_metrics`) and those that ask the model (`model_metrics`).
- `summary` states them. `comparison` compares several methods, with their `compute_agreement` and `check_dataset`.
- `plots` and `comparison_figure` draw. `selection` chooses a method and a layer.
"""

from camscope.evaluation.comparison import ComparisonResult, compare_methods
from camscope.evaluation.ground_truth import GroundTruth, load_ground_truth
from camscope.evaluation.map_generation import generate_maps
from camscope.evaluation.metric_evaluation import EvaluationResult, evaluate

__all__ = [
    "ComparisonResult",
    "EvaluationResult",
    "GroundTruth",
    "compare_methods",
    "evaluate",
    "generate_maps",
    "load_ground_truth",
]
