"""Record what goes into layers, what comes out and what flows back; or just take their outputs.

What a recording holds: layers, their calls, and what went in, came out and flowed back in each.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node, get_gradient_edge

from camscope.errors import LayerError, warn_caller
from camscope.hooks.base import (
    Hooks,
    evaluating,
    expect_initialized,
    find_layers,
    here_only,
    on_gradient,
    plain_checkpoints,
    recomputing,
    unwrap,
)
from camscope.plurals import plural
from camscope.pytree import Path, leaves, mapped, replaced, the_tensor

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


Edge = tuple[Node | None, int]


@contextmanager
def record(
    model: nn.Module,
    layers: str | nn.Module | Iterable[str | nn.Module],
    *,
    inputs: bool = False,
    outputs: bool = True,
    gradients: bool = False,
    device: torch.device | str | None = "cpu",
) -> Iterator[Recording]:
    """Snapshots of layers' inputs, outputs and gradients inside the `with`; the model computes what it always does.

        with record(model, ["layer3", "layer4.*.bn2"], inputs=True, gradients=True) as rec:
            model(x)[:, 3].sum().backward()
        rec["layer3"].input, rec["layer3"].output, rec["layer3"].gradient, rec["layer3"].input_gradient

    `layers`: names, glob patterns or modules. `inputs`, `outputs`, `gradients`: what to keep; gradients need a backward
    pass (`.backward()` or `torch.autograd.grad`) inside the `with`. `device`: where snapshots are kept, None: where
    they arise. An unknown layer is a LayerError.

    The numbers are those of PyTorch's full backward hooks, without their price: those put a node of their own around
    the layer, and an in-place operation next to it (ResNet's ReLU, `+=`) then raises. Here nothing is put anywhere.
    """
    recorder = _Recorder(inputs, outputs, gradients, None if device is None else torch.device(device))
    recording = Recording()
    with recorder:
        if gradients:
            recorder.enter_context(plain_checkpoints())
        for name, module in find_layers(model, layers).items():
            recording[name] = LayerRecord(name, recorder.wanted)
            recorder.watch(module, recording[name])
        yield recording
    recorder.warn_of_lost()


def extract(
    model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module], x: Tensor | tuple[Any, ...]
) -> dict[str, Tensor]:
    """Feature maps (N,K,h,w), or what the layers return, by name: of their last call in one forward pass in eval mode.

    `layers`: names, glob patterns or modules. `x`: the input (N,C,H,W), or a tuple of inputs. Of a layer that returns
    several tensors the floating one of highest rank is taken. A layer that does not run is a LayerError.
    """
    expect_initialized(unwrap(model))
    with evaluating(unwrap(model)), torch.no_grad(), record(model, layers, device=None) as recording:
        model(*(x if isinstance(x, tuple) else (x,)))
    return {name: the_tensor(name, layer.output)[1] for name, layer in recording.items()}


@dataclass(eq=False)
class _Running:
    """A call that has begun: its record, where in the graph its inputs are, and how long the graph is so far."""

    call: Call
    edges: dict[Path, Edge]
    since: int


class _Recorder(Hooks):
    """The hooks behind a recording: one before a layer runs, one after; both only look."""

    def __init__(self, inputs: bool, outputs: bool, gradients: bool, device: torch.device | None) -> None:
        super().__init__()
        kinds = {"inputs": inputs, "outputs": outputs, "gradients": gradients}
        self.wanted = frozenset(kind for kind, asked in kinds.items() if asked)
        self._device = device
        self._flows: list[tuple[str, Flow]] = []
        self.callback(self._settle)

    def watch(self, module: nn.Module, layer: LayerRecord) -> None:
        running: list[_Running] = []  # a stack: a module may run inside itself
        before, after = partial(self._before, running), partial(self._after, running, layer)
        self.hold(module.register_forward_pre_hook(here_only(before), with_kwargs=True))
        self.hold(module.register_forward_hook(here_only(after), with_kwargs=True))

    def _settle(self) -> None:
        for _, flow in self._flows:
            flow.settle()

    def warn_of_lost(self) -> None:
        """Say which gradients could not be told."""
        if lost := sorted({name for name, flow in self._flows if flow.lost}):
            names = ", ".join(map(repr, lost))
            text = f"no gradient recorded at {names}: its input or output is a view that the model changes in place"
            warn_caller(text)

    def _before(
        self, running: list[_Running], module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        if recomputing():
            return
        taken, call = (args, keywords), Call()
        if "inputs" in self.wanted:
            # before the layer runs: it may write over its input
            call.inputs, call.keywords = mapped(taken, self._copy)
        edges: dict[Path, Edge] = {}
        if "gradients" in self.wanted:
            call._frames = (frame(taken), None)
            for path, leaf in _connected(taken):
                edge = get_gradient_edge(leaf)
                edges[path] = (edge.node, edge.output_nr)
                call._flows[0][path] = Flow(leaf, self._copy)
        running.append(_Running(call, edges, _get_sequence_nr()))

    def _after(self, running: list[_Running], layer: LayerRecord, module: nn.Module, *taken_and_output: Any) -> None:
        if recomputing():
            return
        run, output = running.pop(), taken_and_output[-1]
        if "outputs" in self.wanted:
            run.call.output = mapped(output, self._copy)
        if "gradients" in self.wanted:
            run.call._frames = (run.call._frames[0], frame(output))
            self._follow(run, output)
            self._flows += [(layer.name, flow) for flow in run.call.flows()]
        layer.calls.append(run.call)

    def _follow(self, run: _Running, output: object) -> None:
        """Tensor hooks where the output's gradient arrives, node hooks where this call sends its inputs theirs."""
        into, out_of = run.call._flows
        ends: list[Node] = []
        for path, leaf in _connected(output):
            out_of[path] = Flow(leaf, self._copy)
            self.hold(on_gradient(leaf, out_of[path].add))
            edge = get_gradient_edge(leaf)
            ends.append(edge.node)
            for at, flow in into.items():
                if run.edges[at] == (edge.node, edge.output_nr):  # the layer hands its input on
                    self.hold(on_gradient(leaf, flow.add))
        for at, sender, index in _senders(ends, run.edges, run.since):
            self.hold(sender.register_hook(partial(_pass_on, into[at], index)))

    def _copy(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(self._device if self._device is not None else tensor.device, copy=True)


def _connected(value: object) -> Iterator[tuple[Path, Tensor]]:
    return ((path, leaf) for path, leaf in leaves(value) if leaf.requires_grad) if torch.is_grad_enabled() else iter(())


def _pass_on(flow: Flow, index: int, sent: tuple[Tensor | None, ...], received: object) -> None:
    flow.add(sent[index])


def _senders(ends: list[Node], edges: dict[Path, Edge], since: int) -> Iterator[tuple[Path, Node, int]]:
    """The nodes between a call's output and its inputs that send gradients to an input, each with the place in its sum.

    Only what was built since the call began is walked through.
    """
    wanted: dict[Edge, list[Path]] = {}
    for path, edge in edges.items():
        wanted.setdefault(edge, []).append(path)
    seen: set[Node] = set()
    while ends:
        node = ends.pop()
        if node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        for index, (behind, number) in enumerate(node.next_functions):
            for path in wanted.get((behind, number), ()):
                yield path, node, index
            if behind is not None and (behind, number) not in wanted:
                ends.append(behind)
