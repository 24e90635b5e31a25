"""Metrics for the maps of a batch run, and comparisons of attribution methods. Needs the extra `metrics`."""

from camscope.evaluation.comparison_result import ComparisonResult
from camscope.evaluation.diff import RunDiff, diff_runs
from camscope.evaluation.evaluate_run import EvaluationResult, evaluate
from camscope.evaluation.ground_truth import GroundTruth, load_ground_truth
from camscope.evaluation.map_generation import generate_maps
from camscope.evaluation.method_comparison import compare_methods
from camscope.evaluation.metric_value_files import MapSelection
from camscope.evaluation.reader_study.evaluate_reader_study import ReaderStudyResult, evaluate_reader_study
from camscope.evaluation.reader_study.reader_study_estimates import MeasureEstimate

__all__ = [
    "ComparisonResult",
    "EvaluationResult",
    "GroundTruth",
    "MapSelection",
    "MeasureEstimate",
    "ReaderStudyResult",
    "RunDiff",
    "compare_methods",
    "diff_runs",
    "evaluate",
    "evaluate_reader_study",
    "generate_maps",
    "load_ground_truth",
]
