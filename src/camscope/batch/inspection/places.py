"""Slices that are rows of their own, put together by their series: which are missing, and which lie at one place."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.codes import Finding
from camscope.batch.inspection.columns import GROUPED, Codes, Inspected, repeated
from camscope.images.dicom_place import ALIKE, EVEN

Floats = NDArray[np.float64]
SAME = 1e-4  # mm
PLANE = 11  # position, across, down, spacing


def gaps(seen: Inspected) -> Iterator[Finding]:
    """Beside which slices others are missing, and which lie at the same place; series as they stand in single rows."""
    rows, planes = seen.lists("plane", PLANE)
    where = np.full(len(seen.manifest), -1)
    where[rows] = np.arange(len(rows))
    members, series = repeated(seen.coded("series"))
    pixels = seen.coded("pixels").codes
    known = where[members] >= 0
    members, series = members[known], series[known]
    beside: list[Codes] = []
    same: list[Codes] = []
    groups: list[tuple[int, ...]] = []
    broken = 0
    for part in np.split(members, np.flatnonzero(np.diff(series)) + 1) if len(members) else []:
        for own in _parallel(part, planes[where[part]]):
            found, groups_at_one = _of_stack(own, planes[where[own]])
            broken += bool(len(found))
            beside.append(found)
            groups_at_one = [one for one in groups_at_one if len({*pixels[list(one)].tolist()}) > 1]  # else copies
            same += [np.array(one) for one in groups_at_one]
            groups += groups_at_one
    yield Finding("gap", _joined(beside), {"of series whose slices are rows": broken} if broken else {})
    yield Finding("same-place", _joined(same), groups=tuple(groups[:GROUPED]))


def _joined(parts: list[Codes]) -> Codes:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _parallel(rows: Codes, planes: Floats) -> Iterator[Codes]:
    """Slices whose rows and columns point the same way, group by group: a localiser is in one series with three views."""
    rest = np.arange(len(rows))
    while len(rest):
        alike = np.abs(planes[rest, 3:9] - planes[rest[0], 3:9]).max(axis=1) < ALIKE
        yield rows[rest[alike]]
        rest = rest[~alike]


def _of_stack(rows: Codes, planes: Floats) -> tuple[Codes, list[tuple[int, ...]]]:
    """The rows beside a distance that is not the usual one; the groups of rows that lie at one place."""
    normal = np.cross(planes[0, 3:6], planes[0, 6:9])
    along = planes[:, :3] @ normal
    order = np.argsort(along, kind="stable")
    steps = np.diff(along[order])
    apart = steps > SAME
    places = np.concatenate([[0], np.cumsum(apart)])
    twice = np.bincount(places)[places] > 1
    at_one = [tuple(rows[order[places == at]].tolist()) for at in np.unique(places[twice])]
    if np.count_nonzero(apart) < 2:
        return np.empty(0, np.int64), at_one
    usual = float(np.median(steps[apart]))
    odd = np.flatnonzero(apart & (abs(steps - usual) > max(EVEN * usual, 0.01)))
    return rows[order[np.union1d(odd, odd + 1)]], at_one
