"""Measure the attribution inside each region, and the overlap of regions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from math import pi
from typing import Any

import numpy as np

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.audit.core.convert_to_summary_entries import round_significant, summarize_estimate
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.summary_schema import AttributionMass, RegionOverlap, Summary
from camscope.audit.shortcuts.border_and_marker_detectors import select_largest_component
from camscope.audit.shortcuts.load_images_and_region_masks import (
    FINDING_REGION,
    ORGAN_REGION,
    RegionSample,
    RegionSamples,
)
from camscope.batch.image_manifest import import_arrow
from camscope.batch.sql_query import table_to_dicts
from camscope.geometry import Placement
from camscope.metrics.mean_estimates import estimate_mean
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.optional_packages import require

MIN_OVERLAP_SHARE = 0.5  # of a region's pixels: editing the other region edits most of it, too
MAX_OTHER_MAPS = 8  # maps of other patients in the baseline
SHARE_BOUNDS = (0.0, 1.0)
TOP_PIXEL_FRACTION = 0.10  # of the pixels, whose share in the region is the confounder sensitivity of Sun et al. 2023


def load_attributions(
    context: AuditContext, method_title: str, finding: Finding, rows: Sequence[int]
) -> dict[int, FloatArray]:
    """Return a dict from row number to the raw map of a method. Maps with NaN are left out."""
    field, selected_rows = import_arrow("dataset").field, import_arrow().array(rows, import_arrow().int64())
    is_selected = (field("method") == method_title) & (field("target") == str(finding.class_index))
    is_selected &= field("row").isin(selected_rows)
    table = context.maps.table(columns=["row", "grid", "attribution"], filter=is_selected)
    attributions = {}
    for row in table_to_dicts(table):
        if row["attribution"] is not None:
            attribution = np.asarray(row["attribution"], np.float64).reshape(tuple(row["grid"]))
            if np.isfinite(attribution).all():
                attributions[row["row"]] = attribution
    return attributions


def compute_attribution_mass_by_region(
    context: AuditContext, samples: RegionSamples, explainer: Any, finding: Finding, stride: float
) -> list[AttributionMass]:
    """Measure, for every region, the share of a method's attribution that lies inside."""
    rows = [sample.row for sample in samples.samples]
    attributions = {
        row: resize_map_to_input(attribution, samples.samples[0].x.shape[1:])
        for row, attribution in load_attributions(context, explainer.composed_name, finding, rows).items()
    }
    order = np.random.default_rng((context.config.seed, 5)).permutation(sorted(attributions)).tolist()
    return [
        AttributionMass(
            region=name,
            method=explainer.composed_name,
            finding=finding.name,
            stride=round_significant(stride) or 0.0,
            **_summarize_region_mass(context, samples.select_with_region(name), name, attributions, order, stride),
        )
        for name in samples.region_names
    ]


def _summarize_region_mass(
    context: AuditContext,
    samples: Sequence[RegionSample],
    region_name: str,
    attributions: Mapping[int, FloatArray],
    shuffled_rows: Sequence[int],
    stride: float,
) -> dict[str, Any]:
    """Summarize the attribution mass of a region: its share, its enrichment, and whether the maps can resolve it."""
    pairs = [(sample.row, sample.regions[region_name]) for sample in samples if sample.row in attributions]
    groups = [context.cohort.patients[row] for row, _ in pairs]
    shares = np.array([compute_mass_share(attributions[row], mask) for row, mask in pairs])
    areas = np.array([mask.mean() for _, mask in pairs])
    other_shares = np.array(
        [_compute_shuffled_share(context, row, mask, attributions, shuffled_rows) for row, mask in pairs]
    )
    sensitivities = np.array([compute_confounder_sensitivity(attributions[row], mask) for row, mask in pairs])
    diameter = float(np.median([measure_region_width(mask) for _, mask in pairs])) if pairs else 0.0
    is_resolvable = bool(pairs) and diameter >= stride
    baseline_name = "maps of other patients"
    return {
        "share": _summarize_values(
            shares, groups, _compute_mean_without_nan(other_shares), baseline_name, context, SHARE_BOUNDS
        ),
        "enrichment": _summarize_values(
            shares / areas, groups, _compute_mean_without_nan(other_shares / areas), baseline_name, context
        ),
        "confounder_sensitivity": _summarize_values(
            sensitivities, groups, TOP_PIXEL_FRACTION, "chance", context, SHARE_BOUNDS
        ),
        "is_resolvable": is_resolvable,
        "diameter": round_significant(diameter) or 0.0,
        "reason": "" if is_resolvable else "below the resolution of the maps" if pairs else "no image has it",
        "max_enrichment": round_significant(_compute_mean_without_nan(1 / areas[~np.isnan(shares)])),
    }


def measure_region_width(mask: Mask) -> float:
    """Return the width of a region in pixels. For a blob it is the diameter, and for a frame the thickness."""
    edt = require("scipy.ndimage", extra="audit").distance_transform_edt
    return min(compute_equivalent_diameter(mask), 2.0 * float(edt(np.pad(mask, 1)).max()))


