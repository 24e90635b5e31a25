"""Overlaps: how much of a region lies in another one, so that what is one cause is not read as several."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from camscope.audit.numbers import rounded
from camscope.audit.schema import Overlap, Summary
from camscope.audit.shortcuts.scenes import FINDING, ORGAN, Mask, Scenes

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
