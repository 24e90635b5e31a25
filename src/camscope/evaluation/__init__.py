"""Metrics over the maps of a run, in a long-form Parquet dataset, and comparisons of methods. Needs the extra `metrics`.

- `generate_maps` computes missing maps, and `ground_truth` reads annotations.
- `evaluate` writes the values: metrics of maps alone (`map_metrics`) and metrics that need the model (`model_based_metrics`).
- `summary` computes means and differences. `method_comparison` compares several methods, with the agreement of their maps.
- `metric_plots` and `comparison_result` draw. `selection` chooses a method and a layer.
"""

from camscope.evaluation.comparison_result import ComparisonResult
from camscope.evaluation.ground_truth import GroundTruth, load_ground_truth
from camscope.evaluation.map_generation import generate_maps
from camscope.evaluation.method_comparison import compare_methods
from camscope.evaluation.run_evaluation import EvaluationResult, evaluate

__all__ = [
    "ComparisonResult",
    "EvaluationResult",
    "GroundTruth",
    "compare_methods",
    "evaluate",
    "generate_maps",
    "load_ground_truth",
]
