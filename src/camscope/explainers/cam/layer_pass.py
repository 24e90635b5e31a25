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
from camscope.explainers.cam.layer_features import Features, padding_seen
from camscope.explainers.core.batching import Widths, measured
from camscope.explainers.core.evaluation_context import OnNonFinite, checked_finite
from camscope.hooks.base import find_layer, find_layers
from camscope.hooks.gradients import HALF_PRECISION_BOOSTS, zero_rows_skipped
from camscope.hooks.partial_forward import Replay
from camscope.hooks.spatial_ops import SpatialOps, may_be_watched
from camscope.hooks.tap import Call, Tap
from camscope.layers.layout import CHANNELS_FIRST, CONVOLUTIONAL, Layout, Seen, is_askew
from camscope.layers.layout_probe import Finding, Place, Verdict, is_known, known_finding, prove, refusal, remember
from camscope.layers.selection import layout_of, noting, suspicion_of
from camscope.plurals import plural
from camscope.targets import Score, full_precision


class Asker(Protocol):
    """What a pass must know of a method."""

    output: str | int | None
    call: int | None
    layout: str | Layout | None
    reshape: Callable[[Tensor], Tensor] | None
    on_nonfinite: OnNonFinite
    needs_gradient: ClassVar[bool]
    second_order: ClassVar[bool]
    runs_model: ClassVar[bool]
    runs_rest: ClassVar[bool]
    own_rules: ClassVar[bool]

    @property
    def question(self) -> Hashable:
        """What the methods have in common that share a backward pass."""

    def values(self, score: Score, output: Any, samples: int) -> Tensor:
        """(N,): the number whose gradient is taken."""


