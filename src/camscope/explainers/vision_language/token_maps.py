"""The values that a method gives to the image tokens of a prompt, and the values that methods of one layer compute."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from camscope.errors import LayerError, TargetError
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.vision_language.answer_scores_and_gradients import (
    ScoredAnswer,
    compute_gradients,
    find_language_model,
    find_last_vision_layer,
    find_projector_name,
    run_model,
    score_answer,
    tap_image_tokens,
    tap_layer_output,
)
from camscope.explainers.vision_language.processor_inputs import VisionLanguageInputs, get_family
from camscope.hooks.find_layers import unwrap
from camscope.layers.image_token_grids import (
    FAMILIES_OF_LEARNED_QUERIES,
    TokenGrid,
    build_tower_grids,
    list_placed_tokens,
)
from camscope.targets import Score, full_precision
from camscope.targets.token_and_answer import BaseTextTarget, ScoredTokens


class TokenMap(NamedTuple):
    """The values (1,T) of the image tokens of one image for one target, with notes and flags, and the grids of the tokens."""

    maps: AttributionMaps
    grids: list[TokenGrid]
    answer: ScoredAnswer


class TokenOutputs(NamedTuple):
    """The outputs (T,K) of a layer at the image tokens of one image, and where these tokens are in the layer's output."""

    grids: list[TokenGrid]
    rows: Tensor  # (T,) indices into the flattened output


def compute_layer_token_maps(
    explainer: Any,
    inputs: VisionLanguageInputs,
    targets: Sequence[Sequence[BaseTextTarget]],
    answers: Sequence[Sequence[ScoredTokens]],
) -> list[list[TokenMap]]:
    """Compute the maps [image][target] of a method that explains one layer, from one forward pass.

    There is one backward pass for each target. The channel weights of a method are means over all image tokens that have a
    place, in all tiles.
    """
    _check_method_needs_one_pass(explainer)
    model: Any = unwrap(explainer.model)
    layer, is_chosen = explainer.layer, explainer.layer is None
    projector, family = find_projector_name(model), get_family(model)
    if layer is None and family in FAMILIES_OF_LEARNED_QUERIES:
        layer = find_last_vision_layer(model)
    n_answer_tokens = max(max(answer.scored) + 1 for row in answers for answer in row)
    with ExitStack() as scope:
        if layer is None or layer == projector:
            name, language_model = find_language_model(model, inputs.is_encoder_decoder)
            layer = projector or f"the input of {name}"
            tap = scope.enter_context(tap_image_tokens(language_model))
            logits = run_model(model, inputs, n_answer_tokens)
            if not tap.embeddings:
                raise LayerError(f"{name} did not receive the image tokens as inputs_embeds: name a layer")
        else:
            tap = scope.enter_context(tap_layer_output(model, layer, explainer.output_index))
            logits = run_model(model, inputs, n_answer_tokens)
            if not tap.embeddings:
                raise LayerError(f"layer {layer!r} did not run in the forward pass")
        activation = tap.embeddings[0]
        located = _locate_outputs(model, str(layer), activation, inputs)
        scored = [
            [score_answer(logits[i], target, answer) for target, answer in zip(*row, strict=True)]
            for i, row in enumerate(zip(targets, answers, strict=True))
        ]
        check_finite("the score", torch.stack([a.value for row in scored for a in row]), explainer.on_nonfinite)
        outputs = full_precision(activation.detach()).flatten(0, -2)
        check_finite(f"the activation of layer {layer!r}", outputs, explainer.on_nonfinite)
        results: list[list[TokenMap]] = [[] for _ in targets]
        n_targets = len(targets[0])
        for q in range(n_targets):
            total = torch.stack([row[q].value for row in scored]).sum()
            (gradient,) = compute_gradients(total, [activation], retain_graph=q < n_targets - 1)
            gradients = full_precision(gradient).flatten(0, -2)
            check_finite(f"the gradient at layer {layer!r}", gradients, explainer.on_nonfinite)
            for i, (grids, rows) in enumerate(located):
                placed = torch.tensor(list_placed_tokens(grids), device=rows.device)
                features = _build_features(
                    str(layer), outputs[rows[placed]], gradients[rows[placed]], explainer, model, scored[i][q]
                )
                cells = explainer.compute_layer_map(features).detach().flatten(1)
                values = cells.new_zeros(1, len(rows))
                values[:, placed] = cells
                zero = ~features.gradient.flatten(1).any(1) if explainer.needs_gradient else None
                notes = [f"layer {layer!r} was chosen"] if is_chosen else []
                maps = AttributionMaps(values, str(layer), zero_gradient=zero, notes=tuple(notes))
                maps.sample_notes = tuple(map(tuple, features.sample_notes))
                results[i].append(TokenMap(maps, grids, scored[i][q]))
    return results


