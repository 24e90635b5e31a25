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

from camscope.batch.image_loading import map_in_order
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation.map_metrics import (
    CONTROL_NAMES,
    Row,
    build_control_row,
    build_value_row,
    get_default_region_size,
    make_control_maps,
)
from camscope.evaluation.run_replay import RunReplay, format_method_key
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import Mode, device_and_dtype
from camscope.geometry import Placement
from camscope.hooks.base import unwrap
from camscope.metrics import Metric
from camscope.metrics.explainer_probe import ExplainerProbe
from camscope.metrics.model_scorer import ModelScorer, scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.targets import TargetLike

MapSlot = tuple[str, int]  # a method with its settings, and which of those that are alike
MapFunction = Callable[[Tensor], Tensor]  # other images of a batch (N,C,*S) -> their maps (N,*S)


@dataclass
class EvaluationCase:
    """An image asked one question, and the rows of its maps. `x` (C,*S): as it enters the model; None: `reason`, why not.

    `is_last_of_image`: whether its image has no further case.
    """

    x: Tensor | None
    target: TargetLike = None
    mode: Mode = "eval"
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[MapSlot, Row] = field(default_factory=dict)
    reason: str = ""
    is_last_of_image: bool = False

    @property
    def batch_key(self) -> object:
        """Cases of one kind share their passes."""
        return None if self.x is None else (tuple(self.x.shape), self.mode)

    @property
    def first_row(self) -> Row:
        """A row of it."""
        return next(iter(self.rows.values()))


@dataclass(frozen=True)
class MapBatch:
    """A map of each case: `attributions` (N,*S) in score units on the model's input, and its row; None and NaN where there is none.

    `tie_seeds`: a seed for each, its image's number; `compute_maps`: the maps that the same method makes of other images, if that can
    be had.
    """

    attributions: Tensor
    rows: Sequence[Row | None]
    tie_seeds: Sequence[int]
    compute_maps: MapFunction | None
    is_control: bool = False


def build_cases(replay: RunReplay, rows: Sequence[Row]) -> list[EvaluationCase]:
    """Of one image; what has no map, or no image any more, is a case without one."""
    found: dict[object, EvaluationCase] = {}
    lost: list[EvaluationCase] = []
    x: Tensor | None = None
    for row in rows:
        mode, key = replay.get_mode(row), format_method_key(row)
        try:
            if row["attribution"] is None:
                raise UndefinedError(f"no map: {row['error']}")
            x = replay.read_image(row) if x is None else x
            case = found.setdefault(
                (row["target"], mode), EvaluationCase(x, replay.get_target(row), mode, replay.get_call_settings(row))
            )
            case.rows[key, sum(key == name for name, _ in case.rows)] = row
        except UndefinedError as error:
            lost.append(EvaluationCase(None, rows={(key, 0): row}, reason=str(error)))
    made = [*lost, *found.values()]
    made[-1].is_last_of_image = True
    return made


def iter_run_maps(
    replay: RunReplay, cases: Sequence[EvaluationCase], x: Tensor, targets: Any, explainers: Mapping[str, Explainer]
) -> Iterator[MapBatch]:
    """The maps that the run holds of x (N,C,*S), method by method."""
    none = np.full(x.shape[2:], np.nan)
    for slot in dict.fromkeys(slot for case in cases for slot in case.rows):
        rows = [case.rows.get(slot) for case in cases]
        maps = [none if row is None else replay.run.explanation(row).heatmap("input", scale=None) for row in rows]
        tool = explainers.get(slot[0])
        maps_of = None if tool is None else _build_map_function(tool, x, targets)
        yield MapBatch(torch.from_numpy(np.stack(maps)), rows, list_image_numbers(cases), maps_of)


def iter_control_maps(replay: RunReplay, cases: Sequence[EvaluationCase], x: Tensor) -> Iterator[MapBatch]:
    """Maps of x (N,C,*S) that know nothing of the model."""
    about = [replay.run.explanation(case.first_row) for case in cases]

    def named(name: str) -> MapFunction:
        return lambda images: torch.from_numpy(
            np.stack([make_control_maps(image, one)[name] for image, one in zip(images, about, strict=True)])
        )

    for name in CONTROL_NAMES:
        rows = [build_control_row(case.first_row, name) for case in cases]
        yield MapBatch(named(name)(x), rows, list_image_numbers(cases), named(name), is_control=True)


def list_image_numbers(cases: Sequence[EvaluationCase]) -> list[int]:
    """Of the images of cases, in the run."""
    return [case.first_row["row"] for case in cases]


def _build_map_function(explainer: Explainer, x: Tensor, targets: Any) -> MapFunction:
    """The maps of other images, asked about the classes of x, on the model's input."""

    def maps(images: Tensor) -> Tensor:
        made = ExplainerProbe.from_explainer(explainer, x, targets).compute_maps(images, range(len(images)))
        place = Placement.identity(tuple(images.shape[2:]))
        return torch.from_numpy(np.stack([place.project(one)[0] for one in made]))

    return maps


