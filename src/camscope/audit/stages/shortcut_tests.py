"""The stage that tests for shortcuts: regions that affect maps or predictions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from camscope.audit.clustering.regions_and_subgroups_of_clusters import cluster_and_describe_maps
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.stage_result_schema import FlowStep, SubgroupDifference
from camscope.audit.core.stored_predictions import Predictions, StageResults
from camscope.audit.core.summary_schema import AttributionMass, ClusterAnalysis, ReviewCase, ShortcutResult
from camscope.audit.performance.feature_probes import probe_leakage_of_subgroup_columns
from camscope.audit.performance.subgroup_differences import compare_subgroups
from camscope.audit.shortcuts.load_images_and_region_masks import (
    FINDING_REGION,
    ORGAN_REGION,
    RegionSamples,
    load_region_samples,
)
from camscope.audit.shortcuts.region_attribution import (
    compute_attribution_mass_by_region,
    measure_overlap_between_regions,
)
from camscope.audit.shortcuts.region_names import name_region
from camscope.audit.shortcuts.region_removal_and_insertion import InterventionRunner, write_interventions

SHORTCUT_SALT = 4  # separates this random stream from those of other stages
MAX_REVIEW_IMAGES_PER_REASON = 4


def analyze_shortcuts(context: AuditContext, results: StageResults) -> ShortcutResult:
    """Run the shortcut tests on sampled images, and write `interventions.parquet`.

    They measure attribution mass, interventions, leakage and clusters.
    """
    sizes, findings = context.sample_sizes, context.findings
    predictions = Predictions.read(context.folder, features=True)
    region_rows, edited_rows = (
        context.cohort.sample_rows_of_all_findings(predictions.rows, n_rows, SHORTCUT_SALT, findings)
        for n_rows in (sizes.regions, min(sizes.interventions, sizes.regions))
    )
    samples = load_region_samples(context, region_rows)
    edited = replace(samples, samples=[sample for sample in samples.samples if sample.row in edited_rows])
    runners = [InterventionRunner(context, edited.subtract_finding(f.name), f, predictions) for f in findings]
    interventions = [effect for runner in runners for effect in runner.run_interventions()]
    masked_aurocs = [masked for runner in runners for masked in runner.compute_aurocs_with_region_masked_or_alone()]
    records = [record for runner in runners for record in runner.records]
    write_interventions(context.folder, records, context.cohort.ids)
    by_finding = {finding.name: samples.subtract_finding(finding.name) for finding in findings}
    analyses = [
        cluster_and_describe_maps(context, explainer, finding, by_finding[finding.name], predictions)
        for finding in findings
        for explainer in context.explainers
    ]
    overlaps = [
        overlap for name, subset in by_finding.items() for overlap in measure_overlap_between_regions(subset, name)
    ]
    names = dict.fromkeys(name for subset in by_finding.values() for name in subset.region_names)
    return ShortcutResult(
        region_counts={
            name: max(len(subset.select_with_region(name)) for subset in by_finding.values()) for name in names
        },
        markers_by_finding={finding: _list_marker_regions(subset) for finding, subset in by_finding.items()},
        missing_regions=tuple(_list_missing_regions(samples)),
        overlaps=tuple(overlaps),
        attribution_mass=tuple(_compute_attribution_mass(context, results, by_finding)) if samples.samples else (),
        interventions=tuple(interventions),
        masked_auroc=tuple(masked_aurocs),
        subgroup_differences=tuple(_compare_marker_effects(context, runners)),
        leakage=tuple(probe_leakage_of_subgroup_columns(context.cohort, predictions)),
        cluster_analyses=tuple(analyses),
        review_cases=tuple(_list_review_cases(context, runners, analyses)),
    )


def _compute_attribution_mass(
    context: AuditContext, results: StageResults, by_finding: Mapping[str, RegionSamples]
) -> Iterator[AttributionMass]:
    for explainer in context.explainers:
        stride = max(results.resolve.get_explainer_info(explainer.composed_name).stride)
        for finding in context.findings:
            yield from compute_attribution_mass_by_region(context, by_finding[finding.name], explainer, finding, stride)


def _list_marker_regions(samples: RegionSamples) -> tuple[str, ...]:
    """Return the regions that some images have and others lack."""
    return tuple(name for name in samples.region_names if len(samples.select_with_region(name)) < len(samples.samples))


def _list_missing_regions(samples: RegionSamples) -> Iterator[FlowStep]:
    for name, reasons in samples.missing_reasons.items():
        for reason, count in reasons.most_common(3):
            yield FlowStep(name=name, n_rows=count, reason=reason)
    for reason, count in samples.exclusion_reasons.items():
        yield FlowStep(name="the image", n_rows=count, reason=reason)


def _compare_marker_effects(context: AuditContext, runners: list[InterventionRunner]) -> Iterator[SubgroupDifference]:
    """Compare the effect of removing a marker between subgroups. An image without the marker has the effect 0."""
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


def _list_review_cases(
    context: AuditContext, runners: Sequence[InterventionRunner], cluster_analyses: Sequence[ClusterAnalysis]
) -> Iterator[ReviewCase]:
    """Yield images for manual review, each with a reason. An image can appear for several reasons."""
    ids = context.cohort.ids
    for runner in runners:
        for reason, rows in (
            _list_wrong_predictions(context, runner) | _list_sensitive_images(context, runner)
        ).items():
            for row in rows[:MAX_REVIEW_IMAGES_PER_REASON]:
                yield ReviewCase(id=ids[row], finding=runner.finding.name, reason=reason)
    for analysis in cluster_analyses:
        for cluster in analysis.clusters if analysis.n_clusters > 1 else ():
            for name in cluster.prototypes[:1]:
                reason = f"typical of attribution cluster {cluster.number}"
                yield ReviewCase(id=name, finding=analysis.finding, reason=reason)


def _list_wrong_predictions(context: AuditContext, runner: InterventionRunner) -> dict[str, list[int]]:
    """Return a dict from reason to the rows whose prediction is wrong or uncertain. The most extreme row comes first."""
    truths, log_odds = context.cohort.get_truth_by_row(runner.finding), runner.log_odds
    missed = [row for row, value in log_odds.items() if truths[row] is True and value < 0]
    alarms = [row for row, value in log_odds.items() if truths[row] is False and value > 0]
    labeled = [row for row in log_odds if truths[row] is not None]
    return {
        "missed, with one of the lowest probabilities": sorted(missed, key=lambda row: log_odds[row]),
        "false alarm, with one of the highest probabilities": sorted(alarms, key=lambda row: -log_odds[row]),
        "among the probabilities nearest to 0.5": sorted(labeled, key=lambda row: abs(log_odds[row])),
    }


def _list_sensitive_images(context: AuditContext, runner: InterventionRunner) -> dict[str, list[int]]:
    """Return a dict from reason to rows. Removing or inserting a region changes their prediction by more than the margin."""
    threshold = runner.log_odds_std * context.config.margins.effect
    rows_by_reason = {}
    for region in runner.samples.region_names:
        if region in (FINDING_REGION, ORGAN_REGION):
            continue
        effects: dict[int, float] = {}
        for record in runner.records:
            if record.region == region and record.kind != "keep only":
                effect = abs(record.log_odds_with - record.log_odds_without)
                effects[record.row] = max(effects.get(record.row, 0.0), effect)
        rows = sorted(effects, key=lambda row: (-effects[row], row))
        rows_by_reason[f"changed most by {name_region(region)}"] = [
            row for row in rows if runner.log_odds_std > 0 and effects[row] > threshold
        ]
    return rows_by_reason
