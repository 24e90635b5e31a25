"""AtLayer: the settings by which a method is told which layer it looks at."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Self

from torch import Tensor, nn

from camscope.cards import card_of
from camscope.explainers.base import Explainer
from camscope.explainers.scope import expect_whole
from camscope.hooks.base import find_layer, unwrap
from camscope.layers import Layout, choose_layer
from camscope.targets import Score, Target


@dataclass(eq=False, repr=False)
class AtLayer(Explainer):
    """A method that looks at one layer.

    `layer`: a name, a module, or None: the last layer with spatial extent, named in the result. `output`: key of the
    tensor in a layer that returns several; `call`: which call of a layer that runs several times (default: the last one
    that the score depends on). `layout`: "channels_first", "channels_last" or a Layout, where the layer's shape is
    ambiguous; `reshape`: a callable output -> (N,K,*s) instead. Without either, the layout of anything but a map made by
    convolutions is verified: three forward passes, once for each model, layer and input size.
    """

    layer: str | nn.Module | None = None
    _: KW_ONLY
    output: str | int | None = None
    call: int | None = None
    layout: str | Layout | None = None
    reshape: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_whole(None, call=self.call)
        self.layer = None if self.layer is None else find_layer(unwrap(self.model), self.layer)[0]
        self._chosen: dict[tuple[object, ...], str] = {}

    def settled(self, x: Tensor, score: Score) -> Self:
        """The same method at the layer that it chooses for this input."""
        return self if self.layer is not None else replace(self, layer=self.choose(x, score))

    def told(self, layer: str, model: nn.Module) -> list[str]:
        """A note of the layer that was chosen: where somebody named it, here or for the loaded model, there is none."""
        card = card_of(model)
        named = self.layer is not None or (card is not None and card.layer == layer)
        return [] if named else [f"layer {layer!r} was chosen"]

    def choose(self, x: Tensor, score: Score) -> str:
        """The loaded model's own layer, else the last spatial one: known for as long as the model is built the same.

        It is the last one that any class reads; what a callable target reads is looked up each time.
        """
        model = score.model
        card = card_of(model)
        if card and card.layer:
            return card.layer
        if callable(score.target):
            dense = isinstance(score.target, Target) and score.target.dense
            return choose_layer(model, score.overall, x, dense=dense).name
        built = (tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if built not in self._chosen:
            self._chosen = {**self._chosen, built: choose_layer(model, score.overall, x).name}
        return self._chosen[built]
