"""Describe clusters of maps: their number, their regions, and the subgroup levels that are frequent in each."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.map_clustering import Partition, cluster_maps
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.audit.core.convert_to_summary_entries import round_significant
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.core.subgroup_levels import build_level_masks
from camscope.audit.core.summary_schema import ClusterAnalysis, ClusterStability, MapCluster
from camscope.audit.shortcuts.load_images_and_region_masks import RegionSamples
from camscope.audit.shortcuts.region_attribution import compute_mass_share, load_attributions, resize_map_to_input
from camscope.errors import UndefinedError
from camscope.metrics.intervals_and_p_values import adjust_holm, index_groups
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.optional_packages import require
from camscope.plurals import plural

ENRICHMENT_SIGNIFICANCE_LEVEL = 0.05


def cluster_and_describe_maps(
    context: AuditContext, explainer: Any, finding: Finding, samples: RegionSamples, predictions: Predictions
) -> ClusterAnalysis:
    """Cluster the maps that a method computed for the images with a finding. Describe each cluster.

    Where no number of clusters is supported, the clusters of the smallest number are returned.
    """
    truths = context.cohort.get_truth_by_row(finding)
    positive_rows = [sample.row for sample in samples.samples if truths[sample.row]]
    attributions = load_attributions(context, explainer.composed_name, finding, positive_rows)
    rows, shapes = sorted(attributions), {attribution.shape for attribution in attributions.values()}
    analysis = ClusterAnalysis(
        finding=finding.name, method=explainer.composed_name, n_clusters=1, n_maps=len(rows), n_excluded=0
    )
    try:
        if len(shapes) != 1:
            raise UndefinedError(f"the maps have {plural(len(shapes), 'size')}; expected one size")
        clustering = cluster_maps(
            np.stack([attributions[row] for row in rows]),
            [context.cohort.patient_number_by_row[row] for row in rows],
            seed=context.config.seed,
        )
    except UndefinedError as error:
        return analysis.model_copy(update={"reason": str(error)})
    partition = clustering.partitions.get(clustering.n_clusters) or next(iter(clustering.partitions.values()))
    log_odds = predictions.log_odds_by_row(finding.name)
    return analysis.model_copy(
        update={
            "n_clusters": clustering.n_clusters,
            "n_maps": clustering.n_maps,
            "n_excluded": len(clustering.zero_rows),
            "n_patients": clustering.n_patients,
            "eigenvalues": tuple(round_significant(value) or 0.0 for value in clustering.eigenvalues),
            "stability_by_n_clusters": tuple(
                ClusterStability(
                    n_clusters=k,
                    stability=round_significant(each.stability) or 0.0,
                    null_stability=round_significant(each.reference_stability),
                    separation=round_significant(each.eigengap),
                )
                for k, each in clustering.partitions.items()
            ),
            "clusters": tuple(_build_map_clusters(context, partition, rows, attributions, samples, log_odds)),
        }
    )


def _build_map_clusters(
    context: AuditContext,
    partition: Partition,
    rows: Sequence[int],
    attributions: Mapping[int, FloatArray],
    samples: RegionSamples,
    log_odds: Mapping[int, float],
) -> Iterator[MapCluster]:
    """Yield each cluster with its prototypes, the attribution mass in each region, and the columns associated with it."""
    mass_shares = _compute_mass_shares(rows, attributions, samples)
    enriched_levels = list(_iter_clusters_and_enriched_levels(context, partition, rows))
    for number, cluster in enumerate(partition.clusters):
        members = list(cluster.rows)
        mean_shares = {
            name: round_significant(float(np.nanmean(shares[members])))
            for name, shares in mass_shares.items()
            if not np.isnan(shares[members]).all()
        }
        yield MapCluster(
            number=number,
            n_images=len(members),
            prototypes=tuple(context.cohort.ids[rows[i]] for i in cluster.medoid_rows),
            attribution_mass={name: share for name, share in mean_shares.items() if share is not None},
            missed_share=round_significant(float(np.mean([log_odds[rows[i]] < 0 for i in members]))),
            associated_columns=tuple(text for cluster_number, text in enriched_levels if cluster_number == number),
        )


def _compute_mass_shares(
    rows: Sequence[int], attributions: Mapping[int, FloatArray], samples: RegionSamples
) -> dict[str, FloatArray]:
    """Return a dict from region name to the share (N,) of each map's attribution inside the region. Without the region: NaN."""
    samples_by_row = {sample.row: sample for sample in samples.samples}
    mass_shares = {name: np.full(len(rows), np.nan) for name in samples.region_names}
    for i, row in enumerate(rows):
        attribution = resize_map_to_input(attributions[row], samples_by_row[row].x.shape[1:])
        for name, mask in samples_by_row[row].regions.items():
            mass_shares[name][i] = compute_mass_share(attribution, mask)
    return mass_shares


