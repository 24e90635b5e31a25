"""writing: the tables of an audit, as files for those who go on from there."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.predictions import Answered
from camscope.batch.export import Cells
from camscope.batch.manifest import arrow
from camscope.evaluation import Measures
from camscope.safe_files import write_bytes, writing

if TYPE_CHECKING:
    import pyarrow as pa

METRICS, FAILURES, SUMMARY = "metrics.parquet", "failures.csv", "summary.json"
REPORT, GALLERY = "report.html", "gallery.json"
VALUES = {"localise": "", "faithfulness": "values", "robustness": "values"}
LONG = ("stage", "row", "id", "finding", "method", "layer", "control", "metric", "fill", "value", "reason")


def write_metrics(subject: Subject) -> None:
    """`metrics.parquet`."""
    with writing(subject.folder / METRICS) as file:
        arrow("parquet").write_table(metrics(subject), file)


def metrics(subject: Subject) -> "pa.Table":
    """Every value of every map, in long form."""
    parts = [
        _values(subject, stage, finding, place)
        for stage, inner in VALUES.items()
        for finding in subject.findings
        if ((place := subject.folder / stage / str(finding.index) / inner) / "run.json").is_file()
    ]
    return arrow().concat_tables(parts) if parts else _schema().empty_table()


def _schema() -> "pa.Schema":
    pa = arrow()
    kinds = {"row": pa.int64(), "control": pa.bool_(), "value": pa.float64()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in LONG])


def _values(subject: Subject, stage: str, finding: Finding, place: Path) -> "pa.Table":
    """Of one question, and of maps that know nothing."""
    pa, table = arrow(), Measures(place).table()
    asked = [one in (None, str(finding.index)) for one in table["target"].to_pylist()]
    kept = [own or control for own, control in zip(asked, table["control"].to_pylist(), strict=True)]
    table = table.filter(pa.array(kept, pa.bool_()))
    columns = {name: table[name] for name in LONG if name in table.column_names}
    columns["stage"] = pa.array([stage] * table.num_rows, pa.string())
    columns["finding"] = pa.array([finding.name] * table.num_rows, pa.string())
    return pa.table({name: columns[name] for name in LONG}, schema=_schema())


def write_failures(subject: Subject) -> int:
    """`failures.csv`: the images without an answer or without a map, and why; how many there are."""
    rows = [(subject.ids[row], "predict", why) for row, why in sorted(Answered.read(subject.folder).errors.items())]
    known = {name for name, _, _ in rows}
    table = subject.maps.table(["id", "status", "error"])
    for name, status, error in zip(*(table[one].to_pylist() for one in ("id", "status", "error")), strict=True):
        if status == "failed" and name not in known:
            known.add(name)
            rows.append((name, "explain", error or ""))
    text, cells = io.StringIO(newline=""), Cells()
    sheet = csv.writer(text)
    sheet.writerow(("id", "stage", "reason"))
    for row in rows:
        sheet.writerow(map(cells.text, row))
    write_bytes(subject.folder / FAILURES, text.getvalue().encode("utf-8-sig"))
    return len(rows)
