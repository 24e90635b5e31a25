"""Explain a segmentation of a volume, which a network predicts in overlapping patches merged by Gaussian weights."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ModelInput
from camscope.explainers.core.perturbed_evaluator import track_steps
from camscope.explanation import STATUS_OK, Explanation
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.images.scans.nnunet_preprocess import NnunetPreprocess
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import read_scan
from camscope.plurals import plural
from camscope.targets import Region
from camscope.targets.base import ClassNameLookup
from camscope.targets.score_maps_in_outputs import find_class_score_maps

SIGMA_SHARE, TRUNCATION_SIGMAS = (
    1 / 8,
    4.0,
)  # of nnU-Net's Gaussian: its deviation as a share of the patch, and its reach
FloatArray = NDArray[np.floating[Any]]


class Window(NamedTuple):
    """A patch of the input: where it begins along each axis, and the part of the input."""

    start: tuple[int, ...]
    part: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class PartOfRegion(Region):
    """The part of a region's mean score that one patch contributes: the sum of `cell_weights` times the class scores.

    `whole_region` is the region on the whole input, which describes the target.
    """

    whole_region: Region | None = None

    def prepare_for_image(self, image_context: Any) -> "PartOfRegion":
        """Return the target unchanged: its weights belong to this patch."""
        return self

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Any) -> "PartOfRegion":
        """Return the target unchanged: its class was chosen for the whole input."""
        return self

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return the description of the whole region."""
        return Region.describe(self.whole_region or self, sample, class_name)

    def candidate_scores(self, output: Any) -> Tensor:
        """Compute the part (N,K) for each class."""
        weights = self.cell_weights
        if weights is None:
            raise InputError("a part of a region has no weights; use explain_sliding_windows")
        maps = find_class_score_maps(output, weights.shape[1:])
        return (maps.flatten(2) * weights.to(maps).flatten(1)[:, None]).sum(2)


def explain_sliding_windows(
    explainer: Explainer,
    source: Any,
    target: str | int | Region | None = None,
    *,
    patch_size: Sequence[int] | None = None,
    overlap: float = 0.5,
    progress: bool = False,
) -> Explanation:
    """Explain a segmentation that is predicted in overlapping patches, as nnU-Net and MONAI's sliding windows do.

    The predictions (logits) of all patches are merged, with Gaussian weights as in nnU-Net. The score is the mean of the
    merged logit of a class over a region: where the class is predicted, or a mask. Each patch is explained for its part of
    this score, and the parts sum to the score. The maps of the patches are merged with the same weights.

    Args:
        explainer: An explainer of a segmentation model.
        source: The scan, or a list with one scan per channel for a model of nnU-Net with several channels. A tensor is the
            preprocessed input (C,D,H,W).
        target: The class, or a `Region` with a class and a mask or point.
        patch_size: Size of the patches in the preprocessed input. Two numbers for a model that takes slices (D,h,w) one by
            one. Default: that of nnU-Net's plans.
        overlap: The share of a patch that the next patch overlaps, at least. At least 0 and less than 1.
        progress: Whether to show a progress bar.

    Returns:
        The explanation of the whole scan.

    Raises:
        InputError: The size of the patches is unknown or does not fit, or there are several channels without nnU-Net.
        TargetError: The class is not predicted anywhere and no mask or point is given.

    >>> model = torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 2, 1)).eval()
    >>> weights = [torch.nn.init.constant_(model[i].weight, 0.1) for i in (0, 2)]
    >>> from camscope import HiResCAM
    >>> mask = np.zeros((12, 8, 8), bool)
    >>> mask[2:9] = True
    >>> explainer = HiResCAM(model, "1")
    >>> explain_sliding_windows(explainer, torch.rand(1, 12, 8, 8), Region(1, mask=mask), patch_size=(8, 8, 8)).grid
    (12, 8, 8)

    """
    if not 0 <= overlap < 1:
        raise InputError(f"overlap={overlap}; expected a number of at least 0 and less than 1")
    if patch_size is None:
        if not isinstance(explainer.preprocess, NnunetPreprocess):
            raise InputError("the size of the patches is unknown; pass patch_size=, such as (96, 96, 96)")
        patch_size = explainer.preprocess.patch_size
    item = _prepare_channels(explainer, source, len(patch_size))
    input_size = tuple(item.x.shape[1:])
    windows = list(_iter_windows(input_size, patch_size, overlap))
    gaussian = compute_gaussian_weights(patch_size)
    total_weight = np.zeros(input_size)
    for window in windows:
        total_weight[window.part] += gaussian.reshape([part.stop - part.start for part in window.part])
    # the mean over the windows gives each voxel a weight of 1
    region = _resolve_region(explainer, item, target, windows, gaussian, total_weight)
    weights = (
        np.asarray(region.cell_weights[0].double().cpu()) if region.cell_weights is not None else np.ones(input_size)
    )
    weights = weights / weights.sum() / total_weight
    merged, score, explanations = np.zeros(input_size), 0.0, list[Explanation]()
    with track_steps(f"{explainer.composed_name}, {plural(len(windows), 'patch')}", len(windows), progress) as advance:
        for window in windows:
            advance(1)
            window_weights = weights[window.part].reshape(tuple(patch_size)) * gaussian
            if not window_weights.any():  # the patch does not reach the region, so that its part of the score is 0
                continue
            explanation = _explain_window(explainer, item, window, patch_size, region, window_weights)
            attribution = Placement.identity(tuple(patch_size)).project(explanation.attribution)[0]
            merged[window.part] += (attribution * gaussian).reshape([part.stop - part.start for part in window.part])
            score += explanation.score
            explanations.append(explanation)
    return _build_explanation(explanations, item, merged / total_weight, score, patch_size, overlap, len(windows))


