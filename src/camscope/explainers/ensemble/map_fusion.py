"""Fuse the maps of several layers or methods into one: `Fused`, and `fuse` for existing explanations."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.maps_with_flags import AttributionMaps, determine_statuses, merge_notes_and_flags
from camscope.explainers.core.resize_and_blur import resize_maps
from camscope.explainers.core.run_methods_in_shared_passes import compute_group_maps, group_by_share_key
from camscope.explainers.core.setting_checks import check_one_of
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
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
        """Create an explainer that fuses the maps of one method at several layers. The settings apply to all layers.

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

    def _with_inner_explainers(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner, self.fusion_mode)


def _describe_layer_problem(value: object) -> str:
    """Return the error text for an argument with which `Fused.at_layers` cannot explain several layers."""
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
    """Compute the maps of several explainers as rows [explainer][score]. Share passes where possible."""
    done: dict[int, list[AttributionMaps]] = {}
    for indices in group_by_share_key(explainers):
        done.update(zip(indices, compute_group_maps([explainers[t] for t in indices], x, scores), strict=True))
    return [done[t] for t in range(len(explainers))]


def fuse_attributions(attributions: Sequence[Tensor], fusion_mode: FusionMode) -> Tensor:
    """Fuse maps (N,*s) of several layers. First clip each map at zero and divide it by its maximum."""
    finest_grid = max((attribution.shape[1:] for attribution in attributions), key=math.prod)
    layers = torch.stack([resize_maps(_divide_by_maximum(attribution), finest_grid) for attribution in attributions])
    if fusion_mode == "product":
        return layers.prod(0)
    return layers.amax(0) if fusion_mode == "max" else layers.mean(0)


def _divide_by_maximum(maps: Tensor) -> Tensor:
    """Clip maps (N,*s) at zero. Divide each map by its maximum."""
    peak = maps.flatten(1).amax(1).view(-1, *[1] * (maps.ndim - 1))
    return torch.where(peak > 0, maps.relu() / peak, 0)


def merge_layer_maps(layer_maps: Sequence[AttributionMaps], attribution: Tensor, scaling_note: str) -> AttributionMaps:
    """Build the result for a fused map (N,*s). It has the notes of all layers, and a note for each layer without evidence."""
    notes, layers = [scaling_note], [maps.layer for maps in layer_maps if maps.layer]
    for maps in layer_maps:
        statuses = set(determine_statuses(maps))
        if len(statuses) == 1 and STATUS_OK not in statuses:
            notes.append(f"{maps.layer}: {STATUS_MEANINGS[statuses.pop()]}")
    return replace(
        merge_notes_and_flags(layer_maps, attribution, *notes), layer=" + ".join(layers) or None, layout=None
    )


def fuse(explanations: Sequence[Explanation], fusion_mode: FusionMode = "max") -> Explanation:
    """Fuse explanations of the same target at different layers into one explanation.

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
        _check_same_input_target_and_model(first, explanation)
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


def _check_same_input_target_and_model(reference: Explanation, other: Explanation) -> None:
    """Raise InputError if explanations differ in their input, target, method or model."""
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
