"""Check the requirements of an audit before the first stage. Report all faults of the config at once."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Cohort
from camscope.audit.core.config import DataConfig, MaskSource
from camscope.audit.core.config_faults import FaultCollector
from camscope.audit.core.subgroup_levels import MAX_LEVELS_PER_SUBGROUP
from camscope.audit.shortcuts.load_images_and_region_masks import (
    ORGAN_REGION,
    list_requested_regions,
    open_region_masks,
)
from camscope.batch.build_manifest_from_source import redact_scan_path
from camscope.batch.path_resolver import find_common_folder, is_url
from camscope.errors import CamscopeError, CategoryError, InputError, PreprocessError, UndefinedError
from camscope.evaluation.ground_truth import EVIDENCE_FORMATS, AnnotationColumn, GroundTruth, ImageSize, is_mask_path
from camscope.images.files.find_and_open_image_files import split_path_and_index
from camscope.images.scans.scan import parse_window
from camscope.plurals import inflect, plural

MAX_PROBED_MASKS = 32  # masks and boxes of each source that are read before the audit begins
MIN_READABLE_SHARE = 0.5  # of them
MAX_REASON_CHARACTERS = 300
KEYS_NEEDED_TO_READ_IMAGES = (("model",), ("explain",), ("data", "manifest"), ("data", "root"), ("data", "window"))


def validate_config(context: AuditContext) -> None:
    """Check the settings of all stages before the first stage runs. Raise an error for a setting that would fail later.

    All faults are reported together, each as far as it can be checked without the others.
    """
    faults = context.faults
    checked = _drop_missing_columns(context)
    with faults.collect("data.manifest"):
        _check_split_and_subgroup_levels(checked, faults)
        _check_images_exist_inside_root(checked, faults)
    _check_region_names_and_masks(checked, faults)
    if (window := checked.config.data.window) is not None:
        with faults.collect("data.window"):
            parse_window(window)
    _check_model_and_labels(checked, faults)
    if not any(fault.key[: len(key)] == key for fault in faults.faults for key in KEYS_NEEDED_TO_READ_IMAGES):
        _check_masks_readable(checked)
    faults.raise_if_any()


def _drop_missing_columns(context: AuditContext) -> AuditContext:
    """Record each setting whose column is missing in the manifest. Return a context without these settings."""
    config, faults = context.config, context.faults
    try:
        missing = dict(context.cohort.iter_settings_with_missing_column())
    except CamscopeError as error:
        faults.add("data.manifest", str(error), error)
        faults.raise_if_any()
        raise
    if not missing:
        return context
    for key, problem in missing.items():
        faults.add(key, problem, InputError(problem))
    data, regions = config.data, config.regions
    values = {name: getattr(data, name) for name in DataConfig.model_fields if f"data.{name}" not in missing}
    if "split" not in values:
        values["split_value"] = None
    columns = context.cohort.column_names
    values["subgroups"] = tuple(name for name in data.subgroups if name in columns)
    nothing = {name: field.get_default(call_default_factory=True) for name, field in DataConfig.model_fields.items()}
    changes: dict[str, Any] = {
        "data": data.model_copy(update={**nothing, **values}),
        "regions": regions.model_copy(
            update={
                "organ": None if "regions.organ" in missing else regions.organ,
                "columns": {k: v for k, v in regions.columns.items() if f"regions.columns.{k}" not in missing},
            }
        ),
    }
    if "report.columns" in missing:
        changes["report"] = config.report.model_copy(update={"columns": ()})
    return AuditContext(config.model_copy(update=changes), context.folder, faults=faults)


def _check_split_and_subgroup_levels(context: AuditContext, faults: FaultCollector) -> None:
    """Check that the split has rows. Check that each subgroup column has few enough levels."""
    cohort: Cohort = context.cohort
    with faults.collect("data.split_value" if context.config.data.split else "data.manifest"):
        _ = cohort.rows
        for column in context.config.data.subgroups:
            n_levels = len({*cohort.get_subgroup_level_by_row(column).values()} - {None})
            if n_levels > MAX_LEVELS_PER_SUBGROUP:
                levels = f"{column!r} has {plural(n_levels, 'level')}; expected at most {MAX_LEVELS_PER_SUBGROUP}"
                faults.add("data.subgroups", levels, InputError(f"subgroups: {levels}"))


def _check_images_exist_inside_root(context: AuditContext, faults: FaultCollector) -> None:
    """Check that most images lie inside the root. Check that the first few image files exist."""
    manifest = context.cohort.manifest
    outside = manifest.find_paths_outside_root()
    if 2 * len(outside) > len(manifest):
        masks = [mask for name in _list_mask_columns(context) for mask in manifest.find_paths_outside_root(name)]
        message = describe_outside_paths(outside, masks, len(manifest), manifest.path_resolver.base_folder)
        faults.add("data.root", message, InputError(message))
        return
    if manifest.images is not None:
        return
    resolver = manifest.path_resolver
    paths = [row["path"] for row in manifest.rows(0, MAX_PROBED_MASKS) if resolver.is_allowed(row["path"])]
    missing = [
        path
        for path in paths
        if not is_url(path) and not os.path.lexists(split_path_and_index(resolver.resolve(path))[0])
    ]
    if paths and len(missing) == len(paths):
        message = (
            f"none of the first {plural(len(paths), 'image')} exists, such as {redact_scan_path(missing[0])}: relative paths "
            f"begin in {resolver.base_folder.resolve()}; set root in [data] to the folder where they begin"
        )
        faults.add("data.root", message, InputError(message))


def _list_mask_columns(context: AuditContext) -> list[str]:
    """Return the manifest columns from which the config takes masks."""
    data, regions = context.config.data, context.config.regions
    named = data.ground_truth.values() if isinstance(data.ground_truth, dict) else [data.ground_truth]
    sources = [*named, regions.organ, *regions.columns.values()]
    names = [source.column if isinstance(source, MaskSource) else source for source in sources]
    return [name for name in names if name in context.cohort.manifest.table.column_names and name is not None]


def describe_outside_paths(outside: Sequence[str], masks: Iterable[object], n_paths: int, folder: Path) -> str:
    """State the number of image paths outside a folder. Name the config setting that allows these images and masks."""
    common = find_common_folder([*outside, *filter(is_mask_path, masks)])
    remedy = "anywhere = true" if common is None else f"root = {json.dumps(common, ensure_ascii=False)}"
    lie = (
        f"{len(outside)} of {plural(n_paths, 'path')} {inflect(len(outside), 'lies', 'lie')} outside {folder.resolve()}"
    )
    return f"{lie}, such as {redact_scan_path(outside[0])}: set {remedy} in [data]"


def _check_region_names_and_masks(context: AuditContext, faults: FaultCollector) -> None:
    """Check the names of the regions, and check that their masks can be opened."""
    with faults.collect("regions"):
        list_requested_regions(context)
    with faults.collect("regions"):
        open_region_masks(context)


def _check_model_and_labels(context: AuditContext, faults: FaultCollector) -> None:
    """Check the model, and the settings that depend on it: findings, methods, preprocessing and labels."""
    cohort, data = context.cohort, context.config.data
    with faults.collect("model"):
        _ = context.model
        with faults.collect("explain"):
            if context.explainers[0].preprocess is None and cohort.manifest.images is None:
                faults.add("model.preprocess", str(error := build_missing_preprocess_error()), error)
        n_faults = len(faults.faults)
        if data.label:
            with faults.collect("data.label"):
                cohort.check_labels_are_classes(context.class_names)
        has_truth = bool(data.label or data.labels) and len(faults.faults) == n_faults
        truth_key = "data.label" if data.label else "data.labels"
        if data.label and context.config.model.outputs == "sigmoid":
            truth_key = "model.outputs"
        for name in context.config.explain.findings:
            with faults.collect("explain.findings"):
                context.resolve_finding(name)
        with faults.collect("explain.findings"):
            findings = context.findings
            with faults.collect("data.ground_truth"):
                _ = context.ground_truth
            for finding in findings if has_truth else ():
                with faults.collect(truth_key):
                    truths = [truth for truth in cohort.get_truth_by_row(finding).values() if truth is not None]
                    if not 0 < sum(truths) < len(truths):
                        raise InputError(
                            f"{sum(truths)} of {plural(len(truths), 'labeled row')} have the finding {finding.name!r}; "
                            "expected rows with and without the finding. Check that "
                            f"{data.label or 'its column'!r} is the label column"
                        )


def build_missing_preprocess_error() -> PreprocessError:
    """Return the error for a model whose preprocessing is unknown."""
    return PreprocessError(
        'the model does not declare its preprocessing: write preprocess = "imagenet" in [model], or PREPROCESSING in the '
        "file of its factory"
    )


def _check_masks_readable(context: AuditContext) -> None:
    """Try some masks of each mask source. Record a fault if fewer than half of the masks are readable."""
    sources: dict[str, GroundTruth] = {}
    with context.faults.collect("data.ground_truth"):
        sources |= {f"data.ground_truth.{name}": source for name, source in context.ground_truth.items()}
    with context.faults.collect("regions"):
        for name, masks in open_region_masks(context).items():
            sources["regions.organ" if name == ORGAN_REGION else f"regions.columns.{name}"] = masks
    image_sizes: dict[int, ImageSize | None] = {}
    for key, source in sources.items():
        with context.faults.collect(key):
            _check_half_of_masks_readable(context, source, image_sizes)


def _check_half_of_masks_readable(
    context: AuditContext, ground_truth: GroundTruth, image_sizes: dict[int, ImageSize | None]
) -> None:
    """Read some masks of a source. Raise an InputError if fewer than half of these masks are readable."""
    n_read, problems, missing = 0, list[str](), "no image has a value"
    for row in _sample_annotated_rows(context, ground_truth):
        try:
            if (size := _read_image_size(context, row, image_sizes)) is not None:
                ground_truth.load_mask(row, size)
                n_read += 1
        except UndefinedError as error:  # the image has no annotation
            missing = str(error)
        except CategoryError:
            raise
        except CamscopeError as error:
            problems.append(_describe_unread_mask(ground_truth, row, error))
    n_tried = n_read + len(problems)
    rows = context.cohort.manifest.table.to_pylist() if not n_tried else []
    if rows and not any(_has_annotation(ground_truth, row) for row in rows):
        raise InputError(
            f"{ground_truth.source} has no annotation of any image: {missing}. Accepted are {EVIDENCE_FORMATS}"
        )
    if n_tried and n_read < MIN_READABLE_SHARE * n_tried:
        raise InputError(
            f"{n_read} of {plural(n_tried, 'annotation')} of {ground_truth.source} can be read. The first that cannot is "
            f"{problems[0]}. Accepted are {EVIDENCE_FORMATS}"
        )


def _has_annotation(ground_truth: GroundTruth, row: Mapping[str, Any]) -> bool:
    """Whether a row has an annotation, readable or not."""
    try:
        ground_truth.load_mask(row, (1, 1))
    except UndefinedError:
        return False
    except CamscopeError:  # such as a mask of another size
        return True
    return True


def _sample_annotated_rows(context: AuditContext, ground_truth: GroundTruth) -> Iterator[Mapping[str, Any]]:
    """Yield a few manifest rows, evenly spaced. If the annotations come from a column, its empty cells are skipped."""
    manifest = context.cohort.manifest
    positions = list(range(len(manifest)))
    if isinstance(ground_truth, AnnotationColumn):
        values = manifest.table[ground_truth.name].to_pylist()
        positions = [position for position in positions if values[position] not in (None, "", [])]
    for position in positions[:: max(1, len(positions) // MAX_PROBED_MASKS)][:MAX_PROBED_MASKS]:
        yield manifest.rows(position, position + 1)[0]


def _read_image_size(
    context: AuditContext, row: Mapping[str, Any], image_sizes: dict[int, ImageSize | None]
) -> ImageSize | None:
    """Return the size of an image. Return None for an unreadable image, and for a preprocessing that moves pixels in an
    unknown way.
    """
    number = row["row"]
    if number not in image_sizes:
        item = next(context.load_images([number])).item
        image_sizes[number] = None if item is None or item.placement is None else tuple(item.placement.image_size)
    return image_sizes[number]


def _describe_unread_mask(ground_truth: GroundTruth, row: Mapping[str, Any], error: CamscopeError) -> str:
    """Say which annotation cannot be read, and why. File names of scans are hidden."""
    reason = str(error)
    if not isinstance(ground_truth, AnnotationColumn) or not is_mask_path(value := row[ground_truth.name]):
        return reason[:MAX_REASON_CHARACTERS]
    display_name = redact_scan_path(value)
    for name in (str(ground_truth.locations.base_folder / value), value):
        reason = reason.replace(name, display_name)
    return f"{display_name!r} in row {row['row']}: {reason[:MAX_REASON_CHARACTERS]}"
