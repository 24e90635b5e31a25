"""What is to be seen in a set as a whole: mixes, copies, gaps, splits that share a patient, targets that are none.

Slices that are rows of their own, put together by their series: which are missing, and which lie at one place.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from camscope.batch.inspection.inspection_table import GROUPED, Coded, Codes, Inspected, crossing, groups_of, repeated
from camscope.batch.inspection.issues import ORDER, Finding, codes_of
from camscope.batch.manifest import arrow, taken
from camscope.images.scans.dicom_geometry import ALIKE, EVEN
from camscope.mask_labels import MAX_NAMED

REASONS = 20  # that a finding lists
LARGE, NOTICEABLE = 2.0, 1.01  # ratios of spacings
THICK = 3.0  # voxels this many times as long as wide
DOUBTFUL = re.compile(r"\?+|-1|unknown|unlabell?ed|nan|null|n/?a|missing|tbd|todo|-+", re.IGNORECASE)
SPLITS = re.compile(
    r"train(ing)?|val(id(ation)?)?|dev(elopment)?|test(ing)?|hold-?out|internal|external|(fold[ _-]?)?\d{1,2}", re.I
)
FAILURES = ("missing-file", "missing-codec", "no-pixels", "ambiguous", "unreadable")
OF_FLAGS = ("gap", "geometry", "left-out", "no-place", "odd", "suffix")
Labeled = tuple[int, list[str]]  # a row, and the labels of its mask
MIXES = {"modality": "modality-mix", "format": "format-mix", "codec": "codec-mix", "stored": "stored-mix"}


def findings(seen: Inspected, classes: Sequence[str], *, private: bool) -> list[Finding]:
    """All of them, the gravest first."""
    made = [
        *of_rows(seen),
        *of_manifest(seen),
        *mask_labels(seen),
        *mixes(seen),
        *spacings(seen),
        *gaps(seen),
        *copies(seen),
        *splits(seen, private=private),
        *targets(seen, classes),
    ]
    return sorted((one for one in made if one.count), key=lambda one: ORDER[one.code])


def of_rows(seen: Inspected) -> Iterator[Finding]:
    """What each row says of itself, by code, with the reasons of failures."""
    compute, column = arrow("compute"), seen.facts["findings"].combine_chunks()
    found = Coded.of(compute.list_flatten(column))
    parents = compute.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
    lossless = _differ(seen, "lossy")
    for at, code in enumerate(found.values):
        rows = np.unique(parents[found.codes == at])
        yield Finding(code, rows, _reasons(seen, code, rows))
    yield Finding("lossy-mix", lossless)


def _reasons(seen: Inspected, code: str, rows: Codes) -> dict[str, int]:
    """What the rows say themselves of what was found: why they cannot be read, where the gaps are."""
    chosen = seen.facts.select(["error", "flags"]).take(arrow().array(rows)).to_pylist()
    if code in OF_FLAGS:
        said = Counter(flag for row in chosen for flag in row["flags"] if codes_of([flag]) == [code])
    else:
        said = Counter(row["error"] for row in chosen if row["error"] and code in FAILURES)
    return dict(said.most_common(REASONS))


def _differ(seen: Inspected, name: str) -> Codes:
    """The rows where a fact is true, if it is false in others."""
    values = seen.numbers(name)
    return np.flatnonzero(values == 1) if (values == 0).any() else np.empty(0, np.int64)


def of_manifest(seen: Inspected) -> Iterator[Finding]:
    """Ids that are not unique, columns in the way of a result, masks that only some have."""
    ids = Coded.of(seen.manifest.table["id"])
    rows, groups = repeated(ids)
    yield Finding("repeated-id", rows, groups=groups_of(rows, groups))
    names = [name for name in taken(seen.manifest.table.column_names) if name not in ("row", "target")]
    if names:
        yield Finding("columns", np.arange(len(seen.manifest)), dict.fromkeys(names, len(seen.manifest)))
    masks = seen.given("mask")
    if masks is not None:
        yield Finding("no-mask", masks.missing)


def mask_labels(seen: Inspected) -> Iterator[Finding]:
    """Masks of which no metric knows what counts, until a label is chosen; with how many masks have each label."""
    several: list[Labeled] = []
    levels: list[Labeled] = []
    single: list[Labeled] = []
    for row, names in enumerate(seen.facts["mask_labels"].to_pylist()):
        if names:
            (single if len(names) == 1 else several if len(names) <= MAX_NAMED else levels).append((row, names))
    yield _labels("mask-labels", several)
    yield _labels("mask-levels", levels, named=False)
    counts = Counter(name for _, (name,) in single)
    usual = counts.most_common(1)[0][0] if counts else ""
    rows = [row for row, (name,) in single if name != usual]
    yield Finding("mask-labels-differ", np.array(rows, np.int64), dict(counts.most_common(REASONS)) if rows else {})


def _labels(code: str, found: Sequence[Labeled], *, named: bool = True) -> Finding:
    counts = Counter(name for _, names in found if named for name in names)
    return Finding(code, np.array([row for row, _ in found], np.int64), dict(counts.most_common(REASONS)))


def mixes(seen: Inspected) -> Iterator[Finding]:
    """Facts that are not the same for all images that have them."""
    for name, code in MIXES.items():
        yield _mix(seen.coded(name), code)
    yield _mix(_units(seen), "unit-mix")
    yield _mix(seen.coded("orientation"), "orientation-mix")
    colour = seen.numbers("colour")
    usual = np.nanmean(colour) >= 0.5 if np.isfinite(colour).any() else True
    yield Finding("colour-mix", np.flatnonzero(colour == (0 if usual else 1)))
    yield _monochrome1(seen.coded("photometric"))
    yield _axes(seen)
    yield _windows(seen)


def _mix(coded: Coded, code: str) -> Finding:
    return Finding(code, coded.unusual, coded.named if len(coded.values) > 1 else {})


def _units(seen: Inspected) -> Coded:
    """Of grey DICOM images, where none is a unit of its own."""
    units, modality = seen.coded("unit"), seen.coded("modality")
    if len(modality.values) != 1 or not len(units.values):
        return Coded(np.full(len(units.codes), -1), [])
    dicom = (modality.codes >= 0) & (seen.numbers("colour") == 0)
    codes = np.where(dicom & (units.codes < 0), len(units.values), units.codes)
    return Coded(codes, [*units.values, "none"] if (codes == len(units.values)).any() else units.values)


def _monochrome1(photometric: Coded) -> Finding:
    known = {name: at for at, name in enumerate(photometric.values)}
    rows = np.flatnonzero(photometric.codes == known.get("MONOCHROME1", -2))
    return Finding("monochrome1" if "MONOCHROME2" in known else "all-monochrome1", rows)


def _axes(seen: Inspected) -> Finding:
    lengths = arrow("compute").list_value_length(seen.facts["size"])
    flat, deep = (np.flatnonzero(np.asarray(lengths.fill_null(0)) == axes) for axes in (2, 3))
    details = {"flat": len(flat), "volumes": len(deep)}
    return Finding("axes-mix", min(flat, deep, key=len), details if min(len(flat), len(deep)) else {})


def _windows(seen: Inspected) -> Finding:
    """Rows whose window is not the most frequent one, or that have none where others have."""
    rows, pairs = seen.lists("window", 2)
    without = np.flatnonzero((seen.numbers("windows") == 0) & (seen.numbers("colour") == 0))
    if not len(rows):
        return Finding("window-mix", rows)
    kinds, which, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    other = rows[which.reshape(-1) != counts.argmax()]
    named = {
        f"centre {kinds[at][0]:g}, width {kinds[at][1]:g}": int(counts[at]) for at in np.argsort(-counts, kind="stable")
    }
    details = dict(list(named.items())[:REASONS]) | ({"none": len(without)} if len(without) else {})
    return Finding("window-mix", np.union1d(other, without), details if len(details) > 1 else {})


def spacings(seen: Inspected) -> Iterator[Finding]:
    """Voxels of different sizes, of none, and those much longer than wide."""
    found, some = {}, np.zeros(len(seen.manifest), np.bool_)
    for axes in (2, 3):
        rows, sizes = seen.lists("spacing", axes)
        some[rows] = True
        if not len(rows):
            continue
        ratio = sizes / np.median(sizes, axis=0)
        found[axes] = rows, np.maximum(ratio, 1 / ratio).max(axis=1), float((sizes.max(0) / sizes.min(0)).max())
        if axes == 3:
            yield Finding("anisotropic", rows[sizes.max(1) / sizes.min(1) >= THICK])
    for code, least, most in (("spacing-mix", LARGE, np.inf), ("spacing-differs", NOTICEABLE, LARGE)):
        far = [
            rows[apart > np.sqrt(least)] if least == LARGE else rows[apart > least]
            for rows, apart, spread in found.values()
            if least < spread <= most
        ]
        yield Finding(code, np.sort(np.concatenate(far)) if far else np.empty(0, np.int64))
    medical = (seen.coded("modality").codes >= 0) & np.isfinite(seen.numbers("minimum"))
    yield Finding("no-spacing", np.flatnonzero(medical & ~some) if some.any() else np.empty(0, np.int64))


def copies(seen: Inspected) -> Iterator[Finding]:
    """Rows of equal pixels; those that have one value everywhere are told by that."""
    pixels = _pixels(seen)
    rows, groups = repeated(pixels)
    yield Finding("duplicates", rows, groups=groups_of(rows, groups))
    wanted = seen.given("target")
    if wanted is not None:
        rows, groups = crossing(pixels, wanted)
        yield Finding("duplicate-targets", rows, groups=groups_of(rows, groups))


def _pixels(seen: Inspected) -> Coded:
    pixels = seen.coded("pixels")
    flat = seen.numbers("minimum") == seen.numbers("maximum")
    return Coded(np.where(flat, -1, pixels.codes), pixels.values)


def splits(seen: Inspected, *, private: bool) -> Iterator[Finding]:
    """Patients, studies and pixels that are in several splits; rows that are in none, or of no patient."""
    split, patient = seen.given("split"), seen.given("patient")
    if patient is not None:
        yield Finding("no-patient", patient.missing)
    if split is None:
        return
    yield Finding("no-split", split.missing)
    whole = {"study-in-splits": seen.coded("study"), "pixels-in-splits": _pixels(seen)}
    if patient is not None:
        whole["patient-in-splits"] = patient
    for code, groups in whole.items():
        rows, own = crossing(groups, split)
        yield Finding(code, rows, _by_split(split, rows, private=private), groups_of(rows, own))


def _by_split(split: Coded, rows: Codes, *, private: bool) -> dict[str, int]:
    """How many of the rows are in each split, by its name where that is one of the usual."""
    counts = np.bincount(split.codes[rows], minlength=len(split.values))
    shown = {at: name for at, name in enumerate(split.values) if counts[at]}
    return {
        name if not private or SPLITS.fullmatch(name) else f"split {at + 1}": int(counts[at])
        for at, name in shown.items()
    }


def targets(seen: Inspected, classes: Sequence[str]) -> Iterator[Finding]:
    """Targets that are missing, say that nothing is known, or are none of the classes."""
    wanted = seen.given("target")
    if wanted is None:
        return
    yield Finding("no-target", wanted.missing)
    allowed = {*classes, *map(str, range(len(classes)))}
    doubtful = [bool(DOUBTFUL.fullmatch(name)) and name not in allowed for name in wanted.values]
    unknown = [
        bool(classes) and name not in allowed and not odd for name, odd in zip(wanted.values, doubtful, strict=True)
    ]
    for code, which in (("doubtful-target", doubtful), ("unknown-target", unknown)):
        names = {name for name, odd in zip(wanted.values, which, strict=True) if odd}
        details = [(name, count) for name, count in wanted.named.items() if name in names]
        yield Finding(code, np.flatnonzero(np.isin(wanted.codes, np.flatnonzero(which))), dict(details[:REASONS]))


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
