"""Scenes: images as the model takes them, each with its regions on the model's input."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from camscope.audit.core.context import AuditContext
from camscope.audit.shortcuts.region_base import project_region_to_input
from camscope.audit.shortcuts.region_detectors import REGION_PRESETS, REGIONS
from camscope.batch.image_loading import LoadedImage
from camscope.errors import CamscopeError, CategoryError, InputError, UndefinedError
from camscope.evaluation.ground_truth import GroundTruth
from camscope.evaluation.map_metrics import read_image_tensor
from camscope.geometry import Placement

Mask = npt.NDArray[np.bool_]
MAX_SAMPLE_BYTES = 2_000_000_000  # bytes of inputs and masks at once
FINDING_REGION, ORGAN_REGION, OUTSIDE_ORGAN_REGION = "the finding", "the organ", "outside the organ"


@dataclass(frozen=True, eq=False)
class RegionSample:
    """An image: `x` (C,*S), and of each region that it has the pixels of the model's input (*S); `ground_truth`: of each finding."""

    row: int
    x: Tensor
    placement: Placement | None
    regions: dict[str, Mask]
    ground_truth: dict[str, Mask] = field(default_factory=dict)

    def for_finding(self, finding_name: str) -> "RegionSample":
        """With the regions as they are to a finding: what of them is the finding itself is no shortcut.

        The organ has the whole finding in it: a mask of lungs leaves out what makes them opaque.
        """
        found = self.ground_truth.get(finding_name)
        if found is None:
            return self
        made = {FINDING_REGION: found}
        for name, mask in self.regions.items():
            kept = mask | found if name == ORGAN_REGION else mask & ~found
            if kept.any():
                made[name] = kept
        return replace(self, regions=made)


@dataclass(eq=False)
class RegionSamples:
    """Images of one input size. `missing_reasons`: why images have no such region, and how many."""

    samples: list[RegionSample]
    missing_reasons: dict[str, Counter[str]] = field(default_factory=dict)
    exclusion_reasons: Counter[str] = field(default_factory=Counter)

    def select_with_region(self, region_name: str) -> list[RegionSample]:
        """Those that have it."""
        return [one for one in self.samples if region_name in one.regions]

    def for_finding(self, finding_name: str) -> "RegionSamples":
        """As they are to a finding."""
        return replace(self, samples=[one.for_finding(finding_name) for one in self.samples])

    @property
    def region_names(self) -> list[str]:
        """Of all regions that any image has, in order."""
        return list(dict.fromkeys(name for one in self.samples for name in one.regions))


def list_requested_regions(context: AuditContext) -> list[str]:
    """The names of the regions that are looked for."""
    config = context.config.regions
    presets = config.presets or (REGION_PRESETS[config.modality] if config.modality else ())
    if unknown := [name for name in presets if name not in REGIONS]:
        raise InputError(f"no region {unknown[0]!r}; there are {', '.join(REGIONS)}")
    if twice := next(
        (name for name in config.columns if name in (*presets, FINDING_REGION, ORGAN_REGION, OUTSIDE_ORGAN_REGION)),
        None,
    ):
        raise InputError(
            f"regions.columns names {twice!r}, which is a region of its own: call the column's another name"
        )
    return [*config.columns, *presets]


def open_region_masks(context: AuditContext) -> dict[str, GroundTruth]:
    """The regions whose masks somebody made, but the findings' own."""
    known = {name: context.cohort.open_ground_truth(column) for name, column in context.config.regions.columns.items()}
    if context.config.regions.organ is not None:
        known[ORGAN_REGION] = context.cohort.open_ground_truth(context.config.regions.organ)
    return known


