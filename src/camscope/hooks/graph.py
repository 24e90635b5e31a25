"""The graph behind a tensor: every step that led to it, whoever called it, in a module, a function or in place."""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

HIDING = {
    "DifferentiableGraph": "a scripted part",
    "CopySlices": "an operation in place on a view",
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
    """What may hold other operations that cannot be seen: a scripted part, a function with a way back of its own."""
    kind = kind_of_step(node)
    step: object = node
    if isinstance(step, BackwardCFunction):  # of Python
        return f"the function {kind} with a way back of its own"
    return HIDING.get(kind)
