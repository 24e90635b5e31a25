"""Base classes of methods that explain at one layer, and of weighted sums of its channels.

- `LayerSelectionMixin`: the settings that select a layer.
- `LayerExplainer`: base of all methods that use the channels of one layer.
- `BaseCAM`: weighted sum of the channels of one layer.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from camscope.errors import CamscopeError
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.cam.layer_pass import SharedPass
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.evaluation_context import check_integer
from camscope.explainers.core.maps import (
    AttributionMaps,
    DeferredMap,
    compute_or_return_error,
    is_below_precision,
    resolve_map,
)
from camscope.explainers.core.method import BaseMethod
from camscope.explainers.core.resampling import crop_padding
from camscope.hooks.base import find_layer, unwrap
from camscope.layers.layout import Layout
from camscope.layers.selection import choose_layer
from camscope.model_card import get_card
from camscope.targets import Score, Target


@dataclass(eq=False, repr=False)
class LayerSelectionMixin(Explainer):
    """A method that looks at one layer.

    `layer`: a name, a module, or None: the last layer with spatial extent, named in the result. `output_index`: key of the
    tensor in a layer that returns several; `call_index`: which call of a layer that runs several times (default: the last one
    that the score depends on). `layout`: "channels_first", "channels_last" or a Layout, where the layer's shape is
    ambiguous; `reshape`: a callable output -> (N,K,*s) instead. Without either, the layout of anything but a map made by
    convolutions is verified: three forward passes, once for each model, layer and input size.
    """

    layer: str | nn.Module | None = None
    _: KW_ONLY
    output_index: str | int | None = None
    call_index: int | None = None
    layout: str | Layout | None = None
    reshape: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(None, call_index=self.call_index)
        self.layer = None if self.layer is None else find_layer(unwrap(self.model), self.layer)[0]
        self._chosen_layers: dict[tuple[object, ...], str] = {}

    def resolve(self, x: Tensor, score: Score) -> Self:
        """Return the same method at the layer that it chooses for this input."""
        return self if self.layer is not None else replace(self, layer=self.choose_layer_name(x, score))

    def describe_chosen_layer(self, layer: str, model: nn.Module) -> list[str]:
        """Return a note that names the chosen layer; none if the user or the loaded model named the layer."""
        card = get_card(model)
        named = self.layer is not None or (card is not None and card.layer == layer)
        return [] if named else [f"layer {layer!r} was chosen"]

    def choose_layer_name(self, x: Tensor, score: Score) -> str:
        """The loaded model's own layer, else the last spatial one: known for as long as the model is built the same.

        It is the last one that any class reads; what a callable target reads is looked up each time.
        """
        model = score.model
        card = get_card(model)
        if card and card.layer:
            return card.layer
        if callable(score.target):
            dense = isinstance(score.target, Target) and score.target.dense
            return choose_layer(model, score.combined_class_score, x, dense=dense).name
        built = (tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if built not in self._chosen_layers:
            self._chosen_layers = {
                **self._chosen_layers,
                built: choose_layer(model, score.combined_class_score, x).name,
            }
        return self._chosen_layers[built]


class LayerExplainer(LayerSelectionMixin):
    """Base of methods that make a map from the channels of one layer. A subclass implements `combine`.

    Class constants describe a method:

    - `needs_gradient`: it needs the gradient of the score at the layer.
    - `second_order`: it also needs second derivatives.
    - `runs_model`: it runs the model again inside `combine`.
    - `runs_partial_forward`: of those runs, the part before the layer sees the same input again.
    - `has_custom_backward`: what reaches the layer is not a gradient.
    """

    needs_gradient: ClassVar[bool] = False
    second_order: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    has_custom_backward: ClassVar[bool] = False

    @abstractmethod
    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,K,*s) and what else `features` offer -> (N,*s): the map, as the method's formula has it."""

    def objective(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Return (N,), the quantity whose gradient is taken: by default the score."""
        return score.read_score(output, n_samples)

    @property
    def accepts_integer_input(self) -> bool:
        """Return whether later forward passes, if any, use the same input."""
        return not self.has_custom_backward and (self.runs_partial_forward or not self.runs_model)

    @property
    def objective_key(self) -> Hashable:
        """Return the key of `objective`; methods with equal keys share a backward pass."""
        return "score" if type(self).objective is LayerExplainer.objective else id(self)

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `compute_shared_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores from one forward pass, and one backward pass each."""
        return [resolve_map(entry) for entry in LayerExplainer.compute_shared_maps([self], x, scores)[0]]

    @property
    def share_key(self) -> Hashable:
        """Methods share a pass, whatever their layers."""
        return (LayerExplainer, self.precision, self.output_index, self.call_index, self.on_nonfinite)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> list[list[AttributionMaps | DeferredMap | CamscopeError]]:
        """[method][score]: one forward pass and one backward pass a score, whatever the layers that are named.

        One more forward pass wherever the layer that is chosen changes: questions of places may have several. What only
        combines does so at once, so that one score's gradients are held; the others follow, without hooks.
        """
        layer_explainers = [explainer for explainer in explainers if isinstance(explainer, LayerExplainer)]
        chooser = next((explainer for explainer in layer_explainers if explainer.layer is None), None)
        chosen = [chooser and chooser.choose_layer_name(x, score) for score in scores]
        results: list[list[AttributionMaps | DeferredMap | CamscopeError]] = [[] for _ in layer_explainers]
        for unnamed, numbers in groupby(range(len(scores)), chosen.__getitem__):
            layers, some = (
                [str(explainer.layer or unnamed) for explainer in layer_explainers],
                [scores[i] for i in numbers],
            )
            with SharedPass(layer_explainers, layers, x, some) as shared:
                for i in range(len(some)):
                    for t, features in shared.iter_features(i):
                        compute = partial(layer_explainers[t]._combine_to_maps, features)
                        results[t].append(
                            compute if layer_explainers[t].runs_model else compute_or_return_error(compute)
                        )
        return results

    def _combine_to_maps(self, features: LayerFeatures) -> AttributionMaps:
        with features.score.score_range_tracked() as scores:
            heat = self.combine(features)
        heat = heat if features.input_shares is None else crop_padding(heat, features.input_shares)
        zero, constant = None, scores.is_constant(features.score.machine_epsilon)
        if (
            features.optional_gradient is not None
        ):  # a method that asks of other inputs too may find something all the same
            zero = ~(features.optional_gradient.flatten(1).any(1) | heat.flatten(1).any(1))
            if constant is None and not self.has_custom_backward:
                constant = is_below_precision(
                    features.score.machine_epsilon, features.values, features.optional_gradient, features.activation
                )
        notes = [*self.describe_chosen_layer(features.layer, features.score.model), *features.notes]
        if features.input_shares is not None:
            notes.append(
                "the detector pads its input: the map is the part of the layer that the input is, interpolated"
            )
        if self.runs_model and any(module.training for module in features.score.model.modules()):
            notes.append(f"in train mode a layer may mix the inputs of a pass, and {self.name} fills its passes itself")
        sample_notes = tuple(map(tuple, features.sample_notes))
        return AttributionMaps(
            heat,
            features.layer,
            features.layout,
            zero,
            constant,
            tuple(notes),
            sample_notes,
            layout_unverified=features.layout_unverified,
        )


SPATIAL_AXIS = -1
CANCELLATION_RATIO = 0.05  # of the sizes of its terms: what is left of a denominator
MAX_CANCELLED_SHARE = 0.1  # of the map, by terms with such a denominator


class BaseWeightedChannels(LayerExplainer):
    """Weighted sum of the channels of one layer. A subclass implements `channel_weights`."""

    relu: ClassVar[bool] = True

    @abstractmethod
    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """-> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts."""

    def combine(self, features: LayerFeatures) -> Tensor:
        """Return (N,*s): Σ_k of `contributions`, followed by a ReLU if the method has one."""
        cells = self.contributions(features).sum(1)
        return (cells.relu() if self.relu else cells).view(len(cells), *features.activation.shape[2:])

    def contributions(self, features: LayerFeatures) -> Tensor:
        """Return (N,K,cells), the contribution of each channel to the map."""
        return self.channel_weights(features) * features.activation.flatten(2)


class BaseCAM(BaseWeightedChannels):
    """Weighted sum of the channels of one layer, by the gradient of the score. A subclass implements only `weights`."""

    backward_passes: ClassVar[str] = "1"
    needs_gradient: ClassVar[bool] = True

    @abstractmethod
    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells), (N,K,cells) -> (N,K,1) or (N,K,cells): what each channel, or each of its cells, counts.

        The cells of a grid of any rank lie on the last axis, `SPATIAL_AXIS`.
        """

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1) or (N,K,cells): see `weights`."""
        return self.weights(features.activation.flatten(2), features.gradient.flatten(2))


