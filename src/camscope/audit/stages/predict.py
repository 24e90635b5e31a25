"""The stages that run the model and the methods on all images.

- predict: the predictions, and their performance overall and by subgroup.
- explain: the raw maps of every image, for each method and finding, as a run of `camscope batch`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import ExplainResult, FindingPerformance, FlowStep, MapCounts, PredictResult
from camscope.audit.core.stage_results import StageResults
from camscope.audit.core.summary_values import round_significant
from camscope.audit.performance.model_outputs import (
    are_probability_outputs,
    compute_log_odds,
    compute_logits_and_features,
)
from camscope.audit.performance.performance_summary import (
    compute_performance,
    compute_subgroup_performance,
)
from camscope.audit.performance.subgroups import compare_subgroups
from camscope.batch import BatchOptions, BatchOutcome, BatchRun, run_batch
from camscope.batch.image_loading import LoadedImage
from camscope.errors import (
    OUT_OF_MEMORY,
    InputError,
    LayerError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    RunError,
    TargetError,
    describe_out_of_memory,
    is_out_of_memory,
)
from camscope.plurals import inflect, plural
from camscope.safe_files import build_output_path


def predict_images(context: AuditContext, results: StageResults) -> PredictResult:
    """Predict all images, write `predictions.parquet`, and summarize the performance."""
    predictions = _predict_all(context, *_find_feature_layer(context, results))
    if not predictions.rows:
        error = next(iter(predictions.errors.values()), "")
        raise InputError(f"the model has no prediction for any image: {error}")
    truths = [context.cohort.get_truth(finding) for finding in context.findings]
    predictions.write(context.folder, context.cohort.ids, context.cohort.patient_numbers, truths)
    return PredictResult(
        outputs_are_probabilities=predictions.outputs_are_probabilities,
        flow=tuple(_describe_prediction_flow(context, predictions)),
        performance=tuple(
            _summarize_finding_performance(context, predictions, finding) for finding in context.findings
        ),
    )


def _describe_prediction_flow(context: AuditContext, predictions: Predictions) -> Iterator[FlowStep]:
    """Yield the numbers of images with a prediction and a label, and the reasons for missing predictions."""
    yield FlowStep(name=f"{inflect(len(predictions.rows), 'image')} with a prediction", n_rows=len(predictions.rows))
    for reason, count in sorted(Counter(predictions.errors.values()).items()):
        yield FlowStep(
            name=f"{inflect(count, 'image')} without a prediction", n_rows=count, reason=reason, is_exclusion=True
        )
    for finding in context.findings:
        truths = context.cohort.get_truth(finding)
        n_labeled = sum(truths[row] is not None for row in predictions.rows)
        if n_labeled < len(predictions.rows):
            reason = "images without a label are left out of statistics that need it"
            yield FlowStep(name=f"of them labeled for {finding.name}", n_rows=n_labeled, reason=reason)


def _find_feature_layer(context: AuditContext, results: StageResults) -> tuple[str | None, tuple[int, ...]]:
    """Return the layer and the grid of the first method that explains one layer; its mean over space is the feature."""
    layer_names = dict(context.model.named_modules())
    info = next((info for info in results.resolve.explainers if info.layer in layer_names), None)
    return (None, ()) if info is None else (info.layer, info.grid)


def _predict_all(context: AuditContext, layer: str | None, grid: tuple[int, ...]) -> Predictions:
    rows: list[int] = []
    answers: list[Tensor] = []
    features: list[Tensor] = []
    errors: dict[int, str] = {}
    done = 0
    for batch in context.iter_batches():
        context.on_progress(done := done + len(batch), len(context.cohort.rows))
        for image, prediction in _predict_batch(context, batch, layer, grid):
            if isinstance(prediction, str):
                errors[image.row["row"]] = prediction
            else:
                rows.append(image.row["row"])
                answers.append(prediction[0])
                features.append(prediction[1])
    names = tuple(image.name for image in context.findings)
    if not rows:
        return Predictions([], names, np.empty((0, len(names))), np.empty((0, 0), np.float32), errors)
    logits = torch.stack(answers)
    plain = are_probability_outputs(logits, context.config.model.outputs)
    odds = compute_log_odds(context, logits, context.findings, outputs_are_probabilities=plain)
    return Predictions(rows, names, odds.numpy(), torch.stack(features).numpy(), errors, plain)


def _predict_batch(
    context: AuditContext, batch: Sequence[LoadedImage], layer: str | None, grid: tuple[int, ...]
) -> Iterator[tuple[LoadedImage, tuple[Tensor, Tensor] | str]]:
    """Yield each image with its logits and features, or its error; a failing batch is repeated image by image."""
    images = [image for image in batch if image.item is not None]
    yield from ((image, image.error or "it cannot be read") for image in batch if image.item is None)
    if not images:
        return
    try:
        logits, features = compute_logits_and_features(context, context.stack_on_device(images), layer, grid)
    except (LayerError, MissingExtraError, ModelError, TargetError):
        raise
    except Exception as error:
        if len(images) == 1 and is_out_of_memory(error):  # a problem of the machine, not of the image
            raise RunError(
                f"{context.cohort.ids[images[0].row['row']]}: {describe_out_of_memory(error)}, for this image alone; "
                "free some memory "
                "or take a smaller input, and start again: the audit goes on"
            ) from error
        if len(images) == 1:
            yield images[0], f"the model fails: {error if isinstance(error, NonFiniteError) else type(error).__name__}"
            return
        for image in images:
            yield from _predict_batch(context, [image], layer, grid)
        return
    for image, image_logits, image_features in zip(images, logits, features, strict=True):
        yield image, (image_logits, image_features)


def _summarize_finding_performance(
    context: AuditContext, predictions: Predictions, finding: Finding
) -> FindingPerformance:
    truths, log_odds = context.cohort.get_truth(finding), predictions.log_odds_by_row(finding.name)
    rows = [row for row in predictions.rows if truths[row] is not None]
    truth, scores = np.array([bool(truths[row]) for row in rows], np.bool_), np.array([log_odds[row] for row in rows])
    groups, config = [context.cohort.patients[row] for row in rows], context.config
    if not 0 < truth.sum() < len(truth):
        raise InputError(
            f"of {plural(len(truth), 'labeled image')}, {int(truth.sum())} with the finding {finding.name!r}: "
            "some with it and some "
            f"without are needed; is the label column right?"
        )
    estimates, bins = compute_performance(truth, scores, groups, **context.config.bootstrap_options)
    values = dict(zip(rows, scores.tolist(), strict=True))
    return FindingPerformance(
        finding=finding.name,
        n_positives=int(truth.sum()),
        n_negatives=int((~truth).sum()),
        log_odds_std=round_significant(predictions.log_odds_std(finding.name)) or 0.0,
        **estimates,
        bins=bins,
        subgroups=tuple(compute_subgroup_performance(context.cohort, rows, truth, scores)),
        subgroup_differences=tuple(
            compare_subgroups(
                context.cohort,
                finding,
                values,
                config.margins.auroc_difference,
                {row: bool(truths[row]) for row in rows},
            )
        ),
    )


EXPLAIN_IMAGES_PER_CHUNK = 64  # images lost by an interruption


def explain_images(context: AuditContext, results: StageResults) -> ExplainResult:
    """Compute the maps of all images into `maps/`; an interrupted run continues."""
    config = context.config

    def told(outcome: BatchOutcome) -> None:
        context.on_progress(outcome.n_done_before + outcome.n_processed, outcome.n_images)

    outcome = run_batch(
        context.explainers,
        context.cohort.output_manifest,
        build_output_path(context.folder, "maps"),
        [finding.class_index for finding in context.findings],
        options=BatchOptions(chunk_size=EXPLAIN_IMAGES_PER_CHUNK, window=config.data.window),
        batch_size=config.batch_size,
        retry_failed=True,
        on_progress=told,
    )
    if out_of_memory_reasons := [
        reason for reason in outcome.transient_failure_counts if reason.startswith(OUT_OF_MEMORY)
    ]:
        count = sum(outcome.transient_failure_counts[reason] for reason in out_of_memory_reasons)
        raise RunError(
            f"{plural(count, 'image has', 'images have')} no map: {out_of_memory_reasons[0]}; free some memory or lower "
            "batch_size, and start again: the audit goes on"
        )
    if outcome.n_failures == outcome.n_images:
        raise RunError(f"no image has a map: {outcome.failure_counts.most_common(1)[0][0]}")
    failures = [
        FlowStep(name="no map", n_rows=count, reason=reason) for reason, count in sorted(outcome.failure_counts.items())
    ]
    return ExplainResult(map_counts=tuple(_count_maps(context)), failures=tuple(failures))


def _count_maps(context: AuditContext) -> list[MapCounts]:
    table = BatchRun(context.folder / "maps").table(["method", "target", "status"])
    counts = Counter(zip(*(table[name].to_pylist() for name in ("method", "target", "status")), strict=True))
    map_counts = []
    for explainer in context.explainers:
        for finding in context.findings:
            status_counts = {
                status: count
                for (method, target, status), count in sorted(counts.items())
                if (method, target) == (explainer.full_name, str(finding.class_index))
            }
            failures = status_counts.pop("failed", 0)
            map_counts.append(
                MapCounts(
                    method=explainer.full_name,
                    finding=finding.name,
                    n_maps=sum(status_counts.values()),
                    n_failures=failures,
                    status_counts=status_counts,
                )
            )
    return map_counts
