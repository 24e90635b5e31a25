"""Explain many images, and keep their maps in the Parquet files of a run. A run can be resumed, queried and exported.

Needs the extra `batch`: `pip install "camscope[batch]"`.
"""

from camscope.batch.batch_runner import BatchOptions, OverlayOptions, PrivacyOptions, run_batch
from camscope.batch.build_manifest_from_source import build_manifest
from camscope.batch.export_rows_to_files import ExportResult
from camscope.batch.image_manifest import Manifest
from camscope.batch.inspection import DatasetInspection, DatasetIssue, inspect_images
from camscope.batch.local_engine import BatchOutcome
from camscope.batch.read_and_export_batch_run import BatchRun
from camscope.batch.reader_study.export_reader_study import ReaderStudyExport, ReaderStudyOptions
from camscope.batch.result_rows import OutputNames
from camscope.batch.sql_query import Query

__all__ = [
    "BatchOptions",
    "BatchOutcome",
    "BatchRun",
    "DatasetInspection",
    "DatasetIssue",
    "ExportResult",
    "Manifest",
    "OutputNames",
    "OverlayOptions",
    "PrivacyOptions",
    "Query",
    "ReaderStudyExport",
    "ReaderStudyOptions",
    "build_manifest",
    "inspect_images",
    "run_batch",
]
