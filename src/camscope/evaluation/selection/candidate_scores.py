"""Judging: what the maps of candidates are worth on a block of images."""

import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.evaluation.selection.racing import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    ROBUSTNESS_METRIC,
    CandidateState,
    FloatArray,
    Mask,
    SelectionSample,
)
from camscope.explainers import Explainer
from camscope.explainers.core.dispatch import run_methods
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.geometry import Placement
from camscope.hooks.base import unwrap
from camscope.metrics import METRICS
from camscope.metrics.explainer_probe import ExplainerProbe
from camscope.metrics.input_transforms import GaussianNoise, InputTransform, Shift
from camscope.metrics.model_scorer import scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.metrics.robustness import compare_batch_under_transforms

RACE_IMPUTATIONS = ("mean", "blur")


def evaluate_candidates(
    candidates: Sequence[CandidateState], samples: Sequence[SelectionSample], n_steps: int, region_size: int, seed: int
) -> None:
    """A block of images: maps of all candidates, then what they are worth by each criterion that a standing has."""
    model = candidates[0].explainer.model
    x = torch.stack([one.item.x for one in samples]).to(get_model_device(candidates[0].explainer))
    targets: Any = [one.target for one in samples]
    maps = []
    for one in candidates:
        begin = time.perf_counter()
        maps.append(project_maps_to_input(run_methods([one.explainer], x, [targets])[0].maps[0].attribution, x))
        one.total_seconds += time.perf_counter() - begin
        one.n_images += len(samples)
        one.first_maps = one.first_maps or list(maps[-1])
    ties = [
        zlib.crc32(one.item.x.detach().cpu().numpy().tobytes(), seed) for one in samples
    ]  # each image its own order
    with scoring_scope(
        model,
        x,
        targets,
        class_names=candidates[0].explainer.class_names,
        call_settings=candidates[0].explainer.call_settings,
    ) as scores:
        for one, heat in zip(candidates, maps, strict=True):
            trials = [
                PerturbationTest(heat, scores, fill, n_steps, region_size, seed, ties) for fill in RACE_IMPUTATIONS
            ]
            gaps = [METRICS[FAITHFULNESS_METRIC](trial).array for trial in trials]
            one.metric_values[FAITHFULNESS_METRIC] += np.mean(gaps, 0).tolist()
    for one, heat in zip(candidates, maps, strict=True):
        if LOCALIZATION_METRIC in one.metric_values:
            pairs = zip(heat, (sample.mask for sample in samples), strict=True)
            one.metric_values[LOCALIZATION_METRIC] += [_compute_enrichment(*pair) for pair in pairs]
        if ROBUSTNESS_METRIC in one.metric_values:
            one.metric_values[ROBUSTNESS_METRIC] += _compute_stabilities(one.explainer, x, targets)


def project_maps_to_input(maps: Tensor, x: Tensor) -> FloatArray:
    """(N,*s) -> (N,*S)"""
    place = Placement.identity(tuple(x.shape[2:]))
    return np.stack([place.project(one)[0] for one in maps.detach().double().cpu().numpy()])


def get_model_device(explainer: Explainer) -> torch.device:
    """Where its model is."""
    return device_and_dtype(unwrap(explainer.model))[0]


def make_transforms(x: Tensor) -> tuple[InputTransform, ...]:
    """What leaves a picture as it is: a shift of some pixels, which is 4 of 224, and a little noise."""
    return Shift(max(1, min(x.shape[2:]) // 56)), GaussianNoise(0.01)


def _compute_stabilities(explainer: Explainer, x: Tensor, targets: Any) -> list[float]:
    """(N,C,*S) -> of each sample the mean agreement of its maps with those of the changed input, where the prediction held."""
    try:
        found = compare_batch_under_transforms(ExplainerProbe.from_explainer(explainer, x, targets), make_transforms(x))
    except UndefinedError:  # a map of one of them holds NaN
        if len(x) == 1:
            return [float("nan")]
        return [
            value for n in range(len(x)) for value in _compute_stabilities(explainer, x[n : n + 1], targets[n : n + 1])
        ]
    held = [
        [each.similarity for each in own if each.is_prediction_stable and each.similarity is not None] for own in found
    ]
    return [float(np.mean(values)) if values else float("nan") for values in held]


def _compute_enrichment(attribution: FloatArray, mask: Mask | None) -> float:
    try:
        return float("nan") if mask is None else float(METRICS[LOCALIZATION_METRIC](attribution, mask))
    except UndefinedError:
        return float("nan")
