"""Evaluate metrics that need the model, in batches of images, for the maps of a run and for control maps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.batch.image_loading import map_in_order
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation.evaluate_model_free_metrics import (
    CONTROL_NAMES,
    Row,
    build_control_row,
    build_value_row,
    get_default_region_size,
    make_control_maps,
)
from camscope.evaluation.restore_inputs_and_explainers_of_run import RunReplay, format_method_key
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import Mode, get_device_and_dtype
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.metrics import Metric
from camscope.metrics.explain_changed_inputs import ExplainerProbe, clean_maps_and_predictions_shared
from camscope.metrics.model_scorer import ModelScorer, scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.targets import TargetLike

MapSlot = tuple[str, int]  # method key, and a counter for several maps of one method
MapFunction = Callable[[Tensor], Tensor]  # other images of a batch (N,C,*S) -> their maps (N,*S)
# One map of each case of a batch: the maps (N,*S) in score units on the model's input, NaN where there is none; the row of each
# map; and a function that computes maps of other images by the same method, if there is one.
MapBatch = tuple[Tensor, Sequence[Row | None], MapFunction | None]


@dataclass
class EvaluationCase:
    """One image with one target, and the rows of the maps that explain this target."""

    x: Tensor | None  # (C,*S) the model's input, None if it is not available, with the `reason`
    target: TargetLike = None
    mode: Mode = "eval"
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[MapSlot, Row] = field(default_factory=dict)
    reason: str = ""
    is_last_of_image: bool = False

    @property
    def batch_key(self) -> object:
        """A key for batching. Cases with equal keys can share forward passes."""
        return None if self.x is None else (tuple(self.x.shape), self.mode)

    @property
    def first_row(self) -> Row:
        """The first row of this case."""
        return next(iter(self.rows.values()))


def group_rows_into_cases(replay: RunReplay, rows: Sequence[Row]) -> list[EvaluationCase]:
    """Group the rows of one image by target into evaluation cases. A case that cannot be evaluated holds the reason."""
    cases: dict[object, EvaluationCase] = {}
    missing: list[EvaluationCase] = []
    x: Tensor | None = None
    for row in rows:
        mode, key = replay.get_model_mode(row), format_method_key(row)
        try:
            if row["attribution"] is None:
                raise UndefinedError(f"no map: {row['error']}")
            x = replay.read_image(row) if x is None else x
            case = cases.setdefault(
                (row["target"], mode), EvaluationCase(x, replay.get_target(row), mode, replay.get_forward_options(row))
            )
            case.rows[key, sum(key == name for name, _ in case.rows)] = row
        except UndefinedError as error:
            missing.append(EvaluationCase(None, rows={(key, 0): row}, reason=str(error)))
    all_cases = [*missing, *cases.values()]
    all_cases[-1].is_last_of_image = True
    return all_cases


def iter_stored_maps(
    replay: RunReplay, cases: Sequence[EvaluationCase], x: Tensor, targets: Any, explainers: Mapping[str, Explainer]
) -> Iterator[MapBatch]:
    """Yield the stored maps of the cases, one method at a time. The model inputs are x (N,C,*S)."""
    no_map = np.full(x.shape[2:], np.nan)
    for slot in dict.fromkeys(slot for case in cases for slot in case.rows):
        rows = [case.rows.get(slot) for case in cases]
        maps = [no_map if row is None else replay.run.explanation(row).heatmap("input", scale=None) for row in rows]
        explainer = explainers.get(slot[0])
        compute_maps = None if explainer is None else partial(_explain_other_images, explainer, x, targets)
        yield torch.from_numpy(np.stack(maps)), rows, compute_maps


def iter_control_maps(replay: RunReplay, cases: Sequence[EvaluationCase], x: Tensor) -> Iterator[MapBatch]:
    """Compute the control maps of the images x (N,C,*S). Yield the maps of one control at a time."""
    explanations = [replay.run.explanation(case.first_row) for case in cases]

    def compute_control_maps(name: str, images: Tensor) -> Tensor:
        pairs = zip(images, explanations, strict=True)
        return torch.from_numpy(np.stack([make_control_maps(image, explanation)[name] for image, explanation in pairs]))

    for name in CONTROL_NAMES:
        rows = [build_control_row(case.first_row, name) for case in cases]
        compute_maps = partial(compute_control_maps, name)
        yield compute_maps(x), rows, compute_maps


def _explain_other_images(explainer: Explainer, x: Tensor, targets: Any, images: Tensor) -> Tensor:
    """Explain other images, but for the targets of x. Return the maps at the resolution of the model's input."""
    maps = ExplainerProbe.from_explainer(explainer, x, targets).compute_maps(images, range(len(images)))
    placement = Placement.identity(tuple(images.shape[2:]))
    return torch.from_numpy(np.stack([placement.project(attribution)[0] for attribution in maps]))


CONTROL_EXPLAINERS = ("center", "edges")  # the controls that are explainers


