"""Pass: one forward pass that any number of methods, layers and scores share, one backward pass a score."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from camscope.errors import LayerError
from camscope.explainers.cam.layer_features import LayerFeatures, record_input_shares
from camscope.explainers.core.batching import ActivationBytes, measure_activation_bytes
from camscope.explainers.core.evaluation_context import OnNonFinite, check_finite
from camscope.hooks.base import find_layer, find_layers
from camscope.hooks.gradients import HALF_PRECISION_BOOSTS
from camscope.hooks.partial_forward import PrefixCache
from camscope.hooks.spatial_ops import SpatialMapTracker, is_interception_exact
from camscope.hooks.tap import Tap, TappedCall
from camscope.layers.layout import CHANNELS_FIRST, CHANNELS_FIRST_MODULES, Layout, LayoutHints, has_unequal_strides
from camscope.layers.layout_judgment import LayoutVerdict, ProbeResult
from camscope.layers.layout_probe import (
    OutputLocation,
    cache_result,
    get_cached_result,
    has_cached_result,
    make_layout_error,
    probe_layout,
)
from camscope.layers.selection import find_doubt_reason, infer_layer_layout, record_layout_hints
from camscope.plurals import plural
from camscope.targets import Score, full_precision


class SharedPassMethod(Protocol):
    """What a pass must know of a method."""

    output_index: str | int | None
    call_index: int | None
    layout: str | Layout | None
    reshape: Callable[[Tensor], Tensor] | None
    on_nonfinite: OnNonFinite
    needs_gradient: ClassVar[bool]
    second_order: ClassVar[bool]
    runs_model: ClassVar[bool]
    runs_partial_forward: ClassVar[bool]
    has_custom_backward: ClassVar[bool]

    @property
    def objective_key(self) -> Hashable:
        """What the methods have in common that share a backward pass."""

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """(N,): the number whose gradient is taken."""


class SharedPass(ExitStack):
    """The forward pass of x (N,C,*S) runs at the start of the `with`; `iter_features` runs the backward passes.

    `patch_start`: whether methods may ask for more passes on account of what this one shows.
    """

    def __init__(
        self,
        explainers: Sequence[SharedPassMethod],
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
        self._objective_groups = _group_by_objective(explainers)
        self._layer_maps: dict[object, tuple[Tensor, Layout | None, Callable[[Tensor], Tensor]]] = {}

    def __enter__(self) -> "SharedPass":
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

    def iter_features(self, score_index: int) -> Iterator[tuple[int, LayerFeatures]]:
        """The number of each method, and what it is given for score i."""
        for g, group in enumerate(self._objective_groups):
            values = self._objective_values[score_index][g]
            last = (score_index, g) == (len(self._scores) - 1, len(self._objective_groups) - 1)
            needs_gradients = self._has_repeated_calls or any(self._explainers[t].needs_gradient for t in group)
            layers = list(dict.fromkeys(self._layers[t] for t in group))
            gradients = self._compute_gradients(values, layers, last) if needs_gradients else {}
            for t in group:
                yield t, self._build_features(t, score_index, values, gradients.get(self._layers[t]))

    def _run_forward(self) -> None:
        first, model, scores = self._explainers[0], self._scores[0].model, self._scores
        again = [
            self._layers[t]
            for t, explainer in enumerate(self._explainers)
            if explainer.runs_model and self._allow_more_passes
        ]
        self._activation_bytes: dict[str, ActivationBytes] = {}
        tapped = list(dict.fromkeys(self._layers))
        # what comes before the one layer is remembered for the passes that follow; of several, each would keep its own
        replayed = (
            self._allow_more_passes
            and len(tapped) == 1
            and any(explainer.runs_partial_forward for explainer in self._explainers)
        )
        self._replay = PrefixCache(model, tapped[0], first.call_index or 0) if replayed else None
        self._tap = self.enter_context(
            Tap(
                model, tapped, output_index=first.output_index, call_index=first.call_index, gradients=self._needs_graph
            )
        )
        if self._needs_curvature:  # fused attention has no second derivative
            self.enter_context(sdpa_kernel(SDPBackend.MATH))
        with ExitStack() as around:
            if again:
                self._activation_bytes = around.enter_context(
                    measure_activation_bytes(model, find_layers(model, again))
                )
            around.enter_context(self._replay or nullcontext())
            padded = around.enter_context(record_input_shares(model))
            self._layout_hints = record_layout_hints(model, around)
            unknown = [
                layer
                for t, layer in enumerate(self._layers)
                if self._needs_layout_inference(self._explainers[t], layer)
            ]
            watched = unknown and is_interception_exact(model)
            self._spatial_ops = around.enter_context(SpatialMapTracker(model, self._x.shape[2:])) if watched else None
            output = self._tap.run(lambda: scores[0].forward(self._x))
        self._input_shares = padded[-1] if padded else None
        # which of several calls the score depends on is seen by its gradient, whether a method uses that or not
        self._has_repeated_calls = first.call_index is None and any(
            len(calls) > 1 for calls in self._tap.calls.values()
        )
        # all questions are checked before any backward
        self._objective_values = [
            [self._explainers[g[0]].objective(s, output, len(self._x)) for g in self._objective_groups] for s in scores
        ]
        every = [values for row in self._objective_values for values in row]
        check_finite("the score", torch.cat(every), first.on_nonfinite)

    def _needs_layout_inference(self, explainer: SharedPassMethod, layer: str) -> bool:
        """Whether the layout of a layer is inferred here for the first time for this model and size."""
        place = OutputLocation(layer, explainer.output_index)
        return (
            explainer.layout is None
            and explainer.reshape is None
            and not has_cached_result(self._scores[0].model, place, self._x.shape[1:])
        )

    def _verify_layout(
        self, explainer: SharedPassMethod, layer: str, call_index: int, layout: Layout | None
    ) -> ProbeResult:
        """What is known, or can be proved, of the layout of a layer's call; LayerError where it is contradicted."""
        if layout is None or explainer.layout is not None or math.prod(layout.grid) == 1:
            return ProbeResult(LayoutVerdict.VERIFIED)
        score, x, calls = self._scores[0], self._x, self._tap.calls[layer]
        places = [
            OutputLocation(layer, explainer.output_index, n if len(calls) > 1 else None) for n in range(len(calls))
        ]
        verification = get_cached_result(score.model, places[call_index], x.shape[1:], layout)
        if verification is None and layout.kind == CHANNELS_FIRST:
            convolutional = isinstance(
                find_layer(score.model, layer)[1], CHANNELS_FIRST_MODULES
            )  # where calls are not watched
            for place, call in zip(places, calls, strict=True):
                is_spatial = (
                    convolutional if self._spatial_ops is None else self._spatial_ops.is_spatial_map(call.activation)
                )
                if is_spatial and call.activation.shape[1:] == calls[call_index].activation.shape[1:]:
                    cache_result(score.model, place, x.shape[1:], layout, ProbeResult(LayoutVerdict.BY_CONSTRUCTION))
            verification = get_cached_result(score.model, places[call_index], x.shape[1:], layout)
        if verification is None:
            first = torch.zeros(1, dtype=torch.long, device=x.device)

            def run(inputs: Tensor) -> object:
                return score.forward(inputs, None if len(inputs) == len(x) else first)

            verification = probe_layout(
                score.model, [places[call_index]], layout, x, run, input_shares=self._input_shares
            )[0]
        if verification.verdict is LayoutVerdict.UNDECIDED:
            suspicion = find_doubt_reason(score.model, layout, calls[call_index].activation.shape, self._layout_hints)
            verification = ProbeResult(LayoutVerdict.CONTRADICTED, suspicion) if suspicion else verification
        if verification.verdict is LayoutVerdict.CONTRADICTED:
            raise make_layout_error(f"layer {layer!r}", layout, verification.reason)
        return verification

    def _compute_gradients(self, values: Tensor, layers: Sequence[str], is_last_backward: bool) -> dict[str, Tensor]:
        """The gradient at each layer in at least float32; a float16 one that vanishes is taken again times 2^k."""
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
                gradients[name] = torch.where(
                    is_recovered.view(-1, *[1] * (boosted.ndim - 1)), boosted, gradients[name]
                )
        return gradients

    def _build_features(
        self, explainer_index: int, score_index: int, values: Tensor, gradient: Tensor | None
    ) -> LayerFeatures:
        explainer, layer = self._explainers[explainer_index], self._layers[explainer_index]
        call = self._tap.select_call(layer)
        calls = self._tap.calls[layer]
        place = next(n for n, candidate in enumerate(calls) if candidate is call)
        activation, layout, to_maps = self._read_activation(explainer, layer, call)
        finding = self._verify_layout(explainer, layer, place, layout)
        if gradient is not None:
            check_finite(f"the gradient at layer {layer!r}", gradient, explainer.on_nonfinite)
        notes: tuple[str, ...] = ()
        if len(calls) > 1:
            notes += (f"layer {layer!r} ran {plural(len(calls), 'time')}; call {place} is explained",)
        if layout is not None and explainer.layout is None and has_unequal_strides(layout.grid, self._x.shape[2:]):
            grid, size = ("x".join(map(str, shape)) for shape in (layout.grid, self._x.shape[2:]))
            notes += (f"the grid {grid} of layer {layer!r} has not the proportions of the input {size}: is it one?",)
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
            compute_curvature=(lambda: to_maps(_compute_curvature(values, call.activation)))
            if explainer.second_order
            else _raise_missing_curvature,
            output_index=explainer.output_index,
            call_index=place,
            batch_size=getattr(explainer, "batch_size", None),
            activation_bytes=self._activation_bytes.get(layer, ActivationBytes()),
            replay=self._replay
            if self._replay and self._replay.has_cached_outputs and self._replay.call_index == place
            else None,
            input_shares=self._input_shares,
            notes=notes,
            layout_unverified=finding.verdict is LayoutVerdict.UNDECIDED,
        )

    def _read_activation(
        self, explainer: SharedPassMethod, layer: str, call: TappedCall
    ) -> tuple[Tensor, Layout | None, Callable[[Tensor], Tensor]]:
        """A layer's output as (N,K,*s) in at least float32, its layout, and the same way for its gradient."""
        key = (id(call), str(explainer.layout), explainer.reshape)
        if key not in self._layer_maps:
            output = call.activation.detach()
            check_finite(f"the activation of layer {layer!r}", output, explainer.on_nonfinite)
            layout, to_maps = _resolve_layout(explainer, layer, output, self._x, self._scores[0], self._layout_hints)
            self._layer_maps[key] = to_maps(full_precision(output)), layout, to_maps
        return self._layer_maps[key]


