"""Choose the layer to explain by default: the last layer with a spatial grid that affects the score."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from camscope.errors import LayerError, Remedy
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.hooks.tap_layer_output_and_gradient import Tap
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.hooks.vision_language_tokens import find_vocabulary_sizes
from camscope.layers.infer_layout import advise_on_per_frame_output
from camscope.layers.judge_layout_from_noise_reactions import LayoutVerdict
from camscope.layers.layout import TOKENS
from camscope.layers.spatial_layers import (
    SpatialLayer,
    find_random_masking_reason,
    find_spatial_layers,
    hook_layer_outputs,
    probe_layer_layout,
)
from camscope.layers.verify_layout_by_noise import build_contradicted_layout_error
from camscope.pytree import iter_leaves
from camscope.targets.no_target import NoTarget
from camscope.targets.score_per_sample import Score

ENCODER_NAMES = ("backbone", "encoder", "vision_model", "vision_encoder", "image_encoder")
LAYERS_PER_PASS = 12  # layers that are probed in one forward pass, from the end


def _advise_on_per_frame_layer(model: nn.Module, forward: Callable[[], object], input_shape: Sequence[int]) -> str:
    """Return advice for an error: name the last layer with one map per video frame. Return "" if there is no such layer."""
    remedies: list[str] = []

    def collect_remedy_for_layer(name: str, module: nn.Module, output: object) -> None:
        if isinstance(output, Tensor) and (remedy := advise_on_per_frame_output(output.shape, input_shape)):
            remedies.append(f"layer {name!r}: {remedy}")

    with torch.no_grad(), Hooks() as hooks:
        hook_layer_outputs(model, hooks, collect_remedy_for_layer)
        forward()
    return remedies[-1] if remedies else ""


def choose_feature_layer(model: nn.Module, score: Score, x: Tensor) -> SpatialLayer:
    """Return the last layer with a spatial grid that holds features. The output of the model may be of any kind.

    Layers of the module that computes the output, such as a detection head, are left out, as are convolutions whose
    result is returned. A model whose output has no gradient gets its last layer with features.
    """

    def mix_outputs(inputs: Tensor) -> Tensor:
        return NoTarget().mix_output(score.forward(inputs), len(inputs))

    return choose_layer(model, mix_outputs, x, target_selects_positions=True, for_features=True)


def choose_layer(
    model: nn.Module,
    score: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    target_selects_positions: bool = False,
    for_features: bool = False,
) -> SpatialLayer:
    """Return the last layer that has a spatial grid, holds features and affects the score (N,).

    A backward pass shows whether a layer affects the score. In a transformer with a class token, the patch tokens after
    the last attention do not. With `target_selects_positions`, the score is one of many places, as in segmentation, and
    layers of the head would predict it already. Then the last layer of the backbone or encoder is returned, or of the
    coarsest grid if none has such a name. For `for_features` see `choose_feature_layer`.
    """
    other_inputs = score.extra_model_inputs if isinstance(score, Score) else ()
    class_name, layers = type(model).__name__, find_spatial_layers(model, lambda: score(x), x, other_inputs)
    if for_features:
        layers = _drop_head_layers(model, layers, lambda: score(x))
    layers = _select_encoder_layers(model, layers) if target_selects_positions else layers
    if not layers and x.ndim == 5 and (remedy := _advise_on_per_frame_layer(model, lambda: score(x), x.shape)):
        raise LayerError(f"no layer of {class_name} has maps (N,K,T,h,w); {remedy}")
    if not layers:
        scripted = any(isinstance(part, torch.jit.ScriptModule) for part in unwrap(model).modules())
        hint = "; hooks cannot look into its TorchScript parts" if scripted else ""
        raise LayerError(f"no layer of {class_name} has spatial extent for an input {tuple(x.shape)}{hint}")
    holds_tokens, found_gradient = layers[-1].layout.kind == TOKENS, False
    if holds_tokens:
        layers = [layer for layer in layers if layer.layout.kind == TOKENS]
    step = len(layers) if target_selects_positions or holds_tokens else LAYERS_PER_PASS
    contradicted: list[LayerError] = []
    for end in range(len(layers), 0, -step):
        last = layers[max(0, end - step) : end]
        gradients = _compute_score_gradients(model, score, x, [layer.name for layer in last])
        found_gradient = found_gradient or bool(gradients)
        read = {
            layer: channels
            for layer in reversed(last)
            if (
                channels := _find_channels_that_affect_score(layer, gradients.get(layer.name), target_selects_positions)
            )
            is not None
        }
        if for_features and not found_gradient:
            read = {layer: torch.ones(0, dtype=torch.float32, device="cpu") for layer in reversed(last)}
        order = sorted(read, key=lambda layer: not _holds_features(model, layer, read[layer]))
        for number, layer in enumerate(order):
            # if the first is not a grid of the image, many like it may follow, which share forward passes
            next_layers = order[number : number + LAYERS_PER_PASS] if contradicted else []
            result = probe_layer_layout(model, layer, next_layers, score, x)
            is_doubtful = (
                bool(contradicted) and layer.is_misplaced
            )  # not better than the later layer that the probe rejected
            if result.verdict is not LayoutVerdict.CONTRADICTED and not is_doubtful:
                return layer
            if result.verdict is not LayoutVerdict.CONTRADICTED:
                continue
            contradicted.append(build_contradicted_layout_error(f"layer {layer.name!r}", layer.layout, result.reason))
    if contradicted:
        raise contradicted[0]
    where = "in" if target_selects_positions else "at the patch tokens of"
    reason = f"the score's gradient is zero {where} every layer of {class_name} (an untrained head?)"
    fix = "name a layer"
    if not found_gradient:
        unrelated = f"the score depends on no layer of {class_name} with spatial extent"
        reason, fix = (
            f"{unrelated}: the model detaches it, or turns gradients off",
            f"{fix}, or a method without gradients",
        )
    raise LayerError(reason, fix=fix, remedy=Remedy.SET_LAYER)


def _compute_score_gradients(
    model: nn.Module, score: Callable[[Tensor], Tensor], x: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Compute the gradient of the score at each layer. Return the gradients by name, only for layers that affect the score."""
    with Tap(model, names) as tap:
        scores = tap.run(lambda: score(x)).sum()
        try:
            tap.backward(scores)
        except LayerError:  # the score depends on none of them
            return {}
        return {name: gradient for name in names if (gradient := tap.select_call(name).gradient) is not None}


