"""Region: a question of a part of a map of class scores, as segmentation models return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from camscope.errors import TargetError
from camscope.geometry import project_mask_to_input
from camscope.mask_labels import find_multiple_labels, format_name_list
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets.base import ClassNameLookup, ClassTarget, ImageContext, parse_finite_numbers
from camscope.targets.outputs import check_no_detections, full_precision, get_output_tensor

ADAPTIVE_POOLS: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


@dataclass(frozen=True, eq=False)
class Region(ClassTarget):
    """The mean score of a class over a region of a segmentation's output (N,K,*s) (Vinogradova et al. 2020).

    `mask`: of the original image's size, or of the model's input's; 0 outside, one value inside. `point`: (x, y), one pixel
    instead. Neither: wherever the class is the answer. `label`: default the class that scores most there.
    """

    mask: ArrayLike | Tensor | None = None
    point: Sequence[float] | None = None
    cell_weights: Tensor | None = None

    dense = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.point is not None:
            raise TargetError("Region: a mask or a point, not both")
        if self.mask is not None and not _to_boolean_mask(self.mask).any():
            raise TargetError("Region: the mask is empty: nothing is asked")
        if self.point is not None:
            found = parse_finite_numbers(self.point)
            if found is None:
                raise TargetError(f"point={self.point!r} of a Region: expected finite numbers (x, y)")
            object.__setattr__(self, "point", tuple(found))

    def bind(self, image_context: ImageContext) -> "Region":
        """Mask and point as they lie on the model's input."""
        if self.point is not None:
            _check_point_axes(self.point, image_context.input_size)
            at = image_context.to_input([list(self.point)[::-1]])[0][::-1].tolist()
            _check_point_inside(at, image_context.input_size, self.point)
            return replace(self, point=tuple(at))
        if self.mask is None:
            return self
        mask = _to_boolean_mask(self.mask)
        if mask.shape == image_context.image_size:
            mask = project_mask_to_input(mask, image_context.input_size, image_context.to_image)
        if not mask.any():
            raise TargetError("the region lies outside of what the model sees: the crop has cut it away")
        _check_mask_size(mask, image_context.input_size, image_context.image_size)
        return replace(self, mask=mask)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Region":
        """The weights where the view shows them; `candidate_scores` brings them to the grid that its output has."""
        weights = None if self.cell_weights is None else self.cell_weights.flip([axis + 1 for axis in flips])
        return replace(self, cell_weights=weights)

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Region":
        """The class, and weights (N,*s) of the output's cells."""
        maps = full_precision(class_score_maps(output)).detach()
        grid, input_size = tuple(maps.shape[2:]), tuple(input_size) or tuple(maps.shape[2:])
        if len(grid) != len(input_size):
            raise TargetError(f"the output has places {grid}, the input {input_size}: pass a function output -> (N,)")
        whole = self.mask is None and self.point is None
        weights = torch.ones_like(maps[:, 0]) if whole else self._compute_cell_weights(maps, input_size)
        known = ClassTarget.resolve(replace(self, cell_weights=weights), output, input_size, class_names)
        if not whole or known.resolved_classes is None:
            return known
        weights = (maps.argmax(1) == known.resolved_classes.view(-1, *[1] * (maps.ndim - 2))).to(maps)
        if not bool(weights.flatten(1).any(1).all()):
            raise TargetError(
                f"Region: class {known.label!r} is the answer nowhere in a sample; pass a mask, or a point"
            )
        return replace(known, cell_weights=weights)

    def candidate_scores(self, output: Any) -> Tensor:
        """(N,K)"""
        if self.cell_weights is None:
            raise TargetError("a Region must be settled by a first pass: ask it through a method, or a Score")
        return _weighted_mean(full_precision(class_score_maps(output)), self.cell_weights)

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        scores = self.candidate_scores(output)
        return scores.gather(1, self.class_indices(scores)[:, None])[:, 0]

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """`tabby in a region`, `tabby at (12, 30)`, `tabby where it is the answer`"""
        place = "where it is the answer"
        if self.point is not None:
            place = f"at ({', '.join(f'{value:.4g}' for value in self.point)}) of the input"
        elif self.mask is not None:
            place = "in a region"
        return f"{self.describe_class(sample, class_name)} {place}"

    def _compute_cell_weights(self, maps: Tensor, input_size: tuple[int, ...]) -> Tensor:
        """(N,*s): how much of each cell lies in the region; (N,K,*s) is the output, `input_size` the input's."""
        grid = maps.shape[2:]
        if self.mask is None:
            point = self.point or ()
            _check_point_axes(point, input_size)
            _check_point_inside(point, input_size, point)
            part = torch.zeros(grid, dtype=maps.dtype, device=maps.device)
            places = zip(list(point)[::-1], input_size, grid, strict=True)
            part[tuple(min(int(at * cells / pixels), cells - 1) for at, pixels, cells in places)] = 1
            return part.expand(len(maps), *grid)
        mask = torch.as_tensor(_to_boolean_mask(self.mask), dtype=maps.dtype, device=maps.device)
        _check_mask_size(mask, input_size)
        return ADAPTIVE_POOLS[len(grid)](mask[None, None], grid)[0].expand(len(maps), *grid)