def compute_equivalent_diameter(mask: Mask) -> float:
    """Return the diameter in pixels of a disc or ball that is as large as the mask's largest component."""
    size = float(select_largest_component(mask).sum())
    return float(2 * (size / pi) ** 0.5 if mask.ndim == 2 else 2 * (3 * size / (4 * pi)) ** (1 / 3))


def compute_mass_share(attribution: FloatArray, mask: Mask) -> float:
    """Return the share of a map's positive attribution that lies inside a mask. Return NaN if the map has no positive value."""
    positive = np.maximum(attribution, 0)
    whole = positive.sum()
    return float(positive[mask].sum() / whole) if whole > 0 else float("nan")


def compute_confounder_sensitivity(attribution: FloatArray, mask: Mask) -> float:
    """Return how much of a region is among the top 10 % of the map's pixels, as a share. Return NaN for a constant map.

    Ties count in expectation.
    """
    count = max(1, round(attribution.size * TOP_PIXEL_FRACTION))
    threshold = np.partition(attribution.ravel(), attribution.size - count)[attribution.size - count]
    if attribution.max() == attribution.min():
        return float("nan")
    above, at = attribution > threshold, attribution == threshold
    room = (count - above.sum()) / at.sum()
    return float((above[mask].sum() + room * at[mask].sum()) / mask.sum())


def _compute_shuffled_share(
    context: AuditContext, row: int, mask: Mask, attributions: Mapping[int, FloatArray], shuffled_rows: Sequence[int]
) -> float:
    """Measure the attribution share inside a mask for maps of other patients. Return the mean share, which is a baseline."""
    start, patients = shuffled_rows.index(row), context.cohort.patients
    rotated = [*shuffled_rows[start + 1 :], *shuffled_rows[:start]]
    other_rows = [other for other in rotated if patients[other] != patients[row]]
    return _compute_mean_without_nan(
        np.array([compute_mass_share(attributions[other], mask) for other in other_rows[:MAX_OTHER_MAPS]])
    )


def resize_map_to_input(attribution: FloatArray, input_size: Sequence[int]) -> FloatArray:
    """Resize a map to the size of the model's input."""
    values: FloatArray = np.asarray(Placement.identity(tuple(input_size)).project(attribution)[0], np.float64)
    return values


def _compute_mean_without_nan(values: FloatArray) -> float:
    valid = values[~np.isnan(values)] if values.size else values
    return float(valid.mean()) if valid.size else float("nan")


def _summarize_values(
    values: FloatArray,
    groups: Sequence[Any],
    baseline: float,
    baseline_name: str,
    context: AuditContext,
    bounds: tuple[float, float] | None = None,
) -> EstimateSummary:
    if np.isnan(values).all():
        reason = "no map shows anything: none has a positive value, or each the same everywhere"
        return summarize_estimate(None, baseline, baseline_name, reason if values.size else "no image has it")
    estimate = estimate_mean(values, groups, bounds=bounds, **context.config.bootstrap_options)
    return summarize_estimate(estimate, baseline, baseline_name)


def measure_overlap_between_regions(samples: RegionSamples, finding_name: str) -> Iterator[RegionOverlap]:
    """Yield the overlap of each pair of regions: the mean share of the first region's pixels that lie in the second."""
    names = [name for name in samples.region_names if name not in (FINDING_REGION, ORGAN_REGION)]
    for region, other in permutations(names, 2):
        masks = [(sample.regions[region], sample.regions.get(other)) for sample in samples.select_with_region(region)]
        shares = [
            0.0 if other_mask is None else np.count_nonzero(mask & other_mask) / np.count_nonzero(mask)
            for mask, other_mask in masks
        ]
        if any(shares):
            yield RegionOverlap(
                finding=finding_name,
                region=region,
                other_region=other,
                share=round_significant(float(np.mean(shares))) or 0.0,
                n_images=len(masks),
            )


def find_overlapping_regions(summary: Summary) -> dict[str, list[list[str]]]:
    """Return a dict from finding to groups of overlapping regions.
    The groups hold only regions on which the prediction relies.
    """
    relied_regions: dict[str, list[str]] = {}
    for item in summary.verdicts:
        if (item.question, item.conclusion) == ("shortcut", "supported"):
            relied_regions.setdefault(item.finding, []).append(item.qualifier)
    overlaps = summary.shortcut.overlaps
    return {
        name: group_overlapping_regions(regions, [item for item in overlaps if item.finding == name])
        for name, regions in relied_regions.items()
    }


def group_overlapping_regions(regions: Sequence[str], region_overlaps: Iterable[RegionOverlap]) -> list[list[str]]:
    """Group regions that large overlaps connect. Each group has at least two regions."""
    groups = [{region} for region in regions]
    for overlap in region_overlaps:
        pair = {overlap.region, overlap.other_region}
        if overlap.share > MIN_OVERLAP_SHARE and pair <= set(regions):
            connected = [group for group in groups if group & pair]
            groups = [group for group in groups if group not in connected] + [set().union(*connected)]
    merged = [[region for region in regions if region in group] for group in groups if len(group) > 1]
    return sorted(merged, key=lambda group: regions.index(group[0]))
