"""Interventions: regions removed, inserted or kept alone, and the table of the answers.

- trying: the model asked about images in which a region is removed, inserted or all that is left.
- trials: what the model answered about each changed image, as `interventions.parquet`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.schema import Blanked, Intervention, Number
from camscope.audit.core.summary_values import number
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.model_outputs import logits_of, odds_of
from camscope.audit.shortcuts.effect_sizes import Effect, insertion, removal, untested
from camscope.audit.shortcuts.image_edits import exchanged, inserted, kept, removed
from camscope.audit.shortcuts.region_samples import FINDING, ORGAN, Scene, Scenes
from camscope.batch.manifest import arrow
from camscope.data_readers import read_parquet
from camscope.errors import UndefinedError
from camscope.safe_files import writing

if TYPE_CHECKING:
    import pyarrow as pa


FILE = "interventions.parquet"


@dataclass(frozen=True)
class Trial:
    """An intervention on one image: its log odds `without` the region, and `with_it`.

    `donor`, `other`: of an insertion the rows whose region was pasted, and whose pixels without it.
    """

    row: int
    finding: str
    region: str
    kind: str
    fill: str | None
    without: float
    with_it: float
    donor: int | None = None
    other: int | None = None


def write(folder: Path, trials: Iterable[Trial], ids: Mapping[int, str]) -> None:
    """Every trial, with the name of its image."""
    rows = [{"id": ids[one.row], **asdict(one)} for one in trials]
    with writing(folder / FILE) as file:
        arrow("parquet").write_table(arrow().Table.from_pylist(rows, schema=_schema()), file)


def read(folder: Path) -> "pa.Table":
    """row, id, finding, region, kind, fill, without, with_it, donor, other; no row where none was written."""
    place = folder / FILE
    return read_parquet(place) if place.is_file() else _schema().empty_table()


def _schema() -> "pa.Schema":
    pa = arrow()
    words = dict.fromkeys(("id", "finding", "region", "kind", "fill"), pa.string())
    numbers = dict.fromkeys(("without", "with_it"), pa.float64())
    return pa.schema({"row": pa.int64(), **words, **numbers, "donor": pa.int64(), "other": pa.int64()})


NO_EFFECT = 0.0, "no effect"  # what knows nothing
Array = npt.NDArray[np.float64]
Change = Callable[[Tensor, Tensor], Tensor]  # x (N,C,*S), masks (N,*S) -> changed x


@dataclass(eq=False)
class Trying:
    """The interventions of a finding. `odds`: of each image as it is; `spread`: of all of them, the unit of effects."""

    subject: Subject
    seen: Scenes
    finding: Finding
    odds: Mapping[int, float]
    spread: float
    probabilities: bool = False
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = self.subject.truths(self.finding)
        self.truth = {one.row: known[one.row] for one in self.seen.each}

    def interventions(self) -> Iterator[Intervention]:
        """Every region removed from images with the finding, all that is left of them, and inserted into images without."""
        for name in self.seen.names:
            yield from self.alone(name)
            yield self._inserted(name)

    def alone(self, name: str) -> Iterator[Intervention]:
        """What of these asks for no second image: a region removed, and all that is left of it."""
        there = [one for one in self.seen.with_region(name) if self.truth[one.row] is True]
        for fill in self.subject.config.fills:
            yield self._changed(name, there, fill, "remove")
            yield self._changed(name, there, fill, "keep only")

    def blanked(self) -> Iterator[Blanked]:
        """How well the finding is told when a region is filled, or all but it."""
        for name in self.seen.names:
            there = [one for one in self.seen.with_region(name) if self.truth[one.row] is not None]
            for fill in self.subject.config.fills:
                if name == ORGAN:
                    yield self._without(name, there, fill, "blank")
                if name != FINDING:
                    yield self._without(name, there, fill, "keep only")

    def _changed(
        self, name: str, there: Sequence[Scene], fill: str, kind: Literal["remove", "keep only"]
    ) -> Intervention:
        """How much less the model answers without the region, or without all the rest."""
        change = removed if kind == "remove" else kept
        clean = np.array([self.odds[one.row] for one in there])
        changed = self._asked(there, lambda x, masks: change(x, masks, fill), name)
        self._note(name, kind, fill, there, changed, clean)
        effect = self._effect(
            lambda: removal(name, fill, clean, changed, self.spread, self._groups(there), **self.subject.how)
        )
        return Intervention(region=name, finding=self.finding.name, kind=kind, fill=fill, effect=effect)

    def _inserted(self, name: str) -> Intervention:
        """Of a donor that has it and the finding, less that of an image without the finding: pasting is in both.

        Where that one has no such region, as a marker, the same pixels of it.
        """
        try:
            pairs = list(self._pairs(name))
        except UndefinedError as error:
            lacking = untested(f"insert {name}", None, str(error), self.spread)
            effect = self._effect(lambda: lacking)
            return Intervention(region=name, finding=self.finding.name, kind="insert", fill=None, effect=effect)
        receivers, donors, others = ([three[k] for three in pairs] for k in range(3))
        masks = [donor.regions[name] for _, donor, _ in pairs]
        own = [other.regions.get(name, donor.regions[name]) for _, donor, other in pairs]
        with_it = self._pasted(receivers, masks, donors)
        without = self._pasted(receivers, own, others)
        self._note(name, "insert", None, receivers, without, with_it, donors, others)
        effect = self._effect(
            lambda: insertion(
                name,
                without,
                with_it,
                self.spread,
                self._groups(receivers),
                donors=self._groups(donors),
                others=self._groups(others),
                **self.subject.how,
            )
        )
        return Intervention(region=name, finding=self.finding.name, kind="insert", fill=None, effect=effect)

    def _pairs(self, name: str) -> Iterator[tuple[Scene, Scene, Scene]]:
        """A receiver without the finding, a donor with the region, an image without the finding; of three patients.

        Where some images lack the region, neither the receiver nor the third one has it. UndefinedError where there are none.
        """
        known = [one for one in self.seen.each if self.truth[one.row] is not None]
        carried = np.array([name in one.regions for one in known], np.bool_)
        truth = np.array([bool(self.truth[one.row]) for one in known], np.bool_)
        found = exchanged(truth, carried, self._groups(known), self.subject.config.seed)
        for three in zip(*(one.tolist() for one in found), strict=True):
            receiver, donor, other = (known[one] for one in three)
            yield receiver, donor, other

    def _without(self, name: str, there: Sequence[Scene], fill: str, kind: Literal["blank", "keep only"]) -> Blanked:
        change = removed if kind == "blank" else kept
        answers = self._asked(there, lambda x, masks: change(x, masks, fill), name)
        truth, groups = np.array([bool(self.truth[one.row]) for one in there]), self._groups(there)
        try:
            if not there:
                raise UndefinedError("no image has it")
            found = number(auroc(truth, answers, groups, **self.subject.how), 0.5, "chance")
        except UndefinedError as error:
            found = number(None, 0.5, "chance", str(error))
        return Blanked(region=name, finding=self.finding.name, kind=kind, fill=fill, auroc=found)

    def _note(
        self,
        name: str,
        kind: str,
        fill: str | None,
        rows: Sequence[Scene],
        without: Array,
        with_it: Array,
        *pasted: Sequence[Scene],
    ) -> None:
        numbers = zip(*([one.row for one in some] for some in (rows, *pasted)), strict=True)
        self.trials += [
            Trial(row, self.finding.name, name, kind, fill, less, more, *given)
            for (row, *given), less, more in zip(numbers, without.tolist(), with_it.tolist(), strict=True)
        ]

    def _effect(self, made: Callable[[], Effect]) -> Number:
        if self.spread <= 0:
            return number(None, *NO_EFFECT, "the model gives every image the same answer")
        found = made()
        return number(found.estimate, *NO_EFFECT, found.undefined or found.few)

    def _groups(self, rows: Sequence[Scene]) -> list[Any]:
        return [self.subject.patients[one.row] for one in rows]

    def _pasted(self, receivers: Sequence[Scene], masks: Sequence[Any], donors: Sequence[Scene]) -> Array:
        found, size = [], self.subject.config.at_once
        for start in range(0, len(receivers), size):
            part = slice(start, start + size)
            x = torch.stack([one.x for one in receivers[part]])
            other = torch.stack([one.x for one in donors[part]])
            pasted = inserted(x, torch.from_numpy(np.stack(masks[part])), other)
            found.append(self._odds(pasted))
        return np.concatenate(found) if found else np.empty(0)

    def _asked(self, there: Sequence[Scene], change: Change, name: str) -> Array:
        """(N,) log odds of changed images."""
        found, size = [], self.subject.config.at_once
        for start in range(0, len(there), size):
            part = list(there[start : start + size])
            x = torch.stack([one.x for one in part])
            found.append(self._odds(change(x, torch.from_numpy(np.stack([one.regions[name] for one in part])))))
        return np.concatenate(found) if found else np.empty(0)

    def _odds(self, x: Tensor) -> Array:
        logits, _ = logits_of(self.subject, x)
        return odds_of(self.subject, logits, [self.finding], probabilities=self.probabilities).numpy()[:, 0]
