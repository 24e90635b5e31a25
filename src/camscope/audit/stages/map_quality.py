"""The stages that test the maps: localization, faithfulness, sanity and robustness."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import build_output_path
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.audit.core.convert_to_summary_entries import (
    add_patient_column,
    collect_formulas,
    get_metric_values,
    round_significant,
    select_metric_values_of_finding,
    summarize_estimate,
    summarize_finding_metrics,
)
from camscope.audit.core.fewest_steps_with_same_ranks import reduce_integration_steps
from camscope.audit.core.stage_result_schema import (
    EstimateSummary,
    MetricsResult,
    MetricSummary,
    RandomizationSimilarity,
    RandomizationTest,
    SanityImages,
    SanityResult,
    StablePredictionShare,
    SubgroupDifference,
)
from camscope.audit.core.stored_predictions import StageResults
from camscope.audit.performance.subgroup_differences import compare_subgroups
from camscope.audit.stages.metrics_on_growing_sample import SampledMetrics, SampledStage
from camscope.audit.verdicts.early_stopping import forecast_faithfulness_verdict, forecast_robustness_verdict
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation import EvaluationResult, evaluate
from camscope.explainers import METHODS, Explainer
from camscope.metrics import RandomizationResult, run_randomization_test
from camscope.metrics.explain_changed_inputs import ExplainerProbe, clean_maps_and_predictions_shared
from camscope.metrics.input_transforms import ACQUISITION_TRANSFORMS, InputTransform
from camscope.metrics.mean_estimates import estimate_mean
from camscope.metrics.stability_under_transforms import DEFAULT_TRANSFORMS, compute_stable_prediction_share

FAITHFULNESS_METRICS = (
    "lerf-morf-gap", "deletion", "insertion", "aopc", "necessity", "sufficiency", "average-drop", "average-gain", "road",
)  # fmt: skip
ROBUSTNESS_METRICS = (
    "stability", "acquisition-stability", "max-sensitivity", "determinism", "batch-invariance", "random-logit",
)  # fmt: skip
LOCALIZATION_METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance",
    "effective-area",
)  # fmt: skip
TRANSFORMS_BY_METRIC: Mapping[str, Sequence[InputTransform]] = {
    "stability": DEFAULT_TRANSFORMS,
    "acquisition-stability": ACQUISITION_TRANSFORMS,
}
FAITHFULNESS_SALT, ROBUSTNESS_SALT, SANITY_SALT = 1, 2, 3  # separate the random streams of the stages
RANDOMIZATION_SEEDS = (0, 1, 2)
N_RANDOMIZATION_DEPTHS = 5  # of the cascade, of the first part to all parts; all seeds take the last alone
MIN_SANITY_IMAGES = 5  # for the similarity of maps of different images


def evaluate_faithfulness(context: AuditContext, results: StageResults) -> MetricsResult:
    """Test on sampled images whether the maps show the pixels on which the prediction depends."""
    judge = partial(forecast_faithfulness_verdict, len(context.explainers))
    stage = SampledStage(context, "faithfulness", FAITHFULNESS_METRICS, context.explainers, judge)
    n_samples = context.sample_sizes.faithfulness
    return _evaluate_metrics_on_samples(stage, _draw_positives(context, results, n_samples, FAITHFULNESS_SALT))[0]


def evaluate_robustness(context: AuditContext, results: StageResults) -> MetricsResult:
    """Test whether the maps stay stable under small changes of the image. Sampled images are used."""
    rank = reduce_integration_steps(context)
    judge = partial(forecast_robustness_verdict, context.config.margins.robustness_correlation)
    descriptive_metrics = tuple(name for name in ROBUSTNESS_METRICS if name not in TRANSFORMS_BY_METRIC)
    stage = SampledStage(context, "robustness", ROBUSTNESS_METRICS, rank.explainers, judge, descriptive_metrics)
    n_samples = context.sample_sizes.robustness
    result, metrics = _evaluate_metrics_on_samples(stage, _draw_positives(context, results, n_samples, ROBUSTNESS_SALT))
    if not result.tested:
        return result
    shares = [
        share for finding in context.findings for share in _summarize_stable_predictions(context, finding, metrics)
    ]
    return result.model_copy(update={"stable_predictions": tuple(shares), "path_steps": rank.path_steps})


def _draw_positives(
    context: AuditContext, results: StageResults, n_samples: int, salt: int
) -> dict[Finding, list[int]]:
    """Draw rows of images that have the finding. Return finding -> rows in the order of the draw."""
    rows = results.predictions.rows
    return {
        finding: context.cohort.draw_balanced_rows_in_random_order(rows, n_samples, salt, finding, only_positives=True)
        for finding in context.findings
    }


def _summarize_stable_predictions(
    context: AuditContext, finding: Finding, metrics: Mapping[Finding, SampledMetrics]
) -> Iterator[StablePredictionShare]:
    """Yield, for each stability metric, the share of image changes that left the prediction unchanged."""
    shares: dict[str, list[float]] = {name: [] for name in TRANSFORMS_BY_METRIC}
    reasons: dict[str, str] = {}
    rows = sorted(metrics[finding].rows)
    for batch in context.iter_batches(rows):
        x = context.stack_on_device(batch)
        probe = ExplainerProbe.from_explainer(context.explainers[0], x, [finding.class_index] * len(x))
        for name, transforms in TRANSFORMS_BY_METRIC.items():
            try:
                shares[name].extend(compute_stable_prediction_share(probe, transforms).tolist())
            except GeometryError as error:  # compression applies to images, not to signals
                reasons[name] = str(error)
    patients = [context.cohort.patients[row] for row in rows]
    level = max((look.confidence_level for look in metrics[finding].stopping_looks), default=0.95)
    for name in TRANSFORMS_BY_METRIC if rows else ():
        reason = reasons.get(name, "")
        options = context.config.bootstrap_options
        estimate = (
            None
            if reason
            else estimate_mean(shares[name], patients, bounds=(0.0, 1.0), confidence_level=level, **options)
        )
        yield StablePredictionShare(
            metric=name, finding=finding.name, share=summarize_estimate(estimate, reason=reason)
        )


def _evaluate_metrics_on_samples(
    stage: SampledStage, drawn_rows: Mapping[Finding, Sequence[int]]
) -> tuple[MetricsResult, dict[Finding, SampledMetrics]]:
    """Compute metrics that run the model, on sampled images of each finding."""
    metrics = {finding: stage.evaluate_finding(finding, rows) for finding, rows in drawn_rows.items()}
    images = {row for values in metrics.values() for row in values.rows}
    if not images:
        return MetricsResult(tested=False, reason="no image with a finding has a prediction"), metrics
    summaries = [summary for values in metrics.values() for summary in values.summaries]
    result = MetricsResult(
        n_images=len(images),
        formulas=collect_formulas(summaries),
        metric_summaries=tuple(summaries),
        stopping_looks=tuple(look for values in metrics.values() for look in values.stopping_looks),
    )
    return result, metrics


def evaluate_sanity(context: AuditContext, results: StageResults) -> SanityResult:
    """Test whether the maps change when the model's weights are randomized layer by layer."""
    rank = reduce_integration_steps(context)
    explainers: list[Explainer] = [*rank.explainers, METHODS["edges"](context.model)]  # edges: the control
    tests: list[RandomizationTest] = []
    counts: list[SanityImages] = []
    images, n_done = set[int](), 0
    for finding in context.findings:
        n_samples = context.sample_sizes.sanity
        rows = context.cohort.sample_balanced_rows(
            results.predictions.rows, n_samples, SANITY_SALT, finding, only_positives=True
        )
        x, rows, n_other_sizes = _load_images_and_rows_of_most_common_size(context, rows)
        size = tuple(x.shape[2:])
        counts.append(SanityImages(finding=finding.name, n_images=len(x), size=size, n_other_sizes=n_other_sizes))
        if len(x) < MIN_SANITY_IMAGES:
            continue
        images.update(rows)
        with (
            clean_maps_and_predictions_shared()
        ):  # all tests take the same prediction, and both tests of a method the same maps
            for explainer in explainers:
                context.on_progress(n_done := n_done + 1, len(explainers) * len(context.findings))
                test = _run_randomization_test(context, explainer, x, rows, finding)
                tests.append(test.model_copy(update={"control": explainer is explainers[-1]}))
    if not tests:
        reason = f"fewer than {MIN_SANITY_IMAGES} images with a finding share a size"
        return SanityResult(tested=False, reason=reason, images_by_finding=tuple(counts))
    return SanityResult(
        n_images=len(images), images_by_finding=tuple(counts), tests=tuple(tests), path_steps=rank.path_steps
    )


