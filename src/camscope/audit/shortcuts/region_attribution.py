"""How much of the maps lies in a region, and how far regions overlap.

- Masses: how much of the maps lies in a region, beside the maps of other images in the same place.
- Overlaps: how much of a region lies in another one, so that what is one cause is not read as several.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.schema import Mass, Number, Overlap, Summary
from camscope.audit.core.summary_values import number, rounded
from camscope.audit.shortcuts.region_base import equivalent_diameter
from camscope.audit.shortcuts.region_samples import FINDING, ORGAN, Mask, Scene, Scenes
from camscope.batch.manifest import arrow
from camscope.batch.query import as_dicts
from camscope.errors import UndefinedError
from camscope.geometry import Placement
from camscope.metrics.statistics import estimated

Floats = npt.NDArray[np.float64]
OTHERS = 8  # maps of other patients, that a map is shuffled with
SHARE = (0.0, 1.0)
TOP = 0.10  # of the pixels, whose share in the region is the confounder sensitivity of Sun et al. 2023


def maps_of(subject: Subject, title: str, finding: Finding, rows: Sequence[int]) -> dict[int, Floats]:
    """Row -> map (*s) of a method, as it was made; without those that hold NaN."""
    compute = arrow("compute")
    field = arrow("dataset").field
    wanted = (field("method") == title) & (field("target") == str(finding.index))
    table = subject.maps.table(columns=["row", "grid", "heat"], filter=wanted)
    table = table.filter(compute.is_in(table["row"], arrow().array(list(rows))))
    found = {}
    for row in as_dicts(table):
        if row["heat"] is not None:
            heat = np.asarray(row["heat"], np.float64).reshape(tuple(row["grid"]))
            if np.isfinite(heat).all():
                found[row["row"]] = heat
    return found


def masses(subject: Subject, seen: Scenes, tool: Any, finding: Finding, stride: float) -> list[Mass]:
    """Of every region, for the maps of a method."""
    heats = maps_of(subject, tool.title, finding, [one.row for one in seen.each])
    on_input = {row: _on_input(heat, seen.each[0].x.shape[1:]) for row, heat in heats.items()}
    random = np.random.default_rng((subject.config.seed, 5))
    order = random.permutation(sorted(on_input)).tolist()
    return [_mass(subject, seen, name, on_input, order, tool.title, finding, stride) for name in seen.names]


def _mass(
    subject: Subject,
    seen: Scenes,
    name: str,
    heats: Mapping[int, Floats],
    order: Sequence[int],
    method: str,
    finding: Finding,
    stride: float,
) -> Mass:
    there = [one for one in seen.with_region(name) if one.row in heats]
    groups = [subject.patients[one.row] for one in there]
    own = np.array([share(heats[one.row], one.regions[name]) for one in there])
    area = np.array([one.regions[name].mean() for one in there])
    null = np.array([_shuffled(subject, one, name, heats, order) for one in there])
    diameter = float(np.median([_width(one.regions[name]) for one in there])) if there else 0.0
    resolved = bool(there) and diameter >= stride
    return Mass(
        region=name,
        method=method,
        finding=finding.name,
        share=_number(own, groups, _mean(null), "maps of other patients", subject, SHARE),
        enrichment=_number(own / area, groups, _mean(null / area), "maps of other patients", subject),
        confounder_sensitivity=_number(
            np.array([sensitivity(heats[one.row], one.regions[name]) for one in there]),
            groups,
            TOP,
            "chance",
            subject,
            SHARE,
        ),
        resolved=resolved,
        diameter=rounded(diameter) or 0.0,
        stride=rounded(stride) or 0.0,
        reason="" if resolved else "below the resolution of the maps" if there else "no image has it",
        most=rounded(_mean(1 / area[~np.isnan(own)])),
    )


def _width(mask: Mask) -> float:
    """How wide a region is: of a blob its diameter, of a frame its thickness."""
    edt = import_module("scipy.ndimage").distance_transform_edt
    return min(equivalent_diameter(mask), 2.0 * float(edt(np.pad(mask, 1)).max()))


def share(heat: Floats, mask: Mask) -> float:
    """Of what is positive in a map (*S), how much lies in the region; NaN where nothing is positive."""
    positive = np.maximum(heat, 0)
    whole = positive.sum()
    return float(positive[mask].sum() / whole) if whole > 0 else float("nan")


def sensitivity(heat: Floats, mask: Mask) -> float:
    """Share of the region's pixels among the hottest tenth of the map; ties count in expectation. NaN of a constant map."""
    count = max(1, round(heat.size * TOP))
    least = np.partition(heat.ravel(), heat.size - count)[heat.size - count]
    if heat.max() == heat.min():
        return float("nan")
    above, at = heat > least, heat == least
    room = (count - above.sum()) / at.sum()
    return float((above[mask].sum() + room * at[mask].sum()) / mask.sum())