class Pass(ExitStack):
    """The forward pass of x (N,C,*S) runs at the start of the `with`; `features` runs the backward passes.

    `first`: whether methods may ask for more passes on account of what this one shows.
    """

    def __init__(
        self, tools: Sequence[Asker], layers: Sequence[str], x: Tensor, scores: Sequence[Score], *, first: bool = True
    ) -> None:
        super().__init__()
        self._first = first
        self._tools, self._layers, self._x, self._scores = tools, layers, x, scores
        self._graph = any(tool.needs_gradient for tool in tools)
        self._curved = any(tool.second_order for tool in tools)
        self._groups = _groups(tools)
        self._shapes: dict[object, tuple[Tensor, Layout | None, Callable[[Tensor], Tensor]]] = {}

    def __enter__(self) -> "Pass":
        super().__enter__()
        try:
            self._run()
            if self._several and not self._graph:
                self.close()
                self._graph = True
                self._run()
        except BaseException:
            self.close()
            raise
        return self

    def features(self, i: int) -> Iterator[tuple[int, Features]]:
        """The number of each method, and what it is given for score i."""
        for g, group in enumerate(self._groups):
            values = self._values[i][g]
            last = (i, g) == (len(self._scores) - 1, len(self._groups) - 1)
            wanted = self._several or any(self._tools[t].needs_gradient for t in group)
            layers = list(dict.fromkeys(self._layers[t] for t in group))
            gradients = self._gradients(values, layers, last) if wanted else {}
            for t in group:
                yield t, self._features_of(t, i, values, gradients.get(self._layers[t]))

    def _run(self) -> None:
        first, model, scores = self._tools[0], self._scores[0].model, self._scores
        again = [self._layers[t] for t, tool in enumerate(self._tools) if tool.runs_model and self._first]
        self._widths: dict[str, Widths] = {}
        tapped = list(dict.fromkeys(self._layers))
        # what comes before the one layer is remembered for the passes that follow; of several, each would keep its own
        replayed = self._first and len(tapped) == 1 and any(tool.runs_rest for tool in self._tools)
        self._replay = Replay(model, tapped[0], first.call or 0) if replayed else None
        self._tap = self.enter_context(Tap(model, tapped, output=first.output, call=first.call, gradients=self._graph))
        if self._curved:  # fused attention has no second derivative
            self.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif self._graph and not any(tool.own_rules for tool in self._tools):
            self.enter_context(zero_rows_skipped(model))
        with ExitStack() as around:
            if again:
                self._widths = around.enter_context(measured(model, find_layers(model, again)))
            around.enter_context(self._replay or nullcontext())
            padded = around.enter_context(padding_seen(model))
            self._seen = noting(model, around)
            unknown = [layer for t, layer in enumerate(self._layers) if self._is_inferred(self._tools[t], layer)]
            watched = unknown and may_be_watched(model)
            self._ops = around.enter_context(SpatialOps(model, self._x.shape[2:])) if watched else None
            output = self._tap.run(lambda: scores[0].forward(self._x))
        self._shares = padded[-1] if padded else None
        # which of several calls the score depends on is seen by its gradient, whether a method uses that or not
        self._several = first.call is None and any(len(calls) > 1 for calls in self._tap.calls.values())
        # all questions are checked before any backward
        self._values = [[self._tools[g[0]].values(s, output, len(self._x)) for g in self._groups] for s in scores]
        every = [values for row in self._values for values in row]
        checked_finite("the score", torch.cat(every), first.on_nonfinite)

    def _is_inferred(self, tool: Asker, layer: str) -> bool:
        """Whether the layout of a layer is inferred here for the first time for this model and size."""
        place = Place(layer, tool.output)
        return (
            tool.layout is None
            and tool.reshape is None
            and not is_known(self._scores[0].model, place, self._x.shape[1:])
        )

    def _finding(self, tool: Asker, layer: str, number: int, layout: Layout | None) -> Finding:
        """What is known, or can be proved, of the layout of a layer's call; LayerError where it is contradicted."""
        if layout is None or tool.layout is not None or math.prod(layout.grid) == 1:
            return Finding(Verdict.VERIFIED)
        score, x, calls = self._scores[0], self._x, self._tap.calls[layer]
        places = [Place(layer, tool.output, n if len(calls) > 1 else None) for n in range(len(calls))]
        found = known_finding(score.model, places[number], x.shape[1:], layout)
        if found is None and layout.kind == CHANNELS_FIRST:
            convolutional = isinstance(find_layer(score.model, layer)[1], CONVOLUTIONAL)  # where calls are not watched
            for place, call in zip(places, calls, strict=True):
                made = convolutional if self._ops is None else self._ops.made(call.activation)
                if made and call.activation.shape[1:] == calls[number].activation.shape[1:]:
                    remember(score.model, place, x.shape[1:], layout, Finding(Verdict.BY_CONSTRUCTION))
            found = known_finding(score.model, places[number], x.shape[1:], layout)
        if found is None:
            first = torch.zeros(1, dtype=torch.long, device=x.device)

            def run(inputs: Tensor) -> object:
                return score.forward(inputs, None if len(inputs) == len(x) else first)

            found = prove(score.model, [places[number]], layout, x, run, shares=self._shares)[0]
        if found.verdict is Verdict.UNDECIDED:
            suspicion = suspicion_of(score.model, layout, calls[number].activation.shape, self._seen)
            found = Finding(Verdict.CONTRADICTED, suspicion) if suspicion else found
        if found.verdict is Verdict.CONTRADICTED:
            raise refusal(f"layer {layer!r}", layout, found.reason)
        return found

    def _gradients(self, values: Tensor, layers: Sequence[str], last: bool) -> dict[str, Tensor]:
        """The gradient at each layer in at least float32; a float16 one that vanishes is taken again times 2^k."""
        tap, keep = self._tap, not last or self._curved
        half = any(call.activation.dtype == torch.float16 for name in layers for call in tap.calls[name])
        tap.backward(values.sum(), retain_graph=keep or half)
        gradients = {name: full_precision(_reached(tap, name)) for name in layers}
        for boost in HALF_PRECISION_BOOSTS[1:] if half else ():
            lost = {name: ~gradient.flatten(1).any(1) for name, gradient in gradients.items()}
            if not any(bool(rows.any()) for rows in lost.values()):
                break
            tap.backward(values.sum() * boost, retain_graph=True)
            for name, rows in lost.items():
                boosted = full_precision(_reached(tap, name)) / boost
                found = rows & boosted.flatten(1).isfinite().all(1)
                gradients[name] = torch.where(found.view(-1, *[1] * (boosted.ndim - 1)), boosted, gradients[name])
        return gradients

    def _features_of(self, t: int, i: int, values: Tensor, gradient: Tensor | None) -> Features:
        tool, layer = self._tools[t], self._layers[t]
        call = self._tap.chosen(layer)
        calls = self._tap.calls[layer]
        place = next(n for n, one in enumerate(calls) if one is call)
        activation, layout, to_maps = self._read(tool, layer, call)
        finding = self._finding(tool, layer, place, layout)
        if gradient is not None:
            checked_finite(f"the gradient at layer {layer!r}", gradient, tool.on_nonfinite)
        notes: tuple[str, ...] = ()
        if len(calls) > 1:
            notes += (f"layer {layer!r} ran {plural(len(calls), 'time')}; call {place} is explained",)
        if layout is not None and tool.layout is None and is_askew(layout.grid, self._x.shape[2:]):
            grid, size = ("x".join(map(str, shape)) for shape in (layout.grid, self._x.shape[2:]))
            notes += (f"the grid {grid} of layer {layer!r} has not the proportions of the input {size}: is it one?",)
        return Features(
            layer=layer,
            activation=activation,
            x=self._x,
            score=self._scores[i],
            values=values.detach(),
            layout=layout,
            to_maps=to_maps,
            found=to_maps(gradient) if gradient is not None and tool.needs_gradient else None,
            again=partial(_again, tool, layer, self._scores[i]),
            curvature=(lambda: to_maps(_curvature(values, call.activation))) if tool.second_order else _unknown,
            output=tool.output,
            call=place,
            batch_size=getattr(tool, "batch_size", None),
            widths=self._widths.get(layer, Widths()),
            replay=self._replay if self._replay and self._replay.remembers and self._replay.call == place else None,
            shares=self._shares,
            notes=notes,
            unverified=finding.verdict is Verdict.UNDECIDED,
        )

    def _read(self, tool: Asker, layer: str, call: Call) -> tuple[Tensor, Layout | None, Callable[[Tensor], Tensor]]:
        """A layer's output as (N,K,*s) in at least float32, its layout, and the same way for its gradient."""
        key = (id(call), str(tool.layout), tool.reshape)
        if key not in self._shapes:
            output = call.activation.detach()
            checked_finite(f"the activation of layer {layer!r}", output, tool.on_nonfinite)
            layout, to_maps = _layout(tool, layer, output, self._x, self._scores[0], self._seen)
            self._shapes[key] = to_maps(full_precision(output)), layout, to_maps
        return self._shapes[key]


