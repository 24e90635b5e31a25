"""Metrics that ask the model again.

- Trials: the maps of a run put to its model again: of many images, and all that is changed in them, in the same
  passes.
- Cases: an image of a run asked one question, with the maps that answer it; and many of them as the tensors of a
  batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.batch.image_loading import in_order
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation.map_metrics import FLOORS, Row, floors, of_control, side_of, valued
from camscope.evaluation.run_replay import Again, key_of
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import Mode, home
from camscope.geometry import Placement
from camscope.hooks.base import unwrap
from camscope.metrics import Metric
from camscope.metrics.explainer_probe import Probe
from camscope.metrics.model_scorer import Scores, scoring
from camscope.metrics.perturbation_test import Trial
from camscope.targets import Question

Slot = tuple[str, int]  # a method with its settings, and which of those that are alike
Maker = Callable[[Tensor], Tensor]  # other images of a batch (N,C,*S) -> their maps (N,*S)


@dataclass
class Case:
    """An image asked one question, and the rows of its maps. `x` (C,*S): as it enters the model; None: `reason`, why not.

    `last`: whether its image has no further case.
    """

    x: Tensor | None
    question: Question = None
    mode: Mode = "eval"
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[Slot, Row] = field(default_factory=dict)
    reason: str = ""
    last: bool = False

    @property
    def kind(self) -> object:
        """Cases of one kind share their passes."""
        return None if self.x is None else (tuple(self.x.shape), self.mode)

    @property
    def first(self) -> Row:
        """A row of it."""
        return next(iter(self.rows.values()))


@dataclass(frozen=True)
class Judged:
    """A map of each case: `heat` (N,*S) in score units on the model's input, and its row; None and NaN where there is none.

    `ties`: a seed for each, its image's number; `maps_of`: the maps that the same method makes of other images, if that can
    be had.
    """

    heat: Tensor
    rows: Sequence[Row | None]
    ties: Sequence[int]
    maps_of: Maker | None
    control: bool = False


def cases_of(again: Again, rows: Sequence[Row]) -> list[Case]:
    """Of one image; what has no map, or no image any more, is a case without one."""
    found: dict[object, Case] = {}
    lost: list[Case] = []
    x: Tensor | None = None
    for row in rows:
        mode, key = again.mode(row), key_of(row)
        try:
            if row["heat"] is None:
                raise UndefinedError(f"no map: {row['error']}")
            x = again.image(row) if x is None else x
            case = found.setdefault((row["target"], mode), Case(x, again.question(row), mode, again.call_settings(row)))
            case.rows[key, sum(key == name for name, _ in case.rows)] = row
        except UndefinedError as error:
            lost.append(Case(None, rows={(key, 0): row}, reason=str(error)))
    made = [*lost, *found.values()]
    made[-1].last = True
    return made


def stored(
    again: Again, cases: Sequence[Case], x: Tensor, questions: Any, tools: Mapping[str, Explainer]
) -> Iterator[Judged]:
    """The maps that the run holds of x (N,C,*S), method by method."""
    none = np.full(x.shape[2:], np.nan)
    for slot in dict.fromkeys(slot for case in cases for slot in case.rows):
        rows = [case.rows.get(slot) for case in cases]
        maps = [none if row is None else again.run.explanation(row).heatmap("input", scale=None) for row in rows]
        tool = tools.get(slot[0])
        maps_of = None if tool is None else _maker(tool, x, questions)
        yield Judged(torch.from_numpy(np.stack(maps)), rows, numbers_of(cases), maps_of)


def blind(again: Again, cases: Sequence[Case], x: Tensor) -> Iterator[Judged]:
    """Maps of x (N,C,*S) that know nothing of the model."""
    about = [again.run.explanation(case.first) for case in cases]

    def named(name: str) -> Maker:
        return lambda images: torch.from_numpy(
            np.stack([floors(image, one)[name] for image, one in zip(images, about, strict=True)])
        )

    for name in FLOORS:
        rows = [of_control(case.first, name) for case in cases]
        yield Judged(named(name)(x), rows, numbers_of(cases), named(name), control=True)


def numbers_of(cases: Sequence[Case]) -> list[int]:
    """Of the images of cases, in the run."""
    return [case.first["row"] for case in cases]


def _maker(tool: Explainer, x: Tensor, questions: Any) -> Maker:
    """The maps of other images, asked about the classes of x, on the model's input."""

    def maps(images: Tensor) -> Tensor:
        made = Probe.of(tool, x, questions).maps(images, range(len(images)))
        place = Placement.identity(tuple(images.shape[2:]))
        return torch.from_numpy(np.stack([place.project(one)[0] for one in made]))

    return maps