def _find_channels_that_affect_score(
    layer: SpatialLayer, gradient: Tensor | None, target_selects_positions: bool
) -> Tensor | None:
    """Return a mask (K,) of those channels of a layer that affect the score. Return None if no channel does."""
    if gradient is None:
        return None
    channels = layer.layout.to_maps(gradient).transpose(0, 1).flatten(1).any(1)
    # the score of such a target may be read at another resolution
    any_gradient_suffices = layer.layout.kind != TOKENS and not target_selects_positions
    return channels if any_gradient_suffices or bool(channels.any()) else None


def _drop_head_layers(
    model: nn.Module, layers: list[SpatialLayer], forward: Callable[[], object]
) -> list[SpatialLayer]:
    """Drop layers inside a head, and convolutions whose result is the model's output. If this leaves no layer, return all layers.

    A head is a module that returns the model's output, but does not hold all layers.
    """
    returned: dict[str, list[Tensor]] = {}  # the tensors are kept, so that their ids stay unique

    def record_tensors(name: str, module: nn.Module, args: object, output: object) -> None:
        returned[name] = [leaf for _, leaf in iter_leaves(output)]

    inner = unwrap(model)
    with torch.no_grad(), Hooks() as hooks:
        for name, module in inner.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.add_handle(module.register_forward_hook(thread_local_hook(partial(record_tensors, name))))
        forward()
    final = {id(leaf) for leaf in returned.get("", ())}
    returning = [name for name, leaves in returned.items() if name and final and final <= set(map(id, leaves))]
    heads = tuple(
        f"{name}." for name in returning if any(not f"{layer.name}.".startswith(f"{name}.") for layer in layers)
    )
    predictions = final.intersection(
        id(leaf)
        for name, leaves in returned.items()
        for leaf in leaves
        if isinstance(inner.get_submodule(name), _ConvNd)
    )
    remaining = [
        layer
        for layer in layers
        if not layer.name.startswith(heads) and predictions.isdisjoint(map(id, returned[layer.name]))
    ]
    return remaining or layers