def _shuffled(subject: Subject, one: Scene, name: str, heats: Mapping[int, Floats], order: Sequence[int]) -> float:
    """The mean share of maps of other patients in this image's region."""
    start = order.index(one.row)
    others = [
        row for row in [*order[start + 1 :], *order[:start]] if subject.patients[row] != subject.patients[one.row]
    ]
    found = [share(heats[row], one.regions[name]) for row in others[:OTHERS]]
    return _mean(np.array(found))


def _on_input(heat: Floats, size: Sequence[int]) -> Floats:
    values: Floats = np.asarray(Placement.identity(tuple(size)).project(heat)[0], np.float64)
    return values


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)] if values.size else values
    return float(known.mean()) if known.size else float("nan")


def _number(
    values: Floats,
    groups: Sequence[Any],
    baseline: float,
    name: str,
    subject: Subject,
    bounds: tuple[float, float] | None = None,
) -> Number:
    try:
        if not values.size:
            raise UndefinedError("no image has it")
        if np.isnan(values).all():
            raise UndefinedError("no map shows anything: none has a positive value, or each the same everywhere")
        found = estimated(values, groups, bounds=bounds, **subject.how)
        return number(found, baseline, name)
    except UndefinedError as error:
        return number(None, baseline, name, str(error))


MOST = 0.5  # of a region's pixels: who changes the other one changes it, too


def overlaps(seen: Scenes, finding: str) -> Iterator[Overlap]:
    """Region by region, what of it lies in each other one, without those that it never touches."""
    names = [name for name in seen.names if name not in (FINDING, ORGAN)]
    for region in names:
        there = seen.with_region(region)
        for other in names:
            share = float(np.mean([_share(one.regions[region], one.regions.get(other)) for one in there]))
            if other != region and share > 0:
                yield Overlap(
                    finding=finding, region=region, within=other, share=rounded(share) or 0.0, images=len(there)
                )


def _share(mask: Mask, other: Mask | None) -> float:
    """Of a region's pixels; an image without the other one has none of it."""
    return 0.0 if other is None else float(np.count_nonzero(mask & other) / np.count_nonzero(mask))


def overlapping(summary: Summary) -> dict[str, list[list[str]]]:
    """Finding -> the groups of overlapping regions among those that its answer is said to rely on."""
    relied: dict[str, list[str]] = {}
    for one in summary.verdicts:
        if (one.question, one.word) == ("shortcut", "supported"):
            relied.setdefault(one.finding, []).append(one.subject)
    known = summary.shortcut.overlaps
    return {name: together(regions, [one for one in known if one.finding == name]) for name, regions in relied.items()}


def together(regions: Sequence[str], known: Iterable[Overlap]) -> list[list[str]]:
    """Those of some regions that hang together, most of one lying in another, in their order; none that stands alone."""
    groups = [{one} for one in regions]
    for one in known:
        if one.share > MOST and {one.region, one.within} <= set(regions):
            joined = [group for group in groups if group & {one.region, one.within}]
            groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    made = [[one for one in regions if one in group] for group in groups if len(group) > 1]
    return sorted(made, key=lambda group: regions.index(group[0]))