def compute_gaussian_weights(patch_size: Sequence[int]) -> FloatArray:
    """Compute the weights of the voxels of a patch: a Gaussian with its peak of 1 in the middle, as in nnU-Net.

    >>> compute_gaussian_weights((8,)).round(3).tolist()
    [0.0, 0.011, 0.135, 0.607, 1.0, 0.607, 0.135, 0.011]
    """
    weights = np.ones(())
    for side in patch_size:
        distance, sigma = np.arange(side) - side // 2, side * SIGMA_SHARE
        axis = np.exp(-0.5 * (distance / sigma) ** 2)
        axis[np.abs(distance) > int(TRUNCATION_SIGMAS * sigma + 0.5)] = 0
        weights = weights[..., None] * axis
    weights[weights == 0] = weights[weights > 0].min()
    return weights


def _prepare_channels(explainer: Explainer, source: Any, n_patch_axes: int) -> ModelInput:
    """Return the model's input from a scan, or from a list with one scan per channel of a model of nnU-Net."""
    preprocess = explainer.preprocess
    if (
        isinstance(source, Tensor) and source.ndim == 4 and n_patch_axes == 2
    ):  # slices, which the model takes one by one
        x = source.to(*get_device_and_dtype(unwrap(explainer.model)))
        return ModelInput(x, Placement.identity(tuple(x.shape[1:])), "tensor", None, None)
    if not isinstance(source, list | tuple) or not isinstance(preprocess, NnunetPreprocess):
        return explainer.prepare_input(source)
    scans = [read_scan(part) for part in source]
    x, placement = preprocess.combine_channels(scans)
    first, is_visible = scans[0], all(scan.is_safe_to_display for scan in scans)
    return ModelInput(
        x.to(*get_device_and_dtype(unwrap(explainer.model))),
        placement,
        first.name,
        convert_scan_to_display_pixels(first) if is_visible else None,
        None,
        first.affine,
        (*first.steps, *preprocess.steps),
        first.flags,
    )


def _iter_windows(input_size: Sequence[int], patch_size: Sequence[int], overlap: float) -> Iterator[Window]:
    """Yield the patches, evenly spaced along each axis from one end to the other, as nnU-Net does."""
    n_leading = len(input_size) - len(patch_size)
    sizes = (*(1,) * n_leading, *patch_size)
    if n_leading not in (0, 1) or any(n < 1 or n > side for n, side in zip(sizes, input_size, strict=True)):
        raise InputError(f"patches of size {tuple(patch_size)} do not fit the input of size {tuple(input_size)}")
    starts = []
    for side, n in zip(input_size, sizes, strict=True):
        count = math.ceil((side - n) / max(n * (1 - overlap), 1)) + 1
        starts.append([round(i * (side - n) / max(count - 1, 1)) for i in range(count)])
    for start in itertools.product(*starts):
        yield Window(start, tuple(slice(first, first + n) for first, n in zip(start, sizes, strict=True)))


