"""The first two stages of an audit: check the data, and test the model and its methods on one image."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import MaskSource
from camscope.audit.core.convert_to_summary_entries import round_significant
from camscope.audit.core.stage_result_schema import (
    RANDOM_SAMPLE_REASON,
    AnnotationSource,
    DataCheckResult,
    DataIssue,
    ExplainerInfo,
    FlowStep,
    LevelCount,
    ResolveResult,
)
from camscope.audit.core.stored_predictions import StageResults
from camscope.audit.core.subgroup_levels import (
    AGE_COLUMNS,
    format_age_band,
    is_empty_cell,
    needs_age_bands,
    sort_levels,
)
from camscope.audit.shortcuts.load_images_and_region_masks import open_region_masks
from camscope.audit.stages.columns_that_determine_label import find_columns_that_determine_label
from camscope.batch import Manifest, inspect_images
from camscope.batch.image_manifest import import_arrow
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import accepts_scans
from camscope.explainers.core.redacted_settings_text import format_without_address, redact_parameters
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest, get_loaded_model_metadata
from camscope.models import redact_file_names
from camscope.plurals import inflect

MAX_IDS_PER_ISSUE = 20  # ids listed for each issue


def check_data(context: AuditContext, results: StageResults) -> DataCheckResult:
    """Inspect the images of all splits. This also finds patients that occur in several splits."""
    data, columns = context.config.data, context.cohort.full_manifest.table.column_names
    inspection = inspect_images(
        _renumber_rows(context.cohort.full_manifest),
        patient_column=data.patient,
        split_column=data.split,
        target_column=data.label,
        mask_column=_find_ground_truth_column(context),
        group_by=[name for name in data.subgroups if name in columns],
        profile=context.config.report.profile,
        keep_columns=list(context.config.report.columns),
        all_scans=accepts_scans(context.explainers[0].preprocess),
        on_progress=context.on_progress,
    )
    issues = tuple(
        DataIssue(
            code=issue.code,
            severity=issue.severity,
            message=issue.message,
            count=issue.n_rows,
            ids=tuple(inspection.row_ids(issue.rows, MAX_IDS_PER_ISSUE)),
        )
        for issue in inspection.issues
        if issue.code != "reserved-columns"  # about tables of a batch run, which a manifest is not
    )
    return DataCheckResult(
        annotation_protocol=data.annotation_protocol,
        annotation_sources=tuple(_iter_annotation_sources(context)),
        flow=tuple(_describe_row_flow(context)),
        n_patients=len(set(context.cohort.patients.values())),
        has_patient_column=data.patient is not None,
        issues=issues,
        metadata_value_counts=inspection.value_counts,
        level_counts=tuple(_count_levels(context)),
        determining_columns=find_columns_that_determine_label(context),
    )


def _iter_annotation_sources(context: AuditContext) -> Iterator[AnnotationSource]:
    """Yield the sources of the masks of every finding and region."""
    for name, evidence in {**context.ground_truth, **open_region_masks(context)}.items():
        yield AnnotationSource(
            name=name,
            source=evidence.source,
            categories=evidence.categories,
            excluded_categories=evidence.excluded_categories,
        )


def _find_ground_truth_column(context: AuditContext) -> str | None:
    """Return the manifest column with the masks, boxes or points of the first finding."""
    named = context.config.data.ground_truth
    first = next(iter(named.values()), None) if isinstance(named, dict) else named
    first = first.column if isinstance(first, MaskSource) else first
    return first if first in context.cohort.full_manifest.table.column_names else None


def _renumber_rows(manifest: Manifest) -> Manifest:
    """Number the manifest rows from 0, and replace ages by age bands."""
    rows, table = import_arrow().array(np.arange(len(manifest))), manifest.table
    for index, name in enumerate(table.column_names):
        if name.lower() in AGE_COLUMNS and needs_age_bands(name, ages := table[name].to_pylist()):
            bands = [None if is_empty_cell(age) else format_age_band(age) for age in ages]
            table = table.set_column(index, name, import_arrow().array(bands, import_arrow().string()))
    return replace(manifest, table=table.set_column(0, "row", rows))


def _describe_row_flow(context: AuditContext) -> list[FlowStep]:
    """List how many rows remain after each step from the manifest to the audited rows."""
    data, whole = context.config.data, context.cohort.full_manifest.table
    paths = whole["path"].to_pylist()
    steps = [FlowStep(name=f"{inflect(len(paths), 'row')} of the manifest", n_rows=len(paths))]
    if data.split is not None:
        splits = map(str, whole[data.split].to_pylist())
        paths = [path for path, split in zip(paths, splits, strict=True) if split == data.split_value]
        steps.append(FlowStep(name=f"{inflect(len(paths), 'row')} of the audited split", n_rows=len(paths)))
    if lost := sum(not path for path in paths):
        steps.append(
            FlowStep(name=f"{inflect(lost, 'row')} without a path", n_rows=lost, reason="left out", is_exclusion=True)
        )
    n_audited = len(context.cohort.rows)
    reason = RANDOM_SAMPLE_REASON if n_audited < len(paths) - lost else ""
    return [*steps, FlowStep(name=f"{inflect(n_audited, 'row')} audited", n_rows=n_audited, reason=reason)]


def _count_levels(context: AuditContext) -> Iterator[LevelCount]:
    """Yield the number of rows, patients and positives for each level of each subgroup column."""
    truths = {finding.name: context.cohort.get_truth_by_row(finding) for finding in context.findings}
    for column in context.config.data.subgroups:
        level_by_row = context.cohort.get_subgroup_level_by_row(column)
        for level in sort_levels({level for level in level_by_row.values() if level is not None}):
            rows = [row for row, level_of_row in level_by_row.items() if level_of_row == level]
            yield LevelCount(
                column=column,
                level=level,
                n_rows=len(rows),
                n_patients=len({context.cohort.patients[row] for row in rows}),
                positives_by_finding={name: sum(truth[row] is True for row in rows) for name, truth in truths.items()},
            )


def try_model_on_one_image(context: AuditContext, results: StageResults) -> ResolveResult:
    """Load the model and run its methods on one image. A failing method raises its error before all images are processed."""
    rows = context.first_maps
    model, model_metadata = context.model, get_loaded_model_metadata(context.model)
    source = model_metadata.source if model_metadata else context.config.model.source
    return ResolveResult(
        model=redact_file_names(source) if context.cohort.hides_file_names else source,
        architecture=type(model).__name__,
        weights_digest=compute_model_digest(model),
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_classes=len(context.class_names),
        class_names=context.class_names,
        findings=tuple(finding.name for finding in context.findings),
        input_size=tuple(rows[0]["input_size"]),
        preprocess=format_without_address(context.explainers[0].preprocess),
        outputs=context.config.model.outputs,
        explainers=tuple(map(_build_explainer_info, context.explainers, rows)),
    )


def _build_explainer_info(explainer: Explainer, row: Mapping[str, Any]) -> ExplainerInfo:
    """Describe a method by its layer, grid, stride and settings. `row` is one of its maps."""
    stride = tuple(size / cells for size, cells in zip(row["input_size"], row["grid"], strict=True))
    return ExplainerInfo(
        method=type(explainer).name,
        title=explainer.composed_name,
        layer=row["layer"],
        grid=tuple(row["grid"]),
        stride=stride,
        settings={name: str(value) for name, value in redact_parameters(explainer.parameters).items()},
        paper=type(explainer).paper,
        stride_mm=_compute_stride_mm(row, stride),
    )


def _compute_stride_mm(row: Mapping[str, Any], stride: tuple[float, ...]) -> float | None:
    """Return the largest distance between neighboring map cells on the image, in millimeters."""
    if row["affine"] is None or row["placement"] is None:
        return None
    n = len(stride)
    linear = np.reshape(row["placement"], (n, n + 1))[:, :n] * np.asarray(stride)
    affine = np.reshape(row["affine"], (4, 4))[:3, 3 - n : 3]
    stride_mm = float(np.linalg.norm(affine @ linear, axis=0).max())
    return round_significant(stride_mm) if math.isfinite(stride_mm) else None
