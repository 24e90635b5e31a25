"""The runner: checks a config, estimates the time, and runs the stages in order.

- running: the stages in order, each written when it is done, so that an audit that was stopped goes on where it was.
- askable: whether a config can be asked of its manifest and its model, which is known before any image is read.
- estimating: how long the stages will take, from a few passes of the model and of each method, before they begin.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import (
    DataCheckResult,
    ExplainResult,
    MetricsResult,
    PredictResult,
    ResolveResult,
    SanityResult,
    SchemaModel,
    ShortcutResult,
    StageResult,
    Summary,
)
from camscope.audit.core.subgroup_levels import MAX_LEVELS_PER_SUBGROUP
from camscope.audit.performance.model_outputs import compute_logits_and_features
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
from camscope.audit.stages.predict import explain_images, predict_images
from camscope.audit.stages.shortcut import analyze_shortcuts
from camscope.batch.image_loading import LoadedImage
from camscope.batch.run_store import TEMPORARY_FILE_PATTERN
from camscope.errors import CamscopeError, CategoryError, InputError, OutputError, PreprocessError
from camscope.evaluation.ground_truth import GroundTruth
from camscope.images.scans.scan import Window
from camscope.metrics.weight_randomization import split_model
from camscope.plurals import plural
from camscope.safe_files import build_output_path, write_bytes

IMAGES_KEY = "images"
ESTIMATE_AFTER_STAGE = "resolve"  # which has tried the model and the methods
StageProgressCallback = Callable[[str, int, int], None]  # a stage, and how much of it is done, of how much
EstimateCallback = Callable[[Mapping[str, float]], None]  # stage -> seconds that it will take, about


@dataclass(frozen=True)
class StageSpec:
    """A stage: what it does, and what it makes."""

    function: Callable[[AuditContext], SchemaModel]
    result_cls: type[StageResult]
    is_optional: bool = False


STAGES: dict[str, StageSpec] = {
    "check": StageSpec(check_data, DataCheckResult),
    "resolve": StageSpec(resolve_model, ResolveResult),
    "predict": StageSpec(predict_images, PredictResult),
    "explain": StageSpec(explain_images, ExplainResult),
    "localise": StageSpec(evaluate_localization, MetricsResult, is_optional=True),
    "faithfulness": StageSpec(evaluate_faithfulness, MetricsResult, is_optional=True),
    "sanity": StageSpec(evaluate_sanity, SanityResult, is_optional=True),
    "robustness": StageSpec(evaluate_robustness, MetricsResult, is_optional=True),
    "shortcut": StageSpec(analyze_shortcuts, ShortcutResult, is_optional=True),
}


def run_stages(
    context: AuditContext,
    on_progress: StageProgressCallback,
    *,
    overwrite: bool,
    on_estimate: EstimateCallback | None = None,
) -> dict[str, StageResult]:
    """The parts of all stages: those that are there are read, the others are made."""
    prepare_folder(context, on_progress, overwrite=overwrite)
    made: dict[str, StageResult] = {}
    for name, job in STAGES.items():
        there = _load_stage_result(context.folder, name, job)
        made[name] = there or _run_stage(context, name, job, on_progress)
        if name == ESTIMATE_AFTER_STAGE and on_estimate is not None and there is None:
            on_estimate({stage: took for stage, took in estimate_stage_seconds(context).items() if stage not in made})
    return made


def prepare_folder(context: AuditContext, on_progress: StageProgressCallback, *, overwrite: bool) -> None:
    """The folder is this audit's: a new one, or one of the same config, data, images, weights and version.

    What cannot be asked is an error before anything is read. Then, before any stage looks at them, all images are read and
    their digests noted; `on_progress` of it as of the stage "images".
    """
    validate_config(context)
    _check_audit_folder(context.folder)
    plan, facts = context.folder / PLAN_FILE, provenance.compute_identity(context)
    some = any((context.folder / STAGES_FOLDER).glob("*.json"))
    known = (
        _load_json_or_none(plan) if plan.is_file() and some and not overwrite else None
    )  # a plan alone has cost nothing
    if known is not None:
        _check_same_audit(context, facts, known)
    list_audit_files(context.folder)
    images = digest_images(context, lambda done, total: on_progress(IMAGES_KEY, done, total))
    if known is not None:
        check_images_unchanged(context, known.get(IMAGES_KEY))
        log_interrupted_stages(context.folder)
        return
    remove_outputs(context.folder)
    log_stage_start(context.folder, REPORT_STAGE)
    write_bytes(plan, to_json_bytes({**facts, IMAGES_KEY: images}))


def _check_audit_folder(folder: Path) -> None:
    """OutputError for a folder that holds anything, and no audit: files of other programs are called `audit.json` too."""
    there = (one.name for one in folder.iterdir()) if folder.is_dir() else ()
    if any(not TEMPORARY_FILE_PATTERN.fullmatch(name) for name in there) and not is_plan(folder / PLAN_FILE):
        raise OutputError(f"{folder} exists and is no audit; choose another folder")


def _check_same_audit(context: AuditContext, facts: Mapping[str, str], plan: Any) -> None:
    if other := next((name for name in facts if not isinstance(plan, dict) or plan.get(name) != facts[name]), None):
        raise OutputError(
            f"{context.folder} holds an audit with another {other}: choose another folder, or allow overwriting"
        )


def check_images_unchanged(context: AuditContext, previous: Any) -> None:
    """OutputError where the images are not `previous`: there would be answers of old ones beside maps of new ones."""
    images = digest_images(context)
    if changed := find_changed_images(images, previous if isinstance(previous, dict) else {}):
        raise OutputError(
            f"{context.folder}: {len(changed)} of {plural(len(images), 'image')} differ from those that its stages have seen: "
            "choose another folder, or allow overwriting"
        )


def _run_stage(context: AuditContext, name: str, stage: StageSpec, on_progress: StageProgressCallback) -> StageResult:
    """Run a stage, and keep what it made. One that is skipped says so."""
    begun = time.monotonic()
    if name in context.config.skip:
        part: SchemaModel = stage.result_cls(tested=False, reason="it was skipped, by the config")
    else:
        on_progress(name, 0, 1)
        log_stage_start(context.folder, name, [one.class_index for one in context.findings] if name != "check" else [])
        context.on_progress = lambda done, total: on_progress(name, done, total)
        part = stage.function(context)
    written = to_json_bytes(part.model_dump(mode="json"))
    write_bytes(build_output_path(context.folder, STAGES_FOLDER, f"{name}.json"), written)
    log_stage_files(context.folder, name)
    provenance.append_event(context.folder, {"stage": name, "seconds": round(time.monotonic() - begun, 3)})
    return stage.result_cls.model_validate_json(written)  # as a second start reads it, in the order of the file


def _load_stage_result(folder: Path, name: str, stage: StageSpec) -> StageResult | None:
    """What a stage made before; None where it did not, or not wholly."""
    found = _load_json_or_none(folder / STAGES_FOLDER / f"{name}.json")
    if found is None:
        return None
    try:
        return stage.result_cls.model_validate(found)
    except ValidationError:
        return None


def _load_json_or_none(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def to_json_bytes(document: Mapping[str, Any]) -> bytes:
    """Sorted, without NaN, the same bytes for the same content."""
    return (json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def build_summary(context: AuditContext, stage_results: Mapping[str, Any]) -> Summary:
    """All parts, with the verdicts that follow from them."""
    from camscope.audit.verdicts import derive_verdicts
    from camscope.audit.verdicts.limitations import list_limitations, list_warnings
    from camscope.version import __version__

    config, facts = context.config, provenance.compute_identity(context)
    plain = Summary(
        camscope_version=__version__,
        title=config.title,
        intended_use=config.intended_use,
        config_digest=facts["config"],
        data_digest=facts["data"],
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
    judged = plain.model_copy(update={"verdicts": tuple(derive_verdicts(plain))})
    return judged.model_copy(
        update={"warnings": tuple(list_warnings(judged)), "limits": tuple(list_limitations(judged))}
    )


def resolve_output_folder(output: str | os.PathLike[str]) -> Path:
    """Where an audit goes; OutputError for a file."""
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; an audit is a folder")
    return path


MAX_PROBED_MASKS = 32  # masks that are looked into for several labels before the audit begins


def validate_config(context: AuditContext) -> None:
    """An error for what a later stage would only find out after an hour: names of classes, labels, layers, regions, masks."""
    for column in context.config.data.subgroups:
        if (count := len({*context.get_subgroup_levels(column).values()} - {None})) > MAX_LEVELS_PER_SUBGROUP:
            raise InputError(
                f"subgroups: {column!r} has {plural(count, 'level')}, and the report shows them all: at most {MAX_LEVELS_PER_SUBGROUP} are allowed"
            )
    if context.config.data.window is not None:
        Window.parse(context.config.data.window)
    list_requested_regions(context), context.explainers  # each raises what is wrong with it
    for evidence in (*context.ground_truth.values(), *open_region_masks(context).values()):
        _check_category_choice(context, evidence)
    if context.explainers[0].preprocess is None and context.manifest.images is None:
        raise PreprocessError(
            'the model does not say how images enter it: say preprocess = "imagenet" in [model], or PREPROCESSING in the '
            "file of its factory"
        )
    for finding in context.findings:
        truth = [one for one in context.get_truth(finding).values() if one is not None]
        if not 0 < sum(truth) < len(truth):
            raise InputError(
                f"of {plural(len(truth), 'labeled row')}, {sum(truth)} with the finding {finding.name!r}: some "
                "with it and some without "
                f"are needed; is {context.config.data.label or 'its column'!r} the column of labels?"
            )


def _check_category_choice(context: AuditContext, ground_truth: GroundTruth) -> None:
    """CategoryError where the first masks hold several labels, and none was chosen; what else is odd is for later stages."""
    for row in context.manifest.rows(0, min(MAX_PROBED_MASKS, len(context.rows))):
        try:
            ground_truth.load_mask(row, (1, 1))
        except CategoryError:
            raise
        except CamscopeError:  # of another size than this one, say
            continue


N_TIMED_IMAGES = 4  # images
FAITHFULNESS_PASSES_PER_MAP = (
    60  # passes of an image for each map and fill: of removal step by step, and of imputation, which costs more
)
ROBUSTNESS_MAPS_PER_IMAGE = 35  # maps of an image that robustness makes of each method
N_CONTROL_MAPS = 4  # maps that know nothing
N_RANDOMIZATION_SEEDS = 3  # of randomisation
SECONDS_PER_REGION = 0.01  # seconds to find a region in an image
SECONDS_PER_MAP_SCORE = 0.004  # seconds to hold a map against a mask
SECONDS_PER_CLUSTERING = 5.0  # seconds for the clusters of a method
SecondsByStage = Mapping[str, float]


def estimate_stage_seconds(context: AuditContext) -> SecondsByStage:
    """Stage -> seconds, about: of the machine as it is now. Empty where no image can be read."""
    images = [one for one in context.load_images(context.rows[:N_TIMED_IMAGES]) if one.item is not None]
    images = [one for one in images if one.item and images[0].item and one.item.x.shape == images[0].item.x.shape]
    if not images:
        return {}
    batch = context.worker.collate(images)
    once = _time_second_call(lambda: compute_logits_and_features(context, context.stack_on_device(images))) / len(
        images
    )
    maps = _time_second_call(lambda: context.worker.compute_rows(batch)) / len(images)
    read = _time_second_call(lambda: list(context.load_images([one.row["row"] for one in images]))) / len(images)
    return {
        name: value
        for name, value in _extrapolate_stage_seconds(context, once, maps, read, images).items()
        if name not in context.config.skip
    }


def _extrapolate_stage_seconds(
    context: AuditContext,
    prediction_seconds: float,
    maps_seconds: float,
    read_seconds: float,
    images: list[LoadedImage],
) -> dict[str, float]:
    """`prediction_seconds`, `maps_seconds`, `read_seconds`: seconds an image for an answer, for all its maps, and to read it."""
    config, rows = context.config, len(context.rows)
    sizes, findings, tools = config.sample_sizes, len(context.findings), len(context.explainers)
    regions = len(open_region_masks(context)) + len(list_requested_regions(context))
    tried, seen = min(rows, sizes.interventions), min(rows, sizes.regions)
    losing = len(split_model(context.model, context.stack_on_device(images[:1])))
    return {
        "check": len(context.full_manifest) * read_seconds,
        "predict": rows * (read_seconds + prediction_seconds),
        "explain": rows * (read_seconds + maps_seconds),
        "localise": rows * (read_seconds + (tools + N_CONTROL_MAPS) * SECONDS_PER_MAP_SCORE)
        if context.ground_truth
        else 0.0,
        "faithfulness": min(rows, sizes.faithfulness)
        * (tools + N_CONTROL_MAPS)
        * len(config.imputations)
        * FAITHFULNESS_PASSES_PER_MAP
        * prediction_seconds,
        "sanity": min(rows, sizes.sanity) * N_RANDOMIZATION_SEEDS * losing * maps_seconds / findings,
        "robustness": min(rows, sizes.robustness) * ROBUSTNESS_MAPS_PER_IMAGE * maps_seconds,
        "shortcut": seen * (read_seconds + regions * SECONDS_PER_REGION)
        + tried * findings * regions * (2 * len(config.imputations) + 2) * prediction_seconds
        + tools * SECONDS_PER_CLUSTERING,
    }


def _time_second_call(function: Callable[[], object]) -> float:
    """Seconds of the second time: the first one warms up."""
    try:
        function()
        begun = time.perf_counter()
        function()
    except InputError:
        return 0.0
    return time.perf_counter() - begun
