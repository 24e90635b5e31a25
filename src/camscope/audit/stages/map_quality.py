"""The stages that test the maps.

- faithfulness: how the prediction changes when the highlighted pixels are replaced, for at least two imputations.
- robustness: how much maps change under transformations, noise, other batches and repetition.
- sanity: whether maps change when the weights are randomized; an edge detector serves as a control that fails.
- localization: whether the maps highlight the annotated finding, compared with control maps.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import (
    EstimateSummary,
    MetricsResult,
    MetricSummary,
    RandomizationSimilarity,
    RandomizationTest,
    SanityResult,
    StablePredictionShare,
    SubgroupDifference,
)
from camscope.audit.core.stage_results import StageResults
from camscope.audit.core.summary_values import (
    add_patient_column,
    collect_formulas,
    filter_finding,
    get_metric_values,
    round_significant,
    summarize_estimate,
    summarize_finding_metrics,
)
from camscope.audit.performance.subgroups import compare_subgroups
from camscope.batch import BatchOptions, BatchRun, Manifest, run_batch
from camscope.batch.manifest import import_arrow
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation import EvaluationResult, evaluate
from camscope.explainers import METHODS, Explainer
from camscope.metrics import RandomizationResult as Found
from camscope.metrics import run_randomization_test
from camscope.metrics.explainer_probe import ExplainerProbe
from camscope.metrics.input_transforms import ACQUISITION_TRANSFORMS, InputTransform
from camscope.metrics.robustness import DEFAULT_TRANSFORMS, compute_stable_prediction_share
from camscope.metrics.statistics import estimate_mean
from camscope.safe_files import build_output_path

FAITHFULNESS_METRICS = (
    "lerf-morf-gap", "deletion", "insertion", "aopc", "necessity", "sufficiency", "average-drop", "average-gain", "road",
)  # fmt: skip


def evaluate_faithfulness(context: AuditContext, results: StageResults) -> MetricsResult:
    """Of images with each finding, drawn by the seed."""
    return evaluate_samples(
        context, results, "faithfulness", context.config.sample_sizes.faithfulness, 1, FAITHFULNESS_METRICS
    )


ROBUSTNESS_METRICS = (
    "stability",
    "acquisition-stability",
    "max-sensitivity",
    "determinism",
    "batch-invariance",
    "random-logit",
)
CHANGES_BY_METRIC: Mapping[str, Sequence[InputTransform]] = {
    "stability": DEFAULT_TRANSFORMS,
    "acquisition-stability": ACQUISITION_TRANSFORMS,
}
ROBUSTNESS_SALT = 2


def evaluate_robustness(context: AuditContext, results: StageResults) -> MetricsResult:
    """Of images with each finding, drawn by the seed."""
    result = evaluate_samples(
        context, results, "robustness", context.config.sample_sizes.robustness, ROBUSTNESS_SALT, ROBUSTNESS_METRICS
    )
    return (
        result.model_copy(update={"stable_predictions": tuple(_summarize_stable_predictions(context, results))})
        if result.tested
        else result
    )


def _summarize_stable_predictions(context: AuditContext, results: StageResults) -> Iterator[StablePredictionShare]:
    """Yield the share of input changes under which the prediction stayed, for each stability metric."""
    for finding in context.findings:
        rows = context.cohort.sample_rows(
            results.predictions.rows,
            context.config.sample_sizes.robustness,
            ROBUSTNESS_SALT,
            finding,
            only_positives=True,
        )
        patients = [context.cohort.patients[row] for row in rows]
        for name, (shares, reason) in _compute_stable_prediction_shares(context, finding, rows).items() if rows else ():
            share = (
                summarize_estimate(None, reason=reason)
                if reason
                else summarize_estimate(
                    estimate_mean(shares, patients, bounds=(0.0, 1.0), **context.config.bootstrap_options)
                )
            )
            yield StablePredictionShare(metric=name, finding=finding.name, share=share)


def _compute_stable_prediction_shares(
    context: AuditContext, finding: Finding, rows: Sequence[int]
) -> dict[str, tuple[list[float], str]]:
    """Return for each stability metric the shares of stable predictions by image, or the reason why there are none."""
    shares_by_metric: dict[str, tuple[list[float], str]] = {name: ([], "") for name in CHANGES_BY_METRIC}
    for batch in context.iter_batches(rows):
        x = context.stack_on_device(batch)
        probe = ExplainerProbe.from_explainer(context.explainers[0], x, [finding.class_index] * len(x))
        for name, changes in CHANGES_BY_METRIC.items():
            try:
                shares_by_metric[name][0].extend(compute_stable_prediction_share(probe, changes).tolist())
            except GeometryError as error:  # compression applies to images, not to signals
                shares_by_metric[name] = [], str(error)
    return shares_by_metric


RANDOMIZATION_SEEDS = (0, 1, 2)
MIN_SANITY_IMAGES = 5  # for the similarity of maps of different images


def evaluate_sanity(context: AuditContext, results: StageResults) -> SanityResult:
    """Test the methods by cascading weight randomization, from the output, for the images of each finding."""
    explainers: list[tuple[Explainer, bool]] = [(explainer, False) for explainer in context.explainers]
    explainers.append((METHODS["edges"](context.model), True))
    tests, images, done = [], set[int](), 0
    for finding in context.findings:
        x, rows = _load_most_common_size(
            context,
            context.cohort.sample_rows(
                results.predictions.rows, context.config.sample_sizes.sanity, 3, finding, only_positives=True
            ),
        )
        if len(x) < MIN_SANITY_IMAGES:
            continue
        images.update(rows)
        patients = [context.cohort.patient_numbers[row] for row in rows]
        for explainer, control in explainers:
            context.on_progress(done := done + 1, len(explainers) * len(context.findings))
            tests.append(_run_randomization_test(context, explainer, x, patients, finding, control))
    if not tests:
        return SanityResult(tested=False, reason=f"fewer than {MIN_SANITY_IMAGES} images with a finding share a size")
    return SanityResult(n_images=len(images), tests=tuple(tests))


def _load_most_common_size(context: AuditContext, rows: list[int]) -> tuple[Tensor, list[int]]:
    """Return the images of the most common size, and their rows."""
    read = zip(rows, context.load_images(rows), strict=True)
    items = {row: item.item.x for row, item in read if item.item is not None}
    if not items:
        return torch.empty(0, dtype=torch.float32, device="cpu"), []
    usual = Counter(tuple(item.shape) for item in items.values()).most_common(1)[0][0]
    selected = {row: item for row, item in items.items() if tuple(item.shape) == usual}
    first = next(context.model.parameters())
    return torch.stack(list(selected.values())).to(first.device, first.dtype), list(selected)


def _run_randomization_test(
    context: AuditContext,
    explainer: Explainer,
    x: Tensor,
    patients: Sequence[Hashable],
    finding: Finding,
    control: bool,
) -> RandomizationTest:
    try:
        result = run_randomization_test(explainer, x, [finding.class_index] * len(x), seeds=RANDOMIZATION_SEEDS)
    except (NonFiniteError, UndefinedError) as error:
        return RandomizationTest(
            method=explainer.full_name, finding=finding.name, part_names=(), seeds=RANDOMIZATION_SEEDS, similarities=(),
            passes=None, reason=str(error), control=control,
        )  # fmt: skip
    return RandomizationTest(
        method=explainer.full_name,
        finding=finding.name,
        part_names=result.part_names,
        seeds=result.seeds,
        similarities=tuple(
            _build_similarity(result, name, patients, context.config.bootstrap_options) for name in result.similarities
        ),
        passes=None if result.no_verdict_reason else result.passes,
        reason=result.no_verdict_reason or _find_undecided_reason(result),
        control=control,
    )


def _find_undecided_reason(randomization_result: Found) -> str:
    """Return why the test is neither passed nor failed; "" where it is."""
    reasons = [verdict.reason for verdict in randomization_result.verdicts.values() if verdict.passes is None]
    return reasons[0] if randomization_result.passes is None else ""


def _build_similarity(
    randomization_result: Found, name: str, patients: Sequence[Hashable], bootstrap_options: dict[str, int]
) -> RandomizationSimilarity:
    low, null, high = randomization_result.null_intervals[name]
    verdict = None if randomization_result.no_verdict_reason else randomization_result.verdicts[name]
    return RandomizationSimilarity(
        name=name,
        curve=tuple(
            round_significant(float(similarity)) for similarity in randomization_result.compute_mean_curve(name)
        ),
        null_low=round_significant(low),
        null_mean=round_significant(null),
        null_high=round_significant(high),
        passes=verdict.passes if verdict else None,
        reason=verdict.reason if verdict else randomization_result.no_verdict_reason,
        final_similarity=_summarize_final_similarity(randomization_result, name, patients, bootstrap_options),
    )


def _summarize_final_similarity(
    randomization_result: Found, name: str, patients: Sequence[Hashable], bootstrap_options: dict[str, int]
) -> EstimateSummary:
    """Return the similarity after full randomization; a patient's images of all seeds are resampled together."""
    last = randomization_result.similarities[name][:, -1]
    try:
        estimate = estimate_mean(last.ravel(), [*patients] * len(last), bounds=(-1.0, 1.0), **bootstrap_options)
    except UndefinedError:
        return summarize_estimate(None, reason="no map has a number: there is nothing to compare")
    n_known = int((~np.isnan(last)).any(0).sum())
    return summarize_estimate(replace(estimate, n_values=n_known, n_undefined=last.shape[1] - n_known))


