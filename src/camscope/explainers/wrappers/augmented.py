"""Augmented: the mean over flips and scales of the input."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import Explainer, Maps
from camscope.explainers.grids import on_grid, resized
from camscope.explainers.wrappers.base import Wrapper
from camscope.targets import Score


class Augmented(Wrapper):
    """The mean of the raw maps of the input, flipped and scaled, each carried back to where it belongs.

    `flips`: True, the last spatial axis; an axis or several (0 is the first spatial one), in every combination; False.
    `scales`: factors of the input's size, linear, antialiased where it shrinks; the model must take such sizes. Each
    flip comes at each scale. The plain input always counts, comes first and fixes the class; maps of other scales are
    interpolated linearly onto its grid. What else the model is given stays as it is.
    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)
        for scale in self.scales:
            if not (math.isfinite(scale) and scale > 0):
                raise InputError(f"scales={self.scales}: expected factors above 0, e.g. (0.75, 1.0, 1.25)")

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The mean over all views."""
        views = self._views(x.ndim - 2)
        made = [self.explainer.maps(x, scores)]
        for scale, axes in views:
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            there = self.explainer.maps(resized(x.flip([axis + 2 for axis in axes]), size), scores)
            made.append([_carried_back(one, axes, plain) for one, plain in zip(there, made[0], strict=True)])
        return [_mean([row[i] for row in made]) for i in range(len(scores))]

    def _views(self, rank: int) -> list[tuple[float, tuple[int, ...]]]:
        """Scale and flipped axes of every view but the plain one."""
        if isinstance(self.flips, bool):
            axes = {rank - 1} if self.flips else set()
        else:
            given = [self.flips] if isinstance(self.flips, int) else list(self.flips)
            if not all(-rank <= axis < rank for axis in given):
                raise InputError(f"flips={self.flips!r}: the input's spatial axes are 0..{rank - 1}")
            axes = {axis % rank for axis in given}
        every = [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(sorted(axes), count)]
        return list(itertools.product(dict.fromkeys((1.0, *map(float, self.scales))), every))[1:]


def _carried_back(maps: Maps, axes: Sequence[int], plain: Maps) -> Maps:
    heat = maps.heat.flip([axis + 1 for axis in axes])
    return replace(maps, heat=on_grid(heat, plain.heat.shape[1:]))


def _mean(made: Sequence[Maps]) -> Maps:
    heat = made[0].heat.clone()
    for one in made[1:]:
        heat += one.heat
    zeros = [one.zero_gradient for one in made if one.zero_gradient is not None]
    zero = torch.stack(zeros).all(0) if len(zeros) == len(made) else None
    notes = dict.fromkeys(note for one in made for note in one.notes)
    return replace(made[0], heat=heat / len(made), zero_gradient=zero, notes=(*notes, f"the mean of {len(made)} views"))
