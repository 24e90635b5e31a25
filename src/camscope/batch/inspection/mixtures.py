"""What a set is made of: of each fact its values, and how many images have them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from camscope.batch.inspection.columns import Inspected
from camscope.batch.manifest import arrow
from camscope.wording import plural

PLAIN = ("format", "codec", "modality", "photometric", "stored", "unit")
MOST = 50  # values that are listed


def mixtures(seen: Inspected) -> dict[str, dict[str, int]]:
    """Fact -> value -> images, the most frequent first; facts that no image has are left out."""
    found: dict[str, Mapping[str, int]] = {name: seen.coded(name).named for name in PLAIN}
    found["colour"] = _words(seen, "colour", ("grey", "colour"))
    found["size"] = _joined(seen, "size", "{:.0f}", " x ", "")
    found["spacing"] = _joined(seen, "spacing", "{:.3g}", " x ", " mm")
    found["orientation"] = seen.coded("orientation").named
    found["window"] = _joined(seen, "window", "{:.6g}", ", ", "")
    found["burned in"] = seen.coded("burned_in").named
    found["lossy"] = _words(seen, "lossy", ("no", "yes"))
    found["mask"] = seen.coded("mask").named
    return {name: _most(values) for name, values in found.items() if values}


def _words(seen: Inspected, name: str, words: tuple[str, str]) -> dict[str, int]:
    values = seen.numbers(name)
    counts = {word: int(np.count_nonzero(values == at)) for at, word in enumerate(words)}
    return dict(sorted(((word, count) for word, count in counts.items() if count), key=lambda one: -one[1]))


def _joined(seen: Inspected, name: str, number: str, between: str, end: str) -> dict[str, int]:
    """Lists of numbers as texts: `512 x 512`, `0.66 x 0.66 x 5 mm`."""
    longest = arrow("compute").max(arrow("compute").list_value_length(seen.facts[name])).as_py() or 0
    found: dict[str, int] = {}
    for length in range(1, longest + 1):
        _, values = seen.lists(name, length)
        kinds, counts = np.unique(values, axis=0, return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            text = between.join(number.format(one) for one in kind) + end
            found[text] = found.get(text, 0) + count
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def _most(values: Mapping[str, int]) -> dict[str, int]:
    named = list(values.items())
    rest = {plural(len(named) - MOST, "other"): sum(count for _, count in named[MOST:])} if len(named) > MOST else {}
    return dict(named[:MOST]) | rest


def ranges(seen: Inspected) -> dict[str, list[Any]]:
    """The least and the largest value of all images, and the least and largest of their sides."""
    low, high = seen.numbers("minimum"), seen.numbers("maximum")
    sides = arrow("compute").min_max(arrow("compute").list_flatten(seen.facts["size"])).as_py()
    found = {"values": [float(np.nanmin(low)), float(np.nanmax(high))] if np.isfinite(low).any() else None}
    found["sides"] = None if sides["min"] is None else [sides["min"], sides["max"]]
    return {name: ends for name, ends in found.items() if ends is not None}
