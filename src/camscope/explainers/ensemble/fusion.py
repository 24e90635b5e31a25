"""Fusion of the maps of several layers or methods: `Fused`, `RefineCAM`, and `fuse` for existing explanations."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.core.base import METHODS, Explainer, register
from camscope.explainers.core.base_method import (
    SETTINGS_WITHOUT_EFFECT,
    AttributionMaps,
    determine_statuses,
    merge_notes_and_flags,
)
from camscope.explainers.core.evaluation_context import check_one_of
from camscope.explainers.core.resampling import resize_maps, scale_to_unit_range
from camscope.explainers.core.shared_passes import compute_group_maps, group_by_share_key
from camscope.explainers.ensemble.explainer_wrappers import Wrapper
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
from camscope.hooks.base import find_layer, unwrap
from camscope.layers.selection import SpatialLayer, drop_contradicted_layers, find_spatial_layers
from camscope.targets import Score

FusionMode = Literal["max", "mean", "product"]
FUSION_MODES: tuple[FusionMode, ...] = ("max", "mean", "product")
FUSION_SCALING_NOTE = "fused: each layer's map was divided by its maximum"


class Fused(Wrapper):
    """Fuse the maps of several explainers, usually one method at several layers.

    Explainers share passes if possible. Each map is clipped at zero, divided by its maximum and brought to the finest
    grid. A map without positive evidence is zero. LayerCAM with "max" is both fine and reliable. Its paper first scales
    the maps of shallow stages to tanh(2 M / max M), which is left out here.

    Args:
        explainers: The explainers, of the same model. `Fused.at_layers` makes them from one explainer.
        fusion_mode: How cells are combined. "max" keeps the evidence of any map (Jiang et al. 2021, section III-C),
            "mean" averages, "product" keeps the evidence of all.

    Raises:
        InputError: There is no explainer, or the list has something else.

    >>> from camscope import LayerCAM
    >>> explanation = Fused.at_layers(LayerCAM(model), ["layer2", "layer3", "layer4"]).explain(image, "nodule")
    >>> explanation.grid, explanation.layer
    ((32, 32), 'layer2 + layer3 + layer4')

    """

    name = "fused"

    def __init__(self, explainers: Sequence[Explainer], fusion_mode: FusionMode = "max") -> None:
        if isinstance(explainers, Explainer) or not explainers:
            raise InputError("Fused got no list of explainers: pass a list, or use Fused.at_layers(explainer, layers)")
        if any(isinstance(item, str | nn.Module) for item in explainers):
            raise InputError("Fused takes explainers, but the list has layers: use Fused.at_layers(explainer, layers)")
        check_one_of("fusion_mode", fusion_mode, *FUSION_MODES)
        super().__init__(*explainers)
        self.explainers, self.fusion_mode = tuple(explainers), fusion_mode

    @classmethod
    def at_layers(
        cls, explainer: Explainer, layers: Sequence[str | nn.Module], fusion_mode: FusionMode = "max"
    ) -> Self:
        """Fuse the maps of one method at several layers. All other settings stay the same.

        Args:
            explainer: The method, at any layer.
            layers: Names or modules.
            fusion_mode: See `Fused`.

        Returns:
            One explainer per layer, fused.

        Raises:
            InputError: The method explains no layer, or `layers` is one name and not a list.

        >>> from camscope import LayerCAM, load_model
        >>> len(Fused.at_layers(LayerCAM(load_model("phantom")), ["layer2", "layer4"]).explainers)
        2

        """
        if not isinstance(explainer, LayerExplainer):
            raise InputError(_describe_layer_problem(explainer))
        if isinstance(layers, str):
            raise InputError(
                f"Fused.at_layers takes a list of layers, got {layers!r}: pass [{layers!r}] for a single layer"
            )
        return cls([replace(explainer, layer=layer) for layer in layers], fusion_mode)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the fused map of each score."""
        fused = []
        for maps in zip(*compute_all_maps(self.explainers, x, scores), strict=True):
            attribution = fuse_attributions([layer_maps.attribution for layer_maps in maps], self.fusion_mode)
            fused.append(merge_layer_maps(maps, attribution, FUSION_SCALING_NOTE))
        return fused

    def _with_inner(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner, self.fusion_mode)