def _layout(
    tool: Asker, layer: str, output: Tensor, x: Tensor, score: Score, seen: Seen
) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
    if tool.reshape is not None:
        shape = tool.reshape(output).shape
        if len(shape) != x.ndim or shape[0] != len(x):
            raise LayerError(f"reshape= made {tuple(shape)} of layer {layer!r}; expected (N,K,h,w) with N = {len(x)}")
        return None, tool.reshape
    try:
        layout = layout_of(score.model, layer, output, x, seen, tool.layout)
    except LayerError as error:
        raise LayerError(f"layer {layer!r}: {error}") from None
    return layout, layout.to_maps


def _again(tool: Asker, layer: str, score: Score, x: Tensor) -> Features:
    with Pass([tool], [layer], x, [score], first=False) as another:
        return next(features for _, features in another.features(0))


def _unknown() -> Tensor:
    raise LayerError("the curvature was not kept: the method must say second_order = True")


def _groups(tools: Sequence[Asker]) -> list[list[int]]:
    """Numbers of the methods that take the gradient of the same values."""
    groups: dict[object, list[int]] = {}
    for t, tool in enumerate(tools):
        groups.setdefault(tool.question, []).append(t)
    return list(groups.values())


def _reached(tap: Tap, layer: str) -> Tensor:
    gradient = tap.chosen(layer).gradient
    if gradient is None:
        raise LayerError(f"the score does not depend on layer {layer!r}")
    return gradient


def _curvature(values: Tensor, activation: Tensor) -> Tensor:
    """The Hessian of the values there, times the activation: two backward passes; zero where the score is linear."""
    (gradient,) = torch.autograd.grad(values.sum(), activation, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(activation)
    product = (gradient * activation.detach()).sum()
    (curved,) = torch.autograd.grad(product, activation, retain_graph=True, allow_unused=True)
    return full_precision(torch.zeros_like(activation) if curved is None else curved.detach())
