"""Patches: models that see a part of a volume at a time, explained at the part's place, or over all of it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.inputs import Item
from camscope.explainers.runs import counted
from camscope.explanation import OK, Explanation
from camscope.geometry import Placement
from camscope.targets import Question
from camscope.wording import plural


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
