"""Build the candidate explainers of a method selection, one for each method and layer, and evaluate their maps."""

import contextlib
import re
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, UndefinedError
from camscope.evaluation.selection.rank_and_drop_candidates import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    ROBUSTNESS_METRIC,
    CandidateState,
    SelectionSample,
)
from camscope.explainers import METHODS, Explainer
from camscope.explainers.comparison.grid_of_targets_and_methods import (
    accepts_layer_choice,
    accepts_several_layers,
    create_explainers_at_layers,
)
from camscope.explainers.core.evaluation_context import get_device_and_dtype, inference_scope, inspect_model
from camscope.explainers.core.run_methods_in_shared_passes import run_methods
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.layers.choose_layer import choose_layer
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.metrics import METRICS
from camscope.metrics.explain_changed_inputs import ExplainerProbe
from camscope.metrics.imputation import DEFAULT_IMPUTATIONS
from camscope.metrics.input_transforms import GaussianNoise, Shift
from camscope.metrics.model_scorer import scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.metrics.stability_under_transforms import compare_batch_under_transforms
from camscope.targets import Score

DEFAULT_CANDIDATE_METHODS = (
    "gradcam", "gradcam++", "hirescam", "xgradcam", "layercam",
    "eigencam", "eigengradcam", "fullgrad", "saliency", "inputxgradient",
)  # fmt: skip
N_STAGES = 3  # layers at which a method is tried


def build_candidates(
    model: nn.Module,
    x: Tensor,
    methods: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
) -> list[Explainer]:
    """Build an explainer for each method at each layer. Explainers that fail for the input x (1,C,*S) are left out.

    By default there are ten fast methods and three layers (see `find_stage_layers`).
    """
    layer_names = list(layers) if layers is not None else find_stage_layers(model, x)
    candidates = []
    for name in DEFAULT_CANDIDATE_METHODS if methods is None else methods:
        explainer_cls = METHODS.find(name)
        takes_one_layer = accepts_layer_choice(explainer_cls) and not accepts_several_layers(explainer_cls)
        chosen = layer_names if takes_one_layer else None
        for explainer in create_explainers_at_layers(explainer_cls, model, chosen, {}):
            try:
                run_methods([explainer], x, [None])
            except CamscopeError:
                if methods is not None and layers is not None:
                    raise
            else:
                candidates.append(explainer)
    if not candidates:
        raise InputError("no method works for this model at these layers: pass other methods or layers")
    return candidates


def find_stage_layers(model: nn.Module, x: Tensor) -> list[str]:
    """Return three layers. CNN: the last layer at each of the three lowest resolutions. Transformer: three blocks."""
    model_info = inspect_model(model)
    with inference_scope(model_info, "eval"):
        inner = model_info.model
        spatial_layers = find_spatial_layers(inner, lambda: Score(inner).forward(x), x)
        default = choose_layer(inner, Score(inner).compute_fixed_mix_of_class_scores, x).name
    ends: dict[tuple[int, ...], str] = {}
    for layer in spatial_layers[: 1 + max(i for i, layer in enumerate(spatial_layers) if layer.name == default)]:
        ends.pop(layer.layout.grid, None)
        ends[layer.layout.grid] = layer.name
    stage_layers = list(ends.values())[-N_STAGES:]
    if len(ends) > 1 and "." not in default:
        stages = {layer.name for layer in spatial_layers if "." not in layer.name}  # instead of their last parts
        stage_layers = [name.partition(".")[0] if name.partition(".")[0] in stages else name for name in stage_layers]
    before, *after = re.split(r"\d+", default, maxsplit=1)  # the names of a transformer's blocks differ in a number
    pattern = rf"{re.escape(before)}\d+{re.escape(after[0])}" if after else "(?!)"  # (?!): no name
    blocks = [layer.name for layer in spatial_layers if re.fullmatch(pattern, layer.name)]
    if len(ends) == 1 and len(blocks) > N_STAGES:
        stage_layers = [blocks[len(blocks) * (n + 1) // N_STAGES - 1] for n in range(N_STAGES)]
    return list(dict.fromkeys([*stage_layers[:-1], default]))


def evaluate_candidates(
    candidates: Sequence[CandidateState], samples: Sequence[SelectionSample], n_steps: int, region_size: int, seed: int
) -> None:
    """Explain samples with all candidates. Store the metric values of the maps in each candidate."""
    first = candidates[0]
    x = torch.stack([sample.item.x for sample in samples]).to(get_model_device(first.explainer))
    targets: Any = [sample.target for sample in samples]
    maps_of, placement = dict[int, Any](), Placement.identity(tuple(x.shape[2:]))
    n_batches = first.n_images // len(
        samples
    )  # the first candidate of a batch pays for checks that all share: take turns
    for index in [(n_batches + k) % len(candidates) for k in range(len(candidates))]:
        candidate, start = candidates[index], time.perf_counter()
        raw_maps = run_methods([candidate.explainer], x, [targets])[0].maps[0].attribution.detach().double().cpu()
        maps_of[index] = np.stack([placement.project(raw_map)[0] for raw_map in raw_maps.numpy()])
        candidate.total_seconds += time.perf_counter() - start
        candidate.n_images += len(samples)
        candidate.first_maps = candidate.first_maps or list(maps_of[index])
    maps = [maps_of[index] for index in range(len(candidates))]
    # one order of ties for each image
    tie_seeds = [zlib.crc32(sample.item.x.detach().cpu().numpy().tobytes(), seed) for sample in samples]
    explainer = first.explainer
    with scoring_scope(
        explainer.model, x, targets, class_names=explainer.class_names, forward_options=explainer.forward_options
    ) as scorer:
        for candidate, attributions in zip(candidates, maps, strict=True):
            tests = [
                PerturbationTest(attributions, scorer, imputation, n_steps, region_size, seed, tie_seeds)
                for imputation in DEFAULT_IMPUTATIONS
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
    return get_device_and_dtype(unwrap(explainer.model))[0]


def _compute_stabilities(explainer: Explainer, x: Tensor, targets: Any) -> list[float]:
    """Apply small changes to each input. Return the mean similarity of the maps for each sample (N,)."""
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
