"""Where explanations of one image agree: maps that look the same, with the reason where it is known, and correlations.

Coincidences in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.cam.base import SPATIAL_AXIS, BaseCAM, LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.maps import AttributionMaps
from camscope.explanation import Explanation, FloatArray
from camscope.geometry import Placement
from camscope.targets import Score

MAX_HEATMAP_DIFFERENCE = 1e-4  # of the maximum
UNIFORM_GRADIENT = "the gradient there is one number per channel, as where a model pools what it reads"
NONNEGATIVE_ACTIVATION = "nothing there is negative"
CLASSIFIER_CAM_NAME = (
    "cam"  # weighs by the classifier's row, which is a gradient that is one number per channel, times the cells
)


@dataclass(frozen=True, eq=False)
class EquivalentMaps:
    """Explanations of one class whose displayed map is the same, to 1e-4 of its maximum.

    `conditions`: what was found true of the layer in this pass, under which the formulas of `equal_by_formula` are one whatever
    the numbers; both are empty where the maps are the same here and no more is known.
    """

    explanations: tuple[Explanation, ...]
    conditions: tuple[str, ...] = ()
    equal_by_formula: tuple[Explanation, ...] = ()


class FeatureCapture(LayerExplainer):
    """Rides along in a pass that others share, and notes what is true of a layer. Its map means nothing."""

    name, paper = "witness", ""
    backward_passes = "1"
    needs_gradient = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.conditions_by_score: list[frozenset[str]] = []  # one entry a score, in order

    def combine(self, features: LayerFeatures) -> Tensor:
        """(1,2): a map that no status applies to."""
        A, g = features.activation, features.gradient.flatten(2)
        even = (g - g.mean(SPATIAL_AXIS, keepdim=True)).abs().amax() <= MAX_HEATMAP_DIFFERENCE * g.abs().amax()
        true = {UNIFORM_GRADIENT: bool(even), NONNEGATIVE_ACTIVATION: bool(A.amin() >= 0)}
        self.conditions_by_score.append(frozenset(fact for fact, holds in true.items() if holds))
        return A.new_tensor([[0.0, 1.0]])

    def _combine_to_maps(self, features: LayerFeatures) -> AttributionMaps:
        return AttributionMaps(self.combine(features), features.layer)


def create_feature_captures(explainers: Sequence[Explainer]) -> list[FeatureCapture]:
    """One for each layer at which several methods might coincide, and which a gradient reaches anyway."""
    layers: dict[object, list[LayerExplainer]] = {}
    for tool in explainers:
        if isinstance(tool, LayerExplainer) and (_is_gradient_formula(tool) or tool.name == CLASSIFIER_CAM_NAME):
            layers.setdefault((tool.mode, tool.share_key, tool.layer, str(tool.layout), tool.reshape), []).append(tool)
    made = []
    for found in layers.values():
        first = next((tool for tool in found if tool.needs_gradient), None)
        if first is not None and len(found) > 1:
            witness = first.create_sibling(FeatureCapture)
            made += [witness] if isinstance(witness, FeatureCapture) else []
    return made


def find_equivalent_maps(
    explanations: Sequence[Explanation],
    explainers: Sequence[Explainer],
    conditions_by_layer: Mapping[str | None, frozenset[str]],
) -> list[EquivalentMaps]:
    """Groups among explanations of one class; `explainers` made them, `conditions_by_layer` are what is true of each layer.

    A map without positive evidence coincides with nothing: its status says so already.
    """
    groups: list[list[int]] = []
    for n, one in enumerate(explanations):
        if not one.heatmap("grid").any():
            continue
        home = next((group for group in groups if _have_equal_heatmaps(explanations[group[0]], one)), None)
        groups.append([n]) if home is None else home.append(n)
    found = []
    for group in (group for group in groups if len(group) > 1):
        alike = tuple(explanations[n] for n in group)
        layers = {one.layer for one in alike}
        known = conditions_by_layer.get(layers.pop()) if len(layers) == 1 else None
        because, explained = ((), []) if known is None else _find_shared_formula(known, [explainers[n] for n in group])
        found.append(EquivalentMaps(alike, because, tuple(alike[i] for i in explained)))
    return found


def correlate_maps(explanations: Sequence[Explanation], kind: Literal["pearson", "spearman"] = "pearson") -> FloatArray:
    """(M,M): correlation of the maps as they are displayed, on the finest grid among them; NaN beside a constant map."""
    if kind not in ("pearson", "spearman"):
        raise InputError(f"kind={kind!r}: expected 'pearson' or 'spearman'")
    finest = np.max([one.grid for one in explanations], axis=0)
    place = Placement.identity(finest.tolist())
    rows = np.stack([place.project(one.heatmap("grid").astype(np.float64))[0].ravel() for one in explanations])
    if kind == "spearman":
        rows = np.stack([_rank_values(row) for row in rows])
    centred = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    known = norms > 1e-12 * np.abs(rows).max(1)  # a constant map leaves rounding behind
    scaled = centred / np.where(known, norms, np.nan)[:, None]
    return np.asarray((scaled @ scaled.T).clip(-1, 1))


def _rank_values(values: FloatArray) -> FloatArray:
    """(M,): ranks, the mean one among equals."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[which])


def _have_equal_heatmaps(first: Explanation, second: Explanation) -> bool:
    return first.grid == second.grid and _are_close(first.heatmap("grid"), second.heatmap("grid"))


def _are_close(first: FloatArray, second: FloatArray) -> bool:
    return bool(np.abs(first - second).max() <= MAX_HEATMAP_DIFFERENCE)


def _is_gradient_formula(explainer: Explainer) -> bool:
    """Whether the map is a formula of the activation and the score's gradient there, and of nothing else."""
    return (
        isinstance(explainer, BaseCAM)
        and explainer.objective_key == "score"
        and not (explainer.runs_model or explainer.second_order)
    )


