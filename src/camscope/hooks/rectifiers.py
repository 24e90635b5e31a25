"""ReLUs in the graph of a score, and another way back through them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.autograd.graph import Node

from camscope.hooks.graph import hidden_in, kind_of_step, steps
from camscope.hooks.vocabulary import ACTIVATIONS

Rule = Literal["guided", "deconvnet"]

# what holds the floor of an operation that is a ReLU where that is 0: relu6 is a hardtanh, x.clamp(min=0) a clamp
FLOORS = {
    "Threshold": "_saved_threshold",
    "Hardtanh": "_saved_min_val",
    "Clamp": "_saved_min",
    "ClampMin": "_saved_min",
}
# what steps are called is what functions are, but for these
OTHERS = {"".join(word.capitalize() for word in name.split("_")): name for name in ACTIVATIONS}
OTHERS |= {"PreluKernel": "prelu", "RreluWithNoise": "rrelu", "Maximum": "maximum", "Glu": "glu"}


@dataclass
class Met:
    """What was met on the way back: ReLUs, other activations, and what may hide some of either; how often each."""

    relus: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    hiding: Counter[str] = field(default_factory=Counter)


def rectify(values: Iterable[Tensor], rule: Rule) -> Met:
    """Until their graph is gone, gradients of the values go back through its ReLUs by another rule.

    "guided": what is positive of them, where the input is; "deconvnet": what is positive of them, whatever the input.
    The hooks are the graph's, which is this call's alone: a model has none, and other threads have graphs of their own.
    """
    met = Met()
    for node in steps(values):
        kind = kind_of_step(node)
        if hiding := hidden_in(node):
            met.hiding[hiding] += 1
        elif _is_relu(node, kind):
            met.relus[{"Hardtanh": "relu6", "ClampMin": "clamp"}.get(kind, kind.lower())] += 1
            _bend(node, rule)
        elif kind in OTHERS:
            met.others[OTHERS[kind]] += 1
    return met


def _is_relu(node: Node, kind: str) -> bool:
    floor = getattr(node, FLOORS[kind]) if kind in FLOORS else None
    if isinstance(floor, Tensor):
        return not bool(floor.any())
    return kind == "Relu" or floor == 0


def _bend(node: Node, rule: Rule) -> None:
    if rule == "guided":
        node.register_prehook(_positive)
    else:
        node.register_hook(lambda found, given: (*_positive(given), *found[1:]))


def _positive(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.clamp(min=0) for one in gradients)