def _check_method_needs_one_pass(explainer: Any) -> None:
    """Raise TargetError for a method that runs the model again, or changes what is differentiated."""
    reason = ""
    if explainer.runs_model or explainer.second_order:
        reason = "runs the model on changed inputs or activations, or needs second derivatives"
    elif explainer.has_custom_backward or explainer.differentiated_score_key != "score":
        reason = "needs scores of other classes, or its own backward pass"
    elif explainer.reshape is not None or explainer.layout is not None:
        reason = "has a layout or reshape, which the positions of image tokens replace"
    if reason:
        raise TargetError(
            f"{explainer.composed_name} cannot explain the text of a vision-language model: it {reason}",
            fix="use a method of one forward and one backward pass, such as gradcam, layercam or chefer",
        )


def _locate_outputs(model: Any, layer: str, activation: Tensor, inputs: VisionLanguageInputs) -> list[TokenOutputs]:
    """Find the image tokens of each image in the output of a layer: of the language model, or of the vision tower."""
    mask, shape = inputs.image_token_mask, tuple(activation.shape)
    if shape[:2] == tuple(mask.shape) and activation.ndim == 3:
        if not all(inputs.grids):
            raise LayerError(
                f"layer {layer!r}: the image tokens of {type(model).__name__} are learned queries without a place on the image",
                fix=f"choose a layer of the vision tower, such as {find_last_vision_layer(model)!r}",
            )
        index = torch.arange(mask.numel(), device=mask.device).view_as(mask)
        return [TokenOutputs(grids, index[i][mask[i]]) for i, grids in enumerate(inputs.grids)]
    counts = [len(tiles) for tiles in inputs.tiles]
    vision = getattr(model.config, "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    if activation.ndim == 3 and 0 not in counts and shape[0] == sum(counts) and isinstance(patch, int):
        located, start = list[TokenOutputs](), 0
        for tiles in inputs.tiles:
            grid = tiles[0].size[0] // patch, tiles[0].size[1] // patch
            if math.prod(grid) > shape[1]:
                break
            rows = torch.arange(start * shape[1], (start + len(tiles)) * shape[1], device=activation.device)
            located.append(TokenOutputs(build_tower_grids(grid, shape[1], tiles), rows))
            start += len(tiles)
        else:
            return located
    raise LayerError(
        f"layer {layer!r} of {type(model).__name__} returned {shape}: its cells cannot be placed on the image",
        fix="leave layer out, for the image tokens that enter the language model",
    )


def _build_features(
    layer: str, outputs: Tensor, gradients: Tensor, explainer: Any, model: Any, answer: ScoredAnswer
) -> LayerFeatures:
    """Return the features of one image: its tokens (T,K) become maps (1,K,T) of one axis."""
    activation, gradient = outputs.T[None].contiguous(), gradients.T[None].contiguous()
    return LayerFeatures(
        layer=layer,
        activation=activation,
        x=activation,
        score=Score(model),
        values=answer.value.detach()[None],
        layout=None,
        to_maps=lambda maps: maps,
        optional_gradient=gradient if explainer.needs_gradient else None,
        recompute=_raise_single_pass,
        compute_curvature=_raise_single_pass,
    )


def _raise_single_pass(*args: object) -> Any:
    raise TargetError("a method cannot run a vision-language model again inside one explanation")
