"""Arrange a comparison in a grid: one row per target and layer, one column per method, and their labels."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from torch import nn

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.explanation import Explanation
from camscope.hooks.find_layers import find_layer, unwrap


@dataclass(frozen=True)
class GridEntry:
    """One explanation in the grid, with its position and its cost.

    `row` and `column` are indices of the row and column labels. `method_label` names the method, with settings that
    distinguish it from another one of the same name. `forward_passes` and `backward_passes` are the declared cost of
    the method. `seconds` is its share of the time.
    """

    explanation: Explanation
    row: int
    column: int
    target_index: int
    method_label: str
    forward_passes: str
    backward_passes: str
    seconds: float


class ComparisonGrid(NamedTuple):
    """The entries of a comparison, row by row, and the labels of its rows and columns."""

    entries: tuple[GridEntry, ...]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]


def arrange_in_grid(
    explainers: Sequence[Explainer], explanations: Sequence[Sequence[Explanation]], seconds: Sequence[float]
) -> ComparisonGrid:
    """Arrange explanations in a grid, with a label for each row and column.

    `explanations` are by method, then by target. `seconds` is the time of each method for one target. Layers are rows if
    every method with a layer has all of them. Otherwise each layer has its own columns.
    """
    names, displayed_layers = format_method_labels(explainers), [row[0].layer for row in explanations]
    layers = [None if combines_layers(e) else layer for e, layer in zip(explainers, displayed_layers, strict=True)]
    row_layers = [layer for layer in dict.fromkeys(layers) if layer is not None]
    methods_at_layers = {(name, layer) for name, layer in zip(names, layers, strict=True) if layer is not None}
    layered_methods = {name for name, _ in methods_at_layers}
    if len(methods_at_layers) < len(layered_methods) * len(row_layers) or len(row_layers) == 1:
        row_layers = []
    one_layer = len(set(displayed_layers) - {None}) < 2
    labels = [
        name if where is None or one_layer or layer in row_layers else f"{name} · {where}"
        for name, where, layer in zip(names, displayed_layers, layers, strict=True)
    ]
    columns, entries = tuple(dict.fromkeys(labels)), dict[tuple[int, int], GridEntry]()
    for t, explainer in enumerate(explainers):
        level = row_layers.index(layer) if (layer := layers[t]) in row_layers else 0
        for q, explanation in enumerate(explanations[t]):
            position = q * max(1, len(row_layers)) + level, columns.index(labels[t])
            if position in entries:
                raise InputError(f"{labels[t]} is given twice with the same settings")
            forward, backward = explainer.forward_passes, explainer.backward_passes
            entries[position] = GridEntry(explanation, *position, q, names[t], forward, backward, seconds[t])
    answers = [
        select_explanation_with_commonest_label(column).label_and_score for column in zip(*explanations, strict=True)
    ]
    rows = [layer if len(answers) == 1 else f"{answer} · {layer}" for answer in answers for layer in row_layers]
    return ComparisonGrid(tuple(entries[position] for position in sorted(entries)), tuple(rows or answers), columns)


def select_explanation_with_commonest_label(explanations: Sequence[Explanation]) -> Explanation:
    """Return the first explanation with the most frequent label. The label of a Contrast differs from all others."""
    labels = Counter(explanation.label for explanation in explanations)
    return max(explanations, key=lambda explanation: labels[explanation.label])


def combines_layers(explainer: Explainer) -> bool:
    """Whether an explainer computes a single map from several layers."""
    if isinstance(explainer, Wrapper):
        return len(explainer.inner) > 1 or combines_layers(explainer.inner[0])
    return accepts_several_layers(type(explainer))


def accepts_several_layers(explainer_cls: type[Explainer]) -> bool:
    """Whether a method has a setting `layers`, and computes a single map from these layers."""
    return "layers" in signature(explainer_cls).parameters


def create_explainers_at_layers(
    explainer_cls: type[Explainer],
    model: nn.Module,
    layers: Sequence[str | nn.Module] | None,
    settings: Mapping[str, Any],
) -> list[Explainer]:
    """Create one explainer of a method for each layer. Create a single explainer if the method takes no single layer."""
    for layer in layers or ():
        find_layer(unwrap(model), layer)  # a mistyped name is an error, even if the method ignores it
    if layers is None or not accepts_layer_choice(explainer_cls):
        return [explainer_cls(model, **settings)]
    if accepts_several_layers(explainer_cls):
        return [explainer_cls(model, **{"layers": list(layers), **settings})]
    return [explainer_cls(model, **{"layer": layer, **settings}) for layer in layers]


def accepts_layer_choice(explainer_cls: type[Explainer]) -> bool:
    """Whether a method has a setting `layer` or `layers`."""
    return accepts_several_layers(explainer_cls) or "layer" in signature(explainer_cls).parameters


def format_method_labels(explainers: Sequence[Explainer]) -> list[str]:
    """Return a label for each explainer: the name of its method. Settings are added where explainers have the same name."""
    settings = [(explainer.composed_name, _describe_settings(explainer)) for explainer in explainers]
    labels = []
    for name, values in settings:
        namesakes = [other for other_name, other in settings if other_name == name]
        differences = [f"{k}={v}" for k, v in values.items() if any(other.get(k) != v for other in namesakes)]
        labels.append(" ".join([name, *differences]))
    return labels


def _describe_settings(explainer: Explainer) -> dict[str, str]:
    """Return a dict from setting name to text, without the layer.
    The settings of a wrapper include the inner explainers' settings.
    """
    merged: dict[str, list[str]] = {}
    for inner in explainer.inner if isinstance(explainer, Wrapper) else ():
        for name, value in _describe_settings(inner).items():
            merged.setdefault(name, []).append(value)
    settings = {k: str(v) for k, v in explainer.parameters.items() if k not in ("layer", "explainer", "explainers")}
    return {name: " + ".join(dict.fromkeys(values)) for name, values in merged.items()} | settings
