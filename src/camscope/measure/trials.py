"""Trials: the maps of a run put to its model again: of many images, and all that is changed in them, in the same passes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from camscope.batch.threads import in_order
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.explainers import METHODS, Explainer
from camscope.explainers.scope import home
from camscope.hooks.base import unwrap
from camscope.measure.again import Again
from camscope.measure.cases import Case, Judged, blind, cases_of, stored
from camscope.measure.form import Row, of_control, valued
from camscope.measure.maps import side_of
from camscope.metrics import Metric
from camscope.metrics.scores import Scores, scoring
from camscope.metrics.trial import Trial

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
