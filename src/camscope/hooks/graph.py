"""The graph behind a tensor: every step that led to it, whoever called it, in a module, a function or in place."""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

HIDING = {
    "DifferentiableGraph": "a scripted part",
    "CopySlices": "an operation in place on a view",
    "Where": "torch.where",
}


def steps(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Each step of the outputs' graph once, from the outputs on."""
    waiting = [output.grad_fn for output in outputs]
    seen: set[Node | None] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen and node is not None:
            seen.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def kind_of_step(node: Node) -> str:
    """The operation's name: "Relu" of ReluBackward0."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def hidden_in(node: Node) -> str | None:
    """What may hold, or stand for, operations that cannot be seen: a scripted part, a choice between two values."""
    kind = kind_of_step(node)
    step: object = node
    if isinstance(step, BackwardCFunction):  # of Python
        return f"the function {kind} with a way back of its own"
    if kind == "Mul" and any(_is_switch(getattr(node, f"_saved_{name}", None)) for name in ("self", "other")):
        return "a product with true and false"
    return HIDING.get(kind)


def _is_switch(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool
