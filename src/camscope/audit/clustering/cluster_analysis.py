"""The analysis of clusters of maps: their number, their regions, and the subgroup levels that are enriched in them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.clusters import ClusteringResult as Found
from camscope.audit.clustering.clusters import Partition, cluster_maps
from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import ClusterAnalysis, ClusterStability, MapCluster
from camscope.audit.core.subgroup_levels import split_by_level
from camscope.audit.core.summary_values import round_significant
from camscope.audit.shortcuts.region_attribution import compute_mass_share, load_attributions
from camscope.audit.shortcuts.region_samples import RegionSamples
from camscope.errors import InputError, UndefinedError
from camscope.geometry import Placement
from camscope.metrics.base import Mask
from camscope.metrics.statistics import Estimate, adjust_holm, estimate_mean, index_groups
from camscope.optional import require
from camscope.plurals import plural

ENRICHMENT_SIGNIFICANCE_LEVEL = 0.05


def analyze_clusters(
    context: AuditContext, explainer: Any, finding: Finding, samples: RegionSamples, predictions: Predictions
) -> ClusterAnalysis:
    """Of a method's maps. Where no number of clusters is claimed the two are shown that would be first."""
    truths = context.cohort.get_truth(finding)
    attributions = load_attributions(
        context, explainer.full_name, finding, [one.row for one in samples.samples if truths[one.row]]
    )
    shapes = {attribution.shape for attribution in attributions.values()}
    rows = sorted(attributions)
    try:
        if len(shapes) != 1:
            raise UndefinedError(f"the maps have {plural(len(shapes), 'size')}")
        clustering = cluster_maps(
            np.stack([attributions[row] for row in rows]),
            [context.cohort.patient_numbers[row] for row in rows],
            seed=context.config.seed,
        )
    except UndefinedError as error:
        return ClusterAnalysis(
            finding=finding.name,
            method=explainer.full_name,
            n_clusters=1,
            n_maps=len(rows),
            n_excluded=0,
            reason=str(error),
        )
    return ClusterAnalysis(
        finding=finding.name,
        method=explainer.full_name,
        n_clusters=clustering.n_clusters,
        n_maps=clustering.n_maps,
        n_excluded=len(clustering.zero_rows),
        n_patients=clustering.n_patients,
        eigenvalues=tuple(round_significant(one) or 0.0 for one in clustering.eigenvalues),
        stability_by_n_clusters=tuple(_summarize_stability(one) for one in clustering.partitions),
        clusters=tuple(_build_map_clusters(context, clustering, rows, attributions, samples, predictions, finding)),
        reason="" if clustering.partitions else clustering.reason,
    )


def _summarize_stability(partition: Partition) -> ClusterStability:
    return ClusterStability(
        n_clusters=partition.n_clusters,
        stability=round_significant(partition.stability) or 0.0,
        null_stability=round_significant(max(partition.reference_stabilities))
        if partition.reference_stabilities
        else None,
        separation=round_significant(partition.eigengap),
    )


def _build_map_clusters(
    context: AuditContext,
    clustering: Found,
    rows: Sequence[int],
    attributions: Any,
    samples: RegionSamples,
    predictions: Predictions,
    finding: Finding,
) -> Iterator[MapCluster]:
    if not clustering.partitions:
        return
    partitions = {cluster.n_clusters: cluster for cluster in clustering.partitions}
    partition = partitions.get(clustering.n_clusters) or partitions[min(partitions)]
    masses_by_region = dict(_compute_mean_masses(context, partition, rows, attributions, samples))
    log_odds = predictions.log_odds_by_row(finding.name)
    for cluster in partition.clusters:
        missed_share = float(np.mean([log_odds[rows[i]] < 0 for i in cluster.rows]))
        attribution_mass = {
            name: value for name, each in masses_by_region.items() if (value := each.get(cluster.number)) is not None
        }
        yield MapCluster(
            number=cluster.number,
            n_images=cluster.n_maps,
            prototypes=tuple(context.cohort.ids[rows[i]] for i in cluster.medoid_rows),
            attribution_mass=attribution_mass,
            missed_share=round_significant(missed_share),
            associated_columns=tuple(_describe_enriched_levels(context, partition, rows, cluster.number)),
        )


def _compute_mean_masses(
    context: AuditContext, partition: Partition, rows: Sequence[int], attributions: Any, samples: RegionSamples
) -> Iterator[tuple[str, dict[int, float]]]:
    """Region -> cluster -> the mean share of its maps there."""
    samples_by_row = {sample.row: sample for sample in samples.samples}
    for name in samples.region_names:
        values = []
        for row in rows:
            sample = samples_by_row[row]
            attribution = np.asarray(
                Placement.identity(tuple(sample.x.shape[1:])).project(attributions[row])[0], np.float64
            )
            values.append(compute_mass_share(attribution, sample.regions[name]) if name in sample.regions else np.nan)
        means = compute_cluster_means(
            partition.labels, values, [context.cohort.patient_numbers[row] for row in rows], seed=context.config.seed
        )
        yield (
            name,
            {
                n: mean
                for n, estimate in means.items()
                if estimate and (mean := round_significant(estimate.mean)) is not None
            },
        )


