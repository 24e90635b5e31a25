"""Augmented: the mean over flips and scales of the input."""

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from camscope.errors import CamscopeError, InputError
from camscope.explainers.base import Explainer
from camscope.explainers.grids import on_grid, resized
from camscope.explainers.maps import Maps, merged
from camscope.explainers.wrappers.base import Wrapper
from camscope.hooks.base import unwrap
from camscope.targets import Score
from camscope.wording import plural


class Augmented(Wrapper):
    """The mean of the raw maps of the input, flipped and scaled, each carried back to where it belongs.

    `flips`: True, the last spatial axis; an axis or several (0 is the first spatial one), in every combination; False.
    `scales`: factors of the input's size, linear, antialiased where it shrinks; the model must take such sizes. Each
    flip comes at each scale. The plain input always counts, comes first and fixes the class; a Region or a Box is asked
    for where the view shows it, a function of the output as it is. Maps of other scales are interpolated linearly onto
    the plain input's grid. How large a map is may depend on how many cells it has, by the method: so each scale's maps
    are multiplied by the one number that gives them, over all flips, the mean size of the input's own scale; of flips
    alone it is the exact mean. A layer that is not named is chosen for the plain input, and serves all views. What else
    the model is given stays as it is.
    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        if not _several(scales, numbers.Real) or not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise InputError(f"scales={scales!r}: expected several factors above 0, e.g. (0.75, 1.0, 1.25)")
        if not isinstance(flips, bool | int) and not _several(flips, int):
            raise InputError(f"flips={flips!r}: expected True, False, or spatial axes, e.g. 0 or (0, 1)")
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)

    @property
    def takes_integers(self) -> bool:
        """Whether the inner one does, and no view is interpolated."""
        return super().takes_integers and set(self.scales) == {1.0}

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The mean over all views."""
        if len(scores) > 1 and any(callable(score.target) for score in scores):  # each has a layer of its own
            return [self.maps(x, [score])[0] for score in scores]
        plain = self.explainer.maps(x, scores)
        flips, tool = self._flips(x.ndim - 2), self.explainer.settled(x, scores[0])
        rounds = []
        for scale in dict.fromkeys((1.0, *map(float, self.scales))):
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            views = [plain] if scale == 1 else []
            for axes in flips[len(views) :]:
                asked = [score.viewed(axes, size) for score in scores]
                there = _maps_at(scale, tool, resized(x.flip([axis + 2 for axis in axes]), size), asked)
                views.append([_carried_back(one, axes, own) for one, own in zip(there, plain, strict=True)])
            rounds.append(views)
        return [_mean([[row[i] for row in views] for views in rounds]) for i in range(len(scores))]

    def _flips(self, rank: int) -> list[tuple[int, ...]]:
        """Flipped axes of every view, none first."""
        if isinstance(self.flips, bool):
            axes = {rank - 1} if self.flips else set()
        else:
            given = [self.flips] if isinstance(self.flips, int) else list(self.flips)
            if not all(-rank <= axis < rank for axis in given):
                raise InputError(f"flips={self.flips!r}: the input's spatial axes are 0..{rank - 1}")
            axes = {axis % rank for axis in given}
        return [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(sorted(axes), count)]


def _several(values: object, kind: type) -> bool:
    """Whether it is a sequence of such numbers."""
    return isinstance(values, Sequence) and all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _maps_at(scale: float, tool: Explainer, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
    """The maps of one view; an InputError that names its size where the model refuses what is not the input's own."""
    try:
        return tool.maps(x, scores)
    except Exception as error:
        if scale == 1 or isinstance(error, CamscopeError | torch.OutOfMemoryError):
            raise
        size, model = " x ".join(map(str, x.shape[2:])), type(unwrap(tool.model)).__name__
        raise InputError(
            f"{model} has no answer for an input of {size}, scale {scale:g}: {type(error).__name__}: {error}; pass "
            f"scales=(1.0,), or scales of which it takes the sizes"
        ) from error


def _carried_back(maps: Maps, axes: Sequence[int], plain: Maps) -> Maps:
    heat = maps.heat.flip([axis + 1 for axis in axes])
    return replace(maps, heat=on_grid(heat, plain.heat.shape[1:]))


def _mean(rounds: Sequence[Sequence[Maps]]) -> Maps:
    """Of all views; the first of `rounds` are those of the input's own scale."""
    sums = [torch.stack([one.heat for one in views]).sum(0) for views in rounds]
    sizes = [torch.stack([_size(one.heat) for one in views]).sum(0) for views in rounds]
    heat = sums[0]
    for total, size in zip(sums[1:], sizes[1:], strict=True):
        heat = heat + total * torch.where(size > 0, sizes[0] / size, 0)
    made = [one for views in rounds for one in views]
    return merged(made, heat / len(made), f"the mean of {plural(len(made), 'view')}")


def _size(heat: Tensor) -> Tensor:
    """(N,1,..): the mean absolute value of each map."""
    return heat.abs().mean(tuple(range(1, heat.ndim)), keepdim=True)