def _describe_layer_problem(value: object) -> str:
    """Return the error message for an explainer that cannot be used at several layers."""
    if not isinstance(value, Explainer):
        return f"Fused.at_layers(explainer, layers) takes an explainer, such as GradCAM(model); got {value!r:.80}"
    if not isinstance(value, Wrapper):
        return f"{value!r} does not explain a single layer: Fused.at_layers takes a method that does, such as GradCAM(model)"
    if isinstance(value, Fused):
        return f"{value!r} has several layers already"
    return f"{value!r} is a wrapper and has no layer: pass {type(value).__name__}(Fused.at_layers(explainer, layers))"


def compute_all_maps(
    explainers: Sequence[Explainer], x: Tensor, scores: Sequence[Score]
) -> list[list[AttributionMaps]]:
    """Compute the maps [explainer][score]. Explainers share passes if possible."""
    done: dict[int, list[AttributionMaps]] = {}
    for indices in group_by_share_key(explainers):
        done.update(zip(indices, compute_group_maps([explainers[t] for t in indices], x, scores), strict=True))
    return [done[t] for t in range(len(explainers))]


def fuse_attributions(attributions: Sequence[Tensor], fusion_mode: FusionMode) -> Tensor:
    """Fuse maps (N,*s): clip each map at zero, divide by its maximum, and combine all maps on the finest grid."""
    finest_grid = max((attribution.shape[1:] for attribution in attributions), key=math.prod)
    layers = torch.stack([resize_maps(_divide_by_maximum(attribution), finest_grid) for attribution in attributions])
    if fusion_mode == "product":
        return layers.prod(0)
    return layers.amax(0) if fusion_mode == "max" else layers.mean(0)


def _divide_by_maximum(maps: Tensor) -> Tensor:
    """Clip maps at zero and divide each by its maximum."""
    peak = maps.flatten(1).amax(1).view(-1, *[1] * (maps.ndim - 1))
    return torch.where(peak > 0, maps.relu() / peak, 0)


def merge_layer_maps(layer_maps: Sequence[AttributionMaps], attribution: Tensor, scaling_note: str) -> AttributionMaps:
    """Return a fused map (N,*s) with the notes of all layers. Also note each layer without evidence in every sample."""
    notes, layers = [scaling_note], [maps.layer for maps in layer_maps if maps.layer]
    for maps in layer_maps:
        statuses = set(determine_statuses(maps))
        if len(statuses) == 1 and STATUS_OK not in statuses:
            notes.append(f"{maps.layer}: {STATUS_MEANINGS[statuses.pop()]}")
    return replace(
        merge_notes_and_flags(layer_maps, attribution, *notes), layer=" + ".join(layers) or None, layout=None
    )


def fuse(explanations: Sequence[Explanation], fusion_mode: FusionMode = "max") -> Explanation:
    """Fuse explanations of the same target at several layers into one explanation.

    Args:
        explanations: One explanation per layer, of one input, target and method.
        fusion_mode: See `Fused`, which needs fewer passes.

    Returns:
        One explanation on the finest grid; a layer without positive evidence adds nothing.

    Raises:
        InputError: The explanations are not of one input, target and method.

    >>> from camscope import LayerCAM, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> explanations = [LayerCAM(model, layer).explain(image, "nodule") for layer in ("layer2", "layer4")]
    >>> fused = fuse(explanations)
    >>> fused.layer, fused.grid
    ('layer2 + layer4', (32, 32))

    """
    if not explanations:
        raise InputError("fuse got no explanations: pass one explanation per layer")
    check_one_of("fusion_mode", fusion_mode, *FUSION_MODES)
    first = explanations[0]
    for explanation in explanations[1:]:
        _check_same_input_and_target(first, explanation)
    dtype = np.result_type(np.float32, *(explanation.attribution.dtype for explanation in explanations))
    maps = [torch.from_numpy(explanation.attribution.astype(dtype))[None] for explanation in explanations]
    flagged = [explanation for explanation in explanations if explanation.status != STATUS_OK]
    statuses = [f"{explanation.layer}: {STATUS_MEANINGS[explanation.status]}" for explanation in flagged]
    layers = " + ".join(str(explanation.layer) for explanation in explanations)
    return replace(
        first,
        attribution=fuse_attributions(maps, fusion_mode)[0].numpy(),
        layer=layers,
        layout=None,
        status=flagged[0].status if len(flagged) == len(explanations) else STATUS_OK,
        notes=(*first.notes, FUSION_SCALING_NOTE, *statuses),
        parameters={**first.parameters, "layer": layers, "fusion_mode": fusion_mode},
    )


