"""Several layers as one map: `Fused` of explainers, `fuse` of explanations that there are already."""

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
from camscope.explainers.core.dispatch import compute_group_maps, group_by_share_key
from camscope.explainers.core.evaluation_context import check_one_of
from camscope.explainers.core.maps import AttributionMaps, determine_statuses, merge_maps
from camscope.explainers.core.resampling import resize_maps
from camscope.explainers.ensemble.wrappers import Wrapper
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
from camscope.targets import Score

FusionMode = Literal["max", "mean", "product"]
FUSION_MODES: tuple[FusionMode, ...] = ("max", "mean", "product")
FUSION_SCALING_NOTE = "fused: each layer's map was divided by its maximum"


class Fused(Wrapper):
    """Several explainers as one, as a rule one method at several layers, from as few passes as they can share.

    Each map is cut at zero and divided by its maximum, brought to the finest grid, then cell by cell: `fusion_mode` "max" keeps
    what any of them saw (Jiang et al. 2021, section III-C), "mean" what they have in common, "product" what all saw. A
    map without positive evidence is zero. LayerCAM by the maximum, fine and sure at once; its paper is reported to
    scale the maps of shallow stages first, to tanh(2 M / max M), which is left out:

        Fused.at_layers(LayerCAM(model), ["layer2", "layer3", "layer4"]).explain("cat.jpg", 281)
    """

    name = "fused"

    def __init__(self, explainers: Sequence[Explainer], fusion_mode: FusionMode = "max") -> None:
        if isinstance(explainers, Explainer) or not explainers:
            raise InputError("nothing to fuse: pass a list of explainers, or Fused.at_layers(explainer, layers)")
        if any(isinstance(one, str | nn.Module) for one in explainers):
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
        """One method, with all its settings, at several layers."""
        if not isinstance(explainer, LayerExplainer):
            raise InputError(_explain_missing_layer(explainer))
        if isinstance(layers, str):
            raise InputError(f"Fused.at_layers takes a list of layers; for one, [{layers!r}]")
        return cls([replace(explainer, layer=layer) for layer in layers], fusion_mode)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """One map of each score."""
        columns = zip(*compute_all_maps(self.explainers, x, scores), strict=True)
        return [
            merge_layer_maps(
                maps, fuse_attributions([one.attribution for one in maps], self.fusion_mode), FUSION_SCALING_NOTE
            )
            for maps in columns
        ]

    def _rewrap(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner, self.fusion_mode)


def _explain_missing_layer(value: object) -> str:
    """Why it cannot be put at several layers, and what can."""
    if not isinstance(value, Explainer):
        return f"Fused.at_layers takes an explainer and its layers, as Fused.at_layers(GradCAM(model), layers); {value!r:.80} came instead"
    if not isinstance(value, Wrapper):
        return f"{value!r} has no one layer to choose: Fused.at_layers takes a method that has, as GradCAM(model)"
    if isinstance(value, Fused):
        return f"{value!r} is of several layers already"
    return f"{value!r} does not look at one layer; wrap what is fused: {type(value).__name__}(Fused.at_layers(explainer, layers))"


def compute_all_maps(
    explainers: Sequence[Explainer], x: Tensor, scores: Sequence[Score]
) -> list[list[AttributionMaps]]:
    """[explainer][score]: those of one company share their passes."""
    done: dict[int, list[AttributionMaps]] = {}
    for numbers in group_by_share_key(explainers):
        done.update(zip(numbers, compute_group_maps([explainers[t] for t in numbers], x, scores), strict=True))
    return [done[t] for t in range(len(explainers))]


def fuse_attributions(attributions: Sequence[Tensor], fusion_mode: FusionMode) -> Tensor:
    """Several (N,*s) -> (N,*finest): each cut at zero, over its maximum, on the finest grid, then cell by cell."""
    finest = max((one.shape[1:] for one in attributions), key=math.prod)
    layers = torch.stack([resize_maps(_divide_by_maximum(one), finest) for one in attributions])
    if fusion_mode == "product":
        return layers.prod(0)
    return layers.amax(0) if fusion_mode == "max" else layers.mean(0)


def _divide_by_maximum(maps: Tensor) -> Tensor:
    peak = maps.flatten(1).amax(1).view(-1, *[1] * (maps.ndim - 1))
    return torch.where(peak > 0, maps.relu() / peak, 0)


def merge_layer_maps(layer_maps: Sequence[AttributionMaps], attribution: Tensor, scaling_note: str) -> AttributionMaps:
    """The one map (N,*s) that several became, with what is known of each; `scaling_note`: how they were made comparable."""
    layers = list(filter(None, (one.layer for one in layer_maps)))
    one = merge_maps(layer_maps, attribution, scaling_note, *filter(None, map(_describe_shared_status, layer_maps)))
    return replace(one, layer=" + ".join(layers) or None, layout=None)


def _describe_shared_status(maps: AttributionMaps) -> str | None:
    """What a layer lacks, if every sample lacks it there."""
    found = set(determine_statuses(maps))
    return f"{maps.layer}: {STATUS_MEANINGS[found.pop()]}" if len(found) == 1 and STATUS_OK not in found else None


def fuse(explanations: Sequence[Explanation], fusion_mode: FusionMode = "max") -> Explanation:
    """Several layers' maps of one question as one: each divided by its maximum, on the finest grid, then cell by cell.

    `fusion_mode`: see `Fused`, which spares passes. A layer without positive evidence adds nothing. Raises InputError where the
    explanations are not of one input, target and method.
    """
    if not explanations:
        raise InputError("nothing to fuse: pass one explanation per layer")
    check_one_of("fusion_mode", fusion_mode, *FUSION_MODES)
    first = explanations[0]
    for one in explanations[1:]:
        _check_same_target(first, one)
    precision = np.result_type(np.float32, *(one.attribution.dtype for one in explanations))
    heat = fuse_attributions(
        [torch.from_numpy(one.attribution.astype(precision))[None] for one in explanations], fusion_mode
    )[0].numpy()
    flagged = [one for one in explanations if one.status != STATUS_OK]
    status = flagged[0].status if len(flagged) == len(explanations) else STATUS_OK
    notes = [*first.notes, FUSION_SCALING_NOTE, *(f"{one.layer}: {STATUS_MEANINGS[one.status]}" for one in flagged)]
    layers = " + ".join(str(one.layer) for one in explanations)
    settings = {**first.parameters, "layer": layers, "fusion_mode": fusion_mode}
    return replace(
        first, attribution=heat, layer=layers, layout=None, status=status, notes=tuple(notes), parameters=settings
    )


def _check_same_target(reference: Explanation, other: Explanation) -> None:
    for fact in ("name", "method", "target", "label", "input_size", "placement", "model"):
        if getattr(other, fact) != getattr(reference, fact):
            raise InputError(f"cannot fuse: {fact} is {getattr(reference, fact)!r} and {getattr(other, fact)!r}")
    if not math.isclose(other.score, reference.score, rel_tol=1e-3, abs_tol=1e-6):
        raise InputError(f"cannot fuse: the score is {reference.score:.6g} and {other.score:.6g}: not the same input")
    for picture in ("image", "model_input_image"):
        one, another = getattr(reference, picture), getattr(other, picture)
        if one is not None and another is not None and not np.array_equal(one, another):
            raise InputError("cannot fuse: the explanations are of different images")
