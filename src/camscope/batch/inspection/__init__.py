"""Inspect a set of images before a model uses it."""

from camscope.batch.inspection.dataset_inspection import DatasetInspection, inspect_images
from camscope.batch.inspection.dataset_issue_codes import ISSUES, DatasetIssue

__all__ = ["ISSUES", "DatasetInspection", "DatasetIssue", "inspect_images"]
