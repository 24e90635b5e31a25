"""Orientation: to which side of the body each axis of a volume leads, and the way to another order of sides."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from camscope.errors import PreprocessError
from camscope.geometry import Placement
from camscope.images.scan import Scan, World

SIDES = ("LR", "PA", "IS")  # of millimetres that grow to the right, to the front and up: less, more


def letters(world: World) -> str:
    """(4,4) -> such as "LPS": the side that each array axis leads to, of an oblique volume the nearest.

    Each side is taken once: the axis that follows one most closely has it.
    """
    steps = np.asarray(world[:3, :3], np.float64)
    share = steps / np.linalg.norm(steps, axis=0)
    found, rest = [""] * 3, np.abs(share)
    for _ in range(3):
        side, axis = np.unravel_index(int(rest.argmax()), rest.shape)
        found[axis] = SIDES[side][int(share[side, axis] > 0)]
        rest[side, :] = rest[:, axis] = -1
    return "".join(found)


def turned(scan: Scan, wanted: str) -> tuple[Sequence[int], Sequence[int]]:
    """Which axes of a volume, in their new order, and which of the new ones are flipped, for it to lead to `wanted` sides."""
    if len(scan.shape) != 3 or scan.world is None:
        raise PreprocessError(
            f"{scan.name}: orientation={wanted!r} is for volumes that say where they lie; this is "
            f"{' x '.join(map(str, scan.shape))}{'' if scan.world is not None else ' without a place in the world'}"
        )
    have, sides = letters(scan.world), {letter: pair for pair in SIDES for letter in pair}
    if len(wanted) != 3 or {sides.get(letter) for letter in wanted.upper()} != set(SIDES):
        raise PreprocessError(
            f"orientation={wanted!r}; expected one letter each of L or R, P or A, I or S, such as RAS"
        )
    axes = [next(i for i, own in enumerate(have) if own in sides[letter]) for letter in wanted.upper()]
    return axes, [
        new for new, (axis, letter) in enumerate(zip(axes, wanted.upper(), strict=True)) if have[axis] != letter
    ]


def placed(x: Tensor, place: Placement, axes: Sequence[int], flips: Sequence[int]) -> tuple[Tensor, Placement]:
    """(C,D,H,W) with its axes in that order and some of them reversed, and where it lies then."""
    x, place = x.permute(0, *(1 + axis for axis in axes)), place.transposed(axes)
    for axis in flips:
        x, place = x.flip(1 + axis), place.flipped(axis)
    return x.contiguous(), place
