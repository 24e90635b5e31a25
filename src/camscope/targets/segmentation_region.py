"""Region: the target for a region of a segmentation output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.errors import TargetError
from camscope.geometry import project_mask_to_input
from camscope.mask_labels import find_multiple_labels, format_count_and_names
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, ImageContext, parse_finite_numbers
from camscope.targets.class_targets import ClassTarget
from camscope.targets.find_class_scores import full_precision
from camscope.targets.score_maps_in_outputs import find_class_score_maps
from camscope.unusual_tensors import check_ordinary_tensor

ADAPTIVE_POOLS: dict[int, Callable[..., Tensor]] = dict(
    enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), start=1)
)


@dataclass(frozen=True, eq=False)
class Region(ClassTarget):
    """The mean score of a class over a region of a segmentation output (N,K,*s) (Vinogradova et al. 2020).

    Without `mask` and `point` the region is where the model predicts the class. A depth model has the one class 0, and the
    masks of a model with prompts (SAM) take the place of classes.

    Args:
        label: Index or name of the class, or None for the class that scores most in the region.
        mask: The region, 0 outside and one value inside, in the size of the original image or of the model's input.
        point: The region as one pixel (x, y).
        resolved_classes: Class of each sample, which `resolve_choices` sets.
        cell_weights: (N,*s) weights of the cells of the output, which `resolve_choices` sets.

    Raises:
        TargetError: There is a mask and a point, the mask is empty, or the point is not finite.

    >>> Region(3, point=(12, 30)).point
    (12, 30)

    """

    mask: ArrayLike | Tensor | None = None
    point: Sequence[float] | None = None
    cell_weights: Tensor | None = None

    selects_positions = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.point is not None:
            raise TargetError("Region: expected a mask or a point, not both")
        if self.mask is not None and not _to_boolean_mask(self.mask).any():
            raise TargetError("Region: the mask is empty; expected at least one pixel inside")
        if self.point is not None:
            point = parse_finite_numbers(self.point)
            if point is None:
                raise TargetError(f"point={self.point!r} of a Region: expected finite numbers (x, y)")
            object.__setattr__(self, "point", tuple(point))

    def prepare_for_image(self, image_context: ImageContext) -> "Region":
        """Return the target for one image. Its mask or point is converted from the image to the model's input."""
        if self.point is not None:
            _check_point_has_input_axes(self.point, image_context.input_size)
            point = image_context.to_input([self.point[::-1]])[0][::-1].tolist()
            _check_point_inside_input(point, image_context.input_size, self.point)
            return replace(self, point=tuple(point))
        if self.mask is None:
            return self
        mask = _to_boolean_mask(self.mask)
        if mask.shape == image_context.image_size:
            mask = project_mask_to_input(mask, image_context.input_size, image_context.to_image)
        if not mask.any():
            raise TargetError("the region lies outside of the model's input: the crop has removed it")
        _check_mask_has_input_size(mask, image_context.input_size, image_context.image_size)
        return replace(self, mask=mask)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Region":
        """Return the target with flipped cell weights. `candidate_scores` later resizes these weights to the output grid."""
        weights = None if self.cell_weights is None else self.cell_weights.flip([axis + 1 for axis in flips])
        return replace(self, cell_weights=weights)

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Region":
        """Return the target with a fixed class, and with one weight per cell of the output (N,*s)."""
        maps = full_precision(find_class_score_maps(output, input_size)).detach()
        grid, input_size = tuple(maps.shape[2:]), tuple(input_size) or tuple(maps.shape[2:])
        if len(grid) != len(input_size):
            raise TargetError(
                f"the output grid {grid} and the input {input_size} differ in number of axes: pass a function output -> (N,)"
            )
        is_whole_map = self.mask is None and self.point is None
        weights = torch.ones_like(maps[:, 0]) if is_whole_map else self._compute_cell_weights(maps, input_size)
        resolved = ClassTarget.resolve_choices(replace(self, cell_weights=weights), output, input_size, class_names)
        if not is_whole_map or resolved.resolved_classes is None:
            return resolved
        weights = (maps.argmax(1) == resolved.resolved_classes.view(-1, *[1] * (maps.ndim - 2))).to(maps)
        if not bool(weights.flatten(1).any(1).all()):
            raise TargetError(
                f"Region: a sample has no pixel predicted as class {resolved.label!r}",
                fix="pass a mask, or a point",
            )
        return replace(resolved, cell_weights=weights)

    def candidate_scores(self, output: Any) -> Tensor:
        """Compute the score (N,K) of each class as the mean over the region."""
        if self.cell_weights is None:
            raise TargetError("a Region must be resolved in a first forward pass: use it through a method, or a Score")
        weights = self.cell_weights
        maps = full_precision(find_class_score_maps(output, weights.shape[1:]))
        if maps.shape[2:] != weights.shape[1:]:
            weights = ADAPTIVE_POOLS[weights.ndim - 1](weights[:, None], maps.shape[2:])[:, 0]
        shares = weights.flatten(1) / weights.flatten(1).sum(1, keepdim=True)
        return (maps.flatten(2) * shares[:, None]).sum(2)

    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""
        scores = self.candidate_scores(output)
        return scores.gather(1, self.class_indices(scores)[:, None])[:, 0]

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `tabby in a region`."""
        place = "where it is predicted" if self.mask is None else "in a region"
        if self.point is not None:
            point = ", ".join(f"{round(value, 1):zg}" for value in self.point)
            place = f"at ({point}) of the model's input"
        return f"{self.describe_class(sample, class_name)} {place}"

    def _compute_cell_weights(self, maps: Tensor, input_size: tuple[int, ...]) -> Tensor:
        """Return the share (N,*s) of each cell that lies in the region. The output `maps` (N,K,*s) defines the cells."""
        grid = maps.shape[2:]
        if self.mask is None:
            point = tuple(self.point or ())
            _check_point_has_input_axes(point, input_size)
            _check_point_inside_input(point, input_size, point)
            part = torch.zeros(grid, dtype=maps.dtype, device=maps.device)
            axes = zip(point[::-1], input_size, grid, strict=True)
            part[tuple(min(int(position * cells / pixels), cells - 1) for position, pixels, cells in axes)] = 1
            return part.expand(len(maps), *grid)
        mask = torch.as_tensor(_to_boolean_mask(self.mask), dtype=maps.dtype, device=maps.device)
        _check_mask_has_input_size(mask, input_size)
        return ADAPTIVE_POOLS[len(grid)](mask[None, None], grid)[0].expand(len(maps), *grid)


def _to_boolean_mask(mask: ArrayLike | Tensor) -> NDArray[np.bool_]:
    """Convert a mask to booleans. Raise TargetError if the mask is invalid or marks several regions."""
    if isinstance(mask, Tensor):
        check_ordinary_tensor(mask, "the mask of a Region", "mask", TargetError)
    try:
        array = np.asarray(mask.detach().cpu().double() if isinstance(mask, Tensor) else mask)
    except ValueError as error:
        raise TargetError("the mask of a Region has rows of different lengths: expected an array (H,W)") from error
    if array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise TargetError(
            "the mask of a Region has NaN, or values that are not numbers: expected 0 outside and 1 inside"
        )
    if names := find_multiple_labels(array):
        raise TargetError(
            f"the mask of a Region has several labels, {format_count_and_names(names)}; expected one region",
            fix=f"pass mask == {names[0]}, or mask != 0 for all",
        )
    return np.asarray(array != 0)


def _check_point_has_input_axes(point: Sequence[float], input_size: Sequence[int]) -> None:
    if len(point) != len(input_size):
        counted = plural(len(point), "number")
        raise TargetError(
            f"the point {tuple(point)} has {counted}; expected {len(input_size)}, one per axis of the input"
        )


def _check_point_inside_input(
    point: Sequence[float], input_size: Sequence[int], original_point: Sequence[float]
) -> None:
    if not all(0 <= position < pixels for position, pixels in zip(point[::-1], input_size, strict=True)):
        raise TargetError(f"the point {tuple(original_point)} lies outside of the model's input")


def _check_mask_has_input_size(
    mask: Tensor | NDArray[np.bool_], input_size: tuple[int, ...], image_size: tuple[int, ...] | None = None
) -> None:
    """Raise TargetError if the mask does not have the size of the model's input. `image_size` appears in the message."""
    if tuple(mask.shape) != input_size:
        original = "" if image_size is None else f"the size of the image {image_size}, or "
        raise TargetError(
            f"the mask has size {tuple(mask.shape)}; expected {original}the size of the model's input {input_size}"
        )
