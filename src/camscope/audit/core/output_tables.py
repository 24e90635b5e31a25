"""The tables of an audit that are written for further analysis: metrics and failures."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

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
TEXT_COLUMNS = ("id", "finding", "method", "layer")


def write_metrics(context: AuditContext) -> None:
    """Write `metrics.parquet`."""
    with open_atomic(context.folder / METRICS_FILE) as file:
        import_arrow("parquet").write_table(build_metrics_table(context), file)


def build_metrics_table(context: AuditContext) -> "pa.Table":
    """Return the value of every metric for every map, in long form."""
    pa = import_arrow()
    types = {"stage": pa.string(), "row": pa.int64(), **dict.fromkeys(TEXT_COLUMNS, pa.string()), "control": pa.bool_()}
    types |= {"metric": pa.string(), "imputation": pa.string(), "value": pa.float64(), "reason": pa.string()}
    schema = pa.schema(types)
    parts = [schema.empty_table()]
    for stage, inner in METRIC_FOLDERS.items():
        for finding in context.findings:
            folder = context.folder / stage / str(finding.class_index) / inner
            if (folder / "run.json").is_file():
                table = _read_stage_values(folder, str(finding.class_index))
                columns = {name: table[name] for name in types if name in table.column_names}
                for name, text in (("stage", stage), ("finding", finding.name)):
                    columns[name] = pa.array([text] * table.num_rows, pa.string())
                parts.append(pa.table({name: columns[name] for name in types}, schema=schema))
    return pa.concat_tables(parts)


def _read_stage_values(folder: Path, target: str) -> "pa.Table":
    """Return the values of one stage for a finding, and those of control maps."""
    table = EvaluationResult(folder).table()
    rows = zip(table["target"].to_pylist(), table["control"].to_pylist(), strict=True)
    is_selected = [name in (None, target) or control for name, control in rows]
    return table.filter(import_arrow().array(is_selected, import_arrow().bool_()))


def write_failures(context: AuditContext) -> int:
    """Write `failures.csv`, the images without a prediction or a map, and return their number."""
    errors = Predictions.read(context.folder).errors
    rows = {context.cohort.ids[row]: ("predict", error) for row, error in sorted(errors.items())}
    columns = ["id", "status", "error"]
    table = context.maps.table(columns)
    for name, status, error in zip(*(table[column].to_pylist() for column in columns), strict=True):
        if status == "failed":
            rows.setdefault(name, ("explain", error or ""))
    text, cells = io.StringIO(newline=""), CellEscaper()
    sheet = csv.writer(text)
    sheet.writerow(("id", "stage", "reason"))
    for name, (stage, reason) in rows.items():
        sheet.writerow(map(cells.escape, (name, stage, reason)))
    write_bytes(context.folder / FAILURES_FILE, text.getvalue().encode("utf-8-sig"))
    return len(rows)
