"""The share of attribution in regions, compared with the maps of other patients, and the overlap of regions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import AttributionMass, EstimateSummary, RegionOverlap, Summary
from camscope.audit.core.summary_values import round_significant, summarize_estimate
from camscope.audit.shortcuts.region_base import equivalent_diameter
from camscope.audit.shortcuts.region_samples import FINDING_REGION, ORGAN_REGION, Mask, RegionSample, RegionSamples
from camscope.batch.manifest import import_arrow
from camscope.batch.query import table_to_dicts
from camscope.errors import UndefinedError
from camscope.geometry import Placement
from camscope.metrics.statistics import estimate_mean

FloatArray = npt.NDArray[np.float64]
MAX_OTHER_MAPS = 8  # maps of other patients in the baseline
SHARE_BOUNDS = (0.0, 1.0)
TOP_PIXEL_FRACTION = 0.10  # of the pixels, whose share in the region is the confounder sensitivity of Sun et al. 2023


def load_attributions(
    context: AuditContext, method_title: str, finding: Finding, rows: Sequence[int]
) -> dict[int, FloatArray]:
    """Return row -> raw map (*s) of a method, without maps that hold NaN."""
    compute = import_arrow("compute")
    field = import_arrow("dataset").field
    is_selected = (field("method") == method_title) & (field("target") == str(finding.class_index))
    table = context.maps.table(columns=["row", "grid", "attribution"], filter=is_selected)
    table = table.filter(compute.is_in(table["row"], import_arrow().array(list(rows))))
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
    """Return the attribution mass of a method's maps in every region."""
    attribution_by_row = load_attributions(
        context, explainer.full_name, finding, [sample.row for sample in samples.samples]
    )
    projected = {
        row: project_to_input(attribution, samples.samples[0].x.shape[1:])
        for row, attribution in attribution_by_row.items()
    }
    random = np.random.default_rng((context.config.seed, 5))
    order = random.permutation(sorted(projected)).tolist()
    return [
        _summarize_region_mass(context, samples, name, projected, order, explainer.full_name, finding, stride)
        for name in samples.region_names
    ]


def _summarize_region_mass(
    context: AuditContext,
    samples: RegionSamples,
    region_name: str,
    attributions: Mapping[int, FloatArray],
    shuffled_rows: Sequence[int],
    method: str,
    finding: Finding,
    stride: float,
) -> AttributionMass:
    present = [sample for sample in samples.select_with_region(region_name) if sample.row in attributions]
    groups = [context.cohort.patients[sample.row] for sample in present]
    shares = np.array([compute_mass_share(attributions[sample.row], sample.regions[region_name]) for sample in present])
    area = np.array([sample.regions[region_name].mean() for sample in present])
    shuffled_shares = np.array(
        [_compute_shuffled_share(context, sample, region_name, attributions, shuffled_rows) for sample in present]
    )
    diameter = (
        float(np.median([_measure_region_width(sample.regions[region_name]) for sample in present])) if present else 0.0
    )
    is_resolvable = bool(present) and diameter >= stride
    return AttributionMass(
        region=region_name,
        method=method,
        finding=finding.name,
        share=_summarize_values(
            shares, groups, _compute_nanmean(shuffled_shares), "maps of other patients", context, SHARE_BOUNDS
        ),
        enrichment=_summarize_values(
            shares / area, groups, _compute_nanmean(shuffled_shares / area), "maps of other patients", context
        ),
        confounder_sensitivity=_summarize_values(
            np.array(
                [
                    compute_confounder_sensitivity(attributions[sample.row], sample.regions[region_name])
                    for sample in present
                ]
            ),
            groups,
            TOP_PIXEL_FRACTION,
            "chance",
            context,
            SHARE_BOUNDS,
        ),
        is_resolvable=is_resolvable,
        diameter=round_significant(diameter) or 0.0,
        stride=round_significant(stride) or 0.0,
        reason="" if is_resolvable else "below the resolution of the maps" if present else "no image has it",
        max_enrichment=round_significant(_compute_nanmean(1 / area[~np.isnan(shares)])),
    )


def _measure_region_width(mask: Mask) -> float:
    """Return the width of a region: the diameter of a blob, or the thickness of a frame."""
    edt = import_module("scipy.ndimage").distance_transform_edt
    return min(equivalent_diameter(mask), 2.0 * float(edt(np.pad(mask, 1)).max()))


def compute_mass_share(attribution: FloatArray, mask: Mask) -> float:
    """Return the share of a map's positive attribution in the region; NaN where nothing is positive."""
    positive = np.maximum(attribution, 0)
    whole = positive.sum()
    return float(positive[mask].sum() / whole) if whole > 0 else float("nan")


