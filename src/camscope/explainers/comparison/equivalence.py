"""Find explanations of one image whose maps are equal, with the reason if it is known, and compute correlations of maps."""

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
from camscope.explainers.core.base_method import AttributionMaps
from camscope.explanation import Explanation, FloatArray
from camscope.geometry import Placement
from camscope.targets import Score

MAX_HEATMAP_DIFFERENCE = 1e-4  # relative to the maximum
UNIFORM_GRADIENT = "the gradient there is one number per channel, as before global pooling"
NONNEGATIVE_ACTIVATION = "nothing there is negative"
CLASSIFIER_CAM_NAME = (
    "cam"  # its weights are the classifier's row: a gradient that is uniform per channel, times the number of cells
)


@dataclass(frozen=True, eq=False)
class EquivalentMaps:
    """Explanations of one target whose displayed maps are equal, to 1e-4 of the maximum.

    `conditions`: what holds at the layer in this pass and makes the formulas of `equal_by_formula` equal, whatever the numbers.
    Both are empty if the maps are equal without a known reason.
    """

    explanations: tuple[Explanation, ...]
    conditions: tuple[str, ...] = ()
    equal_by_formula: tuple[Explanation, ...] = ()


class FeatureCapture(LayerExplainer):
    """Takes part in a pass that other methods share, and records properties of a layer. Its map has no meaning."""

    name, title, paper = "featurecapture", "Feature capture", ""
    backward_passes = "1"
    needs_gradient = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.conditions_by_score: list[frozenset[str]] = []  # one entry per score, in order

    def combine(self, features: LayerFeatures) -> Tensor:
        """Record the properties and return a placeholder map (1,2) to which no status applies."""
        A, g = features.activation, features.gradient.flatten(2)
        even = (g - g.mean(SPATIAL_AXIS, keepdim=True)).abs().amax() <= MAX_HEATMAP_DIFFERENCE * g.abs().amax()
        true = {UNIFORM_GRADIENT: bool(even), NONNEGATIVE_ACTIVATION: bool(A.amin() >= 0)}
        self.conditions_by_score.append(frozenset(fact for fact, holds in true.items() if holds))
        return A.new_tensor([[0.0, 1.0]])

    def _combine_to_maps(self, features: LayerFeatures) -> AttributionMaps:
        return AttributionMaps(self.combine(features), features.layer)


def create_feature_captures(explainers: Sequence[Explainer]) -> list[FeatureCapture]:
    """Return one capture for each layer at which several methods might coincide and a gradient is computed anyway."""
    layers: dict[object, list[LayerExplainer]] = {}
    for explainer in explainers:
        if isinstance(explainer, LayerExplainer) and (
            _is_gradient_formula(explainer) or explainer.name == CLASSIFIER_CAM_NAME
        ):
            layers.setdefault(
                (explainer.mode, explainer.share_key, explainer.layer, str(explainer.layout), explainer.reshape), []
            ).append(explainer)
    captures = []
    for group in layers.values():
        first = next((explainer for explainer in group if explainer.needs_gradient), None)
        if first is not None and len(group) > 1:
            capture = first.create_sibling(FeatureCapture)
            captures += [capture] if isinstance(capture, FeatureCapture) else []
    return captures


def find_equivalent_maps(
    explanations: Sequence[Explanation],
    explainers: Sequence[Explainer],
    conditions_by_layer: Mapping[str | None, frozenset[str]],
) -> list[EquivalentMaps]:
    """Return the groups of equal maps among explanations of one target, in the order of their `explainers`.

    `conditions_by_layer` holds the properties of each layer. A map without positive evidence belongs to no group, because its
    status says so already.
    """
    groups: list[list[int]] = []
    for n, explanation in enumerate(explanations):
        if not explanation.heatmap("grid").any():
            continue
        placement = next((group for group in groups if _have_equal_heatmaps(explanations[group[0]], explanation)), None)
        groups.append([n]) if placement is None else placement.append(n)
    equivalent_maps = []
    for group in (group for group in groups if len(group) > 1):
        members = tuple(explanations[n] for n in group)
        layers = {explanation.layer for explanation in members}
        conditions = conditions_by_layer.get(layers.pop()) if len(layers) == 1 else None
        because, explained = (
            ((), []) if conditions is None else _find_shared_formula(conditions, [explainers[n] for n in group])
        )
        equivalent_maps.append(EquivalentMaps(members, because, tuple(members[i] for i in explained)))
    return equivalent_maps


def correlate_maps(explanations: Sequence[Explanation], kind: Literal["pearson", "spearman"] = "pearson") -> FloatArray:
    """Return the correlation matrix (M,M) of the displayed maps on the finest grid among them; NaN for a constant map."""
    if kind not in ("pearson", "spearman"):
        raise InputError(f"kind={kind!r}: expected 'pearson' or 'spearman'")
    finest_grid = np.max([explanation.grid for explanation in explanations], axis=0)
    placement = Placement.identity(finest_grid.tolist())
    rows = np.stack(
        [placement.project(explanation.heatmap("grid").astype(np.float64))[0].ravel() for explanation in explanations]
    )
    if kind == "spearman":
        rows = np.stack([_rank_values(row) for row in rows])
    centered = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centered, axis=1)
    is_valid = norms > 1e-12 * np.abs(rows).max(1)  # a constant map leaves only rounding
    scaled = centered / np.where(is_valid, norms, np.nan)[:, None]
    return np.asarray((scaled @ scaled.T).clip(-1, 1))