def _check_same_input_and_target(reference: Explanation, other: Explanation) -> None:
    """Raise InputError if two explanations differ in input, target, method or model."""
    for fact in ("name", "method", "target", "label", "input_size", "placement", "model"):
        if getattr(other, fact) != getattr(reference, fact):
            raise InputError(
                f"cannot fuse explanations with different {fact}: {getattr(reference, fact)!r} and {getattr(other, fact)!r}"
            )
    if not math.isclose(other.score, reference.score, rel_tol=1e-3, abs_tol=1e-6):
        raise InputError(
            f"cannot fuse explanations of different inputs: their scores are {reference.score:.6g} and {other.score:.6g}"
        )
    for picture in ("image", "model_input_image"):
        first_image, another = getattr(reference, picture), getattr(other, picture)
        if first_image is not None and another is not None and not np.array_equal(first_image, another):
            raise InputError("cannot fuse explanations of different images")


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
        """Compute the map of each score. All layers share one forward pass, and each score has one backward pass."""
        if self.layers is not None:
            return self._compute_maps_at_layers(self.layers, x, scores)
        groups = groupby(scores, partial(self._choose_layers, x))
        return [maps for layers, some in groups for maps in self._compute_maps_at_layers(layers, x, list(some))]

    def _compute_maps_at_layers(
        self, layers: Sequence[str | nn.Module], x: Tensor, scores: Sequence[Score]
    ) -> list[AttributionMaps]:
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
        """Return this method with the layers that it chooses for the input."""
        return self if self.layers is not None else replace(self, layers=self._choose_layers(x, score))

    def _choose_layers(self, x: Tensor, score: Score) -> list[str]:
        """Return the last layer of each resolution, finest first. The result is cached."""
        deepest, model = self._base_explainer.choose_layer_name(x, score), score.model
        key = (deepest, tuple(x.shape[1:]), tuple((name, type(module)) for name, module in model.named_modules()))
        if key not in self._stages_by_model:
            layers = find_spatial_layers(model, lambda: score.forward(x), x, score.extra_tensors)
            while True:  # until the cells of each stage react to the parts of the input that they are drawn over
                stages = find_last_layer_per_resolution(model, layers, deepest)
                checked = [layer for layer in layers if layer.name in stages[:-1]]
                valid = drop_contradicted_layers(model, checked, score.forward, x)
                if len(valid) == len(checked):
                    break
                layers = [layer for layer in layers if layer not in checked or layer in valid]
            self._stages_by_model = {**self._stages_by_model, key: stages}
        return self._stages_by_model[key]


def find_last_layer_per_resolution(model: nn.Module, layers: Sequence[SpatialLayer], deepest_layer: str) -> list[str]:
    """Return the last layer of each of the four coarsest resolutions, finest first. `deepest_layer` is the last of all."""
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
    """Scale several maps (N,*s) to 0..1 and return their product on the finest grid."""
    finest_grid = max((attribution.shape[1:] for attribution in maps), key=math.prod)
    resized = [resize_maps(scale_to_unit_range(attribution.relu()), finest_grid) for attribution in maps]
    return torch.stack([scale_to_unit_range(attribution) for attribution in resized]).prod(0)
