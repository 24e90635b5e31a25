"""`Augmented`: the mean map over flips and scales of the input (test-time augmentation)."""

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from camscope.errors import CamscopeError, InputError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.maps_with_flags import AttributionMaps, merge_notes_and_flags
from camscope.explainers.core.resize_and_blur import resize_input, resize_maps
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.hooks.find_layers import unwrap
from camscope.plurals import plural
from camscope.targets import Score


class Augmented(Wrapper):
    """Test-time augmentation: the mean of the raw maps over flips and scales of the input.

    Each map is mapped back to the original input. Resizing is linear, with antialiasing. Each flip is used at each
    scale. The unchanged input is always included and fixes the class. A Region or a Box is moved with the view, a
    function of the output is not.

    Maps of other scales are interpolated linearly to the grid of the unchanged input. Because the values may depend on
    the number of cells, the maps of each scale are multiplied by one number that gives them the mean magnitude of the
    original scale. With flips alone the result is the exact mean. If no layer is named, the one chosen for the
    unchanged input is used for all views. Extra inputs of the model stay the same. It costs one map of the inner method
    for each view.

    Args:
        explainer: The method.
        flips: True for the last spatial axis; an axis or several (0 is the first spatial axis), in every combination;
            or False.
        scales: Factors of the input size, which the model must accept.

    Raises:
        InputError: `scales` has a number that is not above 0, or `flips` is no axis.

    >>> from camscope import GradCAM
    >>> explanation = Augmented(GradCAM(model, "layer4"), flips=True, scales=(1.0, 1.5)).explain(image, "nodule")
    >>> explanation.method, explanation.grid
    ('gradcam, augmented', (16, 16))

    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        if not _is_sequence_of(scales, numbers.Real) or not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise InputError(f"scales={scales!r}: expected a list of factors above 0, e.g. (0.75, 1.0, 1.25)")
        if not isinstance(flips, bool | int) and not _is_sequence_of(flips, int):
            raise InputError(f"flips={flips!r}: expected True, False, or spatial axes, e.g. 0 or (0, 1)")
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether an integer input is accepted. The inner explainer must accept it, and no view may need interpolation."""
        return super().accepts_integer_input and set(self.scales) == {1.0}

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute for each score the mean of the maps of all views. A view is a flipped and rescaled copy of the input."""
        if len(scores) > 1 and any(callable(score.target) for score in scores):  # each may have its own layer
            return [self.compute_maps(x, [score])[0] for score in scores]
        unchanged_maps, explainer = (
            self.explainer.compute_maps(x, scores),
            self.explainer.with_chosen_layers(x, scores[0]),
        )
        flips, views_by_scale = self._list_flip_axes(x.ndim - 2), []
        for scale in dict.fromkeys((1.0, *map(float, self.scales))):
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            views = [unchanged_maps] if scale == 1 else []
            for axes in flips[len(views) :]:
                view = resize_input(x.flip([axis + 2 for axis in axes]), size)
                view_scores = [score.flipped(axes, size) for score in scores]
                maps = _compute_maps_of_view(explainer, view, view_scores, scale)
                pairs = zip(maps, unchanged_maps, strict=True)
                views.append([_undo_flip(flipped_maps, axes, reference) for flipped_maps, reference in pairs])
            views_by_scale.append(views)
        return [_average_views([[row[i] for row in views] for views in views_by_scale]) for i in range(len(scores))]

    def _list_flip_axes(self, n_axes: int) -> list[tuple[int, ...]]:
        """Return which axes each view flips. The first view flips no axis."""
        if isinstance(self.flips, bool):
            flips = [n_axes - 1] * self.flips
        else:
            flips = [self.flips] if isinstance(self.flips, int) else list(self.flips)
        if not all(-n_axes <= axis < n_axes for axis in flips):
            raise InputError(f"flips={self.flips!r} is out of range: the spatial axes of the input are 0..{n_axes - 1}")
        axes = sorted({axis % n_axes for axis in flips})
        return [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(axes, count)]


def _is_sequence_of(values: object, number_type: type) -> bool:
    """Whether a value is a sequence that holds only numbers of this type."""
    if not isinstance(values, Sequence):
        return False
    return all(isinstance(value, number_type) and not isinstance(value, bool) for value in values)


def _compute_maps_of_view(
    explainer: Explainer, view: Tensor, view_scores: Sequence[Score], scale: float
) -> list[AttributionMaps]:
    """Compute the maps of one view, which already has its `scale`. Raise InputError if the model does not accept its size."""
    try:
        return explainer.compute_maps(view, view_scores)
    except Exception as error:
        if scale == 1 or isinstance(error, CamscopeError | torch.OutOfMemoryError):
            raise
        size, model = " x ".join(map(str, view.shape[2:])), type(unwrap(explainer.model)).__name__
        raise InputError(
            f"{model} does not accept an input of size {size} (scale {scale:g}): pass scales=(1.0,), or scales that the model "
            f"accepts. Its error was {type(error).__name__}: {error}"
        ) from error


def _undo_flip(maps: AttributionMaps, axes: Sequence[int], reference: AttributionMaps) -> AttributionMaps:
    """Flip maps back along the axes that the view flipped. Then resize them to the grid of the reference."""
    attribution = maps.attribution.flip([axis + 1 for axis in axes])
    return replace(maps, attribution=resize_maps(attribution, reference.attribution.shape[1:]))


def _average_views(views_by_scale: Sequence[Sequence[AttributionMaps]]) -> AttributionMaps:
    """Compute the mean map over all views. In `views_by_scale`, the first list has the views at the original scale."""
    sums = [torch.stack([view.attribution for view in views]).sum(0) for views in views_by_scale]
    sizes = [
        torch.stack([_compute_mean_magnitude(view.attribution) for view in views]).sum(0) for views in views_by_scale
    ]
    total_map = sums[0]
    for total, size in zip(sums[1:], sizes[1:], strict=True):
        total_map = total_map + total * torch.where(size > 0, sizes[0] / size, 0)
    views = [view for group in views_by_scale for view in group]
    return merge_notes_and_flags(views, total_map / len(views), f"the mean of {plural(len(views), 'view')}")


def _compute_mean_magnitude(attribution: Tensor) -> Tensor:
    """Compute the mean absolute value of each map, as (N,1,...)."""
    return attribution.abs().mean(tuple(range(1, attribution.ndim)), keepdim=True)
