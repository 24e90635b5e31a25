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
from camscope.explainers.core.dispatch import companies, made
from camscope.explainers.core.evaluation_context import expect_one_of
from camscope.explainers.core.maps import Maps, merged, statuses
from camscope.explainers.core.resampling import on_grid
from camscope.explainers.ensemble.wrappers import Wrapper
from camscope.explanation import MEANING, OK, Explanation
from camscope.targets import Score

How = Literal["max", "mean", "product"]
HOW: tuple[How, ...] = ("max", "mean", "product")
SCALED = "fused: each layer's map was divided by its maximum"


class Fused(Wrapper):
    """Several explainers as one, as a rule one method at several layers, from as few passes as they can share.

    Each map is cut at zero and divided by its maximum, brought to the finest grid, then cell by cell: `how` "max" keeps
    what any of them saw (Jiang et al. 2021, section III-C), "mean" what they have in common, "product" what all saw. A
    map without positive evidence is zero. LayerCAM by the maximum, fine and sure at once; its paper is reported to
    scale the maps of shallow stages first, to tanh(2 M / max M), which is left out:

        Fused.of(LayerCAM(model), ["layer2", "layer3", "layer4"]).explain("cat.jpg", 281)
    """

    name = "fused"

    def __init__(self, explainers: Sequence[Explainer], how: How = "max") -> None:
        if isinstance(explainers, Explainer) or not explainers:
            raise InputError("nothing to fuse: pass a list of explainers, or Fused.of(explainer, layers)")
        if any(isinstance(one, str | nn.Module) for one in explainers):
            raise InputError(
                "Fused takes a list of explainers; for one method at several layers, Fused.of(explainer, layers)"
            )
        expect_one_of("how", how, *HOW)
        super().__init__(*explainers)
        self.explainers, self.how = tuple(explainers), how

    @classmethod
    def of(cls, explainer: Explainer, layers: Sequence[str | nn.Module], how: How = "max") -> Self:
        """One method, with all its settings, at several layers."""
        if not isinstance(explainer, LayerExplainer):
            raise InputError(_no_layer(explainer))
        if isinstance(layers, str):
            raise InputError(f"Fused.of takes a list of layers; for one, [{layers!r}]")
        return cls([replace(explainer, layer=layer) for layer in layers], how)

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """One map of each score."""
        columns = zip(*together(self.explainers, x, scores), strict=True)
        return [gathered(maps, joined([one.heat for one in maps], self.how), SCALED) for maps in columns]

    def _round(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner, self.how)


def _no_layer(given: object) -> str:
    """Why it cannot be put at several layers, and what can."""
    if not isinstance(given, Explainer):
        return f"Fused.of takes an explainer and its layers, as Fused.of(GradCAM(model), layers); {given!r:.80} came instead"
    if not isinstance(given, Wrapper):
        return f"{given!r} has no one layer to choose: Fused.of takes a method that has, as GradCAM(model)"
    if isinstance(given, Fused):
        return f"{given!r} is of several layers already"
    return (
        f"{given!r} does not look at one layer; wrap what is fused: {type(given).__name__}(Fused.of(explainer, layers))"
    )


def together(tools: Sequence[Explainer], x: Tensor, scores: Sequence[Score]) -> list[list[Maps]]:
    """[explainer][score]: those of one company share their passes."""
    done: dict[int, list[Maps]] = {}
    for numbers in companies(tools):
        done.update(zip(numbers, made([tools[t] for t in numbers], x, scores), strict=True))
    return [done[t] for t in range(len(tools))]


def joined(maps: Sequence[Tensor], how: How) -> Tensor:
    """Several (N,*s) -> (N,*finest): each cut at zero, over its maximum, on the finest grid, then cell by cell."""
    finest = max((one.shape[1:] for one in maps), key=math.prod)
    layers = torch.stack([on_grid(_over_maximum(one), finest) for one in maps])
    if how == "product":
        return layers.prod(0)
    return layers.amax(0) if how == "max" else layers.mean(0)


def _over_maximum(maps: Tensor) -> Tensor:
    peak = maps.flatten(1).amax(1).view(-1, *[1] * (maps.ndim - 1))
    return torch.where(peak > 0, maps.relu() / peak, 0)


def gathered(maps: Sequence[Maps], heat: Tensor, scaled: str) -> Maps:
    """The one map (N,*s) that several became, with what is known of each; `scaled`: how they were made comparable."""
    layers = list(filter(None, (one.layer for one in maps)))
    one = merged(maps, heat, scaled, *filter(None, map(_said, maps)))
    return replace(one, layer=" + ".join(layers) or None, layout=None)


def _said(maps: Maps) -> str | None:
    """What a layer lacks, if every sample lacks it there."""
    found = set(statuses(maps))
    return f"{maps.layer}: {MEANING[found.pop()]}" if len(found) == 1 and OK not in found else None


def fuse(explanations: Sequence[Explanation], how: How = "max") -> Explanation:
    """Several layers' maps of one question as one: each divided by its maximum, on the finest grid, then cell by cell.

    `how`: see `Fused`, which spares passes. A layer without positive evidence adds nothing. Raises InputError where the
    explanations are not of one input, target and method.
    """
    if not explanations:
        raise InputError("nothing to fuse: pass one explanation per layer")
    expect_one_of("how", how, *HOW)
    first = explanations[0]
    for one in explanations[1:]:
        _expect_same_question(first, one)
    precision = np.result_type(np.float32, *(one.heat.dtype for one in explanations))
    heat = joined([torch.from_numpy(one.heat.astype(precision))[None] for one in explanations], how)[0].numpy()
    flagged = [one for one in explanations if one.status != OK]
    status = flagged[0].status if len(flagged) == len(explanations) else OK
    notes = [*first.notes, SCALED, *(f"{one.layer}: {MEANING[one.status]}" for one in flagged)]
    layers = " + ".join(str(one.layer) for one in explanations)
    settings = {**first.parameters, "layer": layers, "how": how}
    return replace(first, heat=heat, layer=layers, layout=None, status=status, notes=tuple(notes), parameters=settings)


def _expect_same_question(first: Explanation, other: Explanation) -> None:
    for fact in ("name", "method", "target", "label", "input_size", "placement", "model"):
        if getattr(other, fact) != getattr(first, fact):
            raise InputError(f"cannot fuse: {fact} is {getattr(first, fact)!r} and {getattr(other, fact)!r}")
    if not math.isclose(other.score, first.score, rel_tol=1e-3, abs_tol=1e-6):
        raise InputError(f"cannot fuse: the score is {first.score:.6g} and {other.score:.6g}: not the same input")
    for picture in ("image", "seen"):
        one, another = getattr(first, picture), getattr(other, picture)
        if one is not None and another is not None and not np.array_equal(one, another):
            raise InputError("cannot fuse: the explanations are of different images")
