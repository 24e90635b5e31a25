"""RefineCAM: the coarse map that is sure, refined by the finer ones before it."""

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
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.core.base import METHODS, Explainer, register
from camscope.explainers.core.maps import AttributionMaps
from camscope.explainers.core.method import SETTINGS_WITHOUT_EFFECT
from camscope.explainers.core.resampling import resize_maps, scale_to_unit_range
from camscope.explainers.ensemble.fusion import compute_all_maps, merge_layer_maps
from camscope.hooks.base import find_layer, unwrap
from camscope.layers.selection import SpatialLayer, drop_contradicted_layers, find_spatial_layers
from camscope.targets import Score

MAX_STAGES = 4
PRODUCT_SCALING_NOTE = "multiplied: each layer's map was stretched to 0..1"


@register
class RefineCAM(Explainer):
    """The product of several layers' maps: Π_l n(U(n(relu(M_l)))), M Grad-CAM++'s (Domeniconi et al. 2026).

    U brings a map to the finest grid; n stretches it to 0..1, as the authors' code does: what is weakest in a layer rules
    out, so that an early layer, which is positive everywhere, still refines. A constant map says nothing, and is zero.

    `layers`: names (in one text, with commas between); None: the last layer of each resolution, of the four coarsest, as
    the authors choose them; it is found by at most three passes more, once. A model of one resolution, as most vision
    transformers, has one such layer, and that is what is shown: name several blocks to multiply them. `base_method`: the
    method whose maps are multiplied; Grad-CAM++ is fragile at layers with both signs, see there: then `base="gradcam"`.
    """

    name, title, paper = "refinecam", "RefineCAM", "arXiv:2605.14641"
    backward_passes: ClassVar[str] = "1"
    layers: str | Sequence[str] | None = field(default=None, kw_only=False)
    base_method: str = "gradcam++"

    def __post_init__(self) -> None:
        super().__post_init__()
        method = METHODS.get(self.base_method)
        if method is None or not issubclass(method, LayerExplainer):
            looking = [name for name, one in METHODS.items() if issubclass(one, LayerExplainer)]
            near = difflib.get_close_matches(str(self.base_method), looking, n=3, cutoff=0.0)
            raise InputError(
                f"base_method={self.base_method!r} is no method that looks at one layer; nearest: {', '.join(near)}"
            )
        common = {
            name: getattr(self, name)
            for name in (*SETTINGS_WITHOUT_EFFECT[1:], "mode", "precision", "input_key", "frames_first")
        }
        self._base_explainer = method(self.model, **common)
        given = self.layers.split(",") if isinstance(self.layers, str) else self.layers
        if given is not None and not given:
            raise InputError("layers is empty: name one at least, or leave it out")
        if given is not None and "" in map(_strip_layer_name, given):
            raise InputError(f"layers={self.layers!r} has an empty name: expected names with commas between, as 'a,b'")
        model = unwrap(self.model)
        self.layers = None if given is None else [find_layer(model, _strip_layer_name(name))[0] for name in given]
        self._stages_by_model: dict[tuple[object, ...], list[str]] = {}

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `compute_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """One forward pass for all layers, one backward pass a score; where layers are chosen, for those of each score."""
        if self.layers is not None:
            return self._compute_maps_at_layers(self.layers, x, scores)
        found = groupby(scores, partial(self._find_stages_for_input, x))
        return [one for layers, some in found for one in self._compute_maps_at_layers(layers, x, list(some))]

    def _compute_maps_at_layers(
        self, layers: Sequence[str | nn.Module], x: Tensor, scores: Sequence[Score]
    ) -> list[AttributionMaps]:
        columns = zip(
            *compute_all_maps([replace(self._base_explainer, layer=layer) for layer in layers], x, scores), strict=True
        )
        made = [
            merge_layer_maps(maps, _multiply_maps([one.attribution for one in maps]), PRODUCT_SCALING_NOTE)
            for maps in columns
        ]
        if self.layers is not None:
            return made
        chosen = f"layers {', '.join(map(str, layers))} were chosen"
        if len(layers) == 1:
            chosen = f"layer {layers[0]!r} was chosen: the model has one resolution, and nothing refines it"
        return [replace(one, notes=(chosen, *one.notes)) for one in made]

    def resolve(self, x: Tensor, score: Score) -> Self:
        """The same product, of the layers that it finds for this input."""
        return self if self.layers is not None else replace(self, layers=self._find_stages_for_input(x, score))

    def _find_stages_for_input(self, x: Tensor, score: Score) -> list[str]:
        """The last layers of the resolutions, the finest first: known for as long as the model is built the same."""
        deepest, model = self._base_explainer.choose_layer_name(x, score), score.model
        built = (deepest, tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if built not in self._stages_by_model:
            layers = find_spatial_layers(model, lambda: score.forward(x), x.shape)
            found = find_stages(model, layers, deepest)
            while wrong := self._find_misplaced_layers(layers, found[:-1], x, score):
                layers = [layer for layer in layers if layer.name not in wrong]
                found = find_stages(model, layers, deepest)
            self._stages_by_model = {**self._stages_by_model, built: found}
        return self._stages_by_model[built]

    def _find_misplaced_layers(
        self, layers: Sequence[SpatialLayer], names: Sequence[str], x: Tensor, score: Score
    ) -> set[str]:
        """Those whose cells react to other parts of the input than they are drawn over."""
        named = [layer for layer in layers if layer.name in names]
        return {layer.name for layer in named} - {
            layer.name for layer in drop_contradicted_layers(score.model, named, score.forward, x)
        }


def find_stages(model: nn.Module, layers: Sequence[SpatialLayer], deepest_layer: str) -> list[str]:
    """The last layer of each resolution up to the deepest layer, of the four coarsest, the finest first.

    A layer inside one of several blocks of a kind is a step of that block and ends no stage: the first convolution of a
    bottleneck still has the stage before's resolution.
    """
    kinds = {layer.name: type(find_layer(model, layer.name)[1]) for layer in layers}
    alike = Counter((_parent_name(name), kind) for name, kind in kinds.items())
    last: dict[tuple[int, ...], str] = {}
    for layer in layers:
        if layer.name == deepest_layer:
            break
        inside = (name for name in _ancestor_names(layer.name) if name in kinds)
        if not any(alike[_parent_name(name), kinds[name]] > 1 for name in inside):
            last[layer.layout.grid] = layer.name
    cells = {layer.name: math.prod(layer.layout.grid) for layer in layers}
    finer = [name for name in last.values() if cells[name] > cells.get(deepest_layer, 0)]
    return [*sorted(finer, key=lambda name: -cells[name]), deepest_layer][-MAX_STAGES:]


def _multiply_maps(maps: Sequence[Tensor]) -> Tensor:
    """Several (N,*s) -> (N,*finest)."""
    finest = max((one.shape[1:] for one in maps), key=math.prod)
    return torch.stack(
        [scale_to_unit_range(resize_maps(scale_to_unit_range(one.relu()), finest)) for one in maps]
    ).prod(0)


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _ancestor_names(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _strip_layer_name(name: str | nn.Module) -> str | nn.Module:
    return name.strip() if isinstance(name, str) else name
