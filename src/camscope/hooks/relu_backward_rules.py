"""Replace the backward rule of ReLUs in the autograd graph of a score: guided backpropagation and deconvnet."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from camscope.hooks.intercept_torch_functions import ACTIVATIONS

OPAQUE_NODES = {
    "DifferentiableGraph": "a scripted part",
    "CopySlices": "an operation in place on a view",
    "Where": "torch.where",
}


def iter_graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield each node of the autograd graph of the given tensors. No node is repeated."""
    waiting = [output.grad_fn for output in outputs]
    visited: set[Node | None] = {None}
    while waiting:
        node = waiting.pop()
        if node not in visited and node is not None:
            visited.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def get_operation_name(node: Node) -> str:
    """Return the operation of a graph node. For a node ReluBackward0 it is "Relu"."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def describe_opaque_node(node: Node) -> str | None:
    """Describe a graph node in which a ReLU may be hidden, such as a scripted module. Return None for other nodes."""
    kind = get_operation_name(node)
    step: object = node
    if isinstance(step, BackwardCFunction):  # of Python
        return f"the function {kind} with a custom backward"
    factors = [getattr(node, f"_saved_{name}", None) for name in ("self", "other")] if kind == "Mul" else []
    if any(isinstance(factor, Tensor) and factor.dtype == torch.bool for factor in factors):
        return "a product with true and false"
    return OPAQUE_NODES.get(kind)


ReluRule = Literal["guided", "deconvnet"]
# the attribute with the lower bound of an operation that is a ReLU where it is 0: hardtanh is relu6, clamp x.clamp(min=0)
RELU_FLOOR_ATTRIBUTES = {
    "Threshold": "_saved_threshold",
    "Hardtanh": "_saved_min_val",
    "Clamp": "_saved_min",
    "ClampMin": "_saved_min",
}
# nodes are named for their functions, except these
ACTIVATION_BY_NODE_NAME = {"".join(word.capitalize() for word in name.split("_")): name for name in ACTIVATIONS}
ACTIVATION_BY_NODE_NAME |= {"PreluKernel": "prelu", "RreluWithNoise": "rrelu", "Maximum": "maximum", "Glu": "glu"}


@dataclass
class ReluReport:
    """How many ReLUs, other activations and opaque operations the autograd graph of a score has."""

    relus: Counter[str] = field(default_factory=Counter)
    other_activations: Counter[str] = field(default_factory=Counter)
    opaque_operations: Counter[str] = field(default_factory=Counter)


def apply_relu_rule(values: Iterable[Tensor], rule: ReluRule) -> ReluReport:
    """Replace the backward rule of all ReLUs in the autograd graph of some values. Return a report on the ReLUs.

    "guided" keeps positive gradients where the input is positive. "deconvnet" keeps all positive gradients. The hooks
    belong to this graph, so the model has none, and other threads are not affected.
    """
    report = ReluReport()
    for node in iter_graph_nodes(values):
        kind = get_operation_name(node)
        if hiding := describe_opaque_node(node):
            report.opaque_operations[hiding] += 1
        elif kind == "Relu" or (kind in RELU_FLOOR_ATTRIBUTES and _is_zero(getattr(node, RELU_FLOOR_ATTRIBUTES[kind]))):
            report.relus[{"Hardtanh": "relu6", "ClampMin": "clamp"}.get(kind, kind.lower())] += 1
            if rule == "guided":
                node.register_prehook(_clamp_to_positive)
            else:
                node.register_hook(lambda inputs, outputs: (*_clamp_to_positive(outputs), *inputs[1:]))
        elif kind in ACTIVATION_BY_NODE_NAME:
            report.other_activations[ACTIVATION_BY_NODE_NAME[kind]] += 1
    return report


def _is_zero(bound: object) -> bool:
    return not bool(bound.any()) if isinstance(bound, Tensor) else bound == 0


def _clamp_to_positive(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.clamp(min=0) for gradient in gradients)
