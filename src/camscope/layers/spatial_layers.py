"""Find the layers whose output has a spatial grid. Check that the cells of the grid lie in the order of the image."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, Remedy
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.hooks.vision_language_tokens import (
    find_query_counts,
    holds_language_model_tokens,
    is_query_layer,
    is_text_layer,
    is_vision_language_model,
    record_image_tokens,
    record_text_lengths,
)
from camscope.layers.infer_layout import has_unequal_strides, infer_layout, infer_vision_language_token_layout
from camscope.layers.judge_layout_from_noise_reactions import LayoutProbeResult, LayoutVerdict
from camscope.layers.layout import CHANNELS_FIRST, CHANNELS_LAST, TOKENS, Layout
from camscope.layers.recorded_grids_and_token_counts import ConcatRecorder, LayoutHints
from camscope.layers.verify_layout_by_noise import OutputLocation, probe_layout
from camscope.plurals import plural
from camscope.pytree import find_main_tensor, has_attention_rows

GRID_MODULES = (nn.modules.conv._ConvNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd)
PASS_THROUGH_MODULES = (
    nn.Identity,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


@dataclass(frozen=True)
class SpatialLayer:
    """A layer whose output has a grid of cells.

    If `by_construction` is true, convolutions, poolings and elementwise functions computed the output, so that its grid
    needs no verification. `is_misplaced` says whether cells were flipped, shuffled or shifted on the way.
    `doubt_reason` is described in `find_layout_doubt_reason`.
    """

    name: str
    layout: Layout
    by_construction: bool = field(default=False, compare=False)
    doubt_reason: str = field(default="", compare=False)
    is_misplaced: bool = field(default=False, compare=False)


def record_layout_hints(model: nn.Module, scope: ExitStack) -> LayoutHints:
    """Until `scope` closes, record the grids of the model's convolutions and each concatenation of tokens.

    The returned hints are filled while the model runs. Concatenations are recorded if the model has an embedding, or
    parameters (1,T,K) such as class tokens.
    """
    hints = LayoutHints()

    def record_grid(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and math.prod(output.shape[2:]) > 1:
            hints.grids.add(tuple(output.shape[2:]))

    def record_sequence_length(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if isinstance(output, Tensor) and output.ndim > 2:
            hints.works_on_last_axis = True
            hints.sequence_lengths.add(math.prod(output.shape[1:-1]))

    for module in unwrap(model).modules():
        if isinstance(module, GRID_MODULES):
            scope.callback(module.register_forward_hook(thread_local_hook(record_grid)).remove)
        elif type(module) is nn.LayerNorm or isinstance(module, nn.Linear):
            scope.callback(module.register_forward_hook(thread_local_hook(record_sequence_length)).remove)
    has_embedding = any(isinstance(module, nn.Embedding) for module in unwrap(model).modules())
    if has_embedding or any(parameter.ndim == 3 and len(parameter) == 1 for parameter in unwrap(model).parameters()):
        scope.enter_context(ConcatRecorder(hints.concat_lengths))
    record_image_tokens(model, scope, hints.image_token_positions)
    record_text_lengths(model, scope, hints.text_lengths)
    return hints


def infer_layer_layout(
    model: nn.Module, name: str, output: Tensor, x: Tensor, hints: LayoutHints, layout: str | Layout | None = None
) -> Layout:
    """Infer the layout of a layer's output for an input x (N,C,*S). Raise LayerError if the output is not a grid over the image.

    Models such as Hiera store tokens window by window until they merge them. Only then are the tokens in rows.
    """
    inferred = _infer_layout_from_shape(model, name, output.shape, x.shape, hints, layout)
    if layout:
        return inferred
    weights = has_attention_rows(output)
    if reason := _explain_why_no_grid(model, name, output.shape, weights, inferred, x.shape, hints):
        fix = "choose another layer, or pass layout= if you know that it lies on a grid"
        raise LayerError(reason, fix=fix, remedy=Remedy.SET_LAYOUT)
    merge_factor = _find_token_merge_factor(model)
    patches = max(map(math.prod, hints.grids), default=0)
    if merge_factor > 1 and inferred.kind == TOKENS and math.prod(inferred.grid) * merge_factor > patches:
        raise LayerError(
            f"the {plural(output.shape[1], 'token')} are stored window by window and not in rows. They are in rows "
            f"after the model merges them to {patches // merge_factor}: choose a layer of the last stage, or pass a "
            "reshape= that orders them by rows"
        )
    return inferred


def _infer_layout_from_shape(
    model: nn.Module,
    name: str,
    shape: Sequence[int],
    input_shape: Sequence[int],
    hints: LayoutHints,
    layout: str | Layout | None = None,
) -> Layout:
    """Infer the layout of a layer's output from its shape. For a vision-language model, also use the input ids."""
    in_sequence = layout is None and len(shape) == 3 and _is_vision_language_model(model, hints)
    if in_sequence and holds_language_model_tokens(model, name, shape[1], hints.image_token_positions):
        return infer_vision_language_token_layout(shape, input_shape, hints)
    inferred = infer_layout(shape, input_shape, find_layer(model, name)[1], layout, hints)
    return inferred if isinstance(layout, Layout) else with_video_token_order(model, inferred)


