"""Fuse the maps of several layers or methods: `Fused` runs explainers, `fuse` combines existing explanations."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.base_method import AttributionMaps, determine_statuses, merge_maps
from camscope.explainers.core.evaluation_context import check_one_of
from camscope.explainers.core.resampling import resize_maps
from camscope.explainers.core.runner import compute_group_maps, group_by_share_key
from camscope.explainers.ensemble.explainer_wrappers import Wrapper
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
from camscope.targets import Score

FusionMode = Literal["max", "mean", "product"]
FUSION_MODES: tuple[FusionMode, ...] = ("max", "mean", "product")
FUSION_SCALING_NOTE = "fused: each layer's map was divided by its maximum"


class Fused(Wrapper):
    """Several explainers as one, usually one method at several layers, with as few passes as possible.

    Each map is clipped at zero, divided by its maximum and brought to the finest grid. `fusion_mode` then combines the cells:
    "max" keeps what any map shows (Jiang et al. 2021, section III-C), "mean" averages, "product" keeps what all show. A map
    without positive evidence is zero. LayerCAM with "max" is fine and reliable at once. Its paper first scales the maps
    of shallow stages to tanh(2 M / max M), which is left out here:

        Fused.at_layers(LayerCAM(model), ["layer2", "layer3", "layer4"]).explain("cat.jpg", 281)
    """

    name = "fused"

    def __init__(self, explainers: Sequence[Explainer], fusion_mode: FusionMode = "max") -> None:
        if isinstance(explainers, Explainer) or not explainers:
            raise InputError("nothing to fuse: pass a list of explainers, or Fused.at_layers(explainer, layers)")
        if any(isinstance(item, str | nn.Module) for item in explainers):
            raise InputError(
                "Fused takes a list of explainers; for one method at several layers, Fused.at_layers(explainer, layers)"
            )
        check_one_of("fusion_mode", fusion_mode, *FUSION_MODES)
        super().__init__(*explainers)
        self.explainers, self.fusion_mode = tuple(explainers), fusion_mode

    @classmethod
    def at_layers(
        cls, explainer: Explainer, layers: Sequence[str | nn.Module], fusion_mode: FusionMode = "max"
    ) -> Self:
        """Return one method, with all its settings, at several layers."""
        if not isinstance(explainer, LayerExplainer):
            raise InputError(_explain_missing_layer(explainer))
        if isinstance(layers, str):
            raise InputError(f"Fused.at_layers takes a list of layers; for one, [{layers!r}]")
        return cls([replace(explainer, layer=layer) for layer in layers], fusion_mode)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the fused map of each score."""
        fused = []
        for maps in zip(*compute_all_maps(self.explainers, x, scores), strict=True):
            attribution = fuse_attributions([layer_maps.attribution for layer_maps in maps], self.fusion_mode)
            fused.append(merge_layer_maps(maps, attribution, FUSION_SCALING_NOTE))
        return fused

    def _rewrap(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner, self.fusion_mode)


def _explain_missing_layer(value: object) -> str:
    """Return why a value cannot be used at several layers, and what can."""
    if not isinstance(value, Explainer):
        return f"Fused.at_layers(explainer, layers) takes an explainer, as GradCAM(model); got {value!r:.80}"
    if not isinstance(value, Wrapper):
        return f"{value!r} has no single layer to choose: Fused.at_layers takes a method with one, as GradCAM(model)"
    if isinstance(value, Fused):
        return f"{value!r} has several layers already"
    return f"{value!r} does not look at one layer; pass {type(value).__name__}(Fused.at_layers(explainer, layers))"


def compute_all_maps(
    explainers: Sequence[Explainer], x: Tensor, scores: Sequence[Score]
) -> list[list[AttributionMaps]]:
    """Return the maps [explainer][score]; explainers that can share passes do so."""
    done: dict[int, list[AttributionMaps]] = {}
    for indices in group_by_share_key(explainers):
        done.update(zip(indices, compute_group_maps([explainers[t] for t in indices], x, scores), strict=True))
    return [done[t] for t in range(len(explainers))]


def fuse_attributions(attributions: Sequence[Tensor], fusion_mode: FusionMode) -> Tensor:
    """Fuse maps (N,*s): clip each at zero, divide it by its maximum, and combine the cells on the finest grid."""
    finest_grid = max((attribution.shape[1:] for attribution in attributions), key=math.prod)
    layers = torch.stack([resize_maps(_divide_by_maximum(attribution), finest_grid) for attribution in attributions])
    if fusion_mode == "product":
        return layers.prod(0)
    return layers.amax(0) if fusion_mode == "max" else layers.mean(0)


def _divide_by_maximum(maps: Tensor) -> Tensor:
    peak = maps.flatten(1).amax(1).view(-1, *[1] * (maps.ndim - 1))
    return torch.where(peak > 0, maps.relu() / peak, 0)


def merge_layer_maps(layer_maps: Sequence[AttributionMaps], attribution: Tensor, scaling_note: str) -> AttributionMaps:
    """Return the fused map (N,*s) with the notes of each layer, and a layer's status if every sample has the same, not "ok"."""
    notes, layers = [scaling_note], [maps.layer for maps in layer_maps if maps.layer]
    for maps in layer_maps:
        statuses = set(determine_statuses(maps))
        if len(statuses) == 1 and STATUS_OK not in statuses:
            notes.append(f"{maps.layer}: {STATUS_MEANINGS[statuses.pop()]}")
    return replace(merge_maps(layer_maps, attribution, *notes), layer=" + ".join(layers) or None, layout=None)


def fuse(explanations: Sequence[Explanation], fusion_mode: FusionMode = "max") -> Explanation:
    """Fuse explanations of one target at several layers into one.

    Args:
        explanations: One explanation per layer, of one input, target and method.
        fusion_mode: See `Fused`, which needs fewer passes.

    Returns:
        One explanation on the finest grid; a layer without positive evidence adds nothing.

    Raises:
        InputError: The explanations are not of one input, target and method.

    """
    if not explanations:
        raise InputError("nothing to fuse: pass one explanation per layer")
    check_one_of("fusion_mode", fusion_mode, *FUSION_MODES)
    first = explanations[0]
    for explanation in explanations[1:]:
        _check_same_target(first, explanation)
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


def _check_same_target(reference: Explanation, other: Explanation) -> None:
    for fact in ("name", "method", "target", "label", "input_size", "placement", "model"):
        if getattr(other, fact) != getattr(reference, fact):
            raise InputError(f"cannot fuse: {fact} is {getattr(reference, fact)!r} and {getattr(other, fact)!r}")
    if not math.isclose(other.score, reference.score, rel_tol=1e-3, abs_tol=1e-6):
        raise InputError(f"cannot fuse: the score is {reference.score:.6g} and {other.score:.6g}: not the same input")
    for picture in ("image", "model_input_image"):
        first_image, another = getattr(reference, picture), getattr(other, picture)
        if first_image is not None and another is not None and not np.array_equal(first_image, another):
            raise InputError("cannot fuse: the explanations are of different images")