def _find_shared_formula(
    conditions: frozenset[str], explainers: Sequence[Explainer]
) -> tuple[tuple[str, ...], list[int]]:
    """As little of the facts as makes the most formulas one, and the numbers of the methods whose formulas they are."""
    best: tuple[tuple[str, ...], list[int]] = (), []
    given = [fact for fact in (UNIFORM_GRADIENT, NONNEGATIVE_ACTIVATION) if fact in conditions]
    for because in (some for size in range(len(given) + 1) for some in combinations(given, size)):
        drawn = {t: maps for t, tool in enumerate(explainers) if (maps := _evaluate_formula(tool, because)) is not None}
        first = next(iter(drawn.values()), None)
        alike = [t for t, maps in drawn.items() if first is not None and _are_close(first, maps)]
        if len(alike) > max(1, len(best[1])):
            best = because, alike
    return best


def _evaluate_formula(explainer: Explainer, conditions: Sequence[str]) -> FloatArray | None:
    """(N,h,w): what a method makes of numbers drawn at random of which only this is true; None if it reads others."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    A = torch.randn((8, 5, 3, 4), generator=draw, dtype=torch.float64, device="cpu")
    g = torch.randn((8, 5, 3, 4), generator=draw, dtype=torch.float64, device="cpu")
    A = A.abs() if NONNEGATIVE_ACTIVATION in conditions else A
    g = g[..., :1, :1].expand_as(g) if UNIFORM_GRADIENT in conditions else g
    if explainer.name == CLASSIFIER_CAM_NAME and UNIFORM_GRADIENT in conditions:
        heat = (g * A).sum(1)
    elif isinstance(explainer, BaseCAM) and _is_gradient_formula(explainer):
        heat = explainer.combine(_build_synthetic_features(explainer, A, g))
    else:
        return None
    shown = heat.relu().numpy()
    peaks = shown.max((1, 2), keepdims=True)
    return np.asarray(shown / np.where(peaks > 0, peaks, 1))


def _build_synthetic_features(explainer: Explainer, activation: Tensor, gradient: Tensor) -> LayerFeatures:
    score = Score(explainer.model)
    values = activation.new_zeros(len(activation))
    return LayerFeatures(
        "",
        activation,
        activation,
        score,
        values,
        None,
        _raise_unavailable,
        gradient,
        recompute=_raise_unavailable,
        compute_curvature=_raise_unavailable,
    )


def _raise_unavailable(*_: object) -> NoReturn:
    raise NotImplementedError("a formula of activation and gradient reads nothing else")


def describe_equivalent_maps(
    equivalent_maps: Sequence[EquivalentMaps], method_labels: Mapping[int, str], n_targets: int
) -> tuple[str, ...]:
    """What coincides and why; what holds for several of so many questions is said once.

    `method_labels`: the name under which each explanation's method goes, by the explanation's id.
    """
    said: dict[tuple[tuple[str, ...], str, str], list[EquivalentMaps]] = {}
    for group in equivalent_maps:
        words = _describe_group(group, [_quote_label(method_labels[id(one)]) for one in group.explanations])
        said.setdefault(words, []).append(group)
    return tuple(
        f"{_join_names(names)} are one map{where}{_describe_classes(groups, n_targets)}: {why}{_describe_negative_parts(names, groups)}"
        for (names, where, why), groups in said.items()
    )


def _quote_label(name: str) -> str:
    """`'gradcam, denoised'`: a wrapper's title has a comma of its own, and stands in a list."""
    return f"'{name}'" if "," in name else name


def _describe_group(group: EquivalentMaps, method_labels: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """The names of the methods, ` at layer4`, and why they coincide."""
    layers = {one.layer for one in group.explanations}
    if len(layers) > 1:
        names = tuple(f"{name} at {one.layer}" for name, one in zip(method_labels, group.explanations, strict=True))
        return names, "", _describe_reason(group, names)
    layer = layers.pop()
    return tuple(method_labels), f" at {layer}" if layer else "", _describe_reason(group, method_labels)


def _describe_reason(group: EquivalentMaps, names: Sequence[str]) -> str:
    explained = [name for name, one in zip(names, group.explanations, strict=True) if one in group.equal_by_formula]
    if not explained:
        return "the maps are the same here"
    rest = [name for name in names if name not in explained]
    whose = f"the formulas of {_join_names(explained)} are one" if rest else "their formulas are one"
    because = f"{' and '.join(group.conditions)}, so " if group.conditions else ""
    return f"{because}{whose}" + (f"; {_join_names(rest)} {_agreement_phrase(rest)} here" if rest else "")


def _describe_negative_parts(names: Sequence[str], groups: Sequence[EquivalentMaps]) -> str:
    """Which of them go below zero, where others do not: the same cell by cell, they differ where a picture interpolates."""
    heats = [[float(group.explanations[i].attribution.min()) for group in groups] for i in range(len(names))]
    signed = [name for name, lowest in zip(names, heats, strict=True) if min(lowest) < 0]
    if len(signed) in (0, len(names)):
        return ""
    have, their = ("has", "its picture") if len(signed) == 1 else ("have", "their pictures")
    return f"; {_join_names(signed)} also {have} a negative part, which narrows {their} between the cells"


def _agreement_phrase(names: Sequence[str]) -> str:
    return "is the same" if len(names) == 1 else "are the same"


def _describe_classes(groups: Sequence[EquivalentMaps], n_targets: int) -> str:
    """For which classes, where there are several."""
    if n_targets == 1:
        return ""
    if len(groups) == n_targets:
        return " for every class"
    return f" for {_join_names([group.explanations[0].label for group in groups])}"


def _join_names(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