def with_video_token_order(model: nn.Module, layout: Layout) -> Layout:
    """Return the layout with the order in which the model stores the tokens of a video.

    TimeSformer stores them patch by patch, and other models frame by frame.
    """
    is_video = layout.kind == TOKENS and len(layout.grid) == 3
    if is_video and any(type(part).__name__ == "TimesformerEmbeddings" for part in unwrap(model).modules()):
        return replace(layout, time_last=True)
    return layout


def _is_vision_language_model(model: nn.Module, hints: LayoutHints) -> bool:
    """Whether a model mixes image patches with text tokens. All its modules are searched once for all layers of a pass."""
    if hints.is_vision_language is None:
        hints.is_vision_language = is_vision_language_model(model)
    return hints.is_vision_language


def _find_query_counts(model: nn.Module, hints: LayoutHints) -> set[int]:
    """Return the numbers of learned queries. All modules of the model are searched once for all layers of a pass."""
    if hints.query_counts is None:
        hints.query_counts = find_query_counts(model)
    return hints.query_counts


def _explain_why_no_grid(
    model: nn.Module,
    name: str,
    shape: Sequence[int],
    has_attention_rows: bool,
    layout: Layout,
    input_shape: Sequence[int],
    hints: LayoutHints,
) -> str:
    """Return why an output is not a grid: it holds attention weights, queries or text. Return "" if there is no such reason."""
    shape = tuple(shape)
    has_shape_of_weights = {
        CHANNELS_FIRST: len(shape) == 4,
        CHANNELS_LAST: len(shape) == 4 and has_unequal_strides(layout.grid, input_shape[2:]),
        TOKENS: shape[1] == shape[-1],
    }
    if has_attention_rows and has_shape_of_weights[layout.kind]:
        return f"output {shape} holds attention weights between tokens, not an image: each row sums to 1"
    if layout.kind != TOKENS:
        return ""
    if is_query_layer(model, name, shape[1]):
        return f"output {shape} holds {shape[1]} queries of a decoder, which lie on no grid"
    if not _is_vision_language_model(model, hints) and is_text_layer(model, name, shape[1], hints.text_lengths):
        return f"output {shape} holds {plural(shape[1], 'text token')}, which lie on no grid"
    return ""


def find_layout_doubt_reason(model: nn.Module, layout: Layout, shape: Sequence[int], hints: LayoutHints) -> str:
    """Return why the shape of an output raises doubt about its layout if the noise test is undecided. Return "" if
    there is no doubt.
    """
    counts = hints.sequence_lengths | set(map(math.prod, hints.grids))
    if layout.kind == CHANNELS_FIRST and len(shape) == 4 and shape[2] == shape[3] and shape[2] in counts:
        return f"it has the shape of weights between {plural(shape[2], 'token')}, and its cells do not react in place"
    if layout.kind == TOKENS and shape[1] in _find_query_counts(model, hints):
        return f"it has as many tokens as the model has queries, {shape[1]}, and its cells do not react in place"
    return find_random_masking_reason(model) if layout.kind == TOKENS else ""


def find_random_masking_reason(model: nn.Module) -> str:
    """Return why the places of tokens are unknown in a masked autoencoder that hides and shuffles patches. Return "" for
    other models.
    """
    masking = next((part for part in unwrap(model).modules() if hasattr(part, "random_masking")), None)
    if masking is None:
        return ""
    return (
        f"{type(masking).__name__} hides some patches and shuffles the others at random. Take the encoder without masking, as in "
        "timm, or set mask_ratio = 0 and pass an increasing noise= with the image"
    )


