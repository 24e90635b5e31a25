"""LayerExplainer: what every method shares that looks at one layer."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from camscope.cards import card_of
from camscope.explainers.base import Explainer
from camscope.explainers.excused import attempted
from camscope.explainers.features import Features
from camscope.explainers.grids import first_part
from camscope.explainers.maps import Later, Maps
from camscope.explainers.method import Method
from camscope.explainers.passes import Pass
from camscope.explainers.scope import expect_whole
from camscope.hooks.base import find_layer, unwrap
from camscope.layers import Layout, choose_layer
from camscope.targets import Score, Target


@dataclass(eq=False, repr=False)
class LayerExplainer(Explainer):
    """A map made of one layer's channels. A method writes `combine`.

    `layer`: a name, a module, or None: the last layer with spatial extent, named in the result. `output`: key of the
    tensor in a layer that returns several; `call`: which call of a layer that runs several times (default: the last one
    that the score depends on). `layout`: "channels_first", "channels_last" or a Layout, where the layer's shape is
    ambiguous; `reshape`: a callable output -> (N,K,*s) instead.

    Facts of a method: `needs_gradient` of the score at the layer; `second_order`, its curvature too; `runs_model` again
    while it combines; of those, `runs_rest`: what comes before the layer sees the same input again.
    """

    layer: str | nn.Module | None = None
    _: KW_ONLY
    output: str | int | None = None
    call: int | None = None
    layout: str | Layout | None = None
    reshape: Callable[[Tensor], Tensor] | None = None

    needs_gradient: ClassVar[bool] = False
    second_order: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_whole(None, call=self.call)
        self.layer = None if self.layer is None else find_layer(unwrap(self.model), self.layer)[0]
        self._chosen: dict[tuple[object, ...], str] = {}

    @abstractmethod
    def combine(self, features: Features) -> Tensor:
        """(N,K,*s) and what else `features` offer -> (N,*s): the map, as the method's formula has it."""

    def values(self, score: Score, output: Any, samples: int) -> Tensor:
        """(N,): the number whose gradient is taken: the score, unless a method asks another question."""
        return score.read(output, samples)

    @property
    def question(self) -> Hashable:
        """Methods whose `values` are the same share a backward pass."""
        return "score" if type(self).values is LayerExplainer.values else id(self)

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `maps_of`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        return [one() if callable(one) else one for one in LayerExplainer.maps_of([self], x, scores)[0]]

    def settled(self, x: Tensor, score: Score) -> Self:
        """The same method at the layer that it chooses for this input."""
        return self if self.layer is not None else replace(self, layer=self._choose(x, score))

    @property
    def company(self) -> Hashable:
        """Methods share a pass, whatever their layers."""
        return (LayerExplainer, self.precision, self.output, self.call, self.on_nonfinite)

    @staticmethod
    def maps_of(tools: Sequence[Method], x: Tensor, scores: Sequence[Score]) -> list[list[Maps | Later]]:
        """[method][score]: one forward pass and one backward pass a score, whatever the layers that are named.

        One more forward pass wherever the layer that is chosen changes: questions of places may have several. What only
        combines does so at once, so that one score's gradients are held; the others follow, without hooks.
        """
        own = [tool for tool in tools if isinstance(tool, LayerExplainer)]
        chooser = next((tool for tool in own if tool.layer is None), None)
        chosen = [chooser and chooser._choose(x, score) for score in scores]
        made: list[list[Maps | Later]] = [[] for _ in own]
        for unnamed, numbers in groupby(range(len(scores)), chosen.__getitem__):
            layers, some = [str(tool.layer or unnamed) for tool in own], [scores[i] for i in numbers]
            with Pass(own, layers, x, some) as shared:
                for i in range(len(some)):
                    for t, features in shared.features(i):
                        later = partial(attempted, own[t], partial(own[t]._maps, features), x)
                        made[t].append(later if own[t].runs_model else later())
        return made

    def _maps(self, features: Features) -> Maps:
        heat = self.combine(features)
        heat = heat if features.shares is None else first_part(heat, features.shares)
        zero = None
        if features.found is not None:  # a method that asks of other inputs too may find something all the same
            zero = ~(features.found.flatten(1).any(1) | heat.flatten(1).any(1))
        notes = [f"layer {features.layer!r} was chosen"] if self.layer is None else []
        notes += features.notes
        if features.shares is not None:
            notes.append(
                "the detector pads its input: the map is the part of the layer that the input is, interpolated"
            )
        if self.runs_model and any(module.training for module in features.score.model.modules()):
            notes.append(f"in train mode a layer may mix the inputs of a pass, and {self.name} fills its passes itself")
        return Maps(heat, features.layer, features.layout, zero, tuple(notes), tuple(map(tuple, features.remarks)))

    def _choose(self, x: Tensor, score: Score) -> str:
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
