"""Whether the mask of an image fits it: there, readable, of the same size, at the same place, and not empty."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from camscope.batch.inspection.facts import Array
from camscope.errors import CamscopeError
from camscope.images.photo import read_photo
from camscope.images.raster import read_raster
from camscope.images.scan import World
from camscope.images.scans import is_scan, read_scan

MARKED_OTHERWISE = ("[", "{")  # boxes, points, outlines
RASTERS = (b"\x89PNG", b"II*\0", b"MM\0*")


def judged(source: bytes | Path, size: Sequence[int] | None, world: World | None) -> str:
    """`ok`, or what is wrong with the mask of an image of this size (H,W) or (D,H,W): a word of `codes`."""
    try:
        marked, place = _read(source)
    except FileNotFoundError:
        return "mask-missing"
    except (CamscopeError, OSError) as error:
        return "mask-missing" if "no such file" in str(error) else "mask-unreadable"
    if size is not None and _sides(marked.shape) != _sides(size):
        return "mask-size"
    if world is not None and place is not None and _apart(world, place, marked.shape) > 1:
        return "mask-place"
    return "ok" if marked.any() else "mask-empty"


def _read(source: bytes | Path) -> tuple[Array, World | None]:
    """(H,W) or (D,H,W), what is not 0 is marked; grey pictures as they are stored, for labels may be small numbers."""
    if isinstance(source, Path) or is_scan(source):
        scan = read_scan(source)
        return _any(scan.values, colour=scan.colour), scan.world
    if source.startswith(RASTERS):
        try:
            scan = read_raster(source, frame=0)
            return _any(scan.values, colour=scan.colour), None
        except CamscopeError:
            pass  # with a palette, or transparent: as it is seen
    return _any(read_photo(source).pixels, colour=True), None


def _any(values: Array, *, colour: bool) -> Any:
    marked = np.nan_to_num(values) != 0
    return marked.any(-1) if colour else marked


def _sides(shape: Sequence[int]) -> list[int]:
    """Axes of one voxel do not count."""
    return [side for side in shape if side != 1]


def _apart(mine: World, others: World, shape: Sequence[int]) -> float:
    """How far two places of one array are apart at most at its corners, in voxels of the image."""
    sides = (1,) * (3 - len(shape)) + tuple(shape)
    corners = np.array([[*corner, 1.0] for corner in product(*((0, side - 1) for side in sides))]).T
    moved = (np.asarray(others) - np.asarray(mine)) @ corners
    step = np.linalg.norm(np.asarray(mine)[:3, :3], axis=0)[-len(shape) :].min()
    return float(np.linalg.norm(moved[:3], axis=0).max() / step)
