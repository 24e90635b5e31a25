"""`LayerExplainer`: base class of methods that compute a map from the channels of one layer."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Self, cast

from torch import Tensor

from camscope.errors import CamscopeError
from camscope.explainers.cam.differentiable_layer_pass import compute_features_with_graph
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.layer_selection_mixin import LayerSelectionMixin
from camscope.explainers.cam.shared_layer_pass import SharedLayerPass
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.maps_with_flags import (
    AttributionMaps,
    DeferredMap,
    compute_map_or_raise,
    compute_map_or_return_error,
    find_samples_below_precision,
)
from camscope.explainers.core.resize_and_blur import crop_padding
from camscope.explainers.vision_language.token_maps import compute_layer_token_maps
from camscope.hooks.find_layers import unwrap
from camscope.targets import Score


class LayerExplainer(LayerSelectionMixin):
    """Base class of methods that compute a map from the channels of one layer. A subclass implements `compute_layer_map`.

    >>> from camscope import LayerExplainer, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> class ActivationNorm(LayerExplainer):
    ...     name = "activation norm"
    ...     def compute_layer_map(self, features):
    ...         return features.activation.norm(dim=1)
    >>> ActivationNorm(model, "layer4").explain(image, "nodule").grid
    (16, 16)
    """

    @abstractmethod
    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the map of the method from the features of the layer. The map is (N,*s), or flattened (N,cells)."""

    def compute_text_maps(self, inputs: Any, targets: Sequence[Sequence[Any]], answers: Sequence[Sequence[Any]]) -> Any:
        """Compute maps [image][target] over the image tokens of a vision-language model, for text that it writes."""
        return compute_layer_token_maps(self, inputs, targets, answers)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the method accepts an integer input. Only methods that never change the input do."""
        return not self.has_custom_backward and (self.runs_partial_forward or not self.runs_model)

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*s) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def __post_init__(self) -> None:
        super().__post_init__()
        self._copies_with_layout: dict[tuple[object, ...], LayerExplainer] = {}

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores. There is one forward pass for all, and one backward pass for each score."""
        return [compute_map_or_raise(entry) for entry in LayerExplainer.compute_shared_maps([self], x, scores)[0]]

    def compute_differentiable_map(self, x: Tensor, score: Score) -> Tensor:
        """Compute the map (N,*s) with its graph, at the layer and with the layout of `with_layer_and_layout`."""
        features = compute_features_with_graph(self, x, score)
        cells = self.compute_layer_map(features)
        attribution = cells.view(len(cells), *features.activation.shape[2:]) if cells.ndim == 2 else cells
        return attribution if features.input_shares is None else crop_padding(attribution, features.input_shares)

    def with_layer_and_layout(self, x: Tensor, create_score: Callable[[], Score]) -> Self:
        """Return a copy with a layer and a verified layout. An ordinary map finds both, once for each input size."""
        key = (tuple(x.shape[1:]), len({id(module) for module in unwrap(self.model).modules()}))
        if key not in self._copies_with_layout:
            maps = self.compute_maps(x, [create_score()])[0]
            copy = replace(self, layer=maps.layer, layout=maps.layout or self.layout)
            self._copies_with_layout = {**self._copies_with_layout, key: copy}
        return cast(Self, self._copies_with_layout[key])

    @property
    def share_key(self) -> Hashable:
        """A key for shared forward passes: methods with equal keys share a pass. These methods may explain different layers."""
        return (LayerExplainer, self.precision, self.output_index, self.call_index, self.on_nonfinite)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps | DeferredMap | CamscopeError]]:
        """Compute the maps as rows [method][score]. All maps share one forward pass. Each score has one backward pass.

        The methods may explain different layers. If the chosen layer differs from score to score, each change needs
        another forward pass. Methods that run the model again compute their maps later, without hooks. All others
        compute them at once, so that the gradients of only one score are in memory.
        """
        layer_explainers = [explainer for explainer in explainers if isinstance(explainer, LayerExplainer)]
        chooser = next((explainer for explainer in layer_explainers if explainer.layer is None), None)
        chosen = [chooser and chooser.choose_layer_name(x, score) for score in scores]
        results: list[list[AttributionMaps | DeferredMap | CamscopeError]] = [[] for _ in layer_explainers]
        for chosen_layer, indices in groupby(range(len(scores)), chosen.__getitem__):
            layers = [str(explainer.layer or chosen_layer) for explainer in layer_explainers]
            group = [scores[i] for i in indices]
            with SharedLayerPass(layer_explainers, layers, x, group) as shared:
                for i in range(len(group)):
                    for t, features in shared.iter_method_indices_and_features(i):
                        compute = partial(layer_explainers[t]._compute_map_with_notes_and_flags, features)
                        is_deferred = layer_explainers[t].runs_model
                        results[t].append(compute if is_deferred else compute_map_or_return_error(compute))
        return results

    def _compute_map_with_notes_and_flags(self, features: LayerFeatures) -> AttributionMaps:
        """Compute the map of the method with its notes and flags. Cells of a padded border are cropped."""
        score, gradient = features.score, features.optional_gradient
        with score.score_range_tracked() as scores:
            cells = self.compute_layer_map(features)
        attribution = cells.view(len(cells), *features.activation.shape[2:]) if cells.ndim == 2 else cells
        notes = [*self.describe_chosen_layer(features.layer, score.model), *features.notes]
        if features.input_shares is not None:
            attribution = crop_padding(attribution, features.input_shares)
            notes.append("the detector pads its input: the map is the part of the layer that shows it, interpolated")
        zero, constant = None, scores.is_constant(score.machine_epsilon)
        if gradient is not None:  # a method that also runs other inputs may have a map despite a zero gradient
            zero = ~(gradient.flatten(1).any(1) | attribution.flatten(1).any(1))
            if constant is None and not self.has_custom_backward:
                constant = find_samples_below_precision(
                    score.machine_epsilon, features.values, gradient, features.activation
                )
        if self.runs_model and any(module.training for module in score.model.modules()):
            notes.append(f"in train mode a layer may mix the inputs of a pass, and {self.name} fills its passes itself")
        return AttributionMaps(
            attribution,
            features.layer,
            features.layout,
            zero,
            constant,
            tuple(notes),
            tuple(map(tuple, features.sample_notes)),
            layout_unverified=features.layout_unverified,
        )
