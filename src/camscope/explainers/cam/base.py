"""The base of methods that explain at one layer, and of weighted sums of its channels.

- CAM: a weighted sum of one layer's channels.
- LayerExplainer: what every method shares that looks at one layer.
- AtLayer: the settings by which a method is told which layer it looks at.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from camscope.explainers.cam.layer_features import Features
from camscope.explainers.cam.layer_pass import Pass
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import attempted
from camscope.explainers.core.evaluation_context import expect_whole
from camscope.explainers.core.maps import Later, Maps, is_faint
from camscope.explainers.core.method import Method
from camscope.explainers.core.resampling import first_part
from camscope.hooks.base import find_layer, unwrap
from camscope.layers.layout import Layout
from camscope.layers.selection import choose_layer
from camscope.model_card import card_of
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


SPACE = -1
CANCELLED = 0.05  # of the sizes of its terms: what is left of a denominator
CARRIED = 0.1  # of the map, by terms with such a denominator


class WeightedChannels(LayerExplainer):
    """A weighted sum of one layer's channels, whatever the weights come from. A method writes `channel_weights`."""

    relu: ClassVar[bool] = True

    @abstractmethod
    def channel_weights(self, features: Features) -> Tensor:
        """-> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts."""

    def combine(self, features: Features) -> Tensor:
        """(N,*s): Σ_k of `contributions`, and the ReLU where the method has one."""
        cells = self.contributions(features).sum(1)
        return (cells.relu() if self.relu else cells).view(len(cells), *features.activation.shape[2:])

    def contributions(self, features: Features) -> Tensor:
        """(N,K,cells): each channel's part of the map."""
        return self.channel_weights(features) * features.activation.flatten(2)


class CAM(WeightedChannels):
    """A weighted sum of one layer's channels, by the score's gradient. A method writes `weights`, and nothing else."""

    backwards: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells), (N,K,cells) -> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts.

        The cells of a grid of any rank lie on the last axis, `SPACE`.
        """

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1) or (N,K,cells): see `weights`."""
        return self.weights(features.activation.flatten(2), features.gradient.flatten(2))


class QuotientCAM(CAM):
    """A CAM whose channels weigh Σ n / d, with a note where d's that nearly cancel carry the map. Writes `quotients`."""

    @abstractmethod
    def quotients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,cells) twice -> n, d, and the sizes of d's terms; each (N,K,1) or (N,K,cells)."""

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1): Σ n / d, 0 where d is."""
        above, below, _ = self.quotients(activation, gradient)
        return _divided(above, below).sum(SPACE, keepdim=True)

    def channel_weights(self, features: Features) -> Tensor:
        """(N,K,1): see `weights`."""
        parts = self.quotients(features.activation.flatten(2), features.gradient.flatten(2))
        return sum_of_quotients(features, *parts)


def sum_of_quotients(features: Features, above: Tensor, below: Tensor, size: Tensor) -> Tensor:
    """(N,K,1): Σ above / below, 0 where that is; a note on a sample of whose Σ|w A| much has a `below` small beside `size`."""
    parts = _divided(above, below)
    carried = parts.abs() * features.activation.flatten(2).abs().sum(SPACE, keepdim=True)
    doubtful = torch.where(below.abs() < CANCELLED * size, carried, 0)
    share = doubtful.flatten(1).sum(1) / carried.flatten(1).sum(1)
    for sample in (share > CARRIED).nonzero()[:, 0].tolist():
        features.note(
            sample,
            f"{float(share[sample]):.0%} of the map at layer {features.layer!r} comes from denominators that cancel to less "
            f"than {CANCELLED:.0%} of their terms: a slight change of the input, or of the precision, may turn it over; "
            f"choose a layer after a ReLU, or gradcam",
        )
    return parts.sum(SPACE, keepdim=True)


def _divided(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below != 0, above / below, 0)
