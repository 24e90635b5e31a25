"""Record the inputs, outputs and gradients of layers inside a `with`, or extract layer outputs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node, get_gradient_edge

from camscope.errors import warn_caller
from camscope.hooks.find_layers import check_lazy_layers_initialized, find_layers, unwrap
from camscope.hooks.recorded_layer_calls import GradientAccumulator, LayerCall, LayerRecord, Recording, TensorGradients
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from camscope.hooks.thread_local_hooks import (
    Hooks,
    is_in_backward_pass,
    reentrant_checkpoints_disabled,
    register_gradient_hook,
    thread_local_hook,
)
from camscope.pytree import LeafPath, find_main_tensor, iter_leaves, map_leaves

GraphEdge = tuple[Node, int]
# a call that has begun, the graph edges of its inputs, and the sequence number of the graph at its start
OpenCall = tuple[LayerCall, dict[LeafPath, GraphEdge], int]


@contextmanager
def record_layers(
    model: nn.Module,
    layers: str | nn.Module | Iterable[str | nn.Module],
    *,
    inputs: bool = False,
    outputs: bool = True,
    gradients: bool = False,
    device: torch.device | str | None = "cpu",
) -> Iterator[Recording]:
    """Record the inputs, outputs and gradients of layers inside the `with`. The records are copies.

    ::

        with record_layers(model, ["layer3", "layer4.*.bn2"], inputs=True, gradients=True) as recording:
            model(x)[:, 3].sum().backward()
        recording["layer3"].input, recording["layer3"].output, recording["layer3"].gradient

    The gradients equal those of PyTorch's full backward hooks. Those hooks put a node around the layer, so that an
    in-place operation next to it (ResNet's ReLU, `+=`) raises an error. This function adds no node.

    Args:
        model: The model.
        layers: Names, glob patterns or modules.
        inputs: Whether to record inputs.
        outputs: Whether to record outputs.
        gradients: Whether to record gradients. They need a backward pass (`.backward()` or `torch.autograd.grad`)
            inside the `with`.
        device: Device on which the copies are stored, or None for the device of the layer.

    Yields:
        The recording: a `LayerRecord` by the name of each layer.

    Raises:
        LayerError: A layer is unknown.

    >>> model = nn.Sequential(nn.ReLU())
    >>> with record_layers(model, "0") as recording:
    ...     scores = model(torch.tensor([[-1.0, 2.0]]))
    >>> recording["0"].output.tolist()
    [[0.0, 2.0]]

    """
    recorder = _Recorder(inputs, outputs, gradients, None if device is None else torch.device(device))
    recording = Recording()
    with recorder:
        if gradients:
            recorder.enter_context(reentrant_checkpoints_disabled())
        for name, module in find_layers(model, layers).items():
            recording[name] = LayerRecord(name, recorder.recorded_kinds)
            recorder.hook_layer(module, recording[name])
        yield recording
    recorder.warn_of_lost_gradients()


def extract_features(
    model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module], x: Tensor | tuple[Any, ...]
) -> dict[str, Tensor]:
    """Run one forward pass in eval mode. Return the outputs of layers by name, such as feature maps (N,K,h,w).

    Args:
        model: The model.
        layers: Names, glob patterns or modules.
        x: The input (N,C,H,W), or a tuple of inputs.

    Returns:
        The output of each layer. If a layer returns several tensors, it is the floating tensor of highest rank.

    Raises:
        LayerError: A layer is unknown, or does not run.

    >>> features = extract_features(nn.Sequential(nn.Conv2d(3, 8, 3)), "0", torch.zeros(1, 3, 5, 5))
    >>> features["0"].shape
    torch.Size([1, 8, 3, 3])

    """
    check_lazy_layers_initialized(unwrap(model))
    with evaluation_mode(unwrap(model)), torch.no_grad(), record_layers(model, layers, device=None) as recording:
        model(*(x if isinstance(x, tuple) else (x,)))
    return {name: find_main_tensor(name, layer.output)[1] for name, layer in recording.items()}


class _Recorder(Hooks):
    """The hooks that record a layer: one runs before the layer, one after it. Neither hook changes the layer's values."""

    def __init__(self, inputs: bool, outputs: bool, gradients: bool, device: torch.device | None) -> None:
        super().__init__()
        kinds = {"inputs": inputs, "outputs": outputs, "gradients": gradients}
        self.recorded_kinds = frozenset(kind for kind, enabled in kinds.items() if enabled)
        self._device, self._accumulators = device, list[tuple[str, GradientAccumulator]]()
        self.callback(self._release_views)

    def hook_layer(self, module: nn.Module, layer: LayerRecord) -> None:
        """Add hooks to a module that record its calls in `layer`."""
        running: list[OpenCall] = []  # a stack: a module may run inside itself
        before, after = (
            partial(self._start_recording_call, running),
            partial(self._finish_recording_call, running, layer),
        )
        self.add_handle(module.register_forward_pre_hook(thread_local_hook(before), with_kwargs=True))
        self.add_handle(module.register_forward_hook(thread_local_hook(after), with_kwargs=True))

    def _release_views(self) -> None:
        for _, accumulator in self._accumulators:
            accumulator.release_view()

    def warn_of_lost_gradients(self) -> None:
        """Warn if the gradients of a layer are lost. The cause is a view of the tensor that was changed in place."""
        if lost := sorted({name for name, accumulator in self._accumulators if accumulator.is_gradient_lost}):
            names = ", ".join(map(repr, lost))
            reason = "its input or output is a view that the model changes in place"
            warn_caller(f"no gradient recorded at {names}: {reason}")

    def _start_recording_call(
        self, open_calls: list[OpenCall], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the inputs of a call before the layer runs, and prepare its input gradients."""
        if is_in_backward_pass():
            return
        inputs, call = (args, kwargs), LayerCall()
        if "inputs" in self.recorded_kinds:  # before the layer runs: it may write over its input
            call.inputs, call.kwargs = map_leaves(inputs, self._take_snapshot)
        edges: dict[LeafPath, GraphEdge] = {}
        if "gradients" in self.recorded_kinds:
            call._at_inputs = self._accumulate_gradients(inputs)
            edges = {path: _find_gradient_edge(leaf) for path, leaf in _iter_differentiable_tensors(inputs)}
        open_calls.append((call, edges, _get_sequence_nr()))

    def _finish_recording_call(
        self, open_calls: list[OpenCall], layer: LayerRecord, module: nn.Module, *inputs_and_output: Any
    ) -> None:
        """Record the output of a call after the layer ran, and prepare its gradients."""
        if is_in_backward_pass():
            return
        (call, edges, start), output = open_calls.pop(), inputs_and_output[-1]
        if "outputs" in self.recorded_kinds:
            call.output = map_leaves(output, self._take_snapshot)
        if "gradients" in self.recorded_kinds:
            call._at_output = self._accumulate_gradients(output)
            self._hook_gradients(call, edges, start, output)
            self._accumulators += [(layer.name, accumulator) for accumulator in call.iter_accumulators()]
        layer.calls.append(call)

    def _hook_gradients(
        self, call: LayerCall, edges: dict[LeafPath, GraphEdge], start_sequence_number: int, output: object
    ) -> None:
        """Add hooks that record the gradients of a layer call, both at its output and at its inputs."""
        at_inputs, nodes = call._at_inputs.accumulators, list[Node]()
        for path, leaf in _iter_differentiable_tensors(output):
            self.add_handle(register_gradient_hook(leaf, call._at_output.accumulators[path].add_gradient))
            edge = _find_gradient_edge(leaf)
            nodes.append(edge[0])
            for input_path, accumulator in at_inputs.items():
                if edges[input_path] == edge:  # the layer hands its input on
                    self.add_handle(register_gradient_hook(leaf, accumulator.add_gradient))
        for sender in _iter_gradient_senders(nodes, edges, start_sequence_number):
            add_gradient = partial(at_inputs[sender.input_path].add_node_gradient, sender.node_input_index)
            self.add_handle(sender.node.register_hook(add_gradient))

    def _accumulate_gradients(self, value: Any) -> TensorGradients:
        leaves = _iter_differentiable_tensors(value)
        accumulators = {path: GradientAccumulator(leaf, self._take_snapshot) for path, leaf in leaves}
        return TensorGradients(map_leaves(value, lambda _: None), accumulators)

    def _take_snapshot(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(self._device if self._device is not None else tensor.device, copy=True)


def _iter_differentiable_tensors(value: object) -> Iterator[tuple[LeafPath, Tensor]]:
    leaves = iter_leaves(value) if torch.is_grad_enabled() else ()
    return ((path, leaf) for path, leaf in leaves if leaf.requires_grad)


def _find_gradient_edge(tensor: Tensor) -> GraphEdge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class GradientSender(NamedTuple):
    """A graph node that sends a gradient to an input of a layer, and at which index of the node's inputs."""

    input_path: LeafPath
    node: Node
    node_input_index: int


def _iter_gradient_senders(
    output_nodes: list[Node], edges: dict[LeafPath, GraphEdge], start_sequence_number: int
) -> Iterator[GradientSender]:
    """Yield the graph nodes inside one layer call that send a gradient to an input of the layer."""
    paths_by_edge: dict[GraphEdge, list[LeafPath]] = {}
    for path, edge in edges.items():
        paths_by_edge.setdefault(edge, []).append(path)
    visited: set[Node] = set()
    while output_nodes:
        node = output_nodes.pop()
        if node in visited or node._sequence_nr() < start_sequence_number:
            continue
        visited.add(node)
        for index, (next_node, number) in enumerate(node.next_functions):
            if next_node is not None:
                paths = paths_by_edge.get((next_node, number), [])
                yield from (GradientSender(path, node, index) for path in paths)
                output_nodes += [] if paths else [next_node]
