"""Metrics over the maps of a run: long-form Parquet, and the statements that follow. Level 5½. Needs the extra `metrics`.

- `generate_maps` makes the maps that are missing, and `ground_truth` says where the answer is known to be.
- `evaluate` writes the values: those of maps alone (`map_metrics`) and those that ask the model (`model_metrics`).
- `summary` states them. `comparison` compares several methods, with their `agreement` and `findings`.
- `plots` and `comparison_figure` draw. `selection` chooses a method and a layer.
"""

from camscope.evaluation.comparison import Compared, compared
from camscope.evaluation.ground_truth import Evidence, evidence_of
from camscope.evaluation.map_generation import make_maps
from camscope.evaluation.metric_evaluation import Measures, measure

__all__ = ["Compared", "Evidence", "Measures", "compared", "evidence_of", "make_maps", "measure"]
