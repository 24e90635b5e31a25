"""One explanation of several layers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.explanation import MEANING, OK, Explanation, Floats
from camscope.geometry import Placement


def fuse(explanations: Sequence[Explanation], how: Literal["max", "mean"] = "max") -> Explanation:
    """Several layers' maps of one question as one: each divided by its maximum, on the finest grid, then cell by cell.

    `how`: "max" keeps what any layer saw (Jiang et al. 2021, section III-C), "mean" what they agree on. A layer without
    positive evidence adds nothing. Raises InputError where the explanations are not of one input, target and method.
    """
    if not explanations:
        raise InputError("nothing to fuse: pass one explanation per layer")
    if how not in ("max", "mean"):
        raise InputError(f"how={how!r}: expected 'max' or 'mean'")
    first = explanations[0]
    for one in explanations[1:]:
        _expect_same_question(first, one)
    finest = max((one.grid for one in explanations), key=np.prod)
    maps = np.stack([_on_grid(one, finest) for one in explanations])
    heat = maps.max(0) if how == "max" else maps.mean(0)
    flagged = [one for one in explanations if one.status != OK]
    status = flagged[0].status if len(flagged) == len(explanations) else OK
    notes = [f"{one.layer}: {MEANING[one.status]}" for one in flagged]
    notes = [*first.notes, "fused: each layer's map was divided by its maximum", *notes]
    layers = " + ".join(str(one.layer) for one in explanations)
    settings = {**first.parameters, "layer": layers, "how": how}
    return replace(first, heat=heat, layer=layers, layout=None, status=status, notes=tuple(notes), parameters=settings)


def _expect_same_question(first: Explanation, other: Explanation) -> None:
    for fact in ("name", "method", "target", "label", "input_size", "placement", "model"):
        if getattr(other, fact) != getattr(first, fact):
            raise InputError(f"cannot fuse: {fact} is {getattr(first, fact)!r} and {getattr(other, fact)!r}")
    if not math.isclose(other.score, first.score, rel_tol=1e-3, abs_tol=1e-6):
        raise InputError(f"cannot fuse: the score is {first.score:.6g} and {other.score:.6g}: not the same input")
    for picture in ("image", "seen"):
        one, another = getattr(first, picture), getattr(other, picture)
        if one is not None and another is not None and not np.array_equal(one, another):
            raise InputError("cannot fuse: the explanations are of different images")


def _on_grid(explanation: Explanation, grid: tuple[int, ...]) -> Floats:
    """The map over its maximum, carried to another grid of the same input by linear interpolation."""
    heat = explanation.heat
    peak = heat.max()
    scaled = np.maximum(heat, 0) / peak if peak > 0 else np.zeros_like(heat)
    return Placement.identity(grid).project(scaled)[0]