def _select_encoder_layers(model: nn.Module, layers: list[SpatialLayer]) -> list[SpatialLayer]:
    """Select the layers inside the encoder or backbone. If no module is named so, select the layers with the coarsest grid.

    Models of Hugging Face name their backbone in `base_model_prefix`. The coarsest grid may lie in their heads, which pool.
    """
    names = [name for name, _ in unwrap(model).named_modules() if name.rpartition(".")[2] in ENCODER_NAMES]
    shallow = sorted(names, key=lambda name: name.count("."))[:1]
    prefix = getattr(unwrap(model), "base_model_prefix", None)
    if not shallow and isinstance(prefix, str) and isinstance(getattr(unwrap(model), prefix, None), nn.Module):
        shallow = [prefix]
    bodies = [f"{name}.body" for name in shallow if any(layer.name.startswith(f"{name}.body.") for layer in layers)]
    for part in (*bodies, *shallow):
        if inside := [layer for layer in layers if layer.name == part or layer.name.startswith(f"{part}.")]:
            return inside
    fewest = min((math.prod(layer.layout.grid) for layer in layers), default=0)
    return [layer for layer in layers if math.prod(layer.layout.grid) == fewest]


def _holds_features(model: nn.Module, layer: SpatialLayer, channels: Tensor) -> bool:
    """Whether a layer holds features. Dense predictions and inner steps of a block are not features."""
    if len(channels) > 1 and int(channels.sum()) == 1:
        return False
    if layer.layout.kind != TOKENS:
        return True
    # a Linear computes queries, keys and values, or class scores; a decoder's tokens may be its queries
    is_step = "decoder" in layer.name.split(".") or isinstance(find_layer(model, layer.name)[1], nn.Linear)
    return not is_step and len(channels) not in find_vocabulary_sizes(model)


def choose_last_feature_layer(score: Score, x: Tensor) -> SpatialLayer:
    """Return the last layer with a spatial grid that holds features, whether or not the output depends on its patches.

    The patches behind the last attention of a transformer with a class token have no effect on an embedding. Yet they
    are the features that describe each patch.
    """
    model = score.model
    layers = find_spatial_layers(model, lambda: score.forward(x), x, score.extra_model_inputs)
    layers = _drop_head_layers(model, layers, lambda: score.forward(x))
    if layers and layers[-1].layout.kind == TOKENS:
        layers = [layer for layer in layers if layer.layout.kind == TOKENS]
    every_channel, latest_first = torch.ones(0, dtype=torch.bool, device="cpu"), layers[::-1]
    order = sorted(latest_first, key=lambda layer: not _holds_features(model, layer, every_channel))
    contradiction: LayerError | None = None
    for number, layer in enumerate(order):
        next_layers = order[number : number + LAYERS_PER_PASS] if contradiction else []
        result = probe_layer_layout(model, layer, next_layers, score.forward, x)
        if result.verdict is not LayoutVerdict.CONTRADICTED:
            return layer
        contradiction = contradiction or build_contradicted_layout_error(
            f"layer {layer.name!r}", layer.layout, result.reason
        )
        if find_random_masking_reason(model):  # an earlier layer holds the patches before they are hidden
            raise contradiction
    if contradiction:
        raise contradiction
    raise LayerError(f"no layer of {type(model).__name__} has spatial extent for an input {tuple(x.shape)}")