def _resolve_layout(
    explainer: SharedPassMethod, layer: str, output: Tensor, x: Tensor, score: Score, layout_hints: LayoutHints
) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
    if explainer.reshape is not None:
        shape = explainer.reshape(output).shape
        if len(shape) != x.ndim or shape[0] != len(x):
            raise LayerError(f"reshape= made {tuple(shape)} of layer {layer!r}; expected (N,K,h,w) with N = {len(x)}")
        return None, explainer.reshape
    try:
        layout = infer_layer_layout(score.model, layer, output, x, layout_hints, explainer.layout)
    except LayerError as error:
        raise LayerError(f"layer {layer!r}: {error}") from None
    return layout, layout.to_maps


def _recompute_features(explainer: SharedPassMethod, layer: str, score: Score, x: Tensor) -> LayerFeatures:
    with SharedPass([explainer], [layer], x, [score], allow_more_passes=False) as another:
        return next(features for _, features in another.iter_features(0))


def _raise_missing_curvature() -> Tensor:
    raise LayerError("the curvature was not kept: the method must say second_order = True")


def _group_by_objective(explainers: Sequence[SharedPassMethod]) -> list[list[int]]:
    """Numbers of the methods that take the gradient of the same values."""
    groups: dict[object, list[int]] = {}
    for t, explainer in enumerate(explainers):
        groups.setdefault(explainer.objective_key, []).append(t)
    return list(groups.values())


def _require_gradient(tap: Tap, layer: str) -> Tensor:
    gradient = tap.select_call(layer).gradient
    if gradient is None:
        raise LayerError(f"the score does not depend on layer {layer!r}")
    return gradient


def _compute_curvature(values: Tensor, activation: Tensor) -> Tensor:
    """The Hessian of the values there, times the activation: two backward passes; zero where the score is linear."""
    (gradient,) = torch.autograd.grad(values.sum(), activation, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(activation)
    product = (gradient * activation.detach()).sum()
    (curved,) = torch.autograd.grad(product, activation, retain_graph=True, allow_unused=True)
    return full_precision(torch.zeros_like(activation) if curved is None else curved.detach())
