"""Load images as model inputs together with the masks of their regions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.shortcuts.border_and_marker_detectors import REGION_PRESETS, REGIONS
from camscope.errors import CamscopeError, CategoryError, GeometryError, InputError, UndefinedError
from camscope.evaluation.evaluate_model_free_metrics import read_image_tensor
from camscope.evaluation.ground_truth import GroundTruth
from camscope.geometry import Placement, project_mask_to_input
from camscope.metrics.metric_registry import Mask

MAX_SAMPLE_BYTES = 2_000_000_000  # inputs and masks in memory at once
FINDING_REGION, ORGAN_REGION, OUTSIDE_ORGAN_REGION = "the finding", "the organ", "outside the organ"


@dataclass(frozen=True, eq=False)
class RegionSample:
    """An image as a model input (C,*S), with masks (*S) of its regions and its findings.

    `placement` is that of the input on the image. None where the model sees the whole image.
    """

    row: int
    x: Tensor
    placement: Placement | None
    regions: dict[str, Mask]
    ground_truth: dict[str, Mask] = field(default_factory=dict)

    def subtract_finding(self, finding_name: str) -> "RegionSample":
        """Remove the finding's pixels from all regions of the sample, but keep the organ whole. A finding is not a shortcut.

        The organ is extended by the finding: masks of lungs often leave out the opacities in them.
        """
        finding_mask = self.ground_truth.get(finding_name)
        if finding_mask is None:
            return self
        regions = {FINDING_REGION: finding_mask}
        for name, mask in self.regions.items():
            region = mask | finding_mask if name == ORGAN_REGION else mask & ~finding_mask
            if region.any():
                regions[name] = region
        return replace(self, regions=regions)


@dataclass(eq=False)
class RegionSamples:
    """Images of equal input size with their region masks, and counts of the reasons why images or regions are missing."""

    samples: list[RegionSample]
    missing_reasons: dict[str, Counter[str]] = field(default_factory=dict)
    exclusion_reasons: Counter[str] = field(default_factory=Counter)

    def select_with_region(self, region_name: str) -> list[RegionSample]:
        """Return the samples that have the named region."""
        return [sample for sample in self.samples if region_name in sample.regions]

    def subtract_finding(self, finding_name: str) -> "RegionSamples":
        """Remove the finding's pixels from all regions of every sample, but keep the organ whole."""
        return replace(self, samples=[sample.subtract_finding(finding_name) for sample in self.samples])

    @property
    def region_names(self) -> list[str]:
        """The names of all regions that occur in any image."""
        return list(dict.fromkeys(name for sample in self.samples for name in sample.regions))


def list_requested_regions(context: AuditContext) -> list[str]:
    """Return the names of the regions that the config asks for."""
    config = context.config.regions
    presets = config.presets or (REGION_PRESETS[config.modality] if config.modality else ())
    if unknown := [name for name in presets if name not in REGIONS]:
        raise InputError(f"unknown region {unknown[0]!r}; expected one of {', '.join(REGIONS)}")
    if taken := next(
        (name for name in config.columns if name in (*presets, FINDING_REGION, ORGAN_REGION, OUTSIDE_ORGAN_REGION)),
        None,
    ):
        raise InputError(f"regions.columns has {taken!r}, which is the name of a built-in region; choose another name")
    return [*config.columns, *presets]


def open_region_masks(context: AuditContext) -> dict[str, GroundTruth]:
    """Open the region masks that the config names. Return region name -> masks."""
    masks = {name: context.cohort.open_ground_truth(column) for name, column in context.config.regions.columns.items()}
    if context.config.regions.organ is not None:
        masks[ORGAN_REGION] = context.cohort.open_ground_truth(context.config.regions.organ)
    return masks


