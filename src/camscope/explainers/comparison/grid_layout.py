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
class Entry:
    """One explanation's place and price. `row`, `column`: in the comparison's `rows` and `columns`.

    `method`: its name, with the settings that tell it from another of that name; `question`: number of the target;
    `forwards`, `backwards`: what the method declares to cost alone; `seconds`: its share of the passes it was made in.
    """

    row: int
    column: int
    question: int
    method: str
    forwards: str
    backwards: str
    seconds: float


@dataclass(frozen=True)
class Arrangement:
    """Entries row by row, the labels of rows and columns, and of each entry its method's number."""

    entries: list[Entry]
    rows: list[str]
    columns: list[str]
    methods: list[int]


def arranged(
    tools: Sequence[Explainer], found: Sequence[Sequence[Explanation]], seconds: Sequence[float]
) -> Arrangement:
    """[method][target] -> Arrangement. `seconds`: of each method for one target."""
    names, shown = method_names(tools), [row[0].layer for row in found]
    layers = [None if of_several_layers(tool) else layer for tool, layer in zip(tools, shown, strict=True)]
    known = [layer for layer in dict.fromkeys(layers) if layer is not None]
    by_layer = len(known) > 1 and _is_full(names, layers, known)
    one_layer = len(set(shown) - {None}) < 2
    labels = [
        name if where is None or one_layer or (by_layer and own) else f"{name} · {where}"
        for name, where, own in zip(names, shown, layers, strict=True)
    ]
    columns = list(dict.fromkeys(labels))
    depth = len(known) if by_layer else 1
    entries = {}
    for t, tool in enumerate(tools):
        level = next((i for i, layer in enumerate(known) if by_layer and layer == layers[t]), 0)
        for q in range(len(found[t])):
            row, column = q * depth + level, columns.index(labels[t])
            if (row, column) in entries:
                raise InputError(f"{labels[t]} is named twice with the same settings")
            entries[row, column] = Entry(row, column, q, names[t], tool.forwards, tool.backwards, seconds[t]), t
    asked = [common(one) for one in zip(*found, strict=True)]
    rows = [label for one in asked for label in _row_labels(one, known if by_layer else [], len(asked))]
    placed = [entries[place] for place in sorted(entries)]
    return Arrangement([entry for entry, _ in placed], rows, columns, [t for _, t in placed])


def of_several_layers(tool: Explainer) -> bool:
    """Whether one map of it is made of several layers': it has no place among the rows of single ones."""
    if isinstance(tool, Wrapper):
        return len(tool.inner) > 1 or of_several_layers(tool.inner[0])
    return takes_layers(type(tool))


def takes_layers(kind: type[Explainer]) -> bool:
    """Whether a method takes `layers`, all of them for one map, where others take one `layer`."""
    return "layers" in signature(kind).parameters


def at_layers(
    kind: type[Explainer], model: nn.Module, layers: Sequence[str | nn.Module] | None, settings: Mapping[str, Any]
) -> list[Explainer]:
    """A method at each layer; once where it has no layer to choose, takes them all, or none is named."""
    for layer in layers or ():
        find_layer(unwrap(model), layer)  # a mistyped one is an error, whether the method reads it or not
    if layers is None or not has_layer(kind):
        return [kind(model, **settings)]
    if takes_layers(kind):
        return [kind(model, **{"layers": list(layers), **settings})]
    return [kind(model, **{"layer": layer, **settings}) for layer in layers]


def has_layer(kind: type[Explainer]) -> bool:
    """Whether a method has a layer to choose, or several."""
    return takes_layers(kind) or "layer" in signature(kind).parameters


def common(explanations: Sequence[Explanation]) -> Explanation:
    """The first that answers what most answer: a contrast among methods asked of one class speaks for itself alone."""
    labels = Counter(one.label for one in explanations)
    return max(explanations, key=lambda one: labels[one.label])


def method_names(tools: Sequence[Explainer]) -> list[str]:
    """Each method's title, with the settings (but the layer) in which it differs from another of that title."""
    settings = [_settings(tool) for tool in tools]
    names = []
    for tool, own in zip(tools, settings, strict=True):
        others = [other for one, other in zip(tools, settings, strict=True) if one.title == tool.title]
        told = [f"{k}={v}" for k, v in own.items() if any(other.get(k) != v for other in others)]
        names.append(" ".join([tool.title, *told]))
    return names


def _settings(tool: Explainer) -> dict[str, str]:
    """A method's settings but the layer, which has a place of its own; a wrapper's, and those of what is inside."""
    inner = tool.inner if isinstance(tool, Wrapper) else ()
    own = {k: str(v) for k, v in tool.parameters.items() if k not in ("layer", "explainer", "explainers")}
    inside = [_settings(one) for one in inner]
    names = dict.fromkeys(k for one in inside for k in one)
    return {k: " + ".join(dict.fromkeys(one[k] for one in inside if k in one)) for k in names} | own


def _is_full(names: Sequence[str], layers: Sequence[str | None], known: Sequence[str]) -> bool:
    """Whether every method that looks at layers looks at all of them: else a row a layer would leave holes."""
    of: dict[str, set[str]] = {}
    for name, layer in zip(names, layers, strict=True):
        if layer is not None:
            of.setdefault(name, set()).add(layer)
    return all(own == set(known) for own in of.values())


def _row_labels(one: Explanation, layers: Sequence[str], questions: int) -> list[str]:
    if not layers:
        return [one.answer]
    return [layer if questions == 1 else f"{one.answer} · {layer}" for layer in layers]
