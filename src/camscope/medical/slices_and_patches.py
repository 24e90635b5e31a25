"""Volumes: explained slice by slice or patch by patch.

- Slices: a model of pictures asked about every slice of a volume, and its maps as one map of the volume.
- Patches: models that see a part of a volume at a time, explained at the part's place, or over all of it.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import expect_count
from camscope.explainers.core.inputs import Item
from camscope.explainers.core.pixel_base import counted
from camscope.explanation import OK, Explanation
from camscope.geometry import Placement
from camscope.images.scans.scan import Scan, grey, ranged
from camscope.images.scans.scan_preprocess import ScanPreprocess, oriented
from camscope.images.scans.scan_reader import read_scan
from camscope.plurals import plural
from camscope.targets import Question


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


def explain_patch(
    tool: Explainer, source: Any, start: Sequence[int], size: Sequence[int], target: Question = None
) -> Explanation:
    """A part of an image or a volume, of `size` from `start` on in the preprocessed input, explained where it lies.

    The preprocessing is of the whole; what the patch does not show is not covered.
    """
    return _patch(tool, tool.read(source), tuple(start), tuple(size), target)


def explain_patches(
    tool: Explainer,
    source: Any,
    size: Sequence[int],
    target: Question,
    *,
    overlap: float = 0.5,
    progress: bool = False,
) -> Explanation:
    """Every patch of `size` of the preprocessed input, explained, and their maps as one at the input's resolution.

    Neighbours share `overlap` of their length; the last along an axis ends where the input ends. Each pixel has the mean of
    the maps that show it. `target`: of all patches, and not None. The score is that of the patch that has the highest.
    """
    if target is None:
        raise InputError("each patch may have another top class, and their maps have no mean: pass a target")
    if not 0 <= overlap < 1:
        raise InputError(f"overlap={overlap}: expected a number from 0 to below 1")
    item, size = tool.read(source), tuple(size)
    whole = tuple(item.x.shape[1:])
    total, count, best, fine = np.zeros(whole), np.zeros(whole), None, 0
    starts = list(_starts(whole, size, overlap))
    with counted(f"{tool.title}, {plural(len(starts), 'patch')}", len(starts), progress) as advance:
        for start in starts:
            one = _patch(tool, item, start, size, target)
            part = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
            total[part] += Placement.identity(size).project(one.heat)[0]
            count[part] += 1
            fine += one.status == OK
            best = one if best is None or one.score > best.score else best
            advance(1)
    if best is None:
        raise InputError("there is no patch")
    words, notes = " x ".join(map(str, size)), best.notes
    if fine < len(starts):
        notes = (*notes, f"the maps of {len(starts) - fine} of {plural(len(starts), 'patch')} are flagged")
    settings = {**best.parameters, "patch": f"each of {words}, overlap {overlap:g}"}
    return replace(
        best,
        heat=(total / count).astype(best.heat.dtype),
        error=None,
        input_size=whole,
        placement=item.placement,
        status=OK if fine else best.status,
        layout=None,
        measures={},
        parameters=settings,
        seen=item.seen,
        notes=(
            *notes,
            f"the mean of {plural(len(starts), 'patch')} of {words}; the score is that of the highest",
        ),
    )


def _patch(
    tool: Explainer, whole: Item, start: tuple[int, ...], size: tuple[int, ...], target: Question
) -> Explanation:
    shape = tuple(whole.x.shape[1:])
    if len(start) != len(shape) or len(size) != len(shape):
        raise InputError(
            f"start {start} and size {size}; the input has {plural(len(shape), 'axis')}: expected a number for each"
        )
    if any(s < 0 or n < 1 or s + n > side for s, n, side in zip(start, size, shape, strict=True)):
        raise InputError(f"a patch of {size} from {start} on reaches beyond the input {shape}")
    part = (slice(None), *(slice(s, s + n) for s, n in zip(start, size, strict=True)))
    place = None if whole.placement is None else whole.placement.cropped(start, size)
    seen = whole.seen[part[1:]] if whole.seen is not None and whole.seen.shape[: len(shape)] == shape else None
    found = tool.explain(replace(whole, x=whole.x[part], placement=place, seen=seen), target)
    return replace(found, parameters={**found.parameters, "patch": f"{size} from {start} on"})


def _starts(whole: Sequence[int], size: Sequence[int], overlap: float) -> Iterator[tuple[int, ...]]:
    """Of all patches."""
    if len(whole) != len(size) or any(n < 1 or n > side for n, side in zip(size, whole, strict=False)):
        raise InputError(f"patches of {tuple(size)} do not fit the input {tuple(whole)}")
    steps = [max(1, round(n * (1 - overlap))) for n in size]
    each = [sorted({*range(0, side - n, step), side - n}) for side, n, step in zip(whole, size, steps, strict=True)]
    return itertools.product(*each)
