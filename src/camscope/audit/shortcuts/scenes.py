"""Scenes: images as the model takes them, each with its regions on the model's input."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from camscope.audit.shortcuts.regions import PRESETS, REGIONS, on_input
from camscope.audit.subject import Subject
from camscope.batch.reading import Loaded
from camscope.errors import CamscopeError, InputError, UndefinedError
from camscope.geometry import Placement
from camscope.measure.evidence import Evidence
from camscope.measure.maps import picture

Mask = npt.NDArray[np.bool_]
FINDING, ORGAN, OUTSIDE = "the finding", "the organ", "outside the organ"


@dataclass(frozen=True, eq=False)
class Scene:
    """An image: `x` (C,*S), and of each region that it has the pixels of the model's input (*S)."""

    row: int
    x: Tensor
    placement: Placement | None
    regions: dict[str, Mask]


@dataclass(eq=False)
class Scenes:
    """Images of one input size. `missing`: why images have no such region, and how many."""

    each: list[Scene]
    missing: dict[str, Counter[str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def with_region(self, name: str) -> list[Scene]:
        """Those that have it."""
        return [one for one in self.each if name in one.regions]

    @property
    def names(self) -> list[str]:
        """Of all regions that any image has, in order."""
        return list(dict.fromkeys(name for one in self.each for name in one.regions))


def wanted(subject: Subject) -> list[str]:
    """The names of the regions that are looked for."""
    config = subject.config.regions
    presets = config.presets or (PRESETS[config.modality] if config.modality else ())
    if unknown := [name for name in presets if name not in REGIONS]:
        raise InputError(f"no region {unknown[0]!r}; there are {', '.join(REGIONS)}")
    return [*config.columns, *presets]


def masked(subject: Subject) -> dict[str, Evidence]:
    """The regions whose masks somebody made."""
    known = {} if subject.evidence is None else {FINDING: subject.evidence}
    known |= {name: subject.evidence_in(column) for name, column in subject.config.regions.columns.items()}
    if subject.config.regions.organ is not None:
        known[ORGAN] = subject.evidence_in(subject.config.regions.organ)
    return known


def scenes(subject: Subject, rows: Sequence[int]) -> Scenes:
    """Of some rows, those whose input has the size that most have."""
    made, done = Scenes([]), 0
    known = masked(subject)
    for one in subject.loaded(rows):
        done += 1
        subject.told(done, len(rows))
        if one.item is None:
            made.left_out[one.error or "it cannot be read"] += 1
            continue
        regions = dict(_regions(subject, one, known, made))
        made.each.append(Scene(one.row["row"], one.item.x, one.item.placement, regions))
    _keep_one_size(made)
    return made


def _keep_one_size(made: Scenes) -> None:
    sizes = Counter(tuple(one.x.shape) for one in made.each)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        made.left_out["the model's input is of another size"] += len(made.each) - sizes[usual]
        made.each = [one for one in made.each if tuple(one.x.shape) == usual]


def _regions(subject: Subject, one: Loaded, known: dict[str, Evidence], made: Scenes) -> Iterator[tuple[str, Mask]]:
    """Name and pixels of each region that an image has; of the others the reason is noted."""
    row = one.row["row"]
    whole = subject.manifest.rows(subject.place[row], subject.place[row] + 1)[0]
    pixels: Any = None
    found: Mask | None = None
    for name in [*known, *(name for name in wanted(subject) if name not in known)]:
        try:
            if one.item is None or one.item.placement is None:
                raise UndefinedError("where the model's input lies on the image is unknown")
            size = one.item.placement.image_size
            if name in known:
                mask = known[name].mask(whole, size)
            else:
                pixels = picture(subject.source(row)) if pixels is None else pixels
                mask = REGIONS[name](_array(pixels))
            carried = on_input(mask, one.item.placement)
            if name == FINDING:
                found = carried
            elif name != ORGAN:  # what of a region is the finding itself is no shortcut
                carried = carried if found is None else carried & ~found
            if not carried.any():
                raise UndefinedError("none of it was shown to the model")
            yield name, carried
            if name == ORGAN:
                yield OUTSIDE, ~carried
        except UndefinedError as error:
            made.missing.setdefault(name, Counter())[str(error)] += 1
        except CamscopeError as error:
            why = "it cannot be read, or is of another size than its image" if subject.private else str(error)
            made.missing.setdefault(name, Counter())[why] += 1


def _array(pixels: Tensor) -> Any:
    """(C,*S) -> (*S), or (H,W,3)."""
    values = pixels.numpy()
    return values[0] if len(values) == 1 else np.moveaxis(values, 0, -1)