def _load_images_and_rows_of_most_common_size(context: AuditContext, rows: list[int]) -> tuple[Tensor, list[int], int]:
    """Load the images of the most common size as one tensor. Also return their rows, and how many images have other sizes."""
    images = zip(rows, context.load_images(rows), strict=True)
    inputs = {row: image.item.x for row, image in images if image.item is not None}
    if not inputs:
        return torch.empty(0, dtype=torch.float32, device="cpu"), [], 0
    usual = Counter(x.shape for x in inputs.values()).most_common(1)[0][0]
    selected = {row: x for row, x in inputs.items() if x.shape == usual}
    parameter = next(context.model.parameters())
    return (
        torch.stack(list(selected.values())).to(parameter.device, parameter.dtype),
        list(selected),
        len(inputs) - len(selected),
    )


def _run_randomization_test(
    context: AuditContext, explainer: Explainer, x: Tensor, rows: Sequence[int], finding: Finding
) -> RandomizationTest:
    """Test whether the maps change when the weights are randomized. An undefined test gives the reason."""
    test = RandomizationTest(
        method=explainer.composed_name, finding=finding.name, part_names=(), seeds=RANDOMIZATION_SEEDS, similarities=(),
        passes=None, reason="", control=False,
    )  # fmt: skip
    try:
        cascade, result = run_cascade_and_last_step(explainer, x, [finding.class_index] * len(x))
    except (NonFiniteError, UndefinedError) as error:
        return test.model_copy(update={"reason": str(error)})
    reason = result.no_verdict_reason
    if not reason and result.passes is None:
        reason = next(verdict.reason for verdict in result.verdicts.values() if verdict.passes is None)
    return test.model_copy(
        update={
            "part_names": cascade.part_names,
            "similarities": tuple(
                _summarize_similarity(context, cascade, result, name, rows) for name in result.similarities
            ),
            "passes": None if result.no_verdict_reason else result.passes,
            "reason": reason,
        }
    )


