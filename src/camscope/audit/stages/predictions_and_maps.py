"""The stages that predict all images and compute their maps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import build_output_path
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.convert_to_summary_entries import round_significant, summarize_estimate_or_reason
from camscope.audit.core.stage_result_schema import (
    EstimateSummary,
    ExplainResult,
    FindingPerformance,
    FlowStep,
    MapCounts,
    PredictResult,
    ReliabilityPoint,
    SubgroupPerformance,
)
from camscope.audit.core.stored_predictions import Predictions, StageResults
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT, build_level_masks
from camscope.audit.performance.auc import auroc, average_precision
from camscope.audit.performance.calibration import compute_calibration_and_reliability_points
from camscope.audit.performance.compute_log_odds_and_features import (
    are_probability_outputs,
    compute_log_odds,
    compute_logits_and_mean_features,
)
from camscope.audit.performance.subgroup_differences import compare_subgroups
from camscope.batch import BatchOptions, BatchRun, run_batch
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
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import inflect, plural

IMAGES_PER_CHUNK = 64  # images whose maps an interruption loses


def predict_images(context: AuditContext, results: StageResults) -> PredictResult:
    """Predict all images, write `predictions.parquet` and summarize the performance."""
    predictions = _predict_all(context, results)
    if not predictions.rows:
        error = next(iter(predictions.errors.values()), "")
        raise InputError(f"the model has no prediction for any image: {error}")
    cohort, findings = context.cohort, context.findings
    predictions.write(
        context.folder, cohort.ids, cohort.patient_number_by_row, [cohort.get_truth_by_row(f) for f in findings]
    )
    return PredictResult(
        outputs_are_probabilities=predictions.outputs_are_probabilities,
        flow=tuple(_describe_prediction_flow(context, predictions)),
        performance=tuple(_summarize_performance(context, predictions, finding) for finding in findings),
    )


def _predict_all(context: AuditContext, results: StageResults) -> Predictions:
    """Predict every image and collect its features. The features are the spatial mean of a layer's output."""
    layer_names = dict(context.model.named_modules())
    explained_layers = ((info.layer, info.grid) for info in results.resolve.explainers if info.layer in layer_names)
    layer, grid = next(explained_layers, (None, ()))
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    errors: dict[int, str] = {}
    n_done = 0
    for batch in context.iter_batches():
        context.on_progress(n_done := n_done + len(batch), len(context.cohort.rows))
        for image, prediction in _iter_logits_and_features_or_error(context, batch, layer, grid):
            if isinstance(prediction, str):
                errors[image.row["row"]] = prediction
            else:
                outputs[image.row["row"]] = prediction
    names = tuple(finding.name for finding in context.findings)
    if not outputs:
        return Predictions([], names, np.empty((0, len(names))), np.empty((0, 0), np.float32), errors)
    logits, features = (torch.stack(values) for values in zip(*outputs.values(), strict=True))
    are_probabilities = are_probability_outputs(logits, context.config.model.outputs)
    log_odds = compute_log_odds(context, logits, context.findings, outputs_are_probabilities=are_probabilities)
    return Predictions(list(outputs), names, log_odds.numpy(), features.numpy(), errors, are_probabilities)


def _iter_logits_and_features_or_error(
    context: AuditContext, batch: Sequence[LoadedImage], layer: str | None, grid: tuple[int, ...]
) -> Iterator[tuple[LoadedImage, tuple[Tensor, Tensor] | str]]:
    """Yield each image with its logits and features. An image that fails comes with its error instead.

    A failing batch is repeated image by image.
    """
    images = [image for image in batch if image.item is not None]
    yield from ((image, image.error or "it cannot be read") for image in batch if image.item is None)
    if not images:
        return
    try:
        logits, features = compute_logits_and_mean_features(context, context.stack_on_device(images), layer, grid)
    except (LayerError, MissingExtraError, ModelError, TargetError):
        raise
    except Exception as error:
        if len(images) > 1:
            for image in images:
                yield from _iter_logits_and_features_or_error(context, [image], layer, grid)
        elif is_out_of_memory(error):  # a problem of the machine, not of the image
            raise RunError(
                f"{context.cohort.ids[images[0].row['row']]}: {describe_out_of_memory(error)}, for this image alone; "
                "free some memory or use a smaller input, then start the audit again to continue it"
            ) from error
        else:
            yield images[0], f"the model fails: {error if isinstance(error, NonFiniteError) else type(error).__name__}"
        return
    yield from zip(images, zip(logits, features, strict=True), strict=True)


def _describe_prediction_flow(context: AuditContext, predictions: Predictions) -> Iterator[FlowStep]:
    """Yield how many images have a prediction and a label, and why predictions are missing."""
    n_predicted = len(predictions.rows)
    yield FlowStep(name=f"{inflect(n_predicted, 'image')} with a prediction", n_rows=n_predicted)
    for reason, count in sorted(Counter(predictions.errors.values()).items()):
        name = f"{inflect(count, 'image')} without a prediction"
        yield FlowStep(name=name, n_rows=count, reason=reason, is_exclusion=True)
    for finding in context.findings:
        truths = context.cohort.get_truth_by_row(finding)
        n_labeled = sum(truths[row] is not None for row in predictions.rows)
        if n_labeled < n_predicted:
            reason = "images without a label are left out of statistics that need it"
            yield FlowStep(name=f"of them labeled for {finding.name}", n_rows=n_labeled, reason=reason)


