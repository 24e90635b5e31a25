"""`SharedLayerPass`: one forward pass for several methods, layers and scores, with one backward pass per score."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from camscope.errors import CamscopeError, LayerError, ModelError
from camscope.explainers.cam.layer_features_and_perturbed_scores import (
    LayerFeatures,
    record_image_share_of_padded_input,
)
from camscope.explainers.cam.layer_selection_mixin import LayerSelectionMixin
from camscope.explainers.core.chunk_perturbed_copies_by_memory import ActivationBytes, measure_activation_bytes
from camscope.explainers.core.evaluation_context import check_finite
from camscope.hooks.cache_prefix_and_vary_output import PrefixCache
from camscope.hooks.find_layers import find_layer, find_layers, unwrap
from camscope.hooks.input_gradients import HALF_PRECISION_BOOSTS
from camscope.hooks.spatial_map_tracker import SpatialMapTracker, is_output_unchanged_by_interception
from camscope.hooks.tap_layer_output_and_gradient import Tap, TappedCall
from camscope.layers.infer_layout import has_unequal_strides
from camscope.layers.judge_layout_from_noise_reactions import LayoutProbeResult, LayoutVerdict
from camscope.layers.layout import CHANNELS_FIRST, Layout, returns_channels_first
from camscope.layers.spatial_layers import find_layout_doubt_reason, infer_layer_layout, record_layout_hints
from camscope.layers.verify_layout_by_noise import (
    OutputLocation,
    build_contradicted_layout_error,
    cache_layout_result,
    forward_without_side_effects,
    get_cached_layout_result,
    has_cached_layout_result,
    probe_layout,
)
from camscope.plurals import plural
from camscope.targets import Score, full_precision
from camscope.unusual_tensors import check_ordinary_tensor

# errors of PyTorch and of libraries such as torchvision about an operation that can be differentiated only once
NO_SECOND_DERIVATIVE_PATTERN = re.compile(
    r"double backwards?\b|derivative for .* is not implemented|once_differentiable|differentiated twice", re.IGNORECASE
)


class LayerMaps(NamedTuple):
    """The output of a layer as maps (N,K,*s) in at least float32, its layout, and the function that converts outputs."""

    maps: Tensor
    layout: Layout | None
    to_maps: Callable[[Tensor], Tensor]


class SharedLayerPass(ExitStack):
    """One forward pass of x (N,C,*S) for several methods, layers and scores, with one backward pass per score.

    The forward pass runs when the `with` begins. The backward passes run in `iter_method_indices_and_features`.
    """

    def __init__(
        self,
        explainers: Sequence[LayerSelectionMixin],
        layers: Sequence[str],
        x: Tensor,
        scores: Sequence[Score],
        *,
        allow_more_passes: bool = True,
    ) -> None:
        super().__init__()
        self._allow_more_passes = allow_more_passes
        self._explainers, self._layers, self._x, self._scores = explainers, layers, x, scores
        self._needs_graph = any(explainer.needs_gradient for explainer in explainers)
        self._needs_curvature = any(explainer.second_order for explainer in explainers)
        groups: dict[object, list[int]] = {}
        for t, explainer in enumerate(explainers):
            groups.setdefault(explainer.differentiated_score_key, []).append(t)
        self._differentiated_score_groups = list(groups.values())
        self._layer_maps: dict[object, LayerMaps] = {}

    def __enter__(self) -> "SharedLayerPass":
        super().__enter__()
        try:
            self._run_forward()
            if self._has_repeated_calls and not self._needs_graph:
                self.close()
                self._needs_graph = True
                self._run_forward()
        except BaseException:
            self.close()
            raise
        return self

    def iter_method_indices_and_features(self, score_index: int) -> Iterator[tuple[int, LayerFeatures]]:
        """Run the backward passes of one score. Yield the index of each method with the features of its layer."""
        for g, group in enumerate(self._differentiated_score_groups):
            values = self._differentiated_scores[score_index][g]
            last = (score_index, g) == (len(self._scores) - 1, len(self._differentiated_score_groups) - 1)
            needs_gradients = self._has_repeated_calls or any(self._explainers[t].needs_gradient for t in group)
            layers = list(dict.fromkeys(self._layers[t] for t in group))
            gradients = self._compute_gradients(values, layers, last) if needs_gradients else {}
            for t in group:
                yield t, self._build_features(t, score_index, values, gradients.get(self._layers[t]))

    def _run_forward(self) -> None:
        """Run the model once. Record the layers of all methods, and what later passes and the layouts need."""
        first, model, scores = self._explainers[0], self._scores[0].model, self._scores
        layers, methods = list(dict.fromkeys(self._layers)), list(zip(self._layers, self._explainers, strict=True))
        again = [layer for layer, explainer in methods if explainer.runs_model and self._allow_more_passes]
        # outputs before the layer are cached for later passes; of several layers, each would store its own
        cached = self._allow_more_passes and any(explainer.runs_partial_forward for _, explainer in methods)
        self._replay = PrefixCache(model, layers[0], first.call_index or 0) if cached and len(layers) == 1 else None
        tap = Tap(
            model, layers, output_index=first.output_index, call_index=first.call_index, gradients=self._needs_graph
        )
        self._tap = self.enter_context(tap)
        if self._needs_curvature:  # fused attention has no second derivative
            self.enter_context(sdpa_kernel(SDPBackend.MATH))
        with ExitStack() as around:
            measured = find_layers(model, again) if again else {}
            self._activation_bytes = around.enter_context(measure_activation_bytes(model, measured)) if again else {}
            around.enter_context(self._replay or nullcontext())
            padded = around.enter_context(record_image_share_of_padded_input(model))
            self._layout_hints = record_layout_hints(model, around)
            is_unknown = any(map(self._needs_layout_inference, self._explainers, self._layers))
            watched = is_unknown and is_output_unchanged_by_interception(model)
            self._spatial_ops = None
            if watched:
                self._spatial_ops = around.enter_context(
                    SpatialMapTracker(model, self._x, scores[0].extra_model_inputs)
                )
            output = self._tap.run(lambda: scores[0].forward(self._x))
        self._input_shares = padded[-1] if padded else None
        # the gradient shows which of several calls the score depends on, whether a method uses it or not
        repeated = any(len(calls) > 1 for calls in self._tap.calls.values())
        self._has_repeated_calls = first.call_index is None and repeated
        self._differentiated_scores = [  # all targets are checked before any backward pass
            [
                self._explainers[g[0]].compute_differentiated_score(s, output, len(self._x))
                for g in self._differentiated_score_groups
            ]
            for s in scores
        ]
        every = [values for row in self._differentiated_scores for values in row]
        check_finite("the score", torch.cat(every), first.on_nonfinite)

    def _needs_layout_inference(self, explainer: LayerSelectionMixin, layer: str) -> bool:
        """Whether a layer's layout must be inferred, because neither the user nor a cache provides a layout for this
        input size.
        """
        if explainer.layout is not None or explainer.reshape is not None:
            return False
        location = OutputLocation(layer, explainer.output_index)
        return not has_cached_layout_result(self._scores[0].model, location, self._x.shape[1:])

    def _verify_layout(
        self, explainer: LayerSelectionMixin, layer: str, call_index: int, layout: Layout | None
    ) -> LayoutVerdict:
        """Verify the layout of one call of a layer, and return the verdict. Raise LayerError if the layout is contradicted."""
        if layout is None or explainer.layout is not None or math.prod(layout.grid) == 1:
            return LayoutVerdict.VERIFIED
        score, x, calls = self._scores[0], self._x, self._tap.calls[layer]
        indices = range(len(calls)) if len(calls) > 1 else [None]
        locations = [OutputLocation(layer, explainer.output_index, n) for n in indices]
        result = get_cached_layout_result(score.model, locations[call_index], x.shape[1:], layout)
        is_misplaced = False
        if result is None and layout.kind == CHANNELS_FIRST:
            is_misplaced = self._cache_verdicts_and_test_if_misplaced(layer, locations, layout, call_index)
            result = get_cached_layout_result(score.model, locations[call_index], x.shape[1:], layout)
        if result is None:
            first = torch.zeros(1, dtype=torch.long, device=x.device)

            def run_forward(inputs: Tensor) -> object:
                return score.forward(inputs, None if len(inputs) == len(x) else first)

            shares = self._input_shares
            result = probe_layout(
                score.model,
                [locations[call_index]],
                layout,
                x,
                run_forward,
                input_shares=shares,
                misplaced_layers=[layer] if is_misplaced else [],
            )[0]
        if result.verdict is LayoutVerdict.UNDECIDED:
            doubt = find_layout_doubt_reason(
                score.model, layout, calls[call_index].activation.shape, self._layout_hints
            )
            result = LayoutProbeResult(LayoutVerdict.CONTRADICTED, doubt) if doubt else result
        if result.verdict is LayoutVerdict.CONTRADICTED:
            raise build_contradicted_layout_error(f"layer {layer!r}", layout, result.reason)
        return result.verdict

    def _cache_verdicts_and_test_if_misplaced(
        self, layer: str, locations: Sequence[OutputLocation], layout: Layout, call_index: int
    ) -> bool:
        """Cache the verdict for calls whose maps come from convolutions. Return whether one call has misplaced cells."""
        score, x, tracker, calls = self._scores[0], self._x, self._spatial_ops, self._tap.calls[layer]
        if tracker is None and returns_channels_first(find_layer(score.model, layer)[1]):
            # interception would have changed the results of this model: one more forward pass
            tap = Tap(score.model, layer, output_index=locations[0].output_index, gradients=False)
            tracker = SpatialMapTracker(unwrap(score.model), x, score.extra_model_inputs)
            with forward_without_side_effects(score.model, x.device), tap, tracker:
                score.forward(x)
            calls = tap.calls[layer]
        if tracker is None or len(calls) != len(locations):  # a target function may call the model again
            return False
        for location, call in zip(locations, calls, strict=True):
            if tracker.is_spatial_map(call.activation) and call.activation.shape[2:] == layout.grid:
                cache_layout_result(
                    score.model, location, x.shape[1:], layout, LayoutProbeResult(LayoutVerdict.BY_CONSTRUCTION)
                )
        is_misplaced: bool = tracker.is_misplaced(calls[call_index].activation)
        return is_misplaced

    def _compute_gradients(self, values: Tensor, layers: Sequence[str], is_last_backward: bool) -> dict[str, Tensor]:
        """Compute the gradient at each layer, at least in float32.
        If the gradient vanishes in float16, scale the score up first.
        """
        tap, keep = self._tap, not is_last_backward or self._needs_curvature
        half = any(call.activation.dtype == torch.float16 for name in layers for call in tap.calls[name])
        tap.backward(values.sum(), retain_graph=keep or half)
        gradients = {name: full_precision(_require_gradient(tap, name)) for name in layers}
        for boost in HALF_PRECISION_BOOSTS[1:] if half else ():
            lost = {name: ~gradient.flatten(1).any(1) for name, gradient in gradients.items()}
            if not any(bool(rows.any()) for rows in lost.values()):
                break
            tap.backward(values.sum() * boost, retain_graph=True)
            for name, rows in lost.items():
                boosted = full_precision(_require_gradient(tap, name)) / boost
                is_recovered = rows & boosted.flatten(1).isfinite().all(1)
                column = is_recovered.view(-1, *[1] * (boosted.ndim - 1))
                gradients[name] = torch.where(column, boosted, gradients[name])
        return gradients

    def _build_features(
        self, explainer_index: int, score_index: int, values: Tensor, gradient: Tensor | None
    ) -> LayerFeatures:
        """Build what one method needs to compute the map of one score: activation, gradient, layout and notes."""
        explainer, layer = self._explainers[explainer_index], self._layers[explainer_index]
        call, calls = self._tap.select_call(layer), self._tap.calls[layer]
        call_index = next(n for n, candidate in enumerate(calls) if candidate is call)
        activation, layout, to_maps = self._convert_output_to_maps(explainer, layer, call)
        verdict = self._verify_layout(explainer, layer, call_index, layout)
        if gradient is not None:
            check_finite(f"the gradient at layer {layer!r}", gradient, explainer.on_nonfinite)
        notes: tuple[str, ...] = ()
        if len(calls) > 1:
            notes += (f"layer {layer!r} ran {plural(len(calls), 'time')}; call {call_index} is explained",)
        if layout is not None and explainer.layout is None and has_unequal_strides(layout.grid, self._x.shape[2:]):
            grid, size = ("x".join(map(str, shape)) for shape in (layout.grid, self._x.shape[2:]))
            notes += (f"the grid {grid} of layer {layer!r} has not the proportions of the input {size}: is it one?",)
        replay = self._replay

        def compute_curvature() -> Tensor:
            if not explainer.second_order:
                raise LayerError(
                    "no second derivatives were computed: set second_order = True in the class of the method"
                )
            try:
                return to_maps(_compute_hessian_times_activation(values, call.activation))
            except RuntimeError as error:
                if isinstance(error, CamscopeError) or not NO_SECOND_DERIVATIVE_PATTERN.search(str(error)):
                    raise
                raise ModelError(
                    f"{explainer.composed_name} needs second derivatives, and an operation behind layer {layer!r} has none "
                    f"({str(error).splitlines()[0]}); use a method of first order, such as gradcam"
                ) from error

        return LayerFeatures(
            layer=layer,
            activation=activation,
            x=self._x,
            score=self._scores[score_index],
            values=values.detach(),
            layout=layout,
            to_maps=to_maps,
            optional_gradient=to_maps(gradient) if gradient is not None and explainer.needs_gradient else None,
            recompute=partial(_recompute_features, explainer, layer, self._scores[score_index]),
            compute_curvature=compute_curvature,
            output_index=explainer.output_index,
            call_index=call_index,
            batch_size=getattr(explainer, "batch_size", None),
            activation_bytes=self._activation_bytes.get(layer, ActivationBytes()),
            replay=replay if replay and replay.has_cached_outputs and replay.call_index == call_index else None,
            input_shares=self._input_shares,
            notes=notes,
            layout_unverified=verdict is LayoutVerdict.UNDECIDED,
        )

    def _convert_output_to_maps(self, explainer: LayerSelectionMixin, layer: str, call: TappedCall) -> LayerMaps:
        """Convert the output of a layer to maps, by the inferred layout or by the function `reshape` of the user."""
        key, x = (id(call), str(explainer.layout), explainer.reshape), self._x
        if key in self._layer_maps:
            return self._layer_maps[key]
        output = call.activation.detach()
        check_finite(f"the activation of layer {layer!r}", output, explainer.on_nonfinite)
        layout, to_maps = None, explainer.reshape
        if to_maps is None:
            try:
                model, hints = self._scores[0].model, self._layout_hints
                layout = infer_layer_layout(model, layer, output, x, hints, explainer.layout)
            except LayerError as error:
                raise LayerError(f"layer {layer!r}: {error}") from None
            to_maps = layout.to_maps
        maps = to_maps(full_precision(output))
        check_ordinary_tensor(maps, f"the result of reshape= for layer {layer!r}", "maps", LayerError)
        if layout is None and (maps.ndim != x.ndim or len(maps) != len(x)):
            shape = tuple(maps.shape)
            raise LayerError(
                f"reshape= returned the shape {shape} for layer {layer!r}; expected (N,K,h,w) with N = {len(x)}"
            )
        self._layer_maps[key] = LayerMaps(maps, layout, to_maps)
        return self._layer_maps[key]


def _recompute_features(explainer: LayerSelectionMixin, layer: str, score: Score, x: Tensor) -> LayerFeatures:
    with SharedLayerPass([explainer], [layer], x, [score], allow_more_passes=False) as another:
        return next(features for _, features in another.iter_method_indices_and_features(0))


def _require_gradient(tap: Tap, layer: str) -> Tensor:
    gradient = tap.select_call(layer).gradient
    if gradient is None:
        raise LayerError(f"the score does not depend on layer {layer!r}")
    return gradient


def _compute_hessian_times_activation(values: Tensor, activation: Tensor) -> Tensor:
    """Compute the Hessian of the values times the activation. If the values are linear in the activation, the result is zero."""
    (gradient,) = torch.autograd.grad(values.sum(), activation, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(activation)
    product = (gradient * activation.detach()).sum()
    (curved,) = torch.autograd.grad(product, activation, retain_graph=True, allow_unused=True)
    return full_precision(torch.zeros_like(activation) if curved is None else curved.detach())