EXPLAINING = ("centre", "edges")  # of what knows nothing those that are explainers


@dataclass(frozen=True)
class Trials:
    """Metrics that ask the model. `tools`: its explainers, by the name and settings of a row, for those that ask them, too.

    `fills`, `steps`, `region`: see `measure`; `batch_size`: cases that share their passes.
    """

    again: Again
    metrics: Sequence[Metric]
    tools: Mapping[str, Explainer]
    fills: Sequence[str]
    steps: int
    region: int | None
    batch_size: int

    def values(self, images: Iterable[Sequence[Row]], threads: int) -> Iterator[tuple[int, list[Row]]]:
        """The values of some images' rows, a batch at a time, and how many images are done with it."""
        read = in_order(lambda rows: cases_of(self.again, rows), images, threads)
        for _, group in groupby((case for cases in read for case in cases), key=lambda case: case.kind):
            while some := list(islice(group, self.batch_size)):
                yield sum(case.last for case in some), self._of_kind(some)

    def _of_kind(self, cases: Sequence[Case]) -> list[Row]:
        """In halves, where memory ends."""
        if cases[0].x is None:
            each = [(one.name, fill) for one in self.metrics for fill in self._fills(one)]
            return [valued(case.first, name, None, case.reason, fill=fill) for case in cases for name, fill in each]
        try:
            return list(self._of_batch(cases))
        except torch.OutOfMemoryError:
            if len(cases) == 1:
                raise
        torch.cuda.empty_cache()  # only here, where the error is gone, and with it what the pass that failed held
        half = len(cases) // 2
        return self._of_kind(cases[:half]) + self._of_kind(cases[half:])

    def _of_batch(self, cases: Sequence[Case]) -> Iterator[Row]:
        model, names = self.again.model, self.again.reader.categories
        x = torch.stack([case.x for case in cases if case.x is not None]).to(*home(unwrap(model)))
        questions: Any = [case.question for case in cases]
        tried = [one for one in self.metrics if one.needs != "explainer"]
        if tried:
            with scoring(
                model, x, questions, categories=names, mode=cases[0].mode, call_settings=cases[0].call_settings
            ) as scores:
                for judged in stored(self.again, cases, x, questions, self.tools):
                    yield from self._of_maps(tried, scores, judged)
                for judged in blind(self.again, cases, x):
                    yield from self._of_maps(tried, scores, judged)
        for case, own in zip(cases, x, strict=True):
            yield from self._of_explainers(case, own[None])

    def _of_maps(self, metrics: Sequence[Metric], scores: Scores, judged: Judged) -> Iterator[Row]:
        """What metrics say of a map of each case."""
        region = self.region or side_of(scores.x[0])
        fills = self.fills if any(one.filled for one in metrics) else self.fills[:1]
        trials = {fill: Trial(judged.heat, scores, fill, self.steps, region, ties=judged.ties) for fill in fills}
        for one in metrics:
            for fill in self._fills(one):
                trial = trials[fill or self.fills[0]]
                found = one(trial) if one.needs == "trial" else one(trial, judged.maps_of)
                for row, number, reason in zip(judged.rows, found.numbers, found.reasons, strict=True):
                    if row is not None:
                        yield valued(row, one.name, number, reason or None, control=judged.control, fill=fill)

    def _fills(self, metric: Metric) -> Sequence[str | None]:
        """Under which it has a number each."""
        return self.fills if metric.filled else (None,)

    def _of_explainers(self, case: Case, x: Tensor) -> Iterator[Row]:
        """What metrics say of those who made the maps of a case (1,C,*S), and of such that know nothing."""
        metrics = [one for one in self.metrics if one.needs == "explainer"]
        if not metrics:
            return
        each = [(row, self.tools[key], False) for (key, _), row in case.rows.items()]
        controls = [
            (name, METHODS[name](self.again.model, mode=case.mode, **case.call_settings)) for name in EXPLAINING
        ]
        each += [(of_control(case.first, name), tool, True) for name, tool in controls]
        for row, tool, control in each:
            for one in metrics:
                try:
                    yield valued(row, one.name, float(one(tool, x, case.question)), None, control=control)
                except (GeometryError, NonFiniteError, UndefinedError) as error:
                    yield valued(row, one.name, None, str(error), control=control)
