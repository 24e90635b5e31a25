"""A manifest in, one Parquet dataset of maps out: restartable at any instant. Floor 5. Needs the extra `batch_size`."""

from camscope.batch.batch_run import BatchRun
from camscope.batch.export import ExportResult
from camscope.batch.inspection import DatasetInspection, DatasetIssue, inspect_images
from camscope.batch.local_engine import BatchOutcome
from camscope.batch.manifest import Manifest
from camscope.batch.query import Query
from camscope.batch.result_rows import OutputNames
from camscope.batch.runner import run_batch
from camscope.batch.sources import build_manifest

__all__ = [
    "BatchOutcome",
    "BatchRun",
    "DatasetInspection",
    "DatasetIssue",
    "ExportResult",
    "Manifest",
    "OutputNames",
    "Query",
    "build_manifest",
    "inspect_images",
    "run_batch",
]