def class_score_maps(output: Any) -> Tensor:
    """(N,K,*s) scores of every class at every place: a tensor, `lateral`, `logits`, or the only float tensor of such a shape."""
    check_no_detections(output)
    named = output if isinstance(output, Tensor) else None
    for name in ("out", "logits"):
        named = get_output_tensor(output, name) if named is None else named
    many = (
        [leaf for _, leaf in iter_leaves(output) if leaf.is_floating_point() and leaf.ndim > 2]
        if named is None
        else [named]
    )
    if len(many) != 1 or many[0].ndim < 3:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in iter_leaves(output)) or type(output).__name__
        raise TargetError(f"a Region asks for class scores at every place (N,K,*s); the output is {shapes}")
    return many[0]


def _weighted_mean(maps: Tensor, weights: Tensor) -> Tensor:
    """(N,K,*s), (N,*t) -> (N,K); weights of another grid, as where a view has another size, lie where they lay."""
    if maps.shape[2:] != weights.shape[1:]:
        weights = ADAPTIVE_POOLS[weights.ndim - 1](weights[:, None], maps.shape[2:])[:, 0]
    shares = weights.flatten(1) / weights.flatten(1).sum(1, keepdim=True)
    return (maps.flatten(2) * shares[:, None]).sum(2)


def _to_boolean_mask(mask: ArrayLike | Tensor) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Where a mask is not 0; TargetError for what is none."""
    if isinstance(mask, Tensor):
        return _to_boolean_mask(mask.detach().cpu().double().numpy())
    try:
        found = np.asarray(mask)
    except ValueError as error:
        raise TargetError("the mask of a Region has rows of different lengths: expected an array (H,W)") from error
    if found.dtype.kind not in "biuf" or np.isnan(found).any():
        raise TargetError("the mask of a Region is no array of numbers, or holds NaN: expected 0 outside, 1 inside")
    if names := find_multiple_labels(found):
        raise TargetError(
            f"the mask of a Region holds {format_name_list(names)}; expected one region: pass mask == {names[0]}, or mask != 0 for all"
        )
    return np.asarray(found != 0)


def _check_point_axes(point: Sequence[float], size: Sequence[int]) -> None:
    if len(point) != len(size):
        raise TargetError(
            f"the point {tuple(point)} has {plural(len(point), 'number')}; expected {len(size)}, as the input has axes"
        )


def _check_point_inside(point: Sequence[float], size: Sequence[int], original_point: Sequence[float]) -> None:
    if not all(0 <= at < pixels for at, pixels in zip(list(point)[::-1], size, strict=True)):
        raise TargetError(f"the point {tuple(original_point)} lies outside of what the model sees")


def _check_mask_size(
    mask: "Tensor | np.ndarray[Any, np.dtype[np.bool_]]",
    size: tuple[int, ...],
    image_size: tuple[int, ...] | None = None,
) -> None:
    if tuple(mask.shape) != size:
        original = "" if image_size is None else f"the image's size {image_size}, or "
        raise TargetError(f"the mask is {tuple(mask.shape)}; expected {original}the model's input {size}")