def _iter_clusters_and_enriched_levels(
    context: AuditContext, partition: Partition, rows: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Yield (cluster number, text) for levels that are frequent in a cluster, such as `site B: 80 % here, 41 % elsewhere`."""
    patients = [context.cohort.patient_number_by_row[row] for row in rows]
    for column in context.config.data.subgroups:
        levels = context.cohort.get_subgroup_level_by_row(column)
        try:
            enrichments = compute_level_enrichment(partition.labels, [levels[row] for row in rows], patients)
        except UndefinedError:
            continue
        for item in enrichments:
            if item.corrected_p_value < ENRICHMENT_SIGNIFICANCE_LEVEL:
                shares = f"{item.share_inside:.0%} here, {item.share_outside:.0%} elsewhere"
                yield item.cluster, f"{column} {item.level}: {shares}"


@dataclass(frozen=True)
class LevelEnrichment:
    """The share of a subgroup level inside and outside a cluster, with the p-value of Fisher's exact test."""

    cluster: int
    level: Hashable
    share_inside: float
    share_outside: float
    p_value: float
    corrected_p_value: float = 1.0


def compute_level_enrichment(
    labels: npt.NDArray[np.int64], column_values: Sequence[Hashable], groups: Sequence[Hashable] | None = None
) -> tuple[LevelEnrichment, ...]:
    """Compare how frequent each subgroup level is in one cluster and in the others. Test the differences.

    The results are sorted by p-value, with Holm's correction over all tests. Each patient counts once, by the first row,
    because images of one patient are not independent. Rows in no cluster (-1) or without a level are left out. Of two
    clusters, or of two levels, only the last is tested, because the other is its complement. UndefinedError if there is
    only one cluster or level.
    """
    levels = build_level_masks(column_values)
    is_included = np.logical_or.reduce([*levels.values(), np.zeros(len(labels), np.bool_)]) & (labels >= 0)
    included_rows = np.flatnonzero(is_included)
    group_index = index_groups(groups, len(labels))[included_rows]
    rows = included_rows[np.sort(np.unique(group_index, return_index=True)[1])]
    cluster_masks = {int(cluster): labels[rows] == cluster for cluster in np.unique(labels[rows])}
    level_masks = {level: level_mask[rows] for level, level_mask in levels.items() if level_mask[rows].any()}
    if len(cluster_masks) < 2 or len(level_masks) < 2:
        raise UndefinedError(
            f"{plural(len(cluster_masks), 'cluster')} and {plural(len(level_masks), 'level')}; expected at least two of each"
        )
    if len(cluster_masks) == 2:
        del cluster_masks[min(cluster_masks)]
    if len(level_masks) == 2:
        del level_masks[next(iter(level_masks))]
    uncorrected = [
        _test_level_enrichment(cluster, level, cluster_mask, level_mask)
        for cluster, cluster_mask in cluster_masks.items()
        for level, level_mask in level_masks.items()
    ]
    corrected = adjust_holm([item.p_value for item in uncorrected])
    enrichments = [replace(item, corrected_p_value=p) for item, p in zip(uncorrected, corrected, strict=True)]
    return tuple(sorted(enrichments, key=lambda item: item.p_value))


def _test_level_enrichment(cluster: int, level: Hashable, cluster_mask: Mask, level_mask: Mask) -> LevelEnrichment:
    n_inside, n_outside = int((cluster_mask & level_mask).sum()), int((~cluster_mask & level_mask).sum())
    cluster_size, outside_size = int(cluster_mask.sum()), int((~cluster_mask).sum())
    table = [[n_inside, cluster_size - n_inside], [n_outside, outside_size - n_outside]]
    p_value = min(1.0, float(require("scipy.stats", extra="audit").fisher_exact(table)[1]))
    return LevelEnrichment(cluster, level, n_inside / cluster_size, n_outside / outside_size, p_value)