def compute_confounder_sensitivity(attribution: FloatArray, mask: Mask) -> float:
    """Return the share of the region's pixels in the top tenth of the map; ties count in expectation. NaN if constant."""
    count = max(1, round(attribution.size * TOP_PIXEL_FRACTION))
    threshold = np.partition(attribution.ravel(), attribution.size - count)[attribution.size - count]
    if attribution.max() == attribution.min():
        return float("nan")
    above, at = attribution > threshold, attribution == threshold
    room = (count - above.sum()) / at.sum()
    return float((above[mask].sum() + room * at[mask].sum()) / mask.sum())


def _compute_shuffled_share(
    context: AuditContext,
    sample: RegionSample,
    region_name: str,
    attributions: Mapping[int, FloatArray],
    shuffled_rows: Sequence[int],
) -> float:
    """Return the mean share of maps of other patients in this image's region."""
    start = shuffled_rows.index(sample.row)
    other_rows = [
        row
        for row in [*shuffled_rows[start + 1 :], *shuffled_rows[:start]]
        if context.cohort.patients[row] != context.cohort.patients[sample.row]
    ]
    shares = [compute_mass_share(attributions[row], sample.regions[region_name]) for row in other_rows[:MAX_OTHER_MAPS]]
    return _compute_nanmean(np.array(shares))


def project_to_input(attribution: FloatArray, input_size: Sequence[int]) -> FloatArray:
    """Return a map (*s) on the model's input (*S)."""
    values: FloatArray = np.asarray(Placement.identity(tuple(input_size)).project(attribution)[0], np.float64)
    return values


def _compute_nanmean(values: FloatArray) -> float:
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
    try:
        if not values.size:
            raise UndefinedError("no image has it")
        if np.isnan(values).all():
            raise UndefinedError("no map shows anything: none has a positive value, or each the same everywhere")
        estimate = estimate_mean(values, groups, bounds=bounds, **context.config.bootstrap_options)
        return summarize_estimate(estimate, baseline, baseline_name)
    except UndefinedError as error:
        return summarize_estimate(None, baseline, baseline_name, str(error))


MIN_OVERLAP_SHARE = 0.5  # of a region's pixels: editing the other region edits most of it, too


def compute_region_overlaps(samples: RegionSamples, finding_name: str) -> Iterator[RegionOverlap]:
    """Yield the overlap of each region with every other region that it touches."""
    names = [name for name in samples.region_names if name not in (FINDING_REGION, ORGAN_REGION)]
    for region in names:
        present = samples.select_with_region(region)
        for other in names:
            share = float(
                np.mean(
                    [_compute_overlap_share(sample.regions[region], sample.regions.get(other)) for sample in present]
                )
            )
            if other != region and share > 0:
                yield RegionOverlap(
                    finding=finding_name,
                    region=region,
                    other_region=other,
                    share=round_significant(share) or 0.0,
                    n_images=len(present),
                )


def _compute_overlap_share(mask: Mask, other_mask: Mask | None) -> float:
    """Return the share of a region's pixels in another region; 0 where the image lacks the other region."""
    return 0.0 if other_mask is None else float(np.count_nonzero(mask & other_mask) / np.count_nonzero(mask))


def find_overlapping_regions(summary: Summary) -> dict[str, list[list[str]]]:
    """Return for each finding the groups of overlapping regions among those that its prediction relies on."""
    relied_regions: dict[str, list[str]] = {}
    for item in summary.verdicts:
        if (item.question, item.conclusion) == ("shortcut", "supported"):
            relied_regions.setdefault(item.finding, []).append(item.qualifier)
    overlaps = summary.shortcut.overlaps
    return {
        name: merge_overlapping_regions(regions, [item for item in overlaps if item.finding == name])
        for name, regions in relied_regions.items()
    }


def merge_overlapping_regions(regions: Sequence[str], region_overlaps: Iterable[RegionOverlap]) -> list[list[str]]:
    """Return groups of at least two regions that are connected by overlaps above `MIN_OVERLAP_SHARE`, in order."""
    groups = [{one} for one in regions]
    for one in region_overlaps:
        if one.share > MIN_OVERLAP_SHARE and {one.region, one.other_region} <= set(regions):
            connected = [group for group in groups if group & {one.region, one.other_region}]
            groups = [group for group in groups if group not in connected] + [set().union(*connected)]
    merged = [[one for one in regions if one in group] for group in groups if len(group) > 1]
    return sorted(merged, key=lambda group: regions.index(group[0]))