class BaseQuotientCAM(BaseCAM):
    """CAM with channel weights Σ n / d, and a note if nearly canceling d carry the map. Implement `quotient_terms`."""

    @abstractmethod
    def quotient_terms(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N,K,cells) twice -> n, d, and the sizes of d's terms; each (N,K,1) or (N,K,cells)."""

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,1): Σ n / d, 0 where d is."""
        above, below, _ = self.quotient_terms(activation, gradient)
        return _divide_or_zero(above, below).sum(SPATIAL_AXIS, keepdim=True)

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1): see `weights`."""
        parts = self.quotient_terms(features.activation.flatten(2), features.gradient.flatten(2))
        return sum_quotients(features, *parts)


def sum_quotients(features: LayerFeatures, numerator: Tensor, denominator: Tensor, term_size: Tensor) -> Tensor:
    """Return (N,K,1): Σ numerator / denominator, with 0 where the denominator is 0.

    Adds a note for each sample in which channels with a denominator much smaller than `term_size` carry much of Σ|w A|.
    """
    parts = _divide_or_zero(numerator, denominator)
    carried = parts.abs() * features.activation.flatten(2).abs().sum(SPATIAL_AXIS, keepdim=True)
    doubtful = torch.where(denominator.abs() < CANCELLATION_RATIO * term_size, carried, 0)
    share = doubtful.flatten(1).sum(1) / carried.flatten(1).sum(1)
    for sample in (share > MAX_CANCELLED_SHARE).nonzero()[:, 0].tolist():
        features.add_note(
            sample,
            f"{float(share[sample]):.0%} of the map at layer {features.layer!r} comes from denominators that cancel to less "
            f"than {CANCELLATION_RATIO:.0%} of their terms: a slight change of the input, or of the precision, may turn it over; "
            f"choose a layer after a ReLU, or gradcam",
        )
    return parts.sum(SPATIAL_AXIS, keepdim=True)


def _divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator != 0, numerator / denominator, 0)
