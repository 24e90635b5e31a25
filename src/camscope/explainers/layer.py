"""LayerExplainer: what every method shares that looks at one layer."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

from torch import Tensor

from camscope.explainers.at_layer import AtLayer
from camscope.explainers.excused import attempted
from camscope.explainers.features import Features
from camscope.explainers.grids import first_part
from camscope.explainers.maps import Later, Maps, is_faint
from camscope.explainers.method import Method
from camscope.explainers.passes import Pass
from camscope.targets import Score


class LayerExplainer(AtLayer):
    """A map made of one layer's channels. A method writes `combine`.

    Facts of a method: `needs_gradient` of the score at the layer; `second_order`, its curvature too; `runs_model` again
    while it combines; of those, `runs_rest`: what comes before the layer sees the same input again; `own_rules`: what goes
    back to the layer is no gradient, and nothing may shorten its way.
    """

    needs_gradient: ClassVar[bool] = False
    second_order: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    own_rules: ClassVar[bool] = False

    @abstractmethod
    def combine(self, features: Features) -> Tensor:
        """(N,K,*s) and what else `features` offer -> (N,*s): the map, as the method's formula has it."""

    def values(self, score: Score, output: Any, samples: int) -> Tensor:
        """(N,): the number whose gradient is taken: the score, unless a method asks another question."""
        return score.read(output, samples)

    @property
    def takes_integers(self) -> bool:
        """Whether later passes, if there are any, are of the same input."""
        return not self.own_rules and (self.runs_rest or not self.runs_model)

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
        chosen = [chooser and chooser.choose(x, score) for score in scores]
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
        with features.score.observed() as scores:
            heat = self.combine(features)
        heat = heat if features.shares is None else first_part(heat, features.shares)
        zero, constant = None, scores.is_constant(features.score.precision)
        if features.found is not None:  # a method that asks of other inputs too may find something all the same
            zero = ~(features.found.flatten(1).any(1) | heat.flatten(1).any(1))
            if constant is None and not self.own_rules:
                constant = is_faint(features.score.precision, features.values, features.found, features.activation)
        notes = [*self.told(features.layer, features.score.model), *features.notes]
        if features.shares is not None:
            notes.append(
                "the detector pads its input: the map is the part of the layer that the input is, interpolated"
            )
        if self.runs_model and any(module.training for module in features.score.model.modules()):
            notes.append(f"in train mode a layer may mix the inputs of a pass, and {self.name} fills its passes itself")
        own = tuple(map(tuple, features.remarks))
        return Maps(
            heat, features.layer, features.layout, zero, constant, tuple(notes), own, unverified=features.unverified
        )
