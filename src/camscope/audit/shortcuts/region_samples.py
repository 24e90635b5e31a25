"""Scenes: images as the model takes them, each with its regions on the model's input."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from camscope.audit.core.context import Subject
from camscope.audit.shortcuts.region_base import on_input
from camscope.audit.shortcuts.region_detectors import PRESETS, REGIONS
from camscope.batch.image_loading import Loaded
from camscope.errors import CamscopeError, CategoryError, InputError, UndefinedError
from camscope.evaluation.ground_truth import Evidence
from camscope.evaluation.map_metrics import picture
from camscope.geometry import Placement

Mask = npt.NDArray[np.bool_]
BUDGET = 2_000_000_000  # bytes of inputs and masks at once
FINDING, ORGAN, OUTSIDE = "the finding", "the organ", "outside the organ"


@dataclass(frozen=True, eq=False)
class Scene:
    """An image: `x` (C,*S), and of each region that it has the pixels of the model's input (*S); `evidence`: of each finding."""

    row: int
    x: Tensor
    placement: Placement | None
    regions: dict[str, Mask]
    evidence: dict[str, Mask] = field(default_factory=dict)

    def of(self, finding: str) -> "Scene":
        """With the regions as they are to a finding: what of them is the finding itself is no shortcut.

        The organ has the whole finding in it: a mask of lungs leaves out what makes them opaque.
        """
        found = self.evidence.get(finding)
        if found is None:
            return self
        made = {FINDING: found}
        for name, mask in self.regions.items():
            kept = mask | found if name == ORGAN else mask & ~found
            if kept.any():
                made[name] = kept
        return replace(self, regions=made)


@dataclass(eq=False)
class Scenes:
    """Images of one input size. `missing`: why images have no such region, and how many."""

    each: list[Scene]
    missing: dict[str, Counter[str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def with_region(self, name: str) -> list[Scene]:
        """Those that have it."""
        return [one for one in self.each if name in one.regions]

    def of(self, finding: str) -> "Scenes":
        """As they are to a finding."""
        return replace(self, each=[one.of(finding) for one in self.each])

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
    if twice := next((name for name in config.columns if name in (*presets, FINDING, ORGAN, OUTSIDE)), None):
        raise InputError(
            f"regions.columns names {twice!r}, which is a region of its own: call the column's another name"
        )
    return [*config.columns, *presets]


def masked(subject: Subject) -> dict[str, Evidence]:
    """The regions whose masks somebody made, but the findings' own."""
    known = {name: subject.evidence_in(column) for name, column in subject.config.regions.columns.items()}
    if subject.config.regions.organ is not None:
        known[ORGAN] = subject.evidence_in(subject.config.regions.organ)
    return known


def scenes(subject: Subject, rows: Sequence[int]) -> Scenes:
    """Of some rows, those whose input has the size that most have; no more than `BUDGET` holds."""
    made, known, held = Scenes([]), masked(subject), 0
    drawn = np.random.default_rng((subject.config.seed, 9)).permutation(list(rows)).tolist()
    for done, one in enumerate(subject.loaded(drawn), start=1):
        subject.told(done, len(rows))
        if one.item is None:
            made.left_out[one.error or "it cannot be read"] += 1
            continue
        evidence = dict(_evidence(subject, one, made))
        regions = dict(_regions(subject, one, known, made))
        held += one.item.x.nbytes + sum(mask.nbytes for mask in (*evidence.values(), *regions.values()))
        if made.each and held > BUDGET:
            made.left_out["they are more than fit into memory at once"] = len(drawn) - done + 1
            break
        made.each.append(Scene(one.row["row"], one.item.x, one.item.placement, regions, evidence))
    made.each.sort(key=lambda scene: scene.row)
    _keep_one_size(made)
    return made


def _keep_one_size(made: Scenes) -> None:
    sizes = Counter(tuple(one.x.shape) for one in made.each)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        made.left_out["the model's input is of another size"] += len(made.each) - sizes[usual]
        made.each = [one for one in made.each if tuple(one.x.shape) == usual]


def _evidence(subject: Subject, one: Loaded, made: Scenes) -> Iterator[tuple[str, Mask]]:
    """Of each finding that the image has, where it is."""
    for name, evidence in subject.evidence.items():
        place = _placement(one)
        row = _row(subject, one)
        found = _tried(subject, FINDING, made, lambda: evidence.mask(row, _size(place)), place)  # noqa: B023 - called at once
        if found is not None:
            yield name, found


def _regions(subject: Subject, one: Loaded, known: dict[str, Evidence], made: Scenes) -> Iterator[tuple[str, Mask]]:
    """Name and pixels of each region that an image has; of the others the reason is noted."""
    row, place = _row(subject, one), _placement(one)
    seen: dict[int, Any] = {}

    def pixels() -> Any:
        if not seen:
            seen[0] = _array(picture(subject.source(one.row["row"])))
        return seen[0]

    for name in [*known, *(name for name in wanted(subject) if name not in known)]:
        find = (
            (lambda n=name: known[n].mask(row, _size(place)))
            if name in known
            else (lambda n=name: REGIONS[n](pixels()))
        )
        found = _tried(subject, name, made, find, place)
        if found is not None:
            yield name, found
            if name == ORGAN and not found.all():
                yield OUTSIDE, ~found


def _tried(subject: Subject, name: str, made: Scenes, find: Callable[[], Mask], place: Placement | None) -> Mask | None:
    """On the model's input; None, with the reason noted, where there is none."""
    try:
        carried = on_input(find(), place, touching=True)  # of what is thin nothing is left to be seen
        if carried.any():
            return carried
        why = "none of it was shown to the model"
    except UndefinedError as error:
        why = str(error)
    except CategoryError:
        raise  # of the choice of a category, not of this image
    except CamscopeError as error:
        why = "it cannot be read, or is of another size than its image" if subject.private else str(error)
    made.missing.setdefault(name, Counter())[why] += 1
    return None


def _row(subject: Subject, one: Loaded) -> dict[str, Any]:
    """As the manifest has it."""
    place = subject.place[one.row["row"]]
    return subject.manifest.rows(place, place + 1)[0]


def _placement(one: Loaded) -> Placement | None:
    return None if one.item is None else one.item.placement


def _size(place: Placement | None) -> tuple[int, ...]:
    if place is None:
        raise UndefinedError("where the model's input lies on the image is unknown")
    return place.image_size


def _array(pixels: Tensor) -> Any:
    """(C,*S) -> (*S), or (H,W,3)."""
    values = pixels.numpy()
    return values[0] if len(values) == 1 else np.moveaxis(values, 0, -1)