IMAGES_PER_CHUNK = 8  # images lost by an interruption; each takes long


def evaluate_samples(
    context: AuditContext, results: StageResults, stage_name: str, n_samples: int, salt: int, metrics: tuple[str, ...]
) -> MetricsResult:
    """Evaluate metrics that need the model for sampled images with each finding, in the folder `stage_name`."""
    lines: list[MetricSummary] = []
    images = set[int]()
    for finding in context.findings:
        rows = context.cohort.sample_rows(results.predictions.rows, n_samples, salt, finding, only_positives=True)
        images.update(rows)
        folder = build_output_path(context.folder, stage_name, str(finding.class_index))
        lines += _evaluate_finding(context, folder, finding, rows, metrics) if rows else []
    if not images:
        return MetricsResult(tested=False, reason="no image with a finding has a prediction")
    return MetricsResult(n_images=len(images), formulas=collect_formulas(lines), metric_summaries=tuple(lines))


def _evaluate_finding(
    context: AuditContext, folder: Path, finding: Finding, rows: list[int], metrics: tuple[str, ...]
) -> list[MetricSummary]:
    config = context.config
    output_rows, manifest_rows = (
        _select_rows(context, context.cohort.output_manifest, rows),
        _select_rows(context, context.cohort.manifest, rows),
    )
    run_batch(
        context.explainers,
        output_rows,
        folder / "maps",
        [finding.class_index],
        options=BatchOptions(chunk_size=IMAGES_PER_CHUNK, window=config.data.window),
        batch_size=config.batch_size,
    )
    evaluation = evaluate(
        BatchRun(folder / "maps", manifest_rows),
        folder / "values",
        metrics=metrics,
        model=context.model,
        preprocess=context.explainers[0].preprocess,
        explainers=context.explainers,
        imputations=config.imputations,
        batch_size=config.perturbed_batch_size,
        on_progress=context.on_progress,
    )
    return summarize_finding_metrics(context.cohort, evaluation, finding)


