"""Layout of a comparison: a row for each target (and layer), a column for each method, and the labels of both."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn

from camscope.errors import InputError
from camscope.explainers.core.base import Explainer
from camscope.explainers.ensemble.wrappers import Wrapper
from camscope.explanation import Explanation
from camscope.hooks.base import find_layer, unwrap


@dataclass(frozen=True)
class GridEntry:
    """Position and cost of one explanation. `row`, `column`: indices into `row_labels` and `column_labels`.

    `method_label`: the method, with the settings that distinguish it from another of the same name; `target_index`: index of
    the target; `forward_passes`, `backward_passes`: the declared cost of the method alone; `seconds`: its share of the time.
    """

    row: int
    column: int
    target_index: int
    method_label: str
    forward_passes: str
    backward_passes: str
    seconds: float


@dataclass(frozen=True)
class GridLayout:
    """The entries row by row, the labels of rows and columns, and the index of each entry's method."""

    entries: list[GridEntry]
    row_labels: list[str]
    column_labels: list[str]
    method_indices: list[int]


def build_grid_layout(
    explainers: Sequence[Explainer], explanations: Sequence[Sequence[Explanation]], seconds: Sequence[float]
) -> GridLayout:
    """Return the layout of explanations [method][target]. `seconds`: time of each method for one target."""
    names, displayed_layers = format_method_labels(explainers), [row[0].layer for row in explanations]
    layers = [
        None if combines_layers(explainer) else layer
        for explainer, layer in zip(explainers, displayed_layers, strict=True)
    ]
    row_layers = [layer for layer in dict.fromkeys(layers) if layer is not None]
    by_layer = len(row_layers) > 1 and _covers_all_layers(names, layers, row_layers)
    one_layer = len(set(displayed_layers) - {None}) < 2
    labels = [
        name if where is None or one_layer or (by_layer and row_layer) else f"{name} · {where}"
        for name, where, row_layer in zip(names, displayed_layers, layers, strict=True)
    ]
    columns = list(dict.fromkeys(labels))
    depth = len(row_layers) if by_layer else 1
    entries = {}
    for t, explainer in enumerate(explainers):
        level = next((i for i, layer in enumerate(row_layers) if by_layer and layer == layers[t]), 0)
        for q in range(len(explanations[t])):
            row, column = q * depth + level, columns.index(labels[t])
            if (row, column) in entries:
                raise InputError(f"{labels[t]} is given twice with the same settings")
            entries[row, column] = (
                GridEntry(row, column, q, names[t], explainer.forward_passes, explainer.backward_passes, seconds[t]),
                t,
            )
    common_explanations = [select_common_explanation(explanation) for explanation in zip(*explanations, strict=True)]
    rows = [
        label
        for explanation in common_explanations
        for label in _format_row_labels(explanation, row_layers if by_layer else [], len(common_explanations))
    ]
    placed = [entries[place] for place in sorted(entries)]
    return GridLayout([entry for entry, _ in placed], rows, columns, [t for _, t in placed])


def combines_layers(explainer: Explainer) -> bool:
    """Whether one map of the explainer combines several layers, so that it belongs to no row of a single layer."""
    if isinstance(explainer, Wrapper):
        return len(explainer.inner) > 1 or combines_layers(explainer.inner[0])
    return accepts_several_layers(type(explainer))


def accepts_several_layers(explainer_cls: type[Explainer]) -> bool:
    """Whether the method has a setting `layers`, and combines all of them to one map."""
    return "layers" in signature(explainer_cls).parameters


def create_at_layers(
    explainer_cls: type[Explainer],
    model: nn.Module,
    layers: Sequence[str | nn.Module] | None,
    settings: Mapping[str, Any],
) -> list[Explainer]:
    """Return an explainer for each layer, or only one if the method has no layer, combines layers, or no layers are given."""
    for layer in layers or ():
        find_layer(unwrap(model), layer)  # a mistyped name is an error, even if the method ignores it
    if layers is None or not accepts_layer_choice(explainer_cls):
        return [explainer_cls(model, **settings)]
    if accepts_several_layers(explainer_cls):
        return [explainer_cls(model, **{"layers": list(layers), **settings})]
    return [explainer_cls(model, **{"layer": layer, **settings}) for layer in layers]


def accepts_layer_choice(explainer_cls: type[Explainer]) -> bool:
    """Whether the method has a setting `layer` or `layers`."""
    return accepts_several_layers(explainer_cls) or "layer" in signature(explainer_cls).parameters


def select_common_explanation(explanations: Sequence[Explanation]) -> Explanation:
    """Return the first explanation with the most frequent answer: a Contrast among other methods has an answer of its own."""
    labels = Counter(explanation.label for explanation in explanations)
    return max(explanations, key=lambda explanation: labels[explanation.label])


def format_method_labels(explainers: Sequence[Explainer]) -> list[str]:
    """Return the name of each method, with the settings, except the layer, that distinguish it from others of that name."""
    settings = [_describe_settings(explainer) for explainer in explainers]
    names = []
    for explainer, own_settings in zip(explainers, settings, strict=True):
        namesakes = [
            other
            for explainer_b, other in zip(explainers, settings, strict=True)
            if explainer_b.full_name == explainer.full_name
        ]
        differences = [f"{k}={v}" for k, v in own_settings.items() if any(other.get(k) != v for other in namesakes)]
        names.append(" ".join([explainer.full_name, *differences]))
    return names


def _describe_settings(explainer: Explainer) -> dict[str, str]:
    """Return the settings of a method except the layer; of a wrapper, also those of the explainers inside."""
    inner = explainer.inner if isinstance(explainer, Wrapper) else ()
    own_settings = {k: str(v) for k, v in explainer.parameters.items() if k not in ("layer", "explainer", "explainers")}
    all_inner_settings = [_describe_settings(inner_settings) for inner_settings in inner]
    names = dict.fromkeys(k for inner_settings in all_inner_settings for k in inner_settings)
    return {
        k: " + ".join(dict.fromkeys(inner_settings[k] for inner_settings in all_inner_settings if k in inner_settings))
        for k in names
    } | own_settings


def _covers_all_layers(names: Sequence[str], layers: Sequence[str | None], all_layers: Sequence[str]) -> bool:
    """Whether every method with a layer has explanations at all layers; otherwise rows per layer would leave gaps."""
    layers_by_method: dict[str, set[str]] = {}
    for name, layer in zip(names, layers, strict=True):
        if layer is not None:
            layers_by_method.setdefault(name, set()).add(layer)
    return all(method_layers == set(all_layers) for method_layers in layers_by_method.values())


def _format_row_labels(explanation: Explanation, layers: Sequence[str], n_targets: int) -> list[str]:
    if not layers:
        return [explanation.label_and_score]
    return [layer if n_targets == 1 else f"{explanation.label_and_score} · {layer}" for layer in layers]
