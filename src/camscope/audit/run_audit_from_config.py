"""Run an audit from its config to its report, and write the results into a folder."""

import csv
import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.atomic_writes_and_folder_locks import (
    folder_locked,
    open_atomic,
    write_bytes,
)
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.core.summary_schema import Summary
from camscope.audit.finished_audit import AuditRun
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.audit_files_safe_to_replace import (
    FAILURES_FILE,
    GALLERY_FILE,
    METRICS_FILE,
    REPORT_FILE,
    REPORT_STAGE,
    SUMMARY_FILE,
    log_stage_files,
)
from camscope.audit.replan_remaining_stages import EstimateCallback
from camscope.audit.report.gallery import PredictedImage, build_gallery
from camscope.audit.report.render_html_page import create_template_environment, render_page
from camscope.audit.run_stages import (
    StageProgressCallback,
    build_summary,
    check_images_unchanged,
    prepare_folder_and_digest_inputs,
    run_stages,
    to_json_bytes,
)
from camscope.batch.csv_export import CellEscaper
from camscope.batch.image_manifest import import_arrow
from camscope.errors import CamscopeError, InputError, OutputError
from camscope.evaluation import EvaluationResult
from camscope.metrics.metric_registry import Mask
from camscope.optional_packages import require

if TYPE_CHECKING:
    import pyarrow as pa


METRIC_FOLDERS = {
    "localization": ("",),
    "faithfulness": ("values", "look-*/values"),
    "robustness": ("values", "look-*/values"),
}  # patterns inside the folder of a finding


def run_audit(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    output: str | os.PathLike[str] = "camscope-audit",
    *,
    budget: str | None = None,
    overwrite: bool = False,
    on_progress: StageProgressCallback | None = None,
    on_estimate: EstimateCallback | None = None,
) -> "AuditRun":
    """Audit a model and write the results into a folder.

    An interrupted audit continues when it is started again, and ends with the same numbers and the same report.

    Args:
        config: A `Config`, a mapping of its tables, or the TOML file that `camscope audit init` writes.
        output: The folder of the audit.
        budget: The time that the audit may take, such as "10m", in place of the config's `budget`.
        overwrite: Replace an audit of another config, data or model in the folder.
        on_progress: Called with the stage, the number of items done, and their total.
        on_estimate: Called with the estimated seconds of each remaining stage, and again when finished stages correct it.

    Returns:
        The finished audit.

    Raises:
        InputError: The config does not fit the manifest or the model.
        OutputError: The folder holds another audit, or files of another program.

    >>> import tempfile
    >>> config = {
    ...     "n_resamples": 200,
    ...     "skip": ["localization", "faithfulness", "sanity", "robustness", "shortcut"],  # for a quick example
    ...     "data": {"manifest": str(image_folder / "manifest.csv"), "label": "label", "patient": "patient"},
    ...     "model": {"source": "phantom"},
    ...     "explain": {"findings": ["nodule"], "methods": ["gradcam"]},
    ... }
    >>> run_audit(config, tempfile.mkdtemp()).n_failures
    0

    """
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; expected a folder for the audit")
    parsed, faults = Config.parse_source(config)
    if parsed is None:
        faults.raise_if_any()
        raise InputError("the config has no settings")
    if budget is not None:
        parsed = Config.from_source(parsed.model_dump() | {"budget": budget})
    context = AuditContext(parsed, folder, faults=faults)
    report_progress = on_progress or (lambda stage, done, total: None)
    _import_packages_of_report()
    with folder_locked(context.folder):
        identity, image_digests = prepare_folder_and_digest_inputs(context, report_progress, overwrite=overwrite)
        provenance_file.log_audit_start(context, is_restart=overwrite)
        results = run_stages(context, report_progress, on_estimate)
        check_images_unchanged(
            context.folder, image_digests, provenance_file.replace_digests_of_explained_images(context, image_digests)
        )
        summary = build_summary(context, results, identity)
        _write_metrics(context)
        _write_failures(context)
        write_bytes(context.folder / SUMMARY_FILE, to_json_bytes(summary.model_dump(mode="json")))
        _write_report(context, summary, provenance_file.collect_provenance_facts(context, identity))
        log_stage_files(context.folder, REPORT_STAGE)
        provenance_file.write_provenance(context, identity)
    return AuditRun(context.folder)


