"""RefineCAM: the product of the maps of several layers, from coarse to fine."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.core.base_explainer import METHODS, Explainer, register
from camscope.explainers.core.base_method import SETTINGS_WITHOUT_EFFECT
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.resize_and_blur import resize_maps, scale_to_unit_range
from camscope.explainers.ensemble.map_fusion import compute_all_maps, merge_layer_maps
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.layers.spatial_layers import SpatialLayer, drop_layers_with_contradicted_layout, find_spatial_layers
from camscope.targets import Score

MAX_STAGES = 4
PRODUCT_SCALING_NOTE = "multiplied: each layer's map was scaled to 0..1"


@register
class RefineCAM(Explainer):
    """Product of the Grad-CAM++ maps M_l of several layers: Π_l n(U(n(relu(M_l)))) (Domeniconi et al. 2026).

    U resizes a map to the finest grid. n is min-max scaling to 0..1, as in the authors' code, which removes the weakest
    cells of a layer, so that an early layer that is positive everywhere still refines the map. A constant map becomes
    zero. Use it for a map finer than the last layer.

    Args:
        layers: Names, also as one text with commas. None: the last layer of each of the four coarsest resolutions, as
            the authors choose them; finding these layers takes at most three more passes, once. A model with one
            resolution, such as most vision transformers, has only one such layer: name several blocks to multiply their
            maps.
        base_method: The method whose maps are multiplied. Grad-CAM++ is unstable at layers with both signs; use
            "gradcam" there.

    Raises:
        InputError: The base method explains no layer, or `layers` has no name or an empty one.

    >>> explanation = RefineCAM(model, ["layer2", "layer4"]).explain(image, "nodule")
    >>> explanation.grid
    (32, 32)

    """

    name, title, paper = "refinecam", "RefineCAM", "arXiv:2605.14641"
    backward_passes: ClassVar[str] = "1"
    layers: str | Sequence[str] | None = field(default=None, kw_only=False)
    base_method: str = "gradcam++"

    def __post_init__(self) -> None:
        super().__post_init__()
        method = METHODS.get(self.base_method)
        if method is None or not issubclass(method, LayerExplainer):
            layer_methods = [name for name, method_cls in METHODS.items() if issubclass(method_cls, LayerExplainer)]
            nearest = difflib.get_close_matches(str(self.base_method), layer_methods, n=3, cutoff=0.0)
            raise InputError(
                f"base_method={self.base_method!r} is not a method that explains one layer: pass {' or '.join(nearest)}"
            )
        names = (*SETTINGS_WITHOUT_EFFECT[1:], "mode", "precision", "input_key", "frames_first")
        self._base_explainer = method(self.model, **{name: getattr(self, name) for name in names})
        layers = self.layers.split(",") if isinstance(self.layers, str) else self.layers
        if layers is not None:
            if not layers:
                raise InputError("layers is empty: name at least one layer, or leave the setting out")
            layers = [layer.strip() if isinstance(layer, str) else layer for layer in layers]
            if "" in layers:
                raise InputError(
                    f"layers={self.layers!r} has an empty name: expected names with commas between, as 'a,b'"
                )
            layers = [find_layer(unwrap(self.model), layer)[0] for layer in layers]
        self.layers = layers
        self._stages_by_model: dict[tuple[object, ...], list[str]] = {}

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*s) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the map of each score. There is one forward pass for all layers, and one backward pass for each score."""
        if self.layers is not None:
            return self._multiply_maps_of_layers(self.layers, x, scores)
        groups = groupby(scores, partial(self._choose_layers, x))
        return [maps for layers, some in groups for maps in self._multiply_maps_of_layers(layers, x, list(some))]

    def _multiply_maps_of_layers(
        self, layers: Sequence[str | nn.Module], x: Tensor, scores: Sequence[Score]
    ) -> list[AttributionMaps]:
        """Return for each score the product of the maps of the layers."""
        explainers, merged = [replace(self._base_explainer, layer=layer) for layer in layers], []
        for maps in zip(*compute_all_maps(explainers, x, scores), strict=True):
            attribution = _multiply_maps([layer_maps.attribution for layer_maps in maps])
            merged.append(merge_layer_maps(maps, attribution, PRODUCT_SCALING_NOTE))
        if self.layers is not None:
            return merged
        note = f"layers {', '.join(map(str, layers))} were chosen"
        if len(layers) == 1:
            note = f"layer {layers[0]!r} was chosen: the model has one resolution, so that no layer refines the map"
        return [replace(layer_maps, notes=(note, *layer_maps.notes)) for layer_maps in merged]

    def with_chosen_layers(self, x: Tensor, score: Score) -> Self:
        """Return a copy of this method that has layers: the ones that the user named, or ones chosen for this input."""
        return self if self.layers is not None else replace(self, layers=self._choose_layers(x, score))

    def _choose_layers(self, x: Tensor, score: Score) -> list[str]:
        """Choose the last layer of each resolution for this input. The finest resolution is first. Cache the result."""
        deepest, model = self._base_explainer.choose_layer_name(x, score), score.model
        key = (deepest, tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if key not in self._stages_by_model:
            layers = find_spatial_layers(model, lambda: score.forward(x), x, score.extra_model_inputs)
            while True:  # until the cells of each stage react to the parts of the input that they are drawn over
                stages = find_last_layer_per_resolution(model, layers, deepest)
                checked = [layer for layer in layers if layer.name in stages[:-1]]
                valid = drop_layers_with_contradicted_layout(model, checked, score.forward, x)
                if len(valid) == len(checked):
                    break
                layers = [layer for layer in layers if layer not in checked or layer in valid]
            self._stages_by_model = {**self._stages_by_model, key: stages}
        return self._stages_by_model[key]


def find_last_layer_per_resolution(model: nn.Module, layers: Sequence[SpatialLayer], deepest_layer: str) -> list[str]:
    """Return the last layer of each of the four coarsest resolutions, the finest first. Stop at `deepest_layer`."""
    # a layer inside one of several similar blocks ends no stage: a bottleneck's first convolution still has the finer grid
    module_types = {layer.name: type(find_layer(model, layer.name)[1]) for layer in layers}
    parents = {name: name.rpartition(".")[0] for name in module_types}
    sibling_counts = Counter((parents[name], kind) for name, kind in module_types.items())
    last: dict[tuple[int, ...], str] = {}
    for layer in layers:
        if layer.name == deepest_layer:
            break
        enclosing = [name for name in module_types if layer.name.startswith(f"{name}.")]
        if not any(sibling_counts[parents[name], module_types[name]] > 1 for name in enclosing):
            last[layer.layout.grid] = layer.name
    cells = {layer.name: math.prod(layer.layout.grid) for layer in layers}
    finer = [name for name in last.values() if cells[name] > cells.get(deepest_layer, 0)]
    return [*sorted(finer, key=lambda name: -cells[name]), deepest_layer][-MAX_STAGES:]


def _multiply_maps(maps: Sequence[Tensor]) -> Tensor:
    """Multiply the maps (N,*s) of several layers, after scaling them to 0..1 and resizing them to the finest grid."""
    finest_grid = max((attribution.shape[1:] for attribution in maps), key=math.prod)
    resized = [resize_maps(scale_to_unit_range(attribution.relu()), finest_grid) for attribution in maps]
    return torch.stack([scale_to_unit_range(attribution) for attribution in resized]).prod(0)