def _select_rows(context: AuditContext, manifest: Manifest, rows: list[int]) -> Manifest:
    positions = import_arrow().array([context.cohort.manifest_positions[row] for row in rows], import_arrow().int64())
    return replace(manifest, table=manifest.table.take(positions))


LOCALIZATION_METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance",
    "effective-area",
)  # fmt: skip


def evaluate_localization(context: AuditContext, results: StageResults) -> MetricsResult:
    """Evaluate where the maps lie, for the images with an annotated finding."""
    if not context.ground_truth:
        reason = "no masks, boxes or points locate the findings: set ground_truth in [data]"
        return MetricsResult(tested=False, reason=reason)
    findings = [finding for finding in context.findings if finding.name in context.ground_truth]
    evaluations = [(finding, _evaluate_finding_localization(context, finding)) for finding in findings]
    lines = [line for finding, values in evaluations for line in _add_max_enrichment(context, values, finding)]
    if not any(line.value.n_values for line in lines if line.metric == "enrichment" and not line.control):
        return MetricsResult(tested=False, reason=f"no map has a value: {_summarize_reasons(context, evaluations)}")
    images = max(line.value.n_values for line in lines if line.metric == "enrichment")
    levels = tuple(_compare_mass_by_subgroup(context, results, evaluations))
    return MetricsResult(
        n_images=images, formulas=collect_formulas(lines), metric_summaries=tuple(lines), subgroup_differences=levels
    )


def _summarize_reasons(context: AuditContext, evaluations: Sequence[tuple[Finding, EvaluationResult]]) -> str:
    """Return the most common reasons of maps without a value, with their counts."""
    reasons = Counter[str]()
    for finding, evaluation in evaluations:
        maps = evaluation.table("not control and metric = 'enrichment'")
        reasons.update(
            reason or "" for reason in filter_finding(context.cohort, maps, finding, True)["reason"].to_pylist()
        )
    return "; ".join(f"{reason} ({count} x)" for reason, count in reasons.most_common(3)) or "no image has the finding"


def _evaluate_finding_localization(context: AuditContext, finding: Finding) -> EvaluationResult:
    evidence = context.ground_truth[finding.name]
    return evaluate(
        context.maps,
        build_output_path(context.folder, "localization", str(finding.class_index)),
        evidence,
        LOCALIZATION_METRICS,
        strict=False,
        on_progress=context.on_progress,
    )


def _add_max_enrichment(
    context: AuditContext, evaluation: EvaluationResult, finding: Finding
) -> Iterator[MetricSummary]:
    """Yield the metric summaries; those of enrichment with its maximum, the inverse of the masked area."""
    values = filter_finding(context.cohort, evaluation.table(), finding, True)
    areas = [area for area in get_metric_values(values, "energy-inside", "uniform", None).values() if area > 0]
    most = round_significant(fmean(1 / area for area in areas)) if areas else None
    for line in summarize_finding_metrics(context.cohort, evaluation, finding):
        yield line.model_copy(update={"max_value": most}) if line.metric == "enrichment" else line


def _compare_mass_by_subgroup(
    context: AuditContext, results: StageResults, evaluations: Sequence[tuple[Finding, EvaluationResult]]
) -> Iterator[SubgroupDifference]:
    """Compare the share of the map inside the finding between subgroups.

    Only the first method is compared, because every further comparison widens all intervals.
    """
    explainer = context.explainers[0]
    for finding, evaluation in evaluations:
        values = filter_finding(context.cohort, add_patient_column(context.cohort, evaluation.table()), finding, True)
        inside = get_metric_values(
            values, "energy-inside", explainer.full_name, results.resolve.get_explainer_info(explainer.full_name).layer
        )
        if inside:
            yield from compare_subgroups(context.cohort, finding, inside, context.config.margins.mass_difference)