def _find_token_merge_factor(model: nn.Module) -> int:
    """Return the factor by which a model such as Hiera merges tokens. For other models return 1."""
    for module in unwrap(model).modules():
        schedule = getattr(module, "schedule" if type(module).__name__ == "Unroll" else "unroll_schedule", None)
        if isinstance(schedule, list | tuple):
            return math.prod(math.prod(strides) for strides in schedule)
    return 1


def find_spatial_layers(
    model: nn.Module, forward: Callable[[], object], x: Tensor, other_inputs: Sequence[Tensor] = ()
) -> list[SpatialLayer]:
    """Call `forward()`, a forward pass of x. Return all layers with more than one cell, in the order of completion.

    `other_inputs` are tensors that the model takes in addition to x.
    """
    finished: dict[str, tuple[torch.Size, bool, bool, bool]] = {}

    def record_layer(name: str, module: nn.Module, output: object) -> None:
        finished.pop(name, None)
        with suppress(LayerError):
            tensor = find_main_tensor(name, output)[1]
            is_map = tracker.is_spatial_map(tensor)
            finished[name] = (
                tensor.shape,
                is_map,
                tracker.is_misplaced(tensor),
                not is_map and has_attention_rows(tensor),
            )

    with torch.no_grad(), Hooks() as hooks:
        hints = record_layout_hints(model, hooks)
        tracker = hooks.enter_context(SpatialMapTracker(unwrap(model), x, other_inputs))
        hook_layer_outputs(model, hooks, record_layer)
        forward()
    layers = []
    for name, (shape, is_map, is_misplaced, weights) in finished.items():
        with suppress(LayerError):
            layout = _infer_layout_from_shape(model, name, shape, x.shape, hints)
            reason = _explain_why_no_grid(model, name, shape, weights, layout, x.shape, hints)
            if math.prod(layout.grid) > 1 and not reason:
                doubt = find_layout_doubt_reason(model, layout, shape, hints)
                in_plane = layout.kind == CHANNELS_FIRST
                layers.append(SpatialLayer(name, layout, is_map and in_plane, doubt, is_misplaced and in_plane))
    return layers


def hook_layer_outputs(model: nn.Module, hooks: Hooks, on_output: Callable[[str, nn.Module, object], None]) -> None:
    """Add hooks that call `on_output(name, module, output)` after each layer. Dropout and similar layers get no hook."""
    for name, module in unwrap(model).named_modules():
        if name and not isinstance(module, (*PASS_THROUGH_MODULES, torch.jit.ScriptModule)):
            hook = thread_local_hook(lambda module, args, output, name=name: on_output(name, module, output))
            hooks.add_handle(module.register_forward_hook(hook))


def drop_layers_with_contradicted_layout(
    model: nn.Module, layers: Sequence[SpatialLayer], forward: Callable[[Tensor], object], x: Tensor
) -> list[SpatialLayer]:
    """Test the layouts of layers with noise for x (N,C,*S). Return the layers whose layout is not contradicted."""
    return [
        layer
        for layer in layers
        if probe_layer_layout(model, layer, [layer], forward, x).verdict is not LayoutVerdict.CONTRADICTED
    ]


def probe_layer_layout(
    model: nn.Module,
    layer: SpatialLayer,
    other_layers: Sequence[SpatialLayer],
    forward: Callable[[Tensor], object],
    x: Tensor,
) -> LayoutProbeResult:
    """Test the layout of a layer with noise. Test all `other_layers` of the same layout in the same forward passes."""
    if layer.by_construction:
        return LayoutProbeResult(LayoutVerdict.BY_CONSTRUCTION)
    probed = {other.name: other for other in (layer, *other_layers) if other.layout == layer.layout}
    moved = [name for name, other in probed.items() if other.is_misplaced]
    result = probe_layout(model, list(map(OutputLocation, probed)), layer.layout, x, forward, misplaced_layers=moved)[0]
    if result.verdict is LayoutVerdict.UNDECIDED and layer.doubt_reason:
        return LayoutProbeResult(LayoutVerdict.CONTRADICTED, layer.doubt_reason)
    return result