def run_cascade_and_last_step(
    explainer: Explainer, x: Tensor, targets: Sequence[int]
) -> tuple[RandomizationResult, RandomizationResult]:
    """Run a randomization test. Return the result of one seed at several depths, and the final result of all seeds."""
    first_seed, *other_seeds = RANDOMIZATION_SEEDS
    cascade = run_randomization_test(explainer, x, targets, seeds=(first_seed,), n_depths=N_RANDOMIZATION_DEPTHS)
    last_step = run_randomization_test(explainer, x, targets, seeds=other_seeds, n_depths=1)
    final = {
        name: np.concatenate([cascade.similarities[name][:, -1:], last_step.similarities[name]])
        for name in cascade.similarities
    }
    return cascade, replace(last_step, seeds=RANDOMIZATION_SEEDS, similarities=final)


def _summarize_similarity(
    context: AuditContext, cascade: RandomizationResult, result: RandomizationResult, name: str, rows: Sequence[int]
) -> RandomizationSimilarity:
    """Summarize one similarity measure. The curve comes from one seed, but its last value and the verdict use all seeds."""
    low, mean, high = map(round_significant, result.null_intervals[name])
    curve = [*cascade.compute_mean_curve(name)[:-1], result.compute_mean_curve(name)[-1]]
    verdict = None if result.no_verdict_reason else result.verdicts[name]
    return RandomizationSimilarity(
        name=name,
        curve=tuple(round_significant(float(similarity)) for similarity in curve),
        null_low=low,
        null_mean=mean,
        null_high=high,
        passes=verdict.passes if verdict else None,
        reason=verdict.reason if verdict else result.no_verdict_reason,
        final_similarity=_summarize_final_similarity(
            result.similarities[name][:, -1],
            [context.cohort.patient_number_by_row[row] for row in rows],
            context.config.bootstrap_options,
        ),
    )


