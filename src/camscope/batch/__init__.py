"""A manifest in, one Parquet dataset of maps out: restartable at any instant. Floor 5. Needs the extra `batch`."""

from camscope.batch.batch_run import Run
from camscope.batch.export import Exported
from camscope.batch.inspection import Finding, Inspection, inspect_images
from camscope.batch.local_engine import Outcome
from camscope.batch.manifest import Manifest
from camscope.batch.query import Query
from camscope.batch.result_rows import Names
from camscope.batch.runner import run_batch
from camscope.batch.sources import manifest_of

__all__ = [
    "Exported",
    "Finding",
    "Inspection",
    "Manifest",
    "Names",
    "Outcome",
    "Query",
    "Run",
    "inspect_images",
    "manifest_of",
    "run_batch",
]
