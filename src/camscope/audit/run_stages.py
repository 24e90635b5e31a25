"""Run the stages of an audit, skip stages with stored results, and build the summary."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from camscope.atomic_writes_and_folder_locks import build_output_path, write_bytes
from camscope.audit.config_validation import validate_config
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.convert_to_summary_entries import describe_images
from camscope.audit.core.stage_result_schema import StageResult
from camscope.audit.core.stored_predictions import StageResults
from camscope.audit.core.summary_schema import Summary
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.audit_files_safe_to_replace import (
    PLAN_FILE,
    REPORT_STAGE,
    STAGES_FOLDER,
    is_audit_plan,
    list_audit_files,
    log_interrupted_stages,
    log_stage_files,
    log_stage_start,
    read_json_or_none,
    remove_outputs,
)
from camscope.audit.provenance.digests import digest_images, find_changed_images
from camscope.audit.replan_remaining_stages import EstimateCallback, RemainingStagePlanner
from camscope.audit.stages.check_data_and_try_model import check_data, try_model_on_one_image
from camscope.audit.stages.map_quality import (
    evaluate_faithfulness,
    evaluate_localization,
    evaluate_robustness,
    evaluate_sanity,
)
from camscope.audit.stages.predictions_and_maps import explain_images, predict_images
from camscope.audit.stages.shortcut_tests import analyze_shortcuts
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.limitations_and_warnings import list_limitations, list_warnings
from camscope.batch.run_store import TEMPORARY_FILE_PATTERN
from camscope.errors import OutputError, Remedy
from camscope.plurals import plural
from camscope.version import __version__

IMAGES_KEY = "images"
QUICK_STAGES = {"check", "resolve"}  # their results are computed again if the config or the images have changed
OVERWRITE_FIX = "choose another folder, or allow overwriting (overwrite=True)"
DIFFERENCES = {
    "camscope": "another version of camscope",
    "code": "other files of camscope itself, of the same version number",
    "data": "another manifest",
    "model": "other weights of the model",
    "source": "another file of the model",
    "masks": "other masks",
}  # name of a digest of an audit -> what differs if the digest does
StageProgressCallback = Callable[[str, int, int], None]  # stage, number of items done, total number
ImageDigests = Mapping[str, str | None]  # image id -> sha256, None where the image cannot be read


STAGES: dict[str, Callable[[AuditContext, StageResults], StageResult]] = {
    "check": check_data,
    "resolve": try_model_on_one_image,
    "predict": predict_images,
    "explain": explain_images,
    "localization": evaluate_localization,
    "faithfulness": evaluate_faithfulness,
    "sanity": evaluate_sanity,
    "robustness": evaluate_robustness,
    "shortcut": analyze_shortcuts,
}  # the class of the result is that of the field of `Summary`


def prepare_folder_and_digest_inputs(
    context: AuditContext, on_progress: StageProgressCallback, *, overwrite: bool
) -> tuple[dict[str, str], ImageDigests]:
    """Validate the config and reserve the folder for the audit. Return the digests of all inputs, and the digests of the images.

    The folder must be new, or belong to an audit of the same config, data, images, weights and version. All images are
    read here, before any stage uses them; `on_progress` reports them as the stage "images".
    """
    validate_config(context)
    _check_audit_folder(context.folder)
    plan_file = context.folder / PLAN_FILE
    stages = {path.stem for path in (context.folder / STAGES_FOLDER).glob("*.json")}
    has_results = bool(stages - QUICK_STAGES)  # a plan and a check of the data hold no work that could be lost
    plan = read_json_or_none(plan_file) if has_results and not overwrite else None
    if plan is None:
        _ = context.first_maps  # an error appears before anything is written or removed
    identity = provenance_file.compute_digests_of_config_data_and_weights(context)
    for name in identity if plan is not None else ():
        if not isinstance(plan, dict) or plan.get(name) != identity[name]:
            raise OutputError(
                f"{context.folder} holds an audit {_describe_difference(plan, name, identity[name])}, so its finished stages "
                "cannot be used",
                fix=OVERWRITE_FIX,
                remedy=Remedy.ALLOW_OVERWRITE,
            )
    list_audit_files(context.folder)
    image_digests = digest_images(context, lambda done, total: on_progress(IMAGES_KEY, done, total))
    if plan is not None:
        check_images_unchanged(context.folder, image_digests, plan.get(IMAGES_KEY))
        log_interrupted_stages(context.folder)
    else:
        remove_outputs(context.folder)
        log_stage_start(context.folder, REPORT_STAGE)
        write_bytes(plan_file, to_json_bytes({**identity, IMAGES_KEY: image_digests}))
    return identity, image_digests


def run_stages(
    context: AuditContext, on_progress: StageProgressCallback, on_estimate: EstimateCallback | None = None
) -> StageResults:
    """Run all stages and return their results. A stage with a stored result is not run again."""
    results, planner = StageResults(context.folder), RemainingStagePlanner(context, on_estimate)
    for name in STAGES:
        stored = read_json_or_none(context.folder / STAGES_FOLDER / f"{name}.json")
        result_cls: Any = Summary.model_fields[name].annotation
        try:
            results[name] = result_cls.model_validate(stored)
        except ValidationError:  # it is missing or incomplete
            seconds = _run_stage_and_measure_seconds(context, name, results, on_progress, planner)
            planner.report_remaining_time_after_stage(name, seconds)
        if (planned := results[name].planned_sizes) is not None:
            context.planned_sizes = planned
    return results


def _run_stage_and_measure_seconds(
    context: AuditContext,
    name: str,
    results: StageResults,
    on_progress: StageProgressCallback,
    planner: RemainingStagePlanner,
) -> float:
    """Run a stage, write its result and return the seconds it took. A skipped stage also writes a result."""
    start = time.monotonic()
    result_cls: Any = Summary.model_fields[name].annotation
    if name in context.config.skip:
        result = result_cls(tested=False, reason="skipped by the config")
    elif getattr(context.sample_sizes, name, 1) == 0:
        result = result_cls(tested=False, reason=f"it does not fit the budget of {context.config.budget_in_words}")
    else:
        on_progress(name, 0, 1)
        class_indices = [finding.class_index for finding in context.findings] if name != "check" else []
        log_stage_start(context.folder, name, class_indices)
        context.on_progress = lambda done, total: on_progress(name, done, total)
        result = STAGES[name](context, results)
    planned = planner.plan_sizes_after_stage(name, time.monotonic() - start)
    result = result.model_copy(update={"planned_sizes": planned})
    document = to_json_bytes(result.model_dump(mode="json"))
    write_bytes(build_output_path(context.folder, STAGES_FOLDER, f"{name}.json"), document)
    log_stage_files(context.folder, name)
    seconds = time.monotonic() - start
    provenance_file.append_event(context.folder, {"stage": name, "seconds": round(seconds, 3)})
    results[name] = result_cls.model_validate_json(document)  # exactly what a resumed audit reads
    return seconds


def _check_audit_folder(folder: Path) -> None:
    """Raise an OutputError if a folder holds files of other programs."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    if any(not TEMPORARY_FILE_PATTERN.fullmatch(name) for name in names) and not is_audit_plan(folder / PLAN_FILE):
        raise OutputError(f"{folder} exists and is not an audit; choose another folder")