def _summarize_final_similarity(
    similarities: npt.NDArray[np.floating[Any]], patients: list[int], bootstrap_options: Mapping[str, int]
) -> EstimateSummary:
    """Summarize the similarities (seeds, N) after the last step, in which all weights are random.

    The values of a patient over all seeds are one unit.
    """
    try:
        estimate = estimate_mean(
            similarities.ravel(), patients * len(similarities), bounds=(-1.0, 1.0), **bootstrap_options
        )
    except UndefinedError:
        return summarize_estimate(None, reason="no map has a number: there is nothing to compare")
    n_defined = int((~np.isnan(similarities)).any(0).sum())
    return summarize_estimate(replace(estimate, n_values=n_defined, n_undefined=similarities.shape[1] - n_defined))


def evaluate_localization(context: AuditContext, results: StageResults) -> MetricsResult:
    """Measure how well the maps locate the finding. Annotated images are used."""
    if not context.ground_truth:
        reason = "no masks, boxes or points locate the findings: set ground_truth in [data]"
        return MetricsResult(tested=False, reason=reason)
    evaluations = [
        (
            finding,
            evaluate(
                context.maps,
                build_output_path(context.folder, "localization", str(finding.class_index)),
                context.ground_truth[finding.name],
                LOCALIZATION_METRICS,
                strict=False,
                on_progress=context.on_progress,
            ),
        )
        for finding in context.findings
        if finding.name in context.ground_truth
    ]
    summaries = [
        summary for finding, values in evaluations for summary in _add_max_enrichment(context, values, finding)
    ]
    enrichments = [summary for summary in summaries if summary.metric == "enrichment"]
    if not any(summary.value.n_values for summary in enrichments if not summary.control):
        return MetricsResult(tested=False, reason=f"no map has a value: {_summarize_reasons(context, evaluations)}")
    return MetricsResult(
        n_images=max(summary.value.n_values for summary in enrichments),
        formulas=collect_formulas(summaries),
        metric_summaries=tuple(summaries),
        subgroup_differences=tuple(_compare_mass_by_subgroup(context, results, evaluations)),
    )


def _summarize_reasons(context: AuditContext, evaluations: Sequence[tuple[Finding, EvaluationResult]]) -> str:
    """Return the most common reasons for missing metric values, with their counts."""
    reasons = Counter[str]()
    for finding, evaluation in evaluations:
        maps = evaluation.table("not control and metric = 'enrichment'")
        selected = select_metric_values_of_finding(context.cohort, maps, finding, True)
        reasons.update(reason or "" for reason in selected["reason"].to_pylist())
    return "; ".join(f"{reason} ({count} x)" for reason, count in reasons.most_common(3)) or "no image has the finding"


def _add_max_enrichment(
    context: AuditContext, evaluation: EvaluationResult, finding: Finding
) -> Iterator[MetricSummary]:
    """Yield the metric summaries. Add the largest possible enrichment, which is the inverse of the image share of the mask."""
    values = select_metric_values_of_finding(context.cohort, evaluation.table(), finding, True)
    areas = [area for area in get_metric_values(values, "energy-inside", "uniform", None).values() if area > 0]
    maximum = round_significant(fmean(1 / area for area in areas)) if areas else None
    for summary in summarize_finding_metrics(context.cohort, evaluation, finding):
        yield summary.model_copy(update={"max_value": maximum}) if summary.metric == "enrichment" else summary


def _compare_mass_by_subgroup(
    context: AuditContext, results: StageResults, evaluations: Sequence[tuple[Finding, EvaluationResult]]
) -> Iterator[SubgroupDifference]:
    """Compare between subgroups how much of the attribution lies inside the finding.

    Only the first method is compared, because every further comparison widens all intervals.
    """
    title = context.explainers[0].composed_name
    layer = results.resolve.get_explainer_info(title).layer
    for finding, evaluation in evaluations:
        table = add_patient_column(context.cohort, evaluation.table())
        inside = get_metric_values(
            select_metric_values_of_finding(context.cohort, table, finding, True), "energy-inside", title, layer
        )
        if inside:
            yield from compare_subgroups(context.cohort, finding, inside, context.config.margins.mass_difference)
