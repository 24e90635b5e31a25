"""What a recording holds: layers, their calls, and what went in, came out and flowed back in each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.structure import Path, leaves, mapped, replaced
from camscope.wording import plural

Copy = Callable[[Tensor], Tensor]


class Flow:
    """The gradient at one tensor, summed over the ways by which it arrives in one backward pass; the last pass counts.

    A view that is changed in place afterwards gets another place in the graph, and the old one receives a part of its
    gradient or none: that is noticed (the alias shares the view's version counter), and no number is better than it.
    """

    def __init__(self, tensor: Tensor, copy: Copy) -> None:
        self._copy = copy
        self._alias = tensor.detach() if tensor._is_view() else None
        self._version = tensor._version
        self._pass, self._sum = -1, None
        self._lost = False

    _sum: Tensor | None

    def add(self, gradient: Tensor | None) -> None:
        """Take in what arrives by one way."""
        if gradient is None:
            return
        this_pass, copy = torch._C._current_graph_task_id(), self._copy(gradient)
        self._sum = copy if self._sum is None or this_pass != self._pass else self._sum + copy
        self._pass = this_pass

    @property
    def lost(self) -> bool:
        """Whether the tensor was a view that has been changed in place."""
        return self._lost or (self._alias is not None and self._alias._version != self._version)

    @property
    def gradient(self) -> Tensor | None:
        """The whole gradient; None where none arrived."""
        return None if self.lost else self._sum

    def settle(self) -> None:
        """Let go of the model's memory; what is lost stays lost."""
        self._lost, self._alias = self.lost, None


@dataclass(eq=False)
class Call:
    """One call of one layer: snapshots of what went in and came out, of the types that the model used.

    `inputs` are the positional ones, `keywords` the others; None means not recorded.
    """

    inputs: tuple[Any, ...] | None = None
    keywords: dict[str, Any] | None = None
    output: Any = None
    _frames: tuple[Any, Any] = field(default=(((), {}), None), repr=False)
    _flows: tuple[dict[Path, Flow], dict[Path, Flow]] = field(default_factory=lambda: ({}, {}), repr=False)

    @property
    def gradient(self) -> Any:
        """Gradient of what was differentiated with respect to the output, in its structure; None where none arrived."""
        return _filled(self._frames[1], self._flows[1])

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """Gradients that flow back to the positional inputs through this call alone, in their structure."""
        gradients: tuple[Any, ...] = _filled(self._frames[0], self._flows[0])[0]
        return gradients

    @property
    def keyword_gradients(self) -> dict[str, Any]:
        """Gradients that flow back to the keyword inputs through this call alone."""
        gradients: dict[str, Any] = _filled(self._frames[0], self._flows[0])[1]
        return gradients

    def flows(self) -> Iterator[Flow]:
        """Every gradient that is watched."""
        for side in self._flows:
            yield from side.values()


class LayerRecord:
    """All calls of one layer, in the order in which they ended; the short names speak of the last one."""

    def __init__(self, name: str, wanted: frozenset[str]) -> None:
        self.name, self.calls = name, list[Call]()
        self._wanted = wanted

    @property
    def last(self) -> Call:
        """The last call."""
        if not self.calls:
            raise LayerError(f"layer {self.name!r} has not run inside the recording")
        return self.calls[-1]

    @property
    def output(self) -> Any:
        """What the layer returned, of the same type."""
        return self.last.output if "outputs" in self._wanted else self._refuse("outputs")

    @property
    def input(self) -> Any:
        """What went in: the only positional input by itself, else the tuple of them."""
        inputs = self.last.inputs
        return _single(inputs) if inputs is not None else self._refuse("inputs")

    @property
    def gradient(self) -> Any:
        """Gradient with respect to `output`, of the same shape."""
        return self._arrived(self.last.gradient, "output")

    @property
    def input_gradient(self) -> Any:
        """Gradient that flows back to `input` through this layer alone (what other users of it send back is not in)."""
        return self._arrived(_single(self.last.input_gradients), "input")

    def _arrived(self, gradient: object, where: str) -> Any:
        if "gradients" not in self._wanted:
            self._refuse("gradients")
        if next(leaves(gradient), None) is not None:
            return gradient
        if any(flow.lost for flow in self.last.flows()):
            raise LayerError(
                f"the {where} of layer {self.name!r} is a view that the model changes in place: no gradient"
            )
        raise LayerError(
            f"no gradient at the {where} of layer {self.name!r}: inside the recording, run the model with gradients on "
            f"(something at or before the {where} must require them) and call backward"
        )

    def _refuse(self, kind: str) -> NoReturn:
        raise LayerError(f"{kind} of layer {self.name!r} were not recorded; ask for record(…, {kind}=True)")

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        text = f"{self.name or '(model)'}  {plural(len(self.calls), 'call')}"
        if not self.calls:
            return text
        gradient = self.last.gradient if "gradients" in self._wanted else None
        shown = [("input", self.last.inputs), ("output", self.last.output), ("gradient", gradient)]
        return text + "".join(f"  {what} {_shapes(value)}" for what, value in shown if _shapes(value))


class Recording(dict[str, LayerRecord]):
    """Layers by name, in the model's order; a layer that never ran has no calls.

    rec["layer4"].output, rec["layer4"].input, rec["layer4"].gradient       # of the last call
    rec["layer4"].calls[0].output                                           # of any call
    """

    def __missing__(self, name: object) -> NoReturn:
        raise LayerError(f"layer {name!r} is not in this recording; it holds {', '.join(map(repr, self)) or 'none'}")

    def __repr__(self) -> str:
        return "\n".join([f"Recording of {plural(len(self), 'layer')}", *map(repr, self.values())])


def frame(value: Any) -> Any:
    """The structure with None in place of every tensor."""
    return mapped(value, lambda _: None)


def _filled(structure: Any, flows: dict[Path, Flow]) -> Any:
    for path, flow in flows.items():
        structure = replaced(structure, path, flow.gradient)
    return structure


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _shapes(value: object) -> str:
    return " ".join(f"({', '.join(map(str, leaf.shape))})" for _, leaf in leaves(value))
