"""Maps: what a method makes of one question, before it is an Explanation."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

from camscope.explanation import OK
from camscope.layers import Layout


@dataclass
class Maps:
    """Raw maps (N,*s) of one score, and what is known of how they came about: of all, and of each sample (`own`).

    `measures`: numbers (N,) by name, which go into the results as they are.
    `error` (N,*s): each cell's standard error, where the map is a mean over what was drawn.
    `unverified`: whether the layout of the layer could be neither verified nor contradicted.
    """

    heat: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    notes: tuple[str, ...] = ()
    own: tuple[tuple[str, ...], ...] = ()
    measures: dict[str, Tensor] = field(default_factory=dict)
    error: Tensor | None = None
    unverified: bool = False

    def notes_of(self, sample: int) -> tuple[str, ...]:
        """What a result of one sample says of itself."""
        return (*self.notes, *(self.own[sample] if self.own else ()))


Later = Callable[[], Maps]  # a map that takes passes of its own, made when the shared ones are over


def merged(several: Sequence[Maps], heat: Tensor, *said: str) -> Maps:
    """The maps (N,*s) that several became: each note once, and a gradient of zero only where all have that."""
    zeros = [one.zero_gradient for one in several if one.zero_gradient is not None]
    return replace(
        several[0],
        heat=heat,
        error=None,
        zero_gradient=torch.stack(zeros).all(0) if len(zeros) == len(several) else None,
        notes=_once([*(one.notes for one in several), said]),
        own=tuple(map(_once, zip_longest(*(one.own for one in several), fillvalue=()))),
        unverified=any(one.unverified for one in several),
        measures={},  # each was of one map: of what they became it does not hold
    )


def _once(notes: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for row in notes for note in row))


def statuses(maps: Maps) -> list[str]:
    """One word per sample: "ok", or the gravest key of `MEANING` that applies."""
    flat = maps.heat.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    found = [_status(flat.shape[1], zero[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == OK and maps.unverified else status for status in found]


def _status(cells: int, zero_gradient: bool, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if cells == 1:
        return "no_spatial_resolution"
    if not high > 0:
        return "no_positive_evidence"
    return "flat" if low == high else OK