CONTROL_EXPLAINERS = ("centre", "edges")  # of what knows nothing those that are explainers


@dataclass(frozen=True)
class ModelMetricEvaluator:
    """Metrics that ask the model. `explainers`: its explainers, by the name and settings of a row, for those that ask them, too.

    `imputations`, `n_steps`, `region_size`: see `evaluate`; `batch_size`: cases that share their passes.
    """

    replay: RunReplay
    metrics: Sequence[Metric]
    explainers: Mapping[str, Explainer]
    imputations: Sequence[str]
    n_steps: int
    region_size: int | None
    batch_size: int

    def iter_values(self, images: Iterable[Sequence[Row]], num_threads: int) -> Iterator[tuple[int, list[Row]]]:
        """The values of some images' rows, a batch at a time, and how many images are done with it."""
        read = map_in_order(lambda rows: build_cases(self.replay, rows), images, num_threads)
        for _, group in groupby((case for cases in read for case in cases), key=lambda case: case.batch_key):
            while some := list(islice(group, self.batch_size)):
                yield sum(case.is_last_of_image for case in some), self._evaluate_cases(some)

    def _evaluate_cases(self, cases: Sequence[EvaluationCase]) -> list[Row]:
        """In halves, where memory ends."""
        if cases[0].x is None:
            each = [(one.name, fill) for one in self.metrics for fill in self._select_imputations(one)]
            return [
                build_value_row(case.first_row, name, None, case.reason, imputation=fill)
                for case in cases
                for name, fill in each
            ]
        try:
            return list(self._evaluate_batch(cases))
        except torch.OutOfMemoryError:
            if len(cases) == 1:
                raise
        torch.cuda.empty_cache()  # only here, where the error is gone, and with it what the pass that failed held
        half = len(cases) // 2
        return self._evaluate_cases(cases[:half]) + self._evaluate_cases(cases[half:])

    def _evaluate_batch(self, cases: Sequence[EvaluationCase]) -> Iterator[Row]:
        model, names = self.replay.model, self.replay.input_explainer.class_names
        x = torch.stack([case.x for case in cases if case.x is not None]).to(*device_and_dtype(unwrap(model)))
        questions: Any = [case.target for case in cases]
        tried = [one for one in self.metrics if one.input_kind != "explainer"]
        if tried:
            with scoring_scope(
                model, x, questions, class_names=names, mode=cases[0].mode, call_settings=cases[0].call_settings
            ) as scores:
                for judged in iter_run_maps(self.replay, cases, x, questions, self.explainers):
                    yield from self._evaluate_maps(tried, scores, judged)
                for judged in iter_control_maps(self.replay, cases, x):
                    yield from self._evaluate_maps(tried, scores, judged)
        for case, own in zip(cases, x, strict=True):
            yield from self._evaluate_explainers(case, own[None])

    def _evaluate_maps(self, metrics: Sequence[Metric], scorer: ModelScorer, map_batch: MapBatch) -> Iterator[Row]:
        """What metrics say of a map of each case."""
        region = self.region_size or get_default_region_size(scorer.x[0])
        fills = self.imputations if any(one.uses_imputation for one in metrics) else self.imputations[:1]
        trials = {
            fill: PerturbationTest(
                map_batch.attributions, scorer, fill, self.n_steps, region, tie_seeds=map_batch.tie_seeds
            )
            for fill in fills
        }
        for one in metrics:
            for fill in self._select_imputations(one):
                trial = trials[fill or self.imputations[0]]
                found = one(trial) if one.input_kind == "perturbation_test" else one(trial, map_batch.compute_maps)
                for row, number, reason in zip(map_batch.rows, found.numbers, found.reasons, strict=True):
                    if row is not None:
                        yield build_value_row(
                            row, one.name, number, reason or None, is_control=map_batch.is_control, imputation=fill
                        )

    def _select_imputations(self, metric: Metric) -> Sequence[str | None]:
        """Under which it has a number each."""
        return self.imputations if metric.uses_imputation else (None,)

    def _evaluate_explainers(self, case: EvaluationCase, x: Tensor) -> Iterator[Row]:
        """What metrics say of those who made the maps of a case (1,C,*S), and of such that know nothing."""
        metrics = [one for one in self.metrics if one.input_kind == "explainer"]
        if not metrics:
            return
        each = [(row, self.explainers[key], False) for (key, _), row in case.rows.items()]
        controls = [
            (name, METHODS[name](self.replay.model, mode=case.mode, **case.call_settings))
            for name in CONTROL_EXPLAINERS
        ]
        each += [(build_control_row(case.first_row, name), tool, True) for name, tool in controls]
        for row, tool, control in each:
            for one in metrics:
                try:
                    yield build_value_row(row, one.name, float(one(tool, x, case.target)), None, is_control=control)
                except (GeometryError, NonFiniteError, UndefinedError) as error:
                    yield build_value_row(row, one.name, None, str(error), is_control=control)
