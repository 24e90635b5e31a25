"""Scores of the candidates' maps on a block of images."""

import contextlib
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
    SelectionSample,
)
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.explainers.core.runner import run_methods
from camscope.geometry import Placement
from camscope.hooks.base import unwrap
from camscope.metrics import METRICS
from camscope.metrics.explainer_probe import ExplainerProbe
from camscope.metrics.input_transforms import GaussianNoise, Shift
from camscope.metrics.model_scorer import scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.metrics.robustness import compare_batch_under_transforms

RACE_IMPUTATIONS = ("mean", "blur")


def evaluate_candidates(
    candidates: Sequence[CandidateState], samples: Sequence[SelectionSample], n_steps: int, region_size: int, seed: int
) -> None:
    """Explain a block of images with all candidates and append the values of each criterion."""
    first = candidates[0].explainer
    x = torch.stack([sample.item.x for sample in samples]).to(get_model_device(first))
    targets: Any = [sample.target for sample in samples]
    maps, placement = [], Placement.identity(tuple(x.shape[2:]))
    for candidate in candidates:
        start = time.perf_counter()
        raw_maps = run_methods([candidate.explainer], x, [targets])[0].maps[0].attribution.detach().double().cpu()
        maps.append(np.stack([placement.project(raw_map)[0] for raw_map in raw_maps.numpy()]))
        candidate.total_seconds += time.perf_counter() - start
        candidate.n_images += len(samples)
        candidate.first_maps = candidate.first_maps or list(maps[-1])
    # one order of ties for each image
    tie_seeds = [zlib.crc32(sample.item.x.detach().cpu().numpy().tobytes(), seed) for sample in samples]
    with scoring_scope(
        first.model, x, targets, class_names=first.class_names, forward_options=first.forward_options
    ) as scorer:
        for candidate, attributions in zip(candidates, maps, strict=True):
            tests = [
                PerturbationTest(attributions, scorer, imputation, n_steps, region_size, seed, tie_seeds)
                for imputation in RACE_IMPUTATIONS
            ]
            gaps = [METRICS[FAITHFULNESS_METRIC](test).array for test in tests]
            candidate.metric_values[FAITHFULNESS_METRIC] += np.mean(gaps, 0).tolist()
    for candidate, attributions in zip(candidates, maps, strict=True):
        if LOCALIZATION_METRIC in candidate.metric_values:
            for attribution, sample in zip(attributions, samples, strict=True):
                value = float("nan")
                if sample.mask is not None:
                    with contextlib.suppress(UndefinedError):
                        value = float(METRICS[LOCALIZATION_METRIC](attribution, sample.mask))
                candidate.metric_values[LOCALIZATION_METRIC].append(value)
        if ROBUSTNESS_METRIC in candidate.metric_values:
            candidate.metric_values[ROBUSTNESS_METRIC] += _compute_stabilities(candidate.explainer, x, targets)


def get_model_device(explainer: Explainer) -> torch.device:
    """Return the device of an explainer's model."""
    return device_and_dtype(unwrap(explainer.model))[0]


def _compute_stabilities(explainer: Explainer, x: Tensor, targets: Any) -> list[float]:
    """Return for each sample the mean similarity of its maps under changes with a stable prediction."""
    try:
        # a shift of 4 pixels in 224, and weak noise
        transforms = Shift(max(1, min(x.shape[2:]) // 56)), GaussianNoise(0.01)
        agreements = compare_batch_under_transforms(ExplainerProbe.from_explainer(explainer, x, targets), transforms)
    except UndefinedError:  # one of the maps contains NaN
        if len(x) == 1:
            return [float("nan")]
        return [
            value for n in range(len(x)) for value in _compute_stabilities(explainer, x[n : n + 1], targets[n : n + 1])
        ]
    stable = [[agreement.similarity for agreement in row if agreement.is_prediction_stable] for row in agreements]
    similarities = [[value for value in values if value is not None] for values in stable]
    return [float(np.mean(values)) if values else float("nan") for values in similarities]
