"""Judging: what the maps of candidates are worth on a block of images."""

import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.evaluation.selection.racing import FAITHFULNESS, LOCALISATION, ROBUSTNESS, Floats, Mask, Sample, Standing
from camscope.explainers import Explainer
from camscope.explainers.core.dispatch import run
from camscope.explainers.core.evaluation_context import home
from camscope.geometry import Placement
from camscope.hooks.base import unwrap
from camscope.metrics import METRICS
from camscope.metrics.explainer_probe import Probe
from camscope.metrics.input_transforms import Change, Noise, Shift
from camscope.metrics.model_scorer import scoring
from camscope.metrics.perturbation_test import Trial
from camscope.metrics.robustness import agreements_of

FILLS = ("mean", "blur")


def judged(racing: Sequence[Standing], samples: Sequence[Sample], steps: int, region: int, seed: int) -> None:
    """A block of images: maps of all candidates, then what they are worth by each criterion that a standing has."""
    model = racing[0].tool.model
    x = torch.stack([one.item.x for one in samples]).to(home_of(racing[0].tool))
    targets: Any = [one.target for one in samples]
    maps = []
    for one in racing:
        begin = time.perf_counter()
        maps.append(maps_on_input(run([one.tool], x, [targets])[0].maps[0].heat, x))
        one.seconds += time.perf_counter() - begin
        one.images += len(samples)
        one.first = one.first or list(maps[-1])
    ties = [
        zlib.crc32(one.item.x.detach().cpu().numpy().tobytes(), seed) for one in samples
    ]  # each image its own order
    with scoring(
        model, x, targets, categories=racing[0].tool.categories, call_settings=racing[0].tool.call_settings
    ) as scores:
        for one, heat in zip(racing, maps, strict=True):
            trials = [Trial(heat, scores, fill, steps, region, seed, ties) for fill in FILLS]
            gaps = [METRICS[FAITHFULNESS](trial).array for trial in trials]
            one.values[FAITHFULNESS] += np.mean(gaps, 0).tolist()
    for one, heat in zip(racing, maps, strict=True):
        if LOCALISATION in one.values:
            pairs = zip(heat, (sample.mask for sample in samples), strict=True)
            one.values[LOCALISATION] += [_enrichment(*pair) for pair in pairs]
        if ROBUSTNESS in one.values:
            one.values[ROBUSTNESS] += _stabilities(one.tool, x, targets)


def maps_on_input(maps: Tensor, x: Tensor) -> Floats:
    """(N,*s) -> (N,*S)"""
    place = Placement.identity(tuple(x.shape[2:]))
    return np.stack([place.project(one)[0] for one in maps.detach().double().cpu().numpy()])


def home_of(tool: Explainer) -> torch.device:
    """Where its model is."""
    return home(unwrap(tool.model))[0]


def changes(x: Tensor) -> tuple[Change, ...]:
    """What leaves a picture as it is: a shift of some pixels, which is 4 of 224, and a little noise."""
    return Shift(max(1, min(x.shape[2:]) // 56)), Noise(0.01)


def _stabilities(tool: Explainer, x: Tensor, targets: Any) -> list[float]:
    """(N,C,*S) -> of each sample the mean agreement of its maps with those of the changed input, where the prediction held."""
    try:
        found = agreements_of(Probe.of(tool, x, targets), changes(x))
    except UndefinedError:  # a map of one of them holds NaN
        if len(x) == 1:
            return [float("nan")]
        return [value for n in range(len(x)) for value in _stabilities(tool, x[n : n + 1], targets[n : n + 1])]
    held = [[each.value for each in own if each.held and each.value is not None] for own in found]
    return [float(np.mean(values)) if values else float("nan") for values in held]


def _enrichment(heat: Floats, mask: Mask | None) -> float:
    try:
        return float("nan") if mask is None else float(METRICS[LOCALISATION](heat, mask))
    except UndefinedError:
        return float("nan")
