"""The stage that tests for shortcuts: regions that maps highlight or predictions rely on, and images for review."""

from collections.abc import Iterator, Sequence

import numpy as np

from camscope.audit.clustering.cluster_analysis import analyze_clusters
from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import (
    AttributionMass,
    ClusterAnalysis,
    FlowStep,
    ReviewCase,
    ShortcutResult,
    SubgroupDifference,
)
from camscope.audit.core.stage_results import StageResults
from camscope.audit.performance.leakage import probe_columns
from camscope.audit.performance.subgroups import compare_subgroups
from camscope.audit.shortcuts import interventions as trials
from camscope.audit.shortcuts.interventions import InterventionRunner
from camscope.audit.shortcuts.region_attribution import compute_attribution_mass_by_region, compute_region_overlaps
from camscope.audit.shortcuts.region_samples import FINDING_REGION, ORGAN_REGION, RegionSamples, load_region_samples


def analyze_shortcuts(context: AuditContext, results: StageResults) -> ShortcutResult:
    """Measure attribution mass, interventions, leakage and clusters on sampled images; write `interventions.parquet`."""
    config, predictions = context.config, Predictions.read(context.folder, features=True)

    def draw(n_rows: int) -> list[int]:
        return context.cohort.sample_rows_of_all_findings(predictions.rows, n_rows, 4, context.findings)

    samples = load_region_samples(context, draw(config.sample_sizes.regions))
    intervention_samples = _select_samples(
        samples, draw(min(config.sample_sizes.interventions, config.sample_sizes.regions))
    )
    runners = [
        InterventionRunner(
            context,
            intervention_samples.for_finding(one.name),
            one,
            predictions.log_odds_by_row(one.name),
            predictions.log_odds_std(one.name),
            predictions.outputs_are_probabilities,
        )
        for one in context.findings
    ]
    interventions = [result for one in runners for result in one.run_interventions()]
    masked_aurocs = [result for one in runners for result in one.compute_masked_aurocs()]
    trials.write_interventions(context.folder, [trial for one in runners for trial in one.records], context.cohort.ids)
    cluster_analyses = [
        analyze_clusters(context, explainer, finding, samples.for_finding(finding.name), predictions)
        for finding in context.findings
        for explainer in context.explainers
    ]
    samples_by_finding = {one.name: samples.for_finding(one.name) for one in context.findings}
    names = dict.fromkeys(
        name for region_samples in samples_by_finding.values() for name in region_samples.region_names
    )
    return ShortcutResult(
        region_counts={
            name: max(len(region_samples.select_with_region(name)) for region_samples in samples_by_finding.values())
            for name in names
        },
        markers_by_finding={
            finding: _list_markers(region_samples) for finding, region_samples in samples_by_finding.items()
        },
        missing_regions=tuple(_list_missing_regions(samples)),
        overlaps=tuple(
            one
            for finding in context.findings
            for one in compute_region_overlaps(samples.for_finding(finding.name), finding.name)
        ),
        attribution_mass=tuple(_compute_attribution_mass(context, results, samples)),
        interventions=tuple(interventions),
        masked_auroc=tuple(masked_aurocs),
        subgroup_differences=tuple(_compare_marker_effects(context, runners)),
        leakage=tuple(probe_columns(context.cohort, predictions)),
        cluster_analyses=tuple(cluster_analyses),
        review_cases=tuple(list_review_cases(context, predictions, runners, cluster_analyses)),
    )


def _list_markers(samples: RegionSamples) -> tuple[str, ...]:
    """Return the regions that only some images have."""
    return tuple(name for name in samples.region_names if len(samples.select_with_region(name)) < len(samples.samples))


def _select_samples(samples: RegionSamples, rows: list[int]) -> RegionSamples:
    selected = set(rows)
    return RegionSamples(
        [sample for sample in samples.samples if sample.row in selected],
        samples.missing_reasons,
        samples.exclusion_reasons,
    )


def _list_missing_regions(samples: RegionSamples) -> Iterator[FlowStep]:
    for name, reasons in samples.missing_reasons.items():
        for reason, count in reasons.most_common(3):
            yield FlowStep(name=name, n_rows=count, reason=reason)
    for reason, count in samples.exclusion_reasons.items():
        yield FlowStep(name="the image", n_rows=count, reason=reason)