def load_region_samples(context: AuditContext, rows: Sequence[int]) -> RegionSamples:
    """Of some rows, those whose input has the size that most have; no more than `MAX_SAMPLE_BYTES` holds."""
    made, known, held = RegionSamples([]), open_region_masks(context), 0
    drawn = np.random.default_rng((context.config.seed, 9)).permutation(list(rows)).tolist()
    for done, one in enumerate(context.load_images(drawn), start=1):
        context.on_progress(done, len(rows))
        if one.item is None:
            made.exclusion_reasons[one.error or "it cannot be read"] += 1
            continue
        evidence = dict(_iter_finding_masks(context, one, made))
        regions = dict(_iter_region_masks(context, one, known, made))
        held += one.item.x.nbytes + sum(mask.nbytes for mask in (*evidence.values(), *regions.values()))
        if made.samples and held > MAX_SAMPLE_BYTES:
            made.exclusion_reasons["they are more than fit into memory at once"] = len(drawn) - done + 1
            break
        made.samples.append(RegionSample(one.row["row"], one.item.x, one.item.placement, regions, evidence))
    made.samples.sort(key=lambda scene: scene.row)
    _keep_one_size(made)
    return made


def _keep_one_size(samples: RegionSamples) -> None:
    sizes = Counter(tuple(one.x.shape) for one in samples.samples)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        samples.exclusion_reasons["the model's input is of another size"] += len(samples.samples) - sizes[usual]
        samples.samples = [one for one in samples.samples if tuple(one.x.shape) == usual]


def _iter_finding_masks(
    context: AuditContext, loaded_image: LoadedImage, samples: RegionSamples
) -> Iterator[tuple[str, Mask]]:
    """Of each finding that the image has, where it is."""
    for name, evidence in context.ground_truth.items():
        place = _get_placement(loaded_image)
        row = _read_manifest_row(context, loaded_image)
        found = _compute_region_mask(
            context, FINDING_REGION, samples, lambda: evidence.load_mask(row, _require_image_size(place)), place
        )
        if found is not None:
            yield name, found


def _iter_region_masks(
    context: AuditContext, loaded_image: LoadedImage, region_masks: dict[str, GroundTruth], samples: RegionSamples
) -> Iterator[tuple[str, Mask]]:
    """Name and pixels of each region that an image has; of the others the reason is noted."""
    row, place = _read_manifest_row(context, loaded_image), _get_placement(loaded_image)
    seen: dict[int, Any] = {}

    def pixels() -> Any:
        if not seen:
            seen[0] = _to_channels_last(read_image_tensor(context.cohort.get_image_source(loaded_image.row["row"])))
        return seen[0]

    for name in [*region_masks, *(name for name in list_requested_regions(context) if name not in region_masks)]:
        find = (
            (lambda n=name: region_masks[n].load_mask(row, _require_image_size(place)))
            if name in region_masks
            else (lambda n=name: REGIONS[n](pixels()))
        )
        found = _compute_region_mask(context, name, samples, find, place)
        if found is not None:
            yield name, found
            if name == ORGAN_REGION and not found.all():
                yield OUTSIDE_ORGAN_REGION, ~found


def _compute_region_mask(
    context: AuditContext,
    region_name: str,
    samples: RegionSamples,
    find_mask: Callable[[], Mask],
    placement: Placement | None,
) -> Mask | None:
    """On the model's input; None, with the reason noted, where there is none."""
    try:
        carried = project_region_to_input(
            find_mask(), placement, include_touched=True
        )  # of what is thin nothing is left to be seen
        if carried.any():
            return carried
        why = "none of it was shown to the model"
    except UndefinedError as error:
        why = str(error)
    except CategoryError:
        raise  # of the choice of a category, not of this image
    except CamscopeError as error:
        why = (
            "it cannot be read, or is of another size than its image" if context.cohort.hides_file_names else str(error)
        )
    samples.missing_reasons.setdefault(region_name, Counter())[why] += 1
    return None


def _read_manifest_row(context: AuditContext, loaded_image: LoadedImage) -> dict[str, Any]:
    """As the manifest has it."""
    place = context.cohort.manifest_positions[loaded_image.row["row"]]
    return context.cohort.manifest.rows(place, place + 1)[0]


def _get_placement(loaded_image: LoadedImage) -> Placement | None:
    return None if loaded_image.item is None else loaded_image.item.placement


def _require_image_size(placement: Placement | None) -> tuple[int, ...]:
    if placement is None:
        raise UndefinedError("where the model's input lies on the image is unknown")
    return placement.image_size


def _to_channels_last(pixels: Tensor) -> Any:
    """(C,*S) -> (*S), or (H,W,3)."""
    values = pixels.numpy()
    return values[0] if len(values) == 1 else np.moveaxis(values, 0, -1)