def _resolve_region(
    explainer: Explainer,
    item: ModelInput,
    target: str | int | Region | None,
    windows: Sequence[Window],
    gaussian: FloatArray,
    total_weight: FloatArray,
) -> Region:
    """Return the region with its class and its weight of each voxel. The class is predicted by all patches together."""
    region = target if isinstance(target, Region) else Region(target)
    prepared = explainer.prepare_each_target_for_its_image([region], [item], NO_EXTRA_INPUTS)
    if not isinstance(prepared, Region):
        raise InputError(f"target={target!r}; expected a class or a Region")
    logits = _predict_merged_logits(explainer, item, windows, gaussian, total_weight)
    input_size = tuple(item.x.shape[1:])
    is_whole_map = prepared.mask is None and prepared.point is None
    if is_whole_map and getattr(unwrap(explainer.model), "has_overlapping_classes", False):
        chosen = replace(prepared, mask=np.ones(input_size, bool)).resolve_choices(
            logits, input_size, explainer.class_names
        )
        index = int(chosen.class_indices(logits.flatten(2).mean(2))[0])
        mask = (logits[0, index] > 0).cpu().numpy()
        if not mask.any():
            raise TargetError(
                f"class {region.label!r} is predicted nowhere: its logit is below 0", fix="pass a mask, or a point"
            )
        resolved = replace(prepared, mask=mask).resolve_choices(logits, input_size, explainer.class_names)
        return replace(resolved, mask=None)  # it is described as where the class is predicted
    return prepared.resolve_choices(logits, input_size, explainer.class_names)


@torch.no_grad()
def _predict_merged_logits(
    explainer: Explainer, item: ModelInput, windows: Sequence[Window], gaussian: FloatArray, total_weight: FloatArray
) -> Tensor:
    """Predict the logits (1,K,*S) of the whole input: the mean over the patches, by their Gaussian weights."""
    merged: Tensor | None = None
    model = explainer.model
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for window in windows:
            patch = item.x[(slice(None), *window.part)].reshape(len(item.x), *gaussian.shape)
            maps = find_class_score_maps(model(patch[None]), gaussian.shape)[0].double().cpu()
            if tuple(maps.shape[1:]) != gaussian.shape:
                raise InputError(
                    f"the model returns maps of {tuple(maps.shape[1:])} for a patch of {gaussian.shape}; expected equal sizes"
                )
            if merged is None:
                merged = maps.new_zeros(len(maps), *item.x.shape[1:])
            weighted = maps * torch.from_numpy(gaussian)
            merged[(slice(None), *window.part)] += weighted.reshape(merged[(slice(None), *window.part)].shape)
    finally:
        for module, training in was_training.items():
            module.training = training
    if merged is None:
        raise InputError("there are no patches")
    return (merged / torch.from_numpy(total_weight))[None]


def _explain_window(
    explainer: Explainer,
    item: ModelInput,
    window: Window,
    patch_size: Sequence[int],
    region: Region,
    window_weights: FloatArray,
) -> Explanation:
    patch = item.x[(slice(None), *window.part)].reshape(len(item.x), *patch_size)
    part = PartOfRegion(
        region.label,
        resolved_classes=None if region.resolved_classes is None else region.resolved_classes.to(patch.device),
        cell_weights=torch.from_numpy(window_weights)[None].to(patch),
        whole_region=region,
    )
    identity = Placement.identity(tuple(patch_size))
    return explainer.explain(replace(item, x=patch, placement=identity, image=None, model_input_image=None), part)


def _build_explanation(
    explanations: Sequence[Explanation],
    item: ModelInput,
    attribution: FloatArray,
    score: float,
    patch_size: Sequence[int],
    overlap: float,
    n_windows: int,
) -> Explanation:
    """Return the explanation of the whole input. The first patch provides the settings and the label."""
    first = explanations[0]
    n_ok = sum(explanation.status == STATUS_OK for explanation in explanations)
    size = " x ".join(map(str, patch_size))
    notes = [
        f"{plural(n_windows, 'patch')} of {size}, merged with Gaussian weights; {len(explanations)} of them reach the region"
    ]
    if n_ok < len(explanations):
        notes.append(f"the maps of {len(explanations) - n_ok} of {plural(len(explanations), 'patch')} are flagged")
    return replace(
        first,
        attribution=attribution.astype(first.attribution.dtype),
        score=score,
        probability=None,
        top_classes=(),
        standard_error=None,
        input_size=tuple(item.x.shape[1:]),
        placement=item.placement,
        status=STATUS_OK if n_ok else first.status,
        layout=None,
        diagnostics={},
        parameters={**first.parameters, "patch": f"each of {size}, overlap {overlap:g}, Gaussian weights"},
        image=item.image,
        model_input_image=item.model_input_image,
        affine=item.affine,
        scan_steps=item.scan_steps,
        notes=(*dict.fromkeys(note for explanation in explanations for note in explanation.notes), *notes),
    )
