"""Compare two runs of the same images, such as those of two checkpoints, and check conditions on what changed."""

from camscope.evaluation.diff.compare_matched_images import diff_runs
from camscope.evaluation.diff.fail_conditions import ConditionResult, FailCondition
from camscope.evaluation.diff.run_diff import ImageChange, MapChange, RunDiff

__all__ = ["ConditionResult", "FailCondition", "ImageChange", "MapChange", "RunDiff", "diff_runs"]
