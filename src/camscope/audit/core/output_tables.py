"""The tables of an audit that are written for further analysis: metrics and failures."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.batch.export import CellEscaper
from camscope.batch.manifest import import_arrow
from camscope.evaluation import EvaluationResult
from camscope.safe_files import open_atomic, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa

METRICS_FILE, FAILURES_FILE, SUMMARY_FILE = "metrics.parquet", "failures.csv", "summary.json"
REPORT_FILE, GALLERY_FILE = "report.html", "gallery.json"
METRIC_FOLDERS = {"localization": "", "faithfulness": "values", "robustness": "values"}
METRIC_COLUMNS = (
    "stage",
    "row",
    "id",
    "finding",
    "method",
    "layer",
    "control",
    "metric",
    "imputation",
    "value",
    "reason",
)


def write_metrics(context: AuditContext) -> None:
    """Write `metrics.parquet`."""
    with open_atomic(context.folder / METRICS_FILE) as file:
        import_arrow("parquet").write_table(build_metrics_table(context), file)


def build_metrics_table(context: AuditContext) -> "pa.Table":
    """Return the value of every metric for every map, in long form."""
    parts = [
        _read_stage_values(context, stage, finding, place)
        for stage, inner in METRIC_FOLDERS.items()
        for finding in context.findings
        if ((place := context.folder / stage / str(finding.class_index) / inner) / "run.json").is_file()
    ]
    return import_arrow().concat_tables(parts) if parts else _build_metrics_schema().empty_table()


def _build_metrics_schema() -> "pa.Schema":
    pa = import_arrow()
    kinds = {"row": pa.int64(), "control": pa.bool_(), "value": pa.float64()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in METRIC_COLUMNS])


def _read_stage_values(context: AuditContext, stage: str, finding: Finding, folder: Path) -> "pa.Table":
    """Return the values of one stage for a finding, and those of control maps."""
    pa, table = import_arrow(), EvaluationResult(folder).table()
    has_target = [target in (None, str(finding.class_index)) for target in table["target"].to_pylist()]
    is_selected = [target or control for target, control in zip(has_target, table["control"].to_pylist(), strict=True)]
    table = table.filter(pa.array(is_selected, pa.bool_()))
    columns = {name: table[name] for name in METRIC_COLUMNS if name in table.column_names}
    columns["stage"] = pa.array([stage] * table.num_rows, pa.string())
    columns["finding"] = pa.array([finding.name] * table.num_rows, pa.string())
    return pa.table({name: columns[name] for name in METRIC_COLUMNS}, schema=_build_metrics_schema())


def write_failures(context: AuditContext) -> int:
    """Write `failures.csv`, the images without a prediction or a map, and return their number."""
    rows = [
        (context.cohort.ids[row], "predict", error)
        for row, error in sorted(Predictions.read(context.folder).errors.items())
    ]
    names = {name for name, _, _ in rows}
    table = context.maps.table(["id", "status", "error"])
    for name, status, error in zip(*(table[column].to_pylist() for column in ("id", "status", "error")), strict=True):
        if status == "failed" and name not in names:
            names.add(name)
            rows.append((name, "explain", error or ""))
    text, cells = io.StringIO(newline=""), CellEscaper()
    sheet = csv.writer(text)
    sheet.writerow(("id", "stage", "reason"))
    for row in rows:
        sheet.writerow(map(cells.escape, row))
    write_bytes(context.folder / FAILURES_FILE, text.getvalue().encode("utf-8-sig"))
    return len(rows)
