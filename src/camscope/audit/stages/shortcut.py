"""The stage of shortcuts, and the images to look at.

- shortcut: what travels with the finding: regions that the maps lie on, and that the answer relies on.
- reading: the images that somebody should look at, and why: where the model is wrong, unsure, or moved by a marker.
"""

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
    """Masses and interventions of images drawn by the seed; what each intervention did is in `interventions.parquet`."""
    config, answered = context.config, Predictions.read(context.folder, features=True)

    def draw(n_rows: int) -> list[int]:
        return context.cohort.sample_rows_of_all_findings(answered.rows, n_rows, 4, context.findings)

    seen = load_region_samples(context, draw(config.sample_sizes.regions))
    few = _select_samples(seen, draw(min(config.sample_sizes.interventions, config.sample_sizes.regions)))
    tried = [
        InterventionRunner(
            context,
            few.for_finding(one.name),
            one,
            answered.log_odds_by_row(one.name),
            answered.log_odds_std(one.name),
            answered.outputs_are_probabilities,
        )
        for one in context.findings
    ]
    interventions = [found for one in tried for found in one.run_interventions()]
    blanked = [found for one in tried for found in one.compute_masked_aurocs()]
    trials.write_interventions(context.folder, [trial for one in tried for trial in one.records], context.cohort.ids)
    strategies = [
        analyze_clusters(context, tool, finding, seen.for_finding(finding.name), answered)
        for finding in context.findings
        for tool in context.explainers
    ]
    named = {one.name: seen.for_finding(one.name) for one in context.findings}
    names = dict.fromkeys(name for own in named.values() for name in own.region_names)
    return ShortcutResult(
        region_counts={name: max(len(own.select_with_region(name)) for own in named.values()) for name in names},
        markers_by_finding={finding: _list_markers(own) for finding, own in named.items()},
        missing_regions=tuple(_list_missing_regions(seen)),
        overlaps=tuple(
            one
            for finding in context.findings
            for one in compute_region_overlaps(seen.for_finding(finding.name), finding.name)
        ),
        attribution_mass=tuple(_compute_attribution_mass(context, results, seen)),
        interventions=tuple(interventions),
        masked_auroc=tuple(blanked),
        subgroup_differences=tuple(_compare_marker_effects(context, tried)),
        leakage=tuple(probe_columns(context.cohort, answered)),
        cluster_analyses=tuple(strategies),
        review_cases=tuple(list_review_cases(context, answered, tried, strategies)),
    )


def _list_markers(samples: RegionSamples) -> tuple[str, ...]:
    """The regions that some of the images lack."""
    return tuple(name for name in samples.region_names if len(samples.select_with_region(name)) < len(samples.samples))


def _select_samples(samples: RegionSamples, rows: list[int]) -> RegionSamples:
    there = set(rows)
    return RegionSamples(
        [one for one in samples.samples if one.row in there], samples.missing_reasons, samples.exclusion_reasons
    )


def _list_missing_regions(samples: RegionSamples) -> Iterator[FlowStep]:
    for name, reasons in samples.missing_reasons.items():
        for why, count in reasons.most_common(3):
            yield FlowStep(name=name, n_rows=count, reason=why)
    for why, count in samples.exclusion_reasons.items():
        yield FlowStep(name="the image", n_rows=count, reason=why)


def _compute_attribution_mass(
    context: AuditContext, results: StageResults, samples: RegionSamples
) -> Iterator[AttributionMass]:
    for tool in context.explainers if samples.samples else ():
        stride = max(results.resolve.get_explainer_info(tool.full_name).stride)
        for finding in context.findings:
            yield from compute_attribution_mass_by_region(
                context, samples.for_finding(finding.name), tool, finding, stride
            )


def _compare_marker_effects(context: AuditContext, runners: list[InterventionRunner]) -> Iterator[SubgroupDifference]:
    """Whether a marker speaks for the finding at one site more than at another: what removing it takes away, 0 without it."""
    for one in runners:
        for region in context.config.regions.columns:
            gaps: dict[int, list[float]] = {row: [] for row, truth in one.truth_by_row.items() if truth is True}
            for trial in one.records:
                if trial.region == region and trial.kind == "remove" and one.log_odds_std > 0:
                    gaps[trial.row].append((trial.log_odds_with - trial.log_odds_without) / one.log_odds_std)
            if any(gaps.values()):
                values = {row: float(np.mean(own)) if own else 0.0 for row, own in gaps.items()}
                yield from compare_subgroups(
                    context.cohort, one.finding, values, context.config.margins.effect, region=region
                )


MAX_REVIEW_IMAGES_PER_REASON = 4  # images for each reason


def list_review_cases(
    context: AuditContext,
    predictions: Predictions,
    runners: Sequence[InterventionRunner],
    cluster_analyses: Sequence[ClusterAnalysis],
) -> Iterator[ReviewCase]:
    """The list, reason by reason; an image may stand in it for several."""
    for finding, one in zip(context.findings, runners, strict=True):
        yield from _list_wrong_predictions(context, predictions, finding)
        yield from _list_region_sensitive_images(context, one)
    for one_way in cluster_analyses:
        if one_way.n_clusters > 1:
            for cluster in one_way.clusters:
                for name in cluster.prototypes[:1]:
                    yield ReviewCase(
                        id=name,
                        finding=one_way.finding,
                        reason=f"typical of a way of looking (cluster {cluster.number})",
                    )


def _list_wrong_predictions(context: AuditContext, predictions: Predictions, finding: Finding) -> Iterator[ReviewCase]:
    truths, odds = context.cohort.get_truth(finding), predictions.log_odds_by_row(finding.name)
    missed = sorted((row for row in odds if truths[row] is True and odds[row] < 0), key=lambda row: odds[row])
    alarms = sorted((row for row in odds if truths[row] is False and odds[row] > 0), key=lambda row: -odds[row])
    unsure = sorted((row for row in odds if truths[row] is not None), key=lambda row: abs(odds[row]))
    for rows, why in (
        (missed, "missed, with one of the lowest probabilities"),
        (alarms, "false alarm, with one of the highest probabilities"),
        (unsure, "among the probabilities nearest to a half"),
    ):
        for row in rows[:MAX_REVIEW_IMAGES_PER_REASON]:
            yield ReviewCase(id=context.cohort.ids[row], finding=finding.name, reason=why)


def _list_region_sensitive_images(context: AuditContext, runner: InterventionRunner) -> Iterator[ReviewCase]:
    """Whose answer a region moves the most."""
    for region in runner.samples.region_names:
        if region in (FINDING_REGION, ORGAN_REGION):
            continue
        gaps: dict[int, float] = {}
        for trial in runner.records:
            if trial.region == region and trial.kind != "keep only":
                gaps[trial.row] = max(gaps.get(trial.row, 0.0), abs(trial.log_odds_with - trial.log_odds_without))
        for row in sorted(gaps, key=lambda row: (-gaps[row], row))[:MAX_REVIEW_IMAGES_PER_REASON]:
            if runner.log_odds_std > 0 and gaps[row] > runner.log_odds_std * context.config.margins.effect:
                yield ReviewCase(
                    id=context.cohort.ids[row], finding=runner.finding.name, reason=f"moved most by {region}"
                )
