"""writing: the tables of an audit, as files for those who go on from there."""

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
    """`metrics.parquet`."""
    with open_atomic(context.folder / METRICS_FILE) as file:
        import_arrow("parquet").write_table(build_metrics_table(context), file)


def build_metrics_table(context: AuditContext) -> "pa.Table":
    """Every value of every map, in long form."""
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
    """Of one question, and of maps that know nothing."""
    pa, table = import_arrow(), EvaluationResult(folder).table()
    asked = [one in (None, str(finding.class_index)) for one in table["target"].to_pylist()]
    kept = [own or control for own, control in zip(asked, table["control"].to_pylist(), strict=True)]
    table = table.filter(pa.array(kept, pa.bool_()))
    columns = {name: table[name] for name in METRIC_COLUMNS if name in table.column_names}
    columns["stage"] = pa.array([stage] * table.num_rows, pa.string())
    columns["finding"] = pa.array([finding.name] * table.num_rows, pa.string())
    return pa.table({name: columns[name] for name in METRIC_COLUMNS}, schema=_build_metrics_schema())


def write_failures(context: AuditContext) -> int:
    """`failures.csv`: the images without an answer or without a map, and why; how many there are."""
    rows = [
        (context.cohort.ids[row], "predict", why)
        for row, why in sorted(Predictions.read(context.folder).errors.items())
    ]
    known = {name for name, _, _ in rows}
    table = context.maps.table(["id", "status", "error"])
    for name, status, error in zip(*(table[one].to_pylist() for one in ("id", "status", "error")), strict=True):
        if status == "failed" and name not in known:
            known.add(name)
            rows.append((name, "explain", error or ""))
    text, cells = io.StringIO(newline=""), CellEscaper()
    sheet = csv.writer(text)
    sheet.writerow(("id", "stage", "reason"))
    for row in rows:
        sheet.writerow(map(cells.escape, row))
    write_bytes(context.folder / FAILURES_FILE, text.getvalue().encode("utf-8-sig"))
    return len(rows)
