"""Slices: a model of pictures asked about every slice of a volume, and its maps as one map of the volume."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.runs import counted
from camscope.explainers.scope import expect_count
from camscope.explanation import OK, Explanation
from camscope.geometry import Placement
from camscope.images.orientation import oriented
from camscope.images.scan import Scan
from camscope.images.scan_pixels import grey, ranged
from camscope.images.scan_preprocess import ScanPreprocess
from camscope.images.scans import read_scan
from camscope.targets import Question
from camscope.wording import plural


@dataclass(frozen=True, eq=False)
class Slices:
    """`volume`: one explanation (D,h,w) of the whole, in score units that all slices share. `scores`, `probabilities` (D,): the
    answer of each slice, in the order of the volume's axis; `slices`: the explanation of each.
    """

    volume: Explanation
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    slices: Sequence[Explanation]

    @property
    def highest(self) -> int:
        """The slice whose score is the highest."""
        return int(self.scores.argmax())


def explain_slices(
    tool: Explainer,
    source: Any,
    target: Question = None,
    *,
    axis: int = 0,
    batch_size: int = 8,
    progress: bool = False,
) -> Slices:
    """A volume (path, folder of a series, `Scan`) through a model of pictures, slice by slice along `axis`, asked one question.

    The maps are one map of the volume: their numbers are the model's own, and can be compared from slice to slice. `target`
    None: the class of which the model is surest on any slice. Grey values without a window are stretched between the least
    and the largest value of the whole volume, not of each slice. Where the preprocessing has an `orientation`, the volume is
    turned first, and `axis` is one of the turned volume; its "zscore" or "range" is that of each slice.
    """
    expect_count(batch_size=batch_size)
    scan = read_scan(source)
    if len(scan.shape) != 3:
        raise InputError(
            f"{scan.name} is {' x '.join(map(str, scan.shape))}: slices are of a volume; use explain (no --slices)"
        )
    if axis not in (0, 1, 2):
        raise InputError(f"axis={axis!r}; expected 0, 1 or 2")
    window = tool.preprocess.window if isinstance(tool.preprocess, ScanPreprocess) else None
    world, image = scan.world, grey(scan, window) if scan.may_be_shown else None
    tool, scan, place = _turned(tool, scan)
    order = [axis, *(i for i in range(3) if i != axis)]
    flat = [_slice(scan, n, order) for n in range(scan.shape[axis])]
    made, notes = _asked(tool, flat, target, batch_size, progress), list[str]()
    if target is None:
        surest = max(made, key=lambda one: one.score if one.probability is None else one.probability)
        notes.append(f"no class was asked for: {surest.label} is that of which the model is surest on any slice")
        if any(one.target != surest.target for one in made):
            made = _asked(tool, flat, surest.target, batch_size, progress)
    scores, chances = (np.array([getattr(one, key) for one in made], np.float64) for key in ("score", "probability"))
    volume = _together(made, place.transposed(order), order, notes)
    return Slices(replace(volume, image=image, world=world), scores, chances, made)


def _turned(tool: Explainer, scan: Scan) -> tuple[Explainer, Scan, Placement]:
    """The explainer for single slices, the volume that they are cut from, and where it lies on the scan."""
    way, place = tool.preprocess, Placement.identity(scan.shape)
    if isinstance(way, ScanPreprocess) and way.orientation is not None:
        other = copy.copy(tool)
        other.preprocess = replace(way, orientation=None)
        turned, place = oriented(scan, way.orientation)
        return other, replace(turned, steps=(*scan.steps, f"turned to {way.orientation}")), place
    return tool, scan if isinstance(way, ScanPreprocess) or scan.colour else ranged(scan), place


def _slice(scan: Scan, number: int, order: Sequence[int]) -> Scan:
    """One slice (H,W) along the first axis of `order`."""
    values = scan.values.transpose(*order, *range(3, scan.values.ndim))[number]
    pixel = None if scan.spacing is None else tuple(scan.spacing[axis] for axis in order[1:])
    return replace(scan, values=np.ascontiguousarray(values), world=None, pixel=pixel)


def _asked(
    tool: Explainer, flat: Sequence[Scan], target: Question, batch_size: int, progress: bool
) -> list[Explanation]:
    made: list[Explanation] = []
    with counted(f"{tool.title}, {plural(len(flat), 'slice')}", len(flat), progress) as advance:
        for start in range(0, len(flat), batch_size):
            some = flat[start : start + batch_size]
            made += tool.explain_batch(some, target)
            advance(len(some))
    return made


def _together(made: Sequence[Explanation], stack: Placement, order: Sequence[int], notes: Sequence[str]) -> Explanation:
    """The maps as one: its axes are the slices' and then those of a slice."""
    first, best = made[0], max(made, key=lambda one: one.score)
    place = None
    if first.placement is not None:
        flat, matrix = first.placement, np.eye(3, 4)
        matrix[1:, 1:] = flat.matrix
        sizes = ((len(made), *flat.input_size), (len(made), *flat.image_size))
        place = stack.followed(Placement(matrix, *sizes))
    heat, seen = np.stack([one.heat for one in made]), [one.seen for one in made if one.seen is not None]
    flagged = {one.status for one in made} - {OK}
    if flagged:
        count = sum(one.status != OK for one in made)
        notes = [
            *notes,
            f"flagged: {count} of {plural(len(made), 'slice')} ({', '.join(sorted(flagged)).replace('_', ' ')})",
        ]
    return replace(
        best,
        heat=heat,
        error=None,
        input_size=(len(made), *first.input_size),
        placement=place,
        status=OK if any(one.status == OK for one in made) else first.status,
        notes=(*dict.fromkeys(note for one in made for note in one.notes), *notes),
        measures={},
        parameters={**best.parameters, "slices along axis": order[0]},
        seen=np.stack(seen) if len(seen) == len(made) else None,
        steps=(*best.steps, f"slices along axis {order[0]}"),
    )
