"""self_test: whether metrics give here what one knows by hand, of a map that is even and of one that is all inside."""

from collections.abc import Iterator
from functools import cache

import numpy as np

from camscope.audit.answers.performance import auroc
from camscope.metrics import METRICS

SIDE, INSIDE = 8, 4
KNOWN = {
    "energy-inside": (0.25, 1.0),
    "enrichment": (1.0, 4.0),
    "pointing-game": (0.25, 1.0),
    "average-precision": (0.25, 1.0),
}  # of an even map, and of one that is the mask: a quarter of the image


@cache
def self_test() -> str:
    """That it passed, or what is wrong."""
    return "; ".join(_wrong()) or "passed"


def _wrong() -> Iterator[str]:
    mask = np.zeros((SIDE, SIDE), np.bool_)
    mask[:INSIDE, :INSIDE] = True
    for name, known in KNOWN.items():
        for heat, expected in zip((np.ones((SIDE, SIDE)), mask.astype(np.float64)), known, strict=True):
            if abs((found := float(METRICS[name](heat, mask))) - expected) > 1e-9:
                yield f"{name} is {found} and not {expected}"
    odds, truth = np.arange(20.0), np.arange(20) >= 10
    for answers, area in ((odds, 1.0), (odds[[*range(9), 10, 9, *range(11, 20)]], 0.99)):
        if abs((mean := auroc(truth, answers, replicates=200).mean) - area) > 1e-9:
            yield f"AUROC is {mean} and not {area}"
