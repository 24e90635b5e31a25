"""Orientation: to which side of the body each axis of a volume leads, and the way to another order of sides."""

from dataclasses import replace

import numpy as np

from camscope.errors import ImageError, PreprocessError
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


def oriented(scan: Scan, wanted: str) -> tuple[Scan, Placement]:
    """A volume with its axes reordered and flipped so that they lead to the `wanted` sides, and where it lies on the scan."""
    if len(scan.shape) != 3 or scan.world is None:
        raise ImageError(
            f"{scan.name}: orientation={wanted!r} is for volumes that say where they lie; this is "
            f"{' x '.join(map(str, scan.shape))}{'' if scan.world is not None else ' without a place in the world'}"
        )
    have, sides = letters(scan.world), {letter: pair for pair in SIDES for letter in pair}
    if len(wanted) != 3 or {sides.get(letter) for letter in wanted.upper()} != set(SIDES):
        raise PreprocessError(
            f"orientation={wanted!r}; expected one letter each of L or R, P or A, I or S, such as RAS"
        )
    axes = [next(i for i, own in enumerate(have) if own in sides[letter]) for letter in wanted.upper()]
    values = scan.values.transpose(*axes, *range(3, scan.values.ndim))
    place = Placement.identity(scan.shape).transposed(axes)
    for new, letter in enumerate(wanted.upper()):
        if have[axes[new]] != letter:
            values, place = np.flip(values, new), place.flipped(new)
    there = np.eye(4)
    there[:3, :3], there[:3, 3] = place.matrix[:, :3], place.to_image(np.full((1, 3), 0.5))[0] - 0.5
    turned = replace(scan, values=np.ascontiguousarray(values), world=scan.world @ there)
    return (turned if turned.pixel is None else replace(turned, pixel=None)), place
