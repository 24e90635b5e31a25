"""Maps: what a method makes of one question, before it is an Explanation."""

import math
from dataclasses import dataclass

from torch import Tensor

from camscope.explanation import OK
from camscope.layers import Layout


@dataclass
class Maps:
    """Raw maps (N,*s) of one score, and what is known of how they came about."""

    heat: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    notes: tuple[str, ...] = ()


def statuses(maps: Maps) -> list[str]:
    """One word per sample: "ok", or the gravest key of `MEANING` that applies."""
    flat = maps.heat.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    return [_status(flat.shape[1], zero[i], low[i], high[i]) for i in range(len(flat))]


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
