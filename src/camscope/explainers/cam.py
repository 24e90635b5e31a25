"""CAM: a weighted sum of one layer's channels."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from camscope.cards import card_of
from camscope.errors import LayerError
from camscope.explainers.base import Explainer, Maps
from camscope.explainers.scope import Mode, OnNonFinite, checked_finite
from camscope.hooks.base import find_layer, unwrap
from camscope.hooks.rows import zero_rows_skipped
from camscope.hooks.tap import Call, Tap
from camscope.layers import TOKENS, Layout, SpatialLayer, choose_layer, read_layout
from camscope.targets import Score

SPACE = -1
HALF_PRECISION_BOOSTS = (1.0, 2.0**6, 2.0**12, 2.0**15)


@dataclass(frozen=True)
class _Features:
    """A layer's activation (N,K,*s), its layout, and the same way for its gradient."""

    activation: Tensor
    layout: Layout | None
    to_maps: Callable[[Tensor], Tensor]


class CAM(Explainer):
    """A weighted sum of one layer's channels. A method writes `weights`, and nothing else.

    `layer`: a name, a module, or None: the last layer with spatial extent, named in the result. `output`: key of the
    tensor in a layer that returns several; `call`: which call of a layer that runs several times (default: the last one
    that the score depends on). `layout`: "channels_first", "channels_last" or a Layout, where the layer's shape is
    ambiguous; `reshape`: a callable output -> (N,K,*s) instead.
    """

    relu: ClassVar[bool] = True
    backwards: ClassVar[str] = "1"

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module | None = None,
        *,
        preprocess: Any = None,
        categories: Sequence[str] | None = None,
        output: str | int | None = None,
        call: int | None = None,
        layout: str | Layout | None = None,
        reshape: Callable[[Tensor], Tensor] | None = None,
        mode: Mode = "eval",
        on_nonfinite: OnNonFinite = "raise",
    ) -> None:
        super().__init__(model, preprocess=preprocess, categories=categories, mode=mode, on_nonfinite=on_nonfinite)
        self.layer = None if layer is None else find_layer(unwrap(model), layer)[0]
        self.output, self.call, self.layout, self.reshape = output, call, layout, reshape
        self._chosen: dict[tuple[object, ...], SpatialLayer] = {}

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells), (N,K,cells) -> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts.

        The cells of a grid of any rank lie on the last axis, `SPACE`.
        """

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `maps`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        model = scores[0].model
        layer = self.layer if self.layer is not None else self._choose(x, scores[0])
        with Tap(model, [layer], output=self.output, call=self.call) as tap, zero_rows_skipped(model):
            output = tap.run(lambda: scores[0].forward(x))
            values = [score.read(output, len(x)) for score in scores]  # all questions are checked before any backward
            checked_finite("the score", torch.cat(values), self.on_nonfinite)
            read: dict[int, _Features] = {}
            last = len(scores) - 1
            return [self._map(tap, layer, x, model, read, one, i == last) for i, one in enumerate(values)]

    def _map(
        self,
        tap: Tap,
        layer: str,
        x: Tensor,
        model: nn.Module,
        read: "dict[int, _Features]",
        values: Tensor,
        last: bool,
    ) -> Maps:
        gradient = _gradient(tap, values, last)
        checked_finite(f"the gradient at layer {layer!r}", gradient, self.on_nonfinite)
        call = tap.chosen()
        if id(call) not in read:
            read[id(call)] = self._features(call, layer, x, model)
        features = read[id(call)]
        A, G = features.activation, features.to_maps(gradient)
        cells = (self.weights(A.flatten(2), G.flatten(2)) * A.flatten(2)).sum(1)
        heat = (cells.relu() if self.relu else cells).unflatten(1, A.shape[2:])
        return Maps(heat, layer, features.layout, G.flatten(1).abs().amax(1) == 0, self._calls_note(tap, layer))

    def _features(self, call: Call, layer: str, x: Tensor, model: nn.Module) -> "_Features":
        """The output of one call as (N,K,*s), in at least float32, and the way there for its gradient."""
        activation = call.activation.detach()
        checked_finite(f"the activation of layer {layer!r}", activation, self.on_nonfinite)
        if self.reshape is not None:
            shape = self.reshape(activation).shape
            if len(shape) != x.ndim or shape[0] != len(x):
                raise LayerError(
                    f"reshape= made {tuple(shape)} of layer {layer!r}; expected (N,K,h,w) with N = {len(x)}"
                )
            return _Features(self.reshape(_full(activation)), None, self.reshape)
        try:
            layout = read_layout(activation.shape, x.shape, find_layer(model, layer)[1], self.layout)
        except LayerError as error:
            raise LayerError(f"layer {layer!r}: {error}") from None
        return _Features(layout.to_maps(_full(activation)), layout, layout.to_maps)

    def _choose(self, x: Tensor, score: Score) -> str:
        """The loaded model's own layer, else the last spatial one: known for as long as the model is built the same.

        Among tokens it is the last one that any class reads; what a callable target reads is looked up each time.
        """
        model = score.model
        card = card_of(model)
        if card and card.layer:
            return card.layer
        built = (tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if built in self._chosen and not (callable(score.target) and self._chosen[built].layout.kind == TOKENS):
            return self._chosen[built].name
        layer = choose_layer(model, score.overall, x)
        if layer.layout.kind != TOKENS or not callable(score.target):
            self._chosen = {**self._chosen, built: layer}
        return layer.name

    def _calls_note(self, tap: Tap, layer: str) -> tuple[str, ...]:
        notes = [] if self.layer is not None else [f"layer {layer!r} was chosen"]
        calls = tap.calls[layer]
        if len(calls) > 1:
            place = next(i for i, call in enumerate(calls) if call is tap.chosen())
            notes.append(f"layer {layer!r} ran {len(calls)} times; call {place} is explained")
        return tuple(notes)


def _gradient(tap: Tap, values: Tensor, last: bool) -> Tensor:
    """The gradient in at least float32; a float16 one that vanishes is taken again with the score times 2^k."""
    half = tap.chosen().activation.dtype == torch.float16
    gradient = _full(tap.gradient_of(values.sum(), retain_graph=half or not last))
    for boost in HALF_PRECISION_BOOSTS[1:] if half else ():
        lost = ~gradient.flatten(1).any(1)
        if not bool(lost.any()):
            break
        boosted = _full(tap.gradient_of(values.sum() * boost, retain_graph=True)) / boost
        found = lost & boosted.flatten(1).isfinite().all(1)
        gradient = torch.where(found.view(-1, *[1] * (gradient.ndim - 1)), boosted, gradient)
    return gradient


def _full(values: Tensor) -> Tensor:
    """At least float32: pooling and sums in half precision lose what they add up."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