def _describe_enriched_levels(
    context: AuditContext, partition: Partition, rows: Sequence[int], cluster_number: int
) -> Iterator[str]:
    """`site B: 80 % here, 41 % elsewhere`, of columns that may be told."""
    for column in context.config.data.subgroups:
        levels = context.cohort.get_subgroup_levels(column)
        try:
            enrichments = compute_level_enrichment(
                partition.labels, [levels[row] for row in rows], [context.cohort.patient_numbers[row] for row in rows]
            )
        except UndefinedError:
            continue
        for enrichment in enrichments:
            if enrichment.cluster == cluster_number and enrichment.corrected_p_value < ENRICHMENT_SIGNIFICANCE_LEVEL:
                yield f"{column} {enrichment.level}: {enrichment.share_inside:.0%} here, {enrichment.share_outside:.0%} elsewhere"


@dataclass(frozen=True)
class LevelEnrichment:
    """How much more of a level is in a cluster than elsewhere.

    `n_inside` patients (or images) of `cluster_size` in it, `n_outside` of `outside_size`.

    `p_value`: Fisher's exact test, two-sided; `corrected_p_value`: Holm's over all that were asked.
    """

    cluster: int
    level: Hashable
    n_inside: int
    cluster_size: int
    n_outside: int
    outside_size: int
    p_value: float
    corrected_p_value: float = 1.0

    @property
    def share_inside(self) -> float:
        """Of those in the cluster."""
        return self.n_inside / self.cluster_size

    @property
    def share_outside(self) -> float:
        """Of all the others."""
        return self.n_outside / self.outside_size


def compute_level_enrichment(
    labels: npt.ArrayLike, column_values: Sequence[Hashable], groups: Sequence[Hashable] | None = None
) -> tuple[LevelEnrichment, ...]:
    """(N,) clusters, (N,) levels -> each cluster's share of each level beside that elsewhere, the least likely first.

    Of `groups` each counts once, by its first row: two images of a patient are no independent witnesses. Rows in no cluster
    (-1) or without a level are left out. Two clusters, or two levels, are one question: it is asked of the last.
    """
    cluster_labels = _validate_labels(labels, len(column_values))
    levels = split_by_level(column_values)
    is_included = np.logical_or.reduce([*levels.values(), np.zeros(len(cluster_labels), np.bool_)]) & (
        cluster_labels >= 0
    )
    rows = _select_first_per_group(np.flatnonzero(is_included), index_groups(groups, len(cluster_labels)))
    cluster_masks = {int(one): cluster_labels[rows] == one for one in np.unique(cluster_labels[rows])}
    level_masks = {level: level_mask[rows] for level, level_mask in levels.items() if level_mask[rows].any()}
    if len(cluster_masks) < 2 or len(level_masks) < 2:
        raise UndefinedError(
            f"{plural(len(cluster_masks), 'cluster')} and {plural(len(level_masks), 'level')}: there is nothing to compare"
        )
    uncorrected = [_build_level_enrichment(cluster, level, part, level_mask)
            for cluster, part in _drop_complement(cluster_masks).items() for level, level_mask in _drop_complement(level_masks).items()]  # fmt: skip
    corrected = adjust_holm([one.p_value for one in uncorrected])
    enrichments = [replace(one, corrected_p_value=p) for one, p in zip(uncorrected, corrected, strict=True)]
    return tuple(sorted(enrichments, key=lambda one: one.p_value))


def compute_cluster_means(
    labels: npt.ArrayLike, values: npt.ArrayLike, groups: Sequence[Hashable] | None = None, *, seed: int = 0
) -> dict[int, Estimate | None]:
    """(N,) clusters, (N,) a number of each image -> each cluster's mean with its interval; None where no row has a value."""
    numbers = np.asarray(values, np.float64)
    cluster_labels, names = (
        _validate_labels(labels, len(numbers)),
        list(groups) if groups is not None else list(range(len(numbers))),
    )
    means: dict[int, Estimate | None] = {}
    for cluster in np.unique(cluster_labels[cluster_labels >= 0]):
        rows = np.flatnonzero(cluster_labels == cluster)
        has_value = not np.isnan(numbers[rows]).all()
        means[int(cluster)] = (
            estimate_mean(numbers[rows], [names[int(i)] for i in rows], seed=seed) if has_value else None
        )
    return means


def _validate_labels(labels: npt.ArrayLike, n_rows: int) -> npt.NDArray[np.int64]:
    values = np.asarray(labels)
    if values.shape != (n_rows,) or not np.issubdtype(values.dtype, np.integer):
        raise InputError(
            f"labels {values.dtype} {values.shape} of {plural(n_rows, 'row')}: expected (N,) numbers of clusters"
        )
    return values.astype(np.int64)


def _select_first_per_group(rows: npt.NDArray[np.int64], group_index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of each group the first of some rows."""
    return np.asarray(rows[np.sort(np.unique(group_index[rows], return_index=True)[1])])


def _drop_complement(masks: Mapping[Any, Mask]) -> dict[Any, Mask]:
    """Of two the last: the other one is what it is not."""
    return dict(list(masks.items())[-1:] if len(masks) == 2 else masks)


def _build_level_enrichment(cluster: int, level: Hashable, cluster_mask: Mask, level_mask: Mask) -> LevelEnrichment:
    n_inside, n_outside = int((cluster_mask & level_mask).sum()), int((~cluster_mask & level_mask).sum())
    cluster_size, outside_size = int(cluster_mask.sum()), int((~cluster_mask).sum())
    p_value = float(
        _import_scipy_stats().fisher_exact(
            [[n_inside, cluster_size - n_inside], [n_outside, outside_size - n_outside]]
        )[1]
    )
    return LevelEnrichment(cluster, level, n_inside, cluster_size, n_outside, outside_size, min(1.0, p_value))


def _import_scipy_stats() -> Any:
    return require("scipy.stats", extra="audit")