@dataclass(frozen=True)
class ModelMetricEvaluator:
    """Evaluates metrics that need the model, in batches of cases. `evaluate` documents the fields."""

    replay: RunReplay
    metrics: Sequence[Metric]
    explainers: Mapping[str, Explainer]
    imputations: Sequence[str]
    n_steps: int
    region_size: int | None
    batch_size: int

    def iter_finished_counts_and_rows(
        self, images: Iterable[Sequence[Row]], num_threads: int
    ) -> Iterator[tuple[int, list[Row]]]:
        """Evaluate images batch by batch. Yield the number of images just finished, and their table rows."""
        cases_by_image = map_in_order(lambda rows: group_rows_into_cases(self.replay, rows), images, num_threads)
        for _, group in groupby((case for cases in cases_by_image for case in cases), key=lambda case: case.batch_key):
            while batch := list(islice(group, self.batch_size)):
                yield sum(case.is_last_of_image for case in batch), self._evaluate_batch_or_its_halves(batch)

    def _evaluate_batch_or_its_halves(self, cases: Sequence[EvaluationCase]) -> list[Row]:
        """Evaluate a batch of cases. If memory runs out, evaluate its two halves separately."""
        if cases[0].x is None:
            return [
                build_value_row(case.first_row, metric.name, None, case.reason, imputation=imputation)
                for case in cases
                for metric in self.metrics
                for imputation in self._select_imputations(metric)
            ]
        try:
            return list(self._evaluate_batch(cases))
        except torch.OutOfMemoryError:
            if len(cases) == 1:
                raise
        torch.cuda.empty_cache()  # outside the except block, where the failed forward pass has released its memory
        half = len(cases) // 2
        return self._evaluate_batch_or_its_halves(cases[:half]) + self._evaluate_batch_or_its_halves(cases[half:])

    def _evaluate_batch(self, cases: Sequence[EvaluationCase]) -> Iterator[Row]:
        """Yield the rows of a batch: metrics of its maps, of control maps, and of its explainers."""
        model, class_names = self.replay.model, self.replay.input_explainer.class_names
        x = torch.stack([case.x for case in cases if case.x is not None]).to(*get_device_and_dtype(unwrap(model)))
        targets: Any = [case.target for case in cases]
        map_metrics = [metric for metric in self.metrics if metric.input_kind != "explainer"]
        if map_metrics:
            with scoring_scope(
                model, x, targets, class_names=class_names, mode=cases[0].mode, forward_options=cases[0].forward_options
            ) as scorer:
                tie_seeds = [case.first_row["row"] for case in cases]  # the number of each image
                for batch in iter_stored_maps(self.replay, cases, x, targets, self.explainers):
                    yield from self._evaluate_maps(map_metrics, scorer, tie_seeds, batch)
                for batch in iter_control_maps(self.replay, cases, x):
                    yield from self._evaluate_maps(map_metrics, scorer, tie_seeds, batch, is_control=True)
        for case, sample in zip(cases, x, strict=True):
            with clean_maps_and_predictions_shared():
                rows = list(self._evaluate_explainers(case, sample[None]))
            yield from rows

    def _evaluate_maps(
        self,
        metrics: Sequence[Metric],
        scorer: ModelScorer,
        tie_seeds: Sequence[int],
        batch: MapBatch,
        *,
        is_control: bool = False,
    ) -> Iterator[Row]:
        """Evaluate the maps of one method, one map per case. Yield the table rows."""
        attributions, rows, compute_maps = batch
        region_size = self.region_size or get_default_region_size(scorer.x[0])
        imputations = self.imputations if any(m.uses_imputation for m in metrics) else self.imputations[:1]
        tests = {
            imputation: PerturbationTest(
                attributions, scorer, imputation, self.n_steps, region_size, tie_seeds=tie_seeds
            )
            for imputation in imputations
        }
        for metric in metrics:
            for imputation in self._select_imputations(metric):
                test = tests[imputation or self.imputations[0]]
                values = metric(test) if metric.input_kind == "perturbation_test" else metric(test, compute_maps)
                kind: dict[str, Any] = {"is_control": is_control, "imputation": imputation}
                for row, number, reason in zip(rows, values.numbers, values.reasons, strict=True):
                    if row is not None:
                        yield build_value_row(row, metric.name, number, reason or None, **kind)

    def _select_imputations(self, metric: Metric) -> Sequence[str | None]:
        """Return the imputations with which to evaluate a metric. A metric without imputation has the single entry None."""
        return self.imputations if metric.uses_imputation else (None,)

    def _evaluate_explainers(self, case: EvaluationCase, x: Tensor) -> Iterator[Row]:
        """Evaluate the metrics that need an explainer for one input x (1,C,*S). Yield the table rows."""
        metrics = [metric for metric in self.metrics if metric.input_kind == "explainer"]
        if not metrics:
            return
        explained = [(row, self.explainers[key], False) for (key, _), row in case.rows.items()]
        for name in CONTROL_EXPLAINERS:
            explainer = METHODS[name](self.replay.model, mode=case.mode, **case.forward_options)
            explained.append((build_control_row(case.first_row, name), explainer, True))
        for row, explainer, is_control in explained:
            for metric in metrics:
                try:
                    value = float(metric(explainer, x, case.target))
                    yield build_value_row(row, metric.name, value, None, is_control=is_control)
                except (GeometryError, NonFiniteError, UndefinedError) as error:
                    yield build_value_row(row, metric.name, None, str(error), is_control=is_control)
