"""Which place an explanation has among others: a row for each class (and layer), a column for each method."""

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
    """One explanation's place and price. `row`, `column`: in the comparison's `n_rows` and `column_labels`.

    `method_label`: its name, with the settings that tell it from another of that name; `target_index`: number of the target;
    `forward_passes`, `backward_passes`: what the method declares to cost alone; `seconds`: its share of the passes it was made in.
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
    """Entries row by row, the labels of rows and columns, and of each entry its method's number."""

    entries: list[GridEntry]
    row_labels: list[str]
    column_labels: list[str]
    method_indices: list[int]


def build_grid_layout(
    explainers: Sequence[Explainer], explanations: Sequence[Sequence[Explanation]], seconds: Sequence[float]
) -> GridLayout:
    """[method][target] -> Arrangement. `seconds`: of each method for one target."""
    names, shown = format_method_labels(explainers), [row[0].layer for row in explanations]
    layers = [None if combines_layers(tool) else layer for tool, layer in zip(explainers, shown, strict=True)]
    known = [layer for layer in dict.fromkeys(layers) if layer is not None]
    by_layer = len(known) > 1 and _covers_all_layers(names, layers, known)
    one_layer = len(set(shown) - {None}) < 2
    labels = [
        name if where is None or one_layer or (by_layer and own) else f"{name} · {where}"
        for name, where, own in zip(names, shown, layers, strict=True)
    ]
    columns = list(dict.fromkeys(labels))
    depth = len(known) if by_layer else 1
    entries = {}
    for t, tool in enumerate(explainers):
        level = next((i for i, layer in enumerate(known) if by_layer and layer == layers[t]), 0)
        for q in range(len(explanations[t])):
            row, column = q * depth + level, columns.index(labels[t])
            if (row, column) in entries:
                raise InputError(f"{labels[t]} is named twice with the same settings")
            entries[row, column] = (
                GridEntry(row, column, q, names[t], tool.forward_passes, tool.backward_passes, seconds[t]),
                t,
            )
    asked = [select_common_explanation(one) for one in zip(*explanations, strict=True)]
    rows = [label for one in asked for label in _format_row_labels(one, known if by_layer else [], len(asked))]
    placed = [entries[place] for place in sorted(entries)]
    return GridLayout([entry for entry, _ in placed], rows, columns, [t for _, t in placed])


def combines_layers(explainer: Explainer) -> bool:
    """Whether one map of it is made of several layers': it has no place among the rows of single ones."""
    if isinstance(explainer, Wrapper):
        return len(explainer.inner) > 1 or combines_layers(explainer.inner[0])
    return accepts_several_layers(type(explainer))


def accepts_several_layers(explainer_cls: type[Explainer]) -> bool:
    """Whether a method takes `layer_names`, all of them for one map, where others take one `layers`."""
    return "layers" in signature(explainer_cls).parameters


def create_at_layers(
    explainer_cls: type[Explainer],
    model: nn.Module,
    layers: Sequence[str | nn.Module] | None,
    settings: Mapping[str, Any],
) -> list[Explainer]:
    """A method at each layer; once where it has no layer to choose, takes them all, or none is named."""
    for layer in layers or ():
        find_layer(unwrap(model), layer)  # a mistyped one is an error, whether the method reads it or not
    if layers is None or not accepts_layer_choice(explainer_cls):
        return [explainer_cls(model, **settings)]
    if accepts_several_layers(explainer_cls):
        return [explainer_cls(model, **{"layers": list(layers), **settings})]
    return [explainer_cls(model, **{"layer": layer, **settings}) for layer in layers]


def accepts_layer_choice(explainer_cls: type[Explainer]) -> bool:
    """Whether a method has a layer to choose, or several."""
    return accepts_several_layers(explainer_cls) or "layer" in signature(explainer_cls).parameters


def select_common_explanation(explanations: Sequence[Explanation]) -> Explanation:
    """The first that answers what most answer: a contrast among methods asked of one class speaks for itself alone."""
    labels = Counter(one.label for one in explanations)
    return max(explanations, key=lambda one: labels[one.label])


def format_method_labels(explainers: Sequence[Explainer]) -> list[str]:
    """Each method's title, with the settings (but the layer) in which it differs from another of that title."""
    settings = [_describe_settings(tool) for tool in explainers]
    names = []
    for tool, own in zip(explainers, settings, strict=True):
        others = [other for one, other in zip(explainers, settings, strict=True) if one.full_name == tool.full_name]
        told = [f"{k}={v}" for k, v in own.items() if any(other.get(k) != v for other in others)]
        names.append(" ".join([tool.full_name, *told]))
    return names


def _describe_settings(explainer: Explainer) -> dict[str, str]:
    """A method's settings but the layer, which has a place of its own; a wrapper's, and those of what is inside."""
    inner = explainer.inner if isinstance(explainer, Wrapper) else ()
    own = {k: str(v) for k, v in explainer.parameters.items() if k not in ("layer", "explainer", "explainers")}
    inside = [_describe_settings(one) for one in inner]
    names = dict.fromkeys(k for one in inside for k in one)
    return {k: " + ".join(dict.fromkeys(one[k] for one in inside if k in one)) for k in names} | own


def _covers_all_layers(names: Sequence[str], layers: Sequence[str | None], all_layers: Sequence[str]) -> bool:
    """Whether every method that looks at layers looks at all of them: else a row a layer would leave holes."""
    of: dict[str, set[str]] = {}
    for name, layer in zip(names, layers, strict=True):
        if layer is not None:
            of.setdefault(name, set()).add(layer)
    return all(own == set(all_layers) for own in of.values())


def _format_row_labels(explanation: Explanation, layers: Sequence[str], n_targets: int) -> list[str]:
    if not layers:
        return [explanation.label_and_score]
    return [layer if n_targets == 1 else f"{explanation.label_and_score} · {layer}" for layer in layers]
