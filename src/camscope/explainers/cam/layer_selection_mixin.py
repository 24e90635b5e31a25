"""`LayerSelectionMixin`: the settings that name a layer and its layout, and the choice of a layer by default."""

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.setting_checks import check_integer
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.layers.choose_layer import choose_feature_layer, choose_layer
from camscope.layers.layout import Layout
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.targets import Score, Target


@dataclass(eq=False, repr=False)
class LayerSelectionMixin(Explainer):
    """Settings of a method that explains one layer.

    Class constants describe a method:

    - `needs_gradient`: it needs the gradient of the score at the layer.
    - `second_order`: it also needs second derivatives.
    - `runs_model`: it runs the model again inside `compute_layer_map`.
    - `runs_partial_forward`: in those runs, the part before the layer gets the same input again.
    - `has_custom_backward`: the layer receives something other than a gradient, so the backward pass cannot be
      shortened.

    Args:
        layer: A name, a module, or None for the last layer with spatial extent, which the result names.
        output_index: Key of the tensor in a layer that returns several.
        call_index: Which call of a layer that runs several times. None: the last one that the score depends on.
        layout: "channels_first", "channels_last" or a Layout, if the shape of the layer is ambiguous. Without it and
            `reshape`, three forward passes verify the layout, once for each model, layer and input size, unless
            convolutions computed the map. PyTorch's fused attention needs one more pass.
        reshape: A function of the layer's output that returns (N,K,*s), instead of a layout.

    """

    layer: str | nn.Module | None = None
    _: KW_ONLY
    output_index: str | int | None = None
    call_index: int | None = None
    layout: str | Layout | None = None
    reshape: Callable[[Tensor], Tensor] | None = None

    needs_gradient: ClassVar[bool] = False
    second_order: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    has_custom_backward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(None, call_index=self.call_index)
        self.layer = None if self.layer is None else find_layer(unwrap(self.model), self.layer)[0]
        self._chosen_layers: dict[tuple[object, ...], str] = {}

    def compute_differentiated_score(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Compute the quantity (N,) whose gradient the method uses, from the model's output. By default it is the score."""
        return score.read_score(output, n_samples)

    @property
    def differentiated_score_key(self) -> Hashable:
        """A key that is equal for methods with the same `compute_differentiated_score`. Such methods share a backward pass."""
        return (
            "score"
            if type(self).compute_differentiated_score is LayerSelectionMixin.compute_differentiated_score
            else id(self)
        )

    def with_chosen_layers(self, x: Tensor, score: Score) -> Self:
        """Return a copy of this method with a layer: the layer that the user named, or a layer chosen for this input."""
        return self if self.layer is not None else replace(self, layer=self.choose_layer_name(x, score))

    def describe_chosen_layer(self, layer: str, model: nn.Module) -> list[str]:
        """Return a note that names the chosen layer. Return an empty list if the user or the loaded model named the layer."""
        model_metadata = get_loaded_model_metadata(model)
        named = self.layer is not None or (model_metadata is not None and model_metadata.layer == layer)
        return [] if named else [f"layer {layer!r} was chosen"]

    def choose_layer_name(self, x: Tensor, score: Score) -> str:
        """Choose a layer if the user names none: the layer that a loaded model declares, or the last spatial layer with
        an effect on the score.
        """
        model = score.model
        model_metadata = get_loaded_model_metadata(model)
        if model_metadata and model_metadata.layer:
            return model_metadata.layer
        if callable(score.target) and score.has_target(0):
            selects_positions = isinstance(score.target, Target) and score.target.selects_positions
            return choose_layer(
                model, score.compute_fixed_mix_of_class_scores, x, target_selects_positions=selects_positions
            ).name
        key = (tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if key not in self._chosen_layers:
            self._chosen_layers = {**self._chosen_layers, key: self._choose_layer_for_all_classes(x, score)}
        return self._chosen_layers[key]

    @staticmethod
    def _choose_layer_for_all_classes(x: Tensor, score: Score) -> str:
        """Choose a layer that affects any class score. If there are no class scores, drop an optional target."""
        try:
            if score.has_target(0):
                return choose_layer(score.model, score.compute_fixed_mix_of_class_scores, x).name
        except TargetError:
            if not score.optional_target:
                raise
            score.drop_target()
        return choose_feature_layer(score.model, score, x).name
