"""The runner of an audit: checks the config and the folder, runs the stages in order, and builds the summary.

Every stage writes its result when it is done. An audit that was interrupted continues with the first missing result.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import (
    DataCheckResult,
    ExplainResult,
    MetricsResult,
    PredictResult,
    ResolveResult,
    SanityResult,
    ShortcutResult,
    StageResult,
    Summary,
)
from camscope.audit.core.stage_results import StageResults
from camscope.audit.core.subgroup_levels import MAX_LEVELS_PER_SUBGROUP
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import digest_images, find_changed_images
from camscope.audit.provenance.file_ownership import (
    PLAN_FILE,
    REPORT_STAGE,
    STAGES_FOLDER,
    is_plan,
    list_audit_files,
    log_interrupted_stages,
    log_stage_files,
    log_stage_start,
    remove_outputs,
)
from camscope.audit.shortcuts.region_samples import list_requested_regions, open_region_masks
from camscope.audit.stages.data_and_model import check_data, resolve_model
from camscope.audit.stages.map_quality import (
    evaluate_faithfulness,
    evaluate_localization,
    evaluate_robustness,
    evaluate_sanity,
)
from camscope.audit.stages.predictions_and_maps import explain_images, predict_images
from camscope.audit.stages.shortcut import analyze_shortcuts
from camscope.audit.time_estimate import estimate_stage_seconds
from camscope.batch.run_store import TEMPORARY_FILE_PATTERN
from camscope.errors import CamscopeError, CategoryError, InputError, OutputError, PreprocessError
from camscope.evaluation.ground_truth import GroundTruth
from camscope.images.scans.scan import Window
from camscope.plurals import plural
from camscope.safe_files import build_output_path, write_bytes

IMAGES_KEY = "images"
ESTIMATE_AFTER_STAGE = "resolve"  # this stage has run the model and the methods once
MAX_PROBED_MASKS = 32  # masks that are searched for several labels before the audit begins
StageProgressCallback = Callable[[str, int, int], None]  # stage, number of items done, total number
EstimateCallback = Callable[[Mapping[str, float]], None]  # stage -> estimated seconds
ImageDigests = Mapping[str, str | None]  # image id -> sha256, None where the image cannot be read


@dataclass(frozen=True)
class StageSpec:
    """A stage: its function and the class of its result."""

    function: Callable[[AuditContext, StageResults], StageResult]
    result_cls: type[StageResult]
    is_optional: bool = False


STAGES: dict[str, StageSpec] = {
    "check": StageSpec(check_data, DataCheckResult),
    "resolve": StageSpec(resolve_model, ResolveResult),
    "predict": StageSpec(predict_images, PredictResult),
    "explain": StageSpec(explain_images, ExplainResult),
    "localization": StageSpec(evaluate_localization, MetricsResult, is_optional=True),
    "faithfulness": StageSpec(evaluate_faithfulness, MetricsResult, is_optional=True),
    "sanity": StageSpec(evaluate_sanity, SanityResult, is_optional=True),
    "robustness": StageSpec(evaluate_robustness, MetricsResult, is_optional=True),
    "shortcut": StageSpec(analyze_shortcuts, ShortcutResult, is_optional=True),
}


class AuditInputs(NamedTuple):
    """What an audit is computed from, as digests: `identity` by name, and the digest of each image."""

    identity: dict[str, str]
    image_digests: ImageDigests


def prepare_folder(context: AuditContext, on_progress: StageProgressCallback, *, overwrite: bool) -> AuditInputs:
    """Validate the config, claim the folder for this audit, and return the digests of its inputs.

    The folder must be new, or belong to an audit of the same config, data, images, weights and version. All images are
    read here, before any stage uses them; `on_progress` reports them as the stage "images".
    """
    validate_config(context)
    _check_audit_folder(context.folder)
    identity = provenance.compute_identity(context)
    plan_file, plan = context.folder / PLAN_FILE, None
    has_results = any((context.folder / STAGES_FOLDER).glob("*.json"))  # a plan alone holds no work that could be lost
    if plan_file.is_file() and has_results and not overwrite:
        plan = _load_json_or_none(plan_file)
    if plan is not None:
        _check_same_audit(context.folder, identity, plan)
    list_audit_files(context.folder)
    image_digests = digest_images(context, lambda done, total: on_progress(IMAGES_KEY, done, total))
    if plan is not None:
        check_images_unchanged(context.folder, image_digests, plan.get(IMAGES_KEY))
        log_interrupted_stages(context.folder)
    else:
        remove_outputs(context.folder)
        log_stage_start(context.folder, REPORT_STAGE)
        write_bytes(plan_file, to_json_bytes({**identity, IMAGES_KEY: image_digests}))
    return AuditInputs(identity, image_digests)


def run_stages(
    context: AuditContext, on_progress: StageProgressCallback, on_estimate: EstimateCallback | None = None
) -> StageResults:
    """Return the results of all stages; results that the folder already holds are read instead of computed."""
    results = StageResults(context.folder)
    for name, stage in STAGES.items():
        stored = _load_stage_result(context.folder, name, stage)
        results[name] = stored or _run_stage(context, name, stage, results, on_progress)
        if name == ESTIMATE_AFTER_STAGE and on_estimate is not None and stored is None:
            seconds_by_stage = estimate_stage_seconds(context)
            on_estimate({name: seconds for name, seconds in seconds_by_stage.items() if name not in results})
    return results


def _check_audit_folder(folder: Path) -> None:
    """Raise an OutputError for a folder that holds files but no audit; other programs may also write `audit.json`."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    if any(not TEMPORARY_FILE_PATTERN.fullmatch(name) for name in names) and not is_plan(folder / PLAN_FILE):
        raise OutputError(f"{folder} exists and is not an audit; choose another folder")


