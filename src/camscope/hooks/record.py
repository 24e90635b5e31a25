"""Record what goes into layers, what comes out and what flows back; or just take their outputs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node, get_gradient_edge

from camscope.errors import warn_caller
from camscope.hooks.base import Hooks, evaluating, expect_initialized, find_layers, here_only, on_gradient, unwrap
from camscope.hooks.checkpoint import plain_checkpoints, recomputing
from camscope.hooks.recording import Call, Flow, LayerRecord, Recording, frame
from camscope.structure import Path, leaves, mapped, the_tensor

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