def _import_packages_of_report() -> None:
    """Import all packages that draw and write the report. A package upgrade during a long audit then cannot break the report."""
    create_template_environment()
    for name in ("matplotlib.figure", "matplotlib.style", "matplotlib.backends.backend_svg"):
        require(name, extra="audit")


def _write_metrics(context: AuditContext) -> None:
    """Write `metrics.parquet`, with one row for each metric value of each map."""
    pa = import_arrow()
    text_columns = ("id", "finding", "method", "layer")
    types = {"stage": pa.string(), "row": pa.int64(), **dict.fromkeys(text_columns, pa.string()), "control": pa.bool_()}
    types |= {"metric": pa.string(), "imputation": pa.string(), "value": pa.float64(), "reason": pa.string()}
    schema = pa.schema(types)
    parts = [schema.empty_table()]
    for stage, patterns in METRIC_FOLDERS.items():
        for finding in context.findings:
            place = context.folder / stage / str(finding.class_index)
            for run_file in sorted(
                path for pattern in patterns for path in place.glob(f"{pattern}/run.json".lstrip("/"))
            ):
                folder = run_file.parent
                table = _read_metric_rows(folder, str(finding.class_index))
                columns = {name: table[name] for name in types if name in table.column_names}
                for name, text in (("stage", stage), ("finding", finding.name)):
                    columns[name] = pa.array([text] * table.num_rows, pa.string())
                parts.append(pa.table({name: columns[name] for name in types}, schema=schema))
    with open_atomic(context.folder / METRICS_FILE) as file:
        import_arrow("parquet").write_table(pa.concat_tables(parts), file)


def _read_metric_rows(folder: Path, target: str) -> "pa.Table":
    """Read the metric values of one finding and of the control maps. They are in the folder of a stage."""
    table = EvaluationResult(folder).table()
    rows = zip(table["target"].to_pylist(), table["control"].to_pylist(), strict=True)
    is_selected = [name in (None, target) or control for name, control in rows]
    return table.filter(import_arrow().array(is_selected, import_arrow().bool_()))


def _write_failures(context: AuditContext) -> None:
    """Write `failures.csv`. It lists the images that lack a prediction or a map."""
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
        sheet.writerow(map(cells.to_csv_cell, (name, stage, reason)))
    write_bytes(context.folder / FAILURES_FILE, text.getvalue().encode("utf-8-sig"))


def _write_report(context: AuditContext, summary: Summary, provenance: Mapping[str, Any]) -> None:
    """Write the HTML report, and the file that lists its gallery images."""
    predictions, ids = Predictions.read(context.folder), context.cohort.ids
    truths = {finding.name: context.cohort.get_truth_by_row(finding) for finding in context.findings}
    images = [
        PredictedImage(
            row,
            ids[row],
            dict(zip(predictions.findings, log_odds.tolist(), strict=True)),
            {name: truth.get(row) for name, truth in truths.items()},
        )
        for row, log_odds in zip(predictions.rows, predictions.log_odds, strict=True)
    ]
    gallery = build_gallery(
        context.maps,
        summary,
        images,
        {finding.name: str(finding.class_index) for finding in context.findings},
        n_random_images=context.config.sample_sizes.gallery,
        allow_burned_in_text=context.config.report.allow_burned_in_text,
        load_mask=partial(_load_finding_mask, context),
    )
    write_bytes(context.folder / GALLERY_FILE, to_json_bytes(gallery.as_dict))
    write_bytes(context.folder / REPORT_FILE, render_page(summary, gallery, provenance).encode())


def _load_finding_mask(context: AuditContext, row: int, finding: str, size: tuple[int, ...]) -> Mask | None:
    """Load the mask of a finding in an image. Return None if no readable annotation exists."""
    ground_truth, manifest = context.ground_truth.get(finding), context.cohort.manifest
    if ground_truth is None:
        return None
    position = context.cohort.manifest_position_by_row[row]
    try:
        return ground_truth.load_mask(manifest.rows(position, position + 1)[0], size)
    except CamscopeError:  # missing or damaged annotations are counted by the stages
        return None
