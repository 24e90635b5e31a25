"""Inspect a set of images before a model sees it."""

from camscope.batch.inspection.issues import ISSUES, DatasetIssue
from camscope.batch.inspection.report import DatasetInspection
from camscope.batch.inspection.run import inspect_images

__all__ = ["ISSUES", "DatasetInspection", "DatasetIssue", "inspect_images"]