def _compute_attribution_mass(
    context: AuditContext, results: StageResults, samples: RegionSamples
) -> Iterator[AttributionMass]:
    for explainer in context.explainers if samples.samples else ():
        stride = max(results.resolve.get_explainer_info(explainer.full_name).stride)
        for finding in context.findings:
            yield from compute_attribution_mass_by_region(
                context, samples.for_finding(finding.name), explainer, finding, stride
            )


def _compare_marker_effects(context: AuditContext, runners: list[InterventionRunner]) -> Iterator[SubgroupDifference]:
    """Compare the effect of removing each marker between subgroups; the effect is 0 in images without the marker."""
    for runner in runners:
        for region in context.config.regions.columns:
            effects: dict[int, list[float]] = {row: [] for row, truth in runner.truth_by_row.items() if truth is True}
            for record in runner.records:
                if record.region == region and record.kind == "remove" and runner.log_odds_std > 0:
                    effects[record.row].append((record.log_odds_with - record.log_odds_without) / runner.log_odds_std)
            if any(effects.values()):
                values = {row: float(np.mean(values)) if values else 0.0 for row, values in effects.items()}
                yield from compare_subgroups(
                    context.cohort, runner.finding, values, context.config.margins.effect, region=region
                )


MAX_REVIEW_IMAGES_PER_REASON = 4  # for each reason


def list_review_cases(
    context: AuditContext,
    predictions: Predictions,
    runners: Sequence[InterventionRunner],
    cluster_analyses: Sequence[ClusterAnalysis],
) -> Iterator[ReviewCase]:
    """Yield the images for review by reason; an image may occur several times."""
    for finding, runner in zip(context.findings, runners, strict=True):
        yield from _list_wrong_predictions(context, predictions, finding)
        yield from _list_region_sensitive_images(context, runner)
    for analysis in cluster_analyses:
        if analysis.n_clusters > 1:
            for cluster in analysis.clusters:
                for name in cluster.prototypes[:1]:
                    yield ReviewCase(
                        id=name,
                        finding=analysis.finding,
                        reason=f"typical of attribution cluster {cluster.number}",
                    )


def _list_wrong_predictions(context: AuditContext, predictions: Predictions, finding: Finding) -> Iterator[ReviewCase]:
    truths, log_odds = context.cohort.get_truth(finding), predictions.log_odds_by_row(finding.name)
    missed = sorted(
        (row for row in log_odds if truths[row] is True and log_odds[row] < 0), key=lambda row: log_odds[row]
    )
    alarms = sorted(
        (row for row in log_odds if truths[row] is False and log_odds[row] > 0), key=lambda row: -log_odds[row]
    )
    uncertain = sorted((row for row in log_odds if truths[row] is not None), key=lambda row: abs(log_odds[row]))
    for rows, reason in (
        (missed, "missed, with one of the lowest probabilities"),
        (alarms, "false alarm, with one of the highest probabilities"),
        (uncertain, "among the probabilities nearest to 0.5"),
    ):
        for row in rows[:MAX_REVIEW_IMAGES_PER_REASON]:
            yield ReviewCase(id=context.cohort.ids[row], finding=finding.name, reason=reason)


def _list_region_sensitive_images(context: AuditContext, runner: InterventionRunner) -> Iterator[ReviewCase]:
    """Yield the images whose prediction a region changes most."""
    for region in runner.samples.region_names:
        if region in (FINDING_REGION, ORGAN_REGION):
            continue
        effects: dict[int, float] = {}
        for record in runner.records:
            if record.region == region and record.kind != "keep only":
                effects[record.row] = max(
                    effects.get(record.row, 0.0), abs(record.log_odds_with - record.log_odds_without)
                )
        for row in sorted(effects, key=lambda row: (-effects[row], row))[:MAX_REVIEW_IMAGES_PER_REASON]:
            if runner.log_odds_std > 0 and effects[row] > runner.log_odds_std * context.config.margins.effect:
                yield ReviewCase(
                    id=context.cohort.ids[row], finding=runner.finding.name, reason=f"changed most by {region}"
                )