def _rank_values(values: FloatArray) -> FloatArray:
    """Return the ranks (M,), with the mean rank for equal values."""
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
    """Return the fewest conditions under which the most formulas are equal, and the indices of the methods with that formula."""
    best: tuple[tuple[str, ...], list[int]] = (), []
    candidates = [fact for fact in (UNIFORM_GRADIENT, NONNEGATIVE_ACTIVATION) if fact in conditions]
    for because in (some for size in range(len(candidates) + 1) for some in combinations(candidates, size)):
        formula_maps = {
            t: maps
            for t, explainer in enumerate(explainers)
            if (maps := _evaluate_formula(explainer, because)) is not None
        }
        first = next(iter(formula_maps.values()), None)
        equal_indices = [t for t, maps in formula_maps.items() if first is not None and _are_close(first, maps)]
        if len(equal_indices) > max(1, len(best[1])):
            best = because, equal_indices
    return best


def _evaluate_formula(explainer: Explainer, conditions: Sequence[str]) -> FloatArray | None:
    """Evaluate a method's formula on random numbers that fulfill the conditions -> (N,h,w); None if it needs other inputs."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    A = torch.randn((8, 5, 3, 4), generator=generator, dtype=torch.float64, device="cpu")
    g = torch.randn((8, 5, 3, 4), generator=generator, dtype=torch.float64, device="cpu")
    A = A.abs() if NONNEGATIVE_ACTIVATION in conditions else A
    g = g[..., :1, :1].expand_as(g) if UNIFORM_GRADIENT in conditions else g
    if explainer.name == CLASSIFIER_CAM_NAME and UNIFORM_GRADIENT in conditions:
        attribution = (g * A).sum(1)
    elif isinstance(explainer, BaseCAM) and _is_gradient_formula(explainer):
        attribution = explainer.combine(_build_synthetic_features(explainer, A, g))
    else:
        return None
    displayed = attribution.relu().numpy()
    peaks = displayed.max((1, 2), keepdims=True)
    return np.asarray(displayed / np.where(peaks > 0, peaks, 1))


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
    raise NotImplementedError("a formula of activation and gradient uses no other input")


def describe_equivalent_maps(
    equivalent_maps: Sequence[EquivalentMaps], method_labels: Mapping[int, str], n_targets: int
) -> tuple[str, ...]:
    """Return sentences that say which maps are equal and why; what holds for several targets is one sentence.

    `method_labels`: the label of each explanation's method, by the explanation's id.
    """
    groups_by_text: dict[tuple[tuple[str, ...], str, str], list[EquivalentMaps]] = {}
    for group in equivalent_maps:
        description = _describe_group(
            group, [_quote_label(method_labels[id(explanation)]) for explanation in group.explanations]
        )
        groups_by_text.setdefault(description, []).append(group)
    return tuple(
        f"{_join_names(names)} are one map{where}{_describe_classes(groups, n_targets)}: "
        f"{reason}{_describe_negative_parts(names, groups)}"
        for (names, where, reason), groups in groups_by_text.items()
    )


def _quote_label(name: str) -> str:
    """Quote a label with a comma, such as `'gradcam, denoised'`, for use in a list."""
    return f"'{name}'" if "," in name else name


def _describe_group(group: EquivalentMaps, method_labels: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the names of the methods, ` at LAYER`, and why their maps are equal."""
    layers = {explanation.layer for explanation in group.explanations}
    if len(layers) > 1:
        names = tuple(
            f"{name} at {explanation.layer}"
            for name, explanation in zip(method_labels, group.explanations, strict=True)
        )
        return names, "", _describe_reason(group, names)
    layer = layers.pop()
    return tuple(method_labels), f" at {layer}" if layer else "", _describe_reason(group, method_labels)


def _describe_reason(group: EquivalentMaps, names: Sequence[str]) -> str:
    explained = [
        name
        for name, explanation in zip(names, group.explanations, strict=True)
        if explanation in group.equal_by_formula
    ]
    if not explained:
        return "the maps are the same here"
    unexplained = [name for name in names if name not in explained]
    whose = f"the formulas of {_join_names(explained)} are one" if unexplained else "their formulas are one"
    because = f"{' and '.join(group.conditions)}, so " if group.conditions else ""
    return f"{because}{whose}" + (
        f"; {_join_names(unexplained)} {_agreement_phrase(unexplained)} here" if unexplained else ""
    )


def _describe_negative_parts(names: Sequence[str], groups: Sequence[EquivalentMaps]) -> str:
    """Say which methods have negative values, if others do not: equal cells then differ where an image interpolates."""
    minima = [[float(group.explanations[i].attribution.min()) for group in groups] for i in range(len(names))]
    signed = [name for name, lowest in zip(names, minima, strict=True) if min(lowest) < 0]
    if len(signed) in (0, len(names)):
        return ""
    have, their = ("has", "its picture") if len(signed) == 1 else ("have", "their pictures")
    return f"; {_join_names(signed)} also {have} a negative part, which narrows {their} between the cells"


def _agreement_phrase(names: Sequence[str]) -> str:
    return "is the same" if len(names) == 1 else "are the same"


def _describe_classes(groups: Sequence[EquivalentMaps], n_targets: int) -> str:
    """Return ` for CLASSES` if there are several targets."""
    if n_targets == 1:
        return ""
    if len(groups) == n_targets:
        return " for every class"
    return f" for {_join_names([group.explanations[0].label for group in groups])}"


def _join_names(names: Sequence[str]) -> str:
    """Join names as `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
