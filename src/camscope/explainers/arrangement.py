"""Which place an explanation has among others: a row for each class (and layer), a column for each method."""

from collections.abc import Sequence
from dataclasses import dataclass

from camscope.errors import InputError
from camscope.explainers.base import Explainer
from camscope.explanation import Explanation


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
    names, layers = method_names(tools), [row[0].layer for row in found]
    known = [layer for layer in dict.fromkeys(layers) if layer is not None]
    by_layer = len(known) > 1 and _is_full(names, layers, known)
    one_layer = by_layer or len(known) < 2
    labels = [
        name if one_layer or layer is None else f"{name} · {layer}" for name, layer in zip(names, layers, strict=True)
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
    rows = [label for one in found[0] for label in _row_labels(one, known if by_layer else [], len(found[0]))]
    placed = [entries[place] for place in sorted(entries)]
    return Arrangement([entry for entry, _ in placed], rows, columns, [t for _, t in placed])


def method_names(tools: Sequence[Explainer]) -> list[str]:
    """Each method's name, with the settings (but the layer) in which it differs from another of that name."""
    settings = [{k: v for k, v in tool.parameters.items() if k != "layer"} for tool in tools]
    names = []
    for tool, own in zip(tools, settings, strict=True):
        others = [other for one, other in zip(tools, settings, strict=True) if one.name == tool.name]
        told = [f"{k}={v}" for k, v in own.items() if any(other.get(k) != v for other in others)]
        names.append(" ".join([tool.name, *told]))
    return names


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