def _describe_difference(plan: Any, name: str, value: str) -> str:
    """Name what differs between this audit and an earlier audit in the same folder."""
    previous = plan.get(name) if isinstance(plan, dict) else None
    versions = f" ({previous}; this is {value})" if name == "camscope" and isinstance(previous, str) else ""
    return f"with {DIFFERENCES.get(name, f'another {name}')}{versions}"


def check_images_unchanged(folder: Path, image_digests: ImageDigests, previous: Any) -> None:
    """Raise an OutputError if images have changed since the audit was first started."""
    if changed := find_changed_images(image_digests, previous if isinstance(previous, dict) else {}):
        raise OutputError(
            f"{folder}: {len(changed)} of {plural(len(image_digests), 'image')} have changed since the first start of this audit",
            fix=OVERWRITE_FIX,
            remedy=Remedy.ALLOW_OVERWRITE,
        )


def to_json_bytes(document: Mapping[str, Any]) -> bytes:
    """Convert a document to JSON bytes with sorted keys. Equal documents give identical bytes."""
    return (json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def build_summary(context: AuditContext, stage_results: Mapping[str, Any], identity: Mapping[str, str]) -> Summary:
    """Build the summary from the results of all stages, then derive the verdicts from it."""
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
        data_description=describe_images(
            config.regions.modality or "",
            stage_results["check"].metadata_value_counts,
            is_volume=len(stage_results["resolve"].input_size) == 3,
        ),
        **stage_results,
    )
    summary = summary.model_copy(update={"verdicts": tuple(derive_verdicts(summary))})
    return summary.model_copy(
        update={"warnings": tuple(list_warnings(summary)), "limitations": tuple(list_limitations(summary))}
    )
