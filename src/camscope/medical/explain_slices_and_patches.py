"""Explain volumes slice by slice with a 2-D model, and explain images and volumes patch by patch."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import ModelInput
from camscope.explainers.core.perturbed_evaluator import track_steps
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.explanation import STATUS_OK, Explanation
from camscope.geometry import Placement
from camscope.images.scans.scan import Scan, convert_scan_to_display_pixels, rescale_to_display_range
from camscope.images.scans.scan_preprocess import ScanPreprocess, reorient_scan_and_placement
from camscope.images.scans.scan_reader import read_scan
from camscope.plurals import plural
from camscope.targets import TargetLike


@dataclass(frozen=True, eq=False)
class SliceExplanations:
    """The explanations of all slices of a volume, and one explanation of the whole volume.

    Attributes:
        volume: One explanation (D,h,w) of the whole volume. All slices share the score units.
        scores: (D,) the score of each slice along the axis.
        probabilities: (D,) the probability of each slice.
        slices: The explanation of each slice.

    >>> from camscope import GradCAM, explain_slices, load_model
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(resize=64))
    >>> explanations = explain_slices(explainer, Scan(np.random.rand(3, 64, 64).astype(np.float32), "volume"), "nodule")
    >>> explanations.scores.shape, len(explanations.slices), 0 <= explanations.highest_slice < 3
    ((3,), 3, True)

    """

    volume: Explanation
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    slices: Sequence[Explanation]

    @property
    def highest_slice(self) -> int:
        """The index of the slice with the highest score."""
        return int(self.scores.argmax())


def explain_slices(
    explainer: Explainer,
    source: Any,
    target: TargetLike = None,
    *,
    axis: int = 0,
    batch_size: int = 8,
    progress: bool = False,
) -> SliceExplanations:
    """Explain a volume slice by slice with a 2-D model. All slices are explained for the same target.

    The maps are stacked to one map of the volume. Its values are in score units and comparable between slices. Gray values
    without a window are scaled by the minimum and maximum of the volume, not of each slice. If the preprocessing has an
    `orientation`, the volume is reoriented first, and `axis` counts its new axes. "zscore" and "range" normalize each slice
    by itself.

    Args:
        explainer: An explainer of a 2-D model.
        source: The volume: a path, the folder of a series, or a `Scan`.
        target: As in `Explainer.explain`. The default is the class with the highest probability (or score) on any slice.
        axis: The axis along which the volume is sliced.
        batch_size: Slices per batch.
        progress: Whether to show a progress bar.

    Returns:
        The volume's explanation and those of the slices.

    Raises:
        InputError: If the source is not a volume, or `axis` is not 0, 1 or 2.

    >>> from camscope import GradCAM, load_model
    >>> explainer = GradCAM(load_model("phantom"), "layer4", preprocess=ScanPreprocess(resize=64))
    >>> scan = Scan(np.random.rand(3, 64, 64).astype(np.float32), "volume")
    >>> explain_slices(explainer, scan, "nodule").volume.grid
    (3, 8, 8)

    """
    check_positive_integer(batch_size=batch_size)
    scan = read_scan(source)
    if len(scan.shape) != 3:
        raise InputError(
            f"{scan.name} is {' x '.join(map(str, scan.shape))}: expected a volume; use explain, or omit --slices"
        )
    if axis not in (0, 1, 2):
        raise InputError(f"axis={axis!r}; expected 0, 1 or 2")
    window = explainer.preprocess.window if isinstance(explainer.preprocess, ScanPreprocess) else None
    affine, image = scan.affine, convert_scan_to_display_pixels(scan, window) if scan.is_safe_to_display else None
    explainer, scan, placement = _orient_volume(explainer, scan)
    order = [axis, *(i for i in range(3) if i != axis)]
    slices = [_extract_slice(scan, n, order) for n in range(scan.shape[axis])]
    explanations, notes = _explain_slice_batches(explainer, slices, target, batch_size, progress), list[str]()
    if target is None:
        best = max(explanations, key=lambda slice_: slice_.score if slice_.probability is None else slice_.probability)
        notes.append(f"no target given: {best.label} is the class with the highest probability on any slice")
        if any(explanation.target != best.target for explanation in explanations):
            explanations = _explain_slice_batches(explainer, slices, best.target, batch_size, progress)
    scores, probabilities = (
        np.array([getattr(explanation, key) for explanation in explanations], np.float64)
        for key in ("score", "probability")
    )
    volume = _stack_explanations(explanations, placement.transposed(order), order, notes)
    return SliceExplanations(replace(volume, image=image, affine=affine), scores, probabilities, explanations)


class OrientedVolume(NamedTuple):
    """An explainer for the slices of a volume, the reoriented volume, and its placement on the original volume."""

    slice_explainer: Explainer
    scan: Scan
    placement: Placement


def _orient_volume(explainer: Explainer, scan: Scan) -> OrientedVolume:
    """Reorient a volume to the orientation that the preprocessing requires. Its slices then need no reorientation."""
    preprocess, placement = explainer.preprocess, Placement.identity(scan.shape)
    if not isinstance(preprocess, ScanPreprocess):
        return OrientedVolume(explainer, scan if scan.is_color else rescale_to_display_range(scan), placement)
    if preprocess.orientation is None:
        return OrientedVolume(explainer, scan, placement)
    slice_explainer = copy.copy(explainer)
    slice_explainer.preprocess = replace(preprocess, orientation=None)
    reoriented, placement = reorient_scan_and_placement(scan, preprocess.orientation)
    steps = (*scan.steps, f"reoriented to {preprocess.orientation}")
    return OrientedVolume(slice_explainer, replace(reoriented, steps=steps), placement)


def _extract_slice(scan: Scan, index: int, axis_order: Sequence[int]) -> Scan:
    """Return one slice (H,W) of a scan. `index` counts along the first axis of `axis_order`."""
    values = scan.values.transpose(*axis_order, *range(3, scan.values.ndim))[index]
    pixel = None if scan.spacing is None else tuple(scan.spacing[axis] for axis in axis_order[1:])
    return replace(scan, values=np.ascontiguousarray(values), affine=None, pixel_spacing=pixel)


def _explain_slice_batches(
    explainer: Explainer, slices: Sequence[Scan], target: TargetLike, batch_size: int, progress: bool
) -> list[Explanation]:
    """Explain all slices in batches, with an optional progress bar."""
    explanations: list[Explanation] = []
    with track_steps(f"{explainer.composed_name}, {plural(len(slices), 'slice')}", len(slices), progress) as advance:
        for start in range(0, len(slices), batch_size):
            batch = slices[start : start + batch_size]
            explanations += explainer.explain_batch(batch, target)
            advance(len(batch))
    return explanations


def _stack_explanations(
    explanations: Sequence[Explanation], volume_placement: Placement, order: Sequence[int], notes: Sequence[str]
) -> Explanation:
    """Stack the maps (h,w) of all slices. Return one explanation (D,h,w) of the volume."""
    first, best = explanations[0], max(explanations, key=lambda explanation: explanation.score)
    placement = None
    if first.placement is not None:
        slice_placement, matrix = first.placement, np.eye(3, 4)
        matrix[1:, 1:] = slice_placement.matrix
        sizes = ((len(explanations), *slice_placement.input_size), (len(explanations), *slice_placement.image_size))
        placement = volume_placement.composed(Placement(matrix, *sizes))
    n_slices, statuses = len(explanations), [explanation.status for explanation in explanations]
    flagged = [status for status in statuses if status != STATUS_OK]
    if flagged:
        flags = ", ".join(sorted(set(flagged))).replace("_", " ")
        notes = [*notes, f"flagged: {len(flagged)} of {plural(n_slices, 'slice')} ({flags})"]
    input_images = [image for explanation in explanations if (image := explanation.model_input_image) is not None]
    return replace(
        best,
        attribution=np.stack([explanation.attribution for explanation in explanations]),
        standard_error=None,
        input_size=(n_slices, *first.input_size),
        placement=placement,
        status=STATUS_OK if len(flagged) < n_slices else first.status,
        notes=(*dict.fromkeys(note for explanation in explanations for note in explanation.notes), *notes),
        diagnostics={},
        parameters={**best.parameters, "slices along axis": order[0]},
        model_input_image=np.stack(input_images) if len(input_images) == n_slices else None,
        scan_steps=(*best.scan_steps, f"slices along axis {order[0]}"),
    )


def explain_patch(
    explainer: Explainer, source: Any, start: Sequence[int], size: Sequence[int], target: TargetLike = None
) -> Explanation:
    """Explain one patch of an image or volume. The explanation also records where the patch lies on the image.

    The whole source is preprocessed first. Pixels outside the patch count as not covered by the map.

    Args:
        explainer: The explainer.
        source: The image or volume.
        start: The first pixel of the patch in the preprocessed input, one number per axis.
        size: The size of the patch, one number per axis.
        target: As in `Explainer.explain`.

    Returns:
        The explanation, placed on the source.

    Raises:
        InputError: If the patch does not fit the input.

    >>> from camscope import GradCAM, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> explainer = GradCAM(load_model("phantom"), "layer4")
    >>> explanation = explain_patch(explainer, draw_radiograph(0, "nodule").image, (0, 0), (64, 64), "nodule")
    >>> explanation.grid, round(float(explanation.coverage_mask().mean()), 2)  # a quarter of the image
    ((8, 8), 0.25)

    """
    return _explain_patch_of_input(explainer, explainer.prepare_input(source), tuple(start), tuple(size), target)


def explain_patches(
    explainer: Explainer,
    source: Any,
    size: Sequence[int],
    target: TargetLike,
    *,
    overlap: float = 0.5,
    progress: bool = False,
) -> Explanation:
    """Explain overlapping patches of an image or volume. Average their maps to one map of the whole input.

    The last patch along an axis ends at the end of the input. A pixel gets the mean over all patches that contain it. The
    score is the highest score of a patch.

    Args:
        explainer: The explainer.
        source: The image or volume.
        size: The size of each patch in the preprocessed input.
        target: The target of all patches, not None.
        overlap: The share of a patch that the next patch overlaps, along each axis. At least 0 and less than 1.
        progress: Whether to show a progress bar.

    Returns:
        The explanation of the whole input.

    Raises:
        InputError: If there is no target, or the patches do not fit the input.

    >>> from camscope import GradCAM, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> explainer = GradCAM(load_model("phantom"), "layer4")
    >>> explain_patches(explainer, draw_radiograph(0, "nodule").image, (64, 64), "nodule", overlap=0.0).grid
    (128, 128)

    """
    if target is None:
        raise InputError(
            "a target is required: patches may differ in their top class, and such maps cannot be averaged"
        )
    if not 0 <= overlap < 1:
        raise InputError(f"overlap={overlap}; expected a number of at least 0 and less than 1")
    item, size = explainer.prepare_input(source), tuple(size)
    input_size = tuple(item.x.shape[1:])
    total, count, best, n_ok = np.zeros(input_size), np.zeros(input_size), None, 0
    starts = list(_compute_patch_starts(input_size, size, overlap))
    n_patches = plural(len(starts), "patch")
    with track_steps(f"{explainer.composed_name}, {n_patches}", len(starts), progress) as advance:
        for start in starts:
            explanation = _explain_patch_of_input(explainer, item, start, size, target)
            part = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
            total[part] += Placement.identity(size).project(explanation.attribution)[0]
            count[part] += 1
            n_ok += explanation.status == STATUS_OK
            best = explanation if best is None or explanation.score > best.score else best
            advance(1)
    if best is None:
        raise InputError("there are no patches")
    size_text, notes = " x ".join(map(str, size)), best.notes
    if n_ok < len(starts):
        notes = (*notes, f"the maps of {len(starts) - n_ok} of {n_patches} are flagged")
    return replace(
        best,
        attribution=(total / count).astype(best.attribution.dtype),
        standard_error=None,
        input_size=input_size,
        placement=item.placement,
        status=STATUS_OK if n_ok else best.status,
        layout=None,
        diagnostics={},
        parameters={**best.parameters, "patch": f"each of {size_text}, overlap {overlap:g}"},
        model_input_image=item.model_input_image,
        notes=(*notes, f"the mean of {n_patches} of {size_text}; the score is that of the highest"),
    )


def _explain_patch_of_input(
    explainer: Explainer, model_input: ModelInput, start: tuple[int, ...], size: tuple[int, ...], target: TargetLike
) -> Explanation:
    """Explain a patch of the model's input by itself. Raise an InputError if the patch does not fit."""
    shape = tuple(model_input.x.shape[1:])
    if len(start) != len(shape) or len(size) != len(shape):
        raise InputError(
            f"start={start}, size={size}: expected one number for each of the input's {plural(len(shape), 'axis')}"
        )
    if any(s < 0 or n < 1 or s + n > side for s, n, side in zip(start, size, shape, strict=True)):
        raise InputError(f"the patch of size {size} at {start} does not fit the input of size {shape}")
    part = (slice(None), *(slice(s, s + n) for s, n in zip(start, size, strict=True)))
    placement = None if model_input.placement is None else model_input.placement.cropped(start, size)
    image = model_input.model_input_image
    image = None if image is None or image.shape[: len(shape)] != shape else image[part[1:]]
    patch = replace(model_input, x=model_input.x[part], placement=placement, model_input_image=image)
    explanation = explainer.explain(patch, target)
    return replace(explanation, parameters={**explanation.parameters, "patch": f"{size} from {start} on"})


def _compute_patch_starts(
    input_size: Sequence[int], patch_size: Sequence[int], overlap: float
) -> Iterator[tuple[int, ...]]:
    """Yield the position of the first pixel of each patch. Raise an InputError if a patch does not fit into the input."""
    if len(input_size) != len(patch_size) or any(
        n < 1 or n > side for n, side in zip(patch_size, input_size, strict=False)
    ):
        raise InputError(f"patches of size {tuple(patch_size)} do not fit the input of size {tuple(input_size)}")
    steps = [max(1, round(n * (1 - overlap))) for n in patch_size]
    axes = zip(input_size, patch_size, steps, strict=True)
    return itertools.product(*(sorted({*range(0, side - n, step), side - n}) for side, n, step in axes))