def load_region_samples(context: AuditContext, rows: Sequence[int]) -> RegionSamples:
    """Load images with their region masks. Images that do not have the most common size are left out.

    They take at most `MAX_SAMPLE_BYTES`.
    """
    samples, region_masks, n_bytes = RegionSamples([]), open_region_masks(context), 0
    order = np.random.default_rng((context.config.seed, 9)).permutation(list(rows)).tolist()
    for done, image in enumerate(context.load_images(order), start=1):
        context.on_progress(done, len(rows))
        if image.item is None:
            samples.exclusion_reasons[image.error or "it cannot be read"] += 1
            continue
        sample = _build_sample(context, image.row["row"], image.item.x, image.item.placement, region_masks, samples)
        masks = (*sample.regions.values(), *sample.ground_truth.values())
        n_bytes += sample.x.nbytes + sum(mask.nbytes for mask in masks)
        if samples.samples and n_bytes > MAX_SAMPLE_BYTES:
            samples.exclusion_reasons["the images need more memory than allowed"] = len(order) - done + 1
            break
        samples.samples.append(sample)
    samples.samples.sort(key=lambda sample: sample.row)
    sizes = Counter(tuple(sample.x.shape) for sample in samples.samples)
    if len(sizes) > 1:
        most_common = sizes.most_common(1)[0][0]
        samples.exclusion_reasons["the model's input has another size"] += len(samples.samples) - sizes[most_common]
        samples.samples = [sample for sample in samples.samples if tuple(sample.x.shape) == most_common]
    return samples


def _build_sample(
    context: AuditContext,
    row: int,
    x: Tensor,
    placement: Placement | None,
    region_masks: Mapping[str, GroundTruth],
    samples: RegionSamples,
) -> RegionSample:
    """Load the region masks and finding masks of one image. Missing regions are counted in `samples`."""
    cohort = context.cohort
    position = cohort.manifest_position_by_row[row]
    manifest_row = cohort.manifest.rows(position, position + 1)[0]

    def load_mask(ground_truth: GroundTruth) -> Mask:
        if placement is None:
            raise UndefinedError("the position of the model's input on the image is unknown")
        return ground_truth.load_mask(manifest_row, placement.image_size)

    @cache
    def read_pixels() -> Any:
        """Return the pixels of the image as (*S). A color image has the shape (H,W,3)."""
        values = read_image_tensor(cohort.get_image_source(row)).numpy()
        return values[0] if len(values) == 1 else np.moveaxis(values, 0, -1)

    def project_mask_or_count(name: str, load: Callable[[], Mask]) -> Mask | None:
        return _project_mask_or_count_reason(name, load, placement, samples, hides_file_names=cohort.hides_file_names)

    sources = context.ground_truth.items()
    findings = {name: project_mask_or_count(FINDING_REGION, partial(load_mask, source)) for name, source in sources}
    regions = {name: project_mask_or_count(name, partial(load_mask, source)) for name, source in region_masks.items()}
    organ = regions.get(ORGAN_REGION)
    if organ is not None and not organ.all():
        regions[OUTSIDE_ORGAN_REGION] = ~organ
    for name in list_requested_regions(context):
        if name not in region_masks:
            regions[name] = project_mask_or_count(name, partial(lambda region: region(read_pixels()), REGIONS[name]))
    return RegionSample(
        row,
        x,
        placement,
        {name: mask for name, mask in regions.items() if mask is not None},
        {name: mask for name, mask in findings.items() if mask is not None},
    )


def _project_mask_or_count_reason(
    region_name: str,
    load_mask: Callable[[], Mask],
    placement: Placement | None,
    samples: RegionSamples,
    *,
    hides_file_names: bool,
) -> Mask | None:
    """Project a region's mask onto the model's input. If there is no mask, return None and count the reason."""
    try:
        mask = project_region_to_input(load_mask(), placement)
        if mask.any():
            return mask
        reason = "it lies outside the model's input"
    except UndefinedError as error:
        reason = str(error)
    except CategoryError:
        raise  # a mistake of the config, not of this image
    except CamscopeError as error:
        reason = "its mask cannot be read, or differs in size from its image" if hides_file_names else str(error)
    samples.missing_reasons.setdefault(region_name, Counter())[reason] += 1
    return None


def project_region_to_input(mask: Mask, placement: Placement | None) -> Mask:
    """Project a mask from the original image onto the model's input.

    So that thin regions remain, it includes every pixel that holds the center of a pixel of the mask. Without a `placement` the
    model sees the whole image.
    """
    if placement is None:
        return mask.copy()
    if mask.shape != placement.image_size:
        raise GeometryError(
            f"the mask has the size {mask.shape}, but the image {placement.image_size}; expected equal sizes"
        )
    projected = project_mask_to_input(mask, placement.input_size, placement.to_image)
    touched = np.floor(placement.to_input(np.argwhere(mask) + 0.5)).astype(np.int64)
    touched = touched[((touched >= 0) & (touched < projected.shape)).all(1)]
    projected[tuple(touched.T)] = True
    return projected