def _summarize_performance(context: AuditContext, predictions: Predictions, finding: Finding) -> FindingPerformance:
    """Summarize the performance for a finding: AUROC, calibration, subgroups and their differences."""
    cohort, log_odds = context.cohort, predictions.log_odds_by_row(finding.name)
    truths = {
        row: label for row, label in cohort.get_truth_by_row(finding).items() if row in log_odds and label is not None
    }
    rows = [row for row in predictions.rows if row in truths]
    truth, scores = np.array([truths[row] for row in rows], np.bool_), np.array([log_odds[row] for row in rows])
    n_positives, n_negatives = int(truth.sum()), int((~truth).sum())
    if not (n_positives and n_negatives):
        raise InputError(
            f"{n_positives} of {plural(len(truth), 'labeled image')} have the finding {finding.name!r}; expected images with and "
            "without the finding. Check the label column"
        )
    patients = [cohort.patients[row] for row in rows]
    estimates, bins = _compute_performance_and_reliability_points(
        truth, scores, patients, **context.config.bootstrap_options
    )
    margin = context.config.margins.auroc_difference
    differences = compare_subgroups(cohort, finding, {row: log_odds[row] for row in rows}, margin, truths)
    return FindingPerformance(
        finding=finding.name,
        n_positives=n_positives,
        n_negatives=n_negatives,
        log_odds_std=round_significant(predictions.log_odds_std(finding.name)) or 0.0,
        **estimates,
        bins=bins,
        subgroups=tuple(_compute_subgroup_performance(cohort, rows, truth, scores)),
        subgroup_differences=tuple(differences),
    )


def _compute_performance_and_reliability_points(
    truth: Mask, log_odds: FloatArray, patients: Sequence[Any], *, n_resamples: int, seed: int
) -> tuple[dict[str, EstimateSummary], tuple[ReliabilityPoint, ...]]:
    """Return the performance estimates by name, and the points of the reliability diagram."""
    options: Any = {"n_resamples": n_resamples, "seed": seed}
    calibration, bins = compute_calibration_and_reliability_points(truth, log_odds, patients, **options)
    discrimination = {
        "auroc": summarize_estimate_or_reason(lambda: auroc(truth, log_odds, patients, **options), 0.5, "chance"),
        "average_precision": summarize_estimate_or_reason(
            lambda: average_precision(truth, log_odds, patients, **options), float(truth.mean()), "prevalence"
        ),
    }
    return discrimination | calibration, bins


def _compute_subgroup_performance(
    cohort: Cohort, rows: Sequence[int], truth: Mask, log_odds: FloatArray
) -> Iterator[SubgroupPerformance]:
    """Yield the performance in each subgroup level. A level with too few patients has a reason instead."""
    for column in cohort.config.data.subgroups:
        levels = cohort.get_subgroup_level_by_row(column)
        for level, mask in build_level_masks([levels[row] for row in rows]).items():
            patients = [cohort.patients[rows[int(i)]] for i in np.flatnonzero(mask)]
            positives, negatives = int(truth[mask].sum()), int((~truth[mask]).sum())
            estimates: dict[str, Any] = {"reason": "too few patients, or images of one class only"}
            if len(set(patients)) >= MIN_PATIENTS_FOR_VERDICT and positives and negatives:
                options = cohort.config.bootstrap_options
                estimates = _compute_performance_and_reliability_points(
                    truth[mask], log_odds[mask], patients, **options
                )[0]
            yield SubgroupPerformance(
                column=column, level=str(level), n_positives=positives, n_negatives=negatives, **estimates
            )


def explain_images(context: AuditContext, results: StageResults) -> ExplainResult:
    """Write the maps of all images to the folder `maps/`. An interrupted run continues where it stopped."""
    outcome = run_batch(
        context.explainers,
        context.cohort.manifest_with_display_names,
        build_output_path(context.folder, "maps"),
        [finding.class_index for finding in context.findings],
        options=BatchOptions(chunk_size=IMAGES_PER_CHUNK, window=context.config.data.window),
        batch_size=context.config.batch_size,
        retry_failed=True,
        on_progress=lambda outcome: context.on_progress(outcome.n_done_before + outcome.n_processed, outcome.n_images),
    )
    failures = outcome.transient_failure_counts
    if out_of_memory := [reason for reason in failures if reason.startswith(OUT_OF_MEMORY)]:
        count = sum(failures[reason] for reason in out_of_memory)
        raise RunError(
            f"{plural(count, 'image has', 'images have')} no map: {out_of_memory[0]}; free some memory or lower batch_size, "
            "then start the audit again to continue it"
        )
    if outcome.n_failures == outcome.n_images:
        raise RunError(f"no image has a map: {outcome.failure_counts.most_common(1)[0][0]}")
    steps = [
        FlowStep(name="no map", n_rows=count, reason=reason) for reason, count in sorted(outcome.failure_counts.items())
    ]
    return ExplainResult(map_counts=tuple(_count_maps(context)), failures=tuple(steps))


def _count_maps(context: AuditContext) -> Iterator[MapCounts]:
    """Yield the number of maps, of failures and of each status, for every method and finding."""
    table = BatchRun(context.folder / "maps").table(["method", "target", "status"])
    counts = Counter(zip(*(table[name].to_pylist() for name in ("method", "target", "status")), strict=True))
    for explainer in context.explainers:
        for finding in context.findings:
            key = explainer.composed_name, str(finding.class_index)
            status_counts = {status: count for (*group, status), count in sorted(counts.items()) if tuple(group) == key}
            n_failures = status_counts.pop("failed", 0)
            yield MapCounts(
                method=explainer.composed_name,
                finding=finding.name,
                n_maps=sum(status_counts.values()),
                n_failures=n_failures,
                status_counts=status_counts,
            )