def _check_same_audit(folder: Path, identity: Mapping[str, str], plan: Any) -> None:
    for name in identity:
        if not isinstance(plan, dict) or plan.get(name) != identity[name]:
            raise OutputError(
                f"{folder} holds an audit with another {name}: choose another folder, or allow overwriting"
            )


def check_images_unchanged(folder: Path, image_digests: ImageDigests, previous: Any) -> None:
    """Raise an OutputError where images differ from `previous`; the outputs would mix results of old and new images."""
    if changed := find_changed_images(image_digests, previous if isinstance(previous, dict) else {}):
        raise OutputError(
            f"{folder}: {len(changed)} of {plural(len(image_digests), 'image')} differ from those that its stages have read: "
            "choose another folder, or allow overwriting"
        )


def _run_stage(
    context: AuditContext, name: str, stage: StageSpec, results: StageResults, on_progress: StageProgressCallback
) -> StageResult:
    """Run a stage and write its result, also that of a stage that the config skips."""
    start = time.monotonic()
    if name in context.config.skip:
        result = stage.result_cls(tested=False, reason="skipped by the config")
    else:
        on_progress(name, 0, 1)
        class_indices = [finding.class_index for finding in context.findings] if name != "check" else []
        log_stage_start(context.folder, name, class_indices)
        context.on_progress = lambda done, total: on_progress(name, done, total)
        result = stage.function(context, results)
    document = to_json_bytes(result.model_dump(mode="json"))
    write_bytes(build_output_path(context.folder, STAGES_FOLDER, f"{name}.json"), document)
    log_stage_files(context.folder, name)
    provenance.append_event(context.folder, {"stage": name, "seconds": round(time.monotonic() - start, 3)})
    return stage.result_cls.model_validate_json(document)  # exactly what a resumed audit reads


def _load_stage_result(folder: Path, name: str, stage: StageSpec) -> StageResult | None:
    """Return the stored result of a stage; None where it is missing or incomplete."""
    document = _load_json_or_none(folder / STAGES_FOLDER / f"{name}.json")
    if document is None:
        return None
    try:
        return stage.result_cls.model_validate(document)
    except ValidationError:
        return None


def _load_json_or_none(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def to_json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return sorted JSON without NaN; equal documents give equal bytes."""
    return (json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def build_summary(context: AuditContext, stage_results: Mapping[str, Any], identity: Mapping[str, str]) -> Summary:
    """Return the summary: the results of all stages, and the verdicts that follow from them."""
    from camscope.audit.verdicts import derive_verdicts
    from camscope.audit.verdicts.limitations import list_limitations, list_warnings
    from camscope.version import __version__

    config = context.config
    summary = Summary(
        camscope_version=__version__,
        title=config.title,
        intended_use=config.intended_use,
        config_digest=identity["config"],
        data_digest=identity["data"],
        seed=config.seed,
        n_resamples=config.n_resamples,
        margins=config.margins.model_dump(),
        imputations=config.imputations,
        profile=config.report.profile,
        verdicts=(),
        warnings=(),
        limitations=(),
        **stage_results,
    )
    summary = summary.model_copy(update={"verdicts": tuple(derive_verdicts(summary))})
    return summary.model_copy(
        update={"warnings": tuple(list_warnings(summary)), "limitations": tuple(list_limitations(summary))}
    )


def resolve_output_folder(output: str | os.PathLike[str]) -> Path:
    """Return the path of the folder that an audit is written to; OutputError for a file."""
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; expected a folder for the audit")
    return path


def validate_config(context: AuditContext) -> None:
    """Raise an error for settings that a later stage would reject: class names, labels, layers, regions, masks."""
    cohort, data = context.cohort, context.config.data
    for column in data.subgroups:
        n_levels = len({*cohort.get_subgroup_levels(column).values()} - {None})
        if n_levels > MAX_LEVELS_PER_SUBGROUP:
            raise InputError(
                f"subgroups: {column!r} has {plural(n_levels, 'level')}, and the report shows every level; expected at most "
                f"{MAX_LEVELS_PER_SUBGROUP}"
            )
    if data.window is not None:
        Window.parse(data.window)
    list_requested_regions(context)
    explainers = context.explainers
    for ground_truth in (*context.ground_truth.values(), *open_region_masks(context).values()):
        _check_category_choice(context, ground_truth)
    if explainers[0].preprocess is None and cohort.manifest.images is None:
        raise PreprocessError(
            'the model does not declare its preprocessing: write preprocess = "imagenet" in [model], or PREPROCESSING in the '
            "file of its factory"
        )
    cohort.check_labels(context.class_names)
    for finding in context.findings:
        truths = [truth for truth in cohort.get_truth(finding).values() if truth is not None]
        if not 0 < sum(truths) < len(truths):
            raise InputError(
                f"of {plural(len(truths), 'labeled row')}, {sum(truths)} with the finding {finding.name!r}; expected rows with "
                f"it and rows without it: is {data.label or 'its column'!r} the column of labels?"
            )


def _check_category_choice(context: AuditContext, ground_truth: GroundTruth) -> None:
    """Raise a CategoryError where the first masks hold several labels and the config chooses none."""
    for row in context.cohort.manifest.rows(0, min(MAX_PROBED_MASKS, len(context.cohort.rows))):
        try:
            ground_truth.load_mask(row, (1, 1))
        except CategoryError:
            raise
        except CamscopeError:  # any other problem, such as the size, is reported by the stage that needs the mask
            continue
