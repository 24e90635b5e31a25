"""Record the inputs, outputs and gradients of layers inside a `with`, or extract layer outputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node, get_gradient_edge

from camscope.errors import LayerError, warn_caller
from camscope.hooks.base import (
    Hooks,
    check_initialized,
    evaluation_mode,
    find_layers,
    is_recomputing,
    reentrant_checkpoints_disabled,
    register_gradient_hook,
    thread_local_hook,
    unwrap,
)
from camscope.plurals import plural
from camscope.pytree import LeafPath, find_main_tensor, iter_leaves, map_leaves, replace_leaf


class GradientAccumulator:
    """The gradient at one tensor, summed over the paths on which it arrives in one backward pass. The last pass counts.

    A view that is changed in place gets another node in the graph, and the old node receives part of its gradient or none. That
    is detected by the view's version counter, and no gradient is returned then.
    """

    def __init__(self, tensor: Tensor, take_snapshot: Callable[[Tensor], Tensor]) -> None:
        self._take_snapshot = take_snapshot
        self._alias = tensor.detach() if tensor._is_view() else None
        self._version = tensor._version
        self._backward_pass_id, self._was_lost = -1, False
        self._sum: Tensor | None = None

    def add_gradient(self, gradient: Tensor | None) -> None:
        """Add a gradient that arrives at the tensor."""
        if gradient is None:
            return
        this_pass, copy = torch._C._current_graph_task_id(), self._take_snapshot(gradient)
        self._sum = copy if self._sum is None or this_pass != self._backward_pass_id else self._sum + copy
        self._backward_pass_id = this_pass

    def add_node_gradient(self, index: int, input_gradients: tuple[Tensor | None, ...], _: object) -> None:
        """Add the gradient that a graph node sends to its input number `index`."""
        self.add_gradient(input_gradients[index])

    @property
    def is_lost(self) -> bool:
        """Whether the gradient is unknown, because the tensor is a view that was changed in place."""
        return self._was_lost or (self._alias is not None and self._alias._version != self._version)

    @property
    def gradient(self) -> Tensor | None:
        """The total gradient, or None if no gradient arrived."""
        return None if self.is_lost else self._sum

    def release_view(self) -> None:
        """Release the tensor's memory."""
        self._was_lost, self._alias = self.is_lost, None


@dataclass(eq=False)
class _Gradients:
    """The gradients at the tensors of a structure, each in its own accumulator."""

    structure: Any = None
    accumulators: dict[LeafPath, GradientAccumulator] = field(default_factory=dict)

    def fill_structure(self) -> Any:
        """Return the structure with gradients in place of the tensors."""
        result = self.structure
        for path, accumulator in self.accumulators.items():
            result = replace_leaf(result, path, accumulator.gradient)
        return result


@dataclass(eq=False)
class LayerCall:
    """One call of one layer: snapshots of its inputs and outputs, in the dtypes of the model.

    Attributes:
        inputs: The positional inputs. None: not recorded.
        kwargs: The keyword inputs. None: not recorded.
        output: The output. None: not recorded.

    >>> model = nn.Sequential(nn.ReLU())
    >>> with record_layers(model, "0", inputs=True) as recording:
    ...     _ = model(torch.tensor([[-1.0, 2.0]]))
    >>> call = recording["0"].calls[0]
    >>> call.inputs[0].tolist(), call.output.tolist()
    ([[-1.0, 2.0]], [[0.0, 2.0]])

    """

    inputs: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    output: Any = None
    _at_inputs: _Gradients = field(default_factory=lambda: _Gradients(((), {})), repr=False)
    _at_output: _Gradients = field(default_factory=_Gradients, repr=False)

    @property
    def gradient(self) -> Any:
        """The gradient with respect to the output, in the structure of the output. None: no gradient arrived."""
        return self._at_output.fill_structure()

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """The gradients with respect to the positional inputs, through this call alone."""
        return tuple(self._at_inputs.fill_structure()[0])

    @property
    def kwarg_gradients(self) -> dict[str, Any]:
        """The gradients with respect to the keyword inputs, through this call alone."""
        return dict(self._at_inputs.fill_structure()[1])

    def iter_accumulators(self) -> Iterator[GradientAccumulator]:
        """Yield every gradient accumulator of the call."""
        return chain(self._at_inputs.accumulators.values(), self._at_output.accumulators.values())


class LayerRecord:
    """All calls of one layer, in the order in which they ended. The properties refer to the last one.

    Args:
        name: Name of the layer.
        recorded_kinds: What is recorded: "inputs", "outputs", "gradients".

    >>> layer = nn.ReLU()
    >>> model = nn.Sequential(layer, layer)
    >>> with record_layers(model, "0") as recording:
    ...     _ = model(torch.ones(1, 2))
    >>> recording["0"].name, len(recording["0"].calls)
    ('0', 2)

    """

    def __init__(self, name: str, recorded_kinds: frozenset[str]) -> None:
        self.name, self.calls = name, list[LayerCall]()
        self._recorded_kinds = recorded_kinds

    @property
    def last_call(self) -> LayerCall:
        """The last call."""
        if not self.calls:
            raise LayerError(f"layer {self.name!r} did not run inside the `with`")
        return self.calls[-1]

    @property
    def output(self) -> Any:
        """The output of the layer in its last call, in the same structure."""
        return self.last_call.output if "outputs" in self._recorded_kinds else self._raise_not_recorded("outputs")

    @property
    def input(self) -> Any:
        """The positional input of the last call, or a tuple of several inputs."""
        inputs = self.last_call.inputs
        return _unwrap_single(inputs) if inputs is not None else self._raise_not_recorded("inputs")

    @property
    def gradient(self) -> Any:
        """The gradient with respect to `output`, of the same shape."""
        return self._check_gradient(self.last_call.gradient, "output")

    @property
    def input_gradient(self) -> Any:
        """The gradient with respect to `input`, through this layer alone."""
        return self._check_gradient(_unwrap_single(self.last_call.input_gradients), "input")

    def _check_gradient(self, gradient: object, location: str) -> Any:
        if "gradients" not in self._recorded_kinds:
            self._raise_not_recorded("gradients")
        if next(iter_leaves(gradient), None) is not None:
            return gradient
        if any(accumulator.is_lost for accumulator in self.last_call.iter_accumulators()):
            changed = "is a view that the model changes in place"
            raise LayerError(f"the {location} of layer {self.name!r} {changed}: no gradient")
        raise LayerError(
            f"no gradient at the {location} of layer {self.name!r}: inside the `with`, run the model with gradients enabled "
            f"and call backward; a tensor at or before the {location} must require gradients"
        )

    def _raise_not_recorded(self, kind: str) -> NoReturn:
        raise LayerError(f"{kind} of layer {self.name!r} were not recorded: pass {kind}=True to record_layers")

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        text = f"{self.name or '(model)'}  {plural(len(self.calls), 'call')}"
        if not self.calls:
            return text
        gradient = self.last_call.gradient if "gradients" in self._recorded_kinds else None
        values = [("input", self.last_call.inputs), ("output", self.last_call.output), ("gradient", gradient)]
        return text + "".join(f"  {what} {_format_shapes(value)}" for what, value in values if _format_shapes(value))


class Recording(dict[str, LayerRecord]):
    """Layers by name, in the model's order. A layer that never ran has no calls.

    recording["layer4"].output, recording["layer4"].input, recording["layer4"].gradient  # of the last call
    recording["layer4"].calls[0].output                                                  # of any call

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with record_layers(model, ["0", "1"]) as recording:
    ...     _ = model(torch.ones(1, 2))
    >>> {name: tuple(record.output.shape) for name, record in recording.items()}
    {'0': (1, 3), '1': (1, 3)}
    """

    def __missing__(self, name: object) -> NoReturn:
        raise LayerError(f"layer {name!r} was not recorded; recorded layers: {', '.join(map(repr, self)) or 'none'}")

    def __repr__(self) -> str:
        return "\n".join([f"Recording of {plural(len(self), 'layer')}", *map(repr, self.values())])


def _unwrap_single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _format_shapes(value: object) -> str:
    return " ".join(f"({', '.join(map(str, leaf.shape))})" for _, leaf in iter_leaves(value))


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
    """Record copies of the inputs, outputs and gradients of layers inside the `with`.

    ::

        with record_layers(model, ["layer3", "layer4.*.bn2"], inputs=True, gradients=True) as recording:
            model(x)[:, 3].sum().backward()
        recording["layer3"].input, recording["layer3"].output, recording["layer3"].gradient

    The values equal those of PyTorch's full backward hooks. Those put a node around the layer, so an in-place operation next
    to it (ResNet's ReLU, `+=`) raises an error. This recorder inserts nothing.

    Args:
        model: The model.
        layers: Names, glob patterns or modules.
        inputs: Whether to record inputs.
        outputs: Whether to record outputs.
        gradients: Whether to record gradients. They need a backward pass (`.backward()` or `torch.autograd.grad`)
            inside the `with`.
        device: Where snapshots are stored, or None for the device of the layer.

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
            recorder.watch_layer(module, recording[name])
        yield recording
    recorder.warn_of_lost_gradients()


def extract_features(
    model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module], x: Tensor | tuple[Any, ...]
) -> dict[str, Tensor]:
    """Return the outputs of layers by name, such as feature maps (N,K,h,w), from one forward pass in eval mode.

    Args:
        model: The model.
        layers: Names, glob patterns or modules.
        x: The input (N,C,H,W), or a tuple of inputs.

    Returns:
        The output of each layer. Of several tensors it is the floating one of highest rank.

    Raises:
        LayerError: A layer is unknown, or does not run.

    >>> features = extract_features(nn.Sequential(nn.Conv2d(3, 8, 3)), "0", torch.zeros(1, 3, 5, 5))
    >>> features["0"].shape
    torch.Size([1, 8, 3, 3])

    """
    check_initialized(unwrap(model))
    with evaluation_mode(unwrap(model)), torch.no_grad(), record_layers(model, layers, device=None) as recording:
        model(*(x if isinstance(x, tuple) else (x,)))
    return {name: find_main_tensor(name, layer.output)[1] for name, layer in recording.items()}


class _Recorder(Hooks):
    """The hooks of a recording: one before a layer runs, one after it. Both only read."""

    def __init__(self, inputs: bool, outputs: bool, gradients: bool, device: torch.device | None) -> None:
        super().__init__()
        kinds = {"inputs": inputs, "outputs": outputs, "gradients": gradients}
        self.recorded_kinds = frozenset(kind for kind, enabled in kinds.items() if enabled)
        self._device, self._accumulators = device, list[tuple[str, GradientAccumulator]]()
        self.callback(self._release_views)

    def watch_layer(self, module: nn.Module, layer: LayerRecord) -> None:
        running: list[OpenCall] = []  # a stack: a module may run inside itself
        before, after = partial(self._begin_call, running), partial(self._end_call, running, layer)
        self.add_handle(module.register_forward_pre_hook(thread_local_hook(before), with_kwargs=True))
        self.add_handle(module.register_forward_hook(thread_local_hook(after), with_kwargs=True))

    def _release_views(self) -> None:
        for _, accumulator in self._accumulators:
            accumulator.release_view()

    def warn_of_lost_gradients(self) -> None:
        """Warn of gradients that could not be recorded."""
        if lost := sorted({name for name, accumulator in self._accumulators if accumulator.is_lost}):
            names = ", ".join(map(repr, lost))
            reason = "its input or output is a view that the model changes in place"
            warn_caller(f"no gradient recorded at {names}: {reason}")

    def _begin_call(
        self, open_calls: list[OpenCall], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_recomputing():
            return
        inputs, call = (args, kwargs), LayerCall()
        if "inputs" in self.recorded_kinds:  # before the layer runs: it may write over its input
            call.inputs, call.kwargs = map_leaves(inputs, self._take_snapshot)
        edges: dict[LeafPath, GraphEdge] = {}
        if "gradients" in self.recorded_kinds:
            call._at_inputs = self._accumulate_gradients(inputs)
            edges = {path: _find_edge(leaf) for path, leaf in _iter_differentiable_tensors(inputs)}
        open_calls.append((call, edges, _get_sequence_nr()))

    def _end_call(
        self, open_calls: list[OpenCall], layer: LayerRecord, module: nn.Module, *inputs_and_output: Any
    ) -> None:
        if is_recomputing():
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
        """Add hooks that record the gradients of the output and of the inputs of one call."""
        at_inputs, nodes = call._at_inputs.accumulators, list[Node]()
        for path, leaf in _iter_differentiable_tensors(output):
            self.add_handle(register_gradient_hook(leaf, call._at_output.accumulators[path].add_gradient))
            edge = _find_edge(leaf)
            nodes.append(edge[0])
            for input_path, accumulator in at_inputs.items():
                if edges[input_path] == edge:  # the layer hands its input on
                    self.add_handle(register_gradient_hook(leaf, accumulator.add_gradient))
        for path, node, index in _iter_gradient_senders(nodes, edges, start_sequence_number):
            self.add_handle(node.register_hook(partial(at_inputs[path].add_node_gradient, index)))

    def _accumulate_gradients(self, value: Any) -> _Gradients:
        leaves = _iter_differentiable_tensors(value)
        accumulators = {path: GradientAccumulator(leaf, self._take_snapshot) for path, leaf in leaves}
        return _Gradients(map_leaves(value, lambda _: None), accumulators)

    def _take_snapshot(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(self._device if self._device is not None else tensor.device, copy=True)


def _iter_differentiable_tensors(value: object) -> Iterator[tuple[LeafPath, Tensor]]:
    leaves = iter_leaves(value) if torch.is_grad_enabled() else ()
    return ((path, leaf) for path, leaf in leaves if leaf.requires_grad)


def _find_edge(tensor: Tensor) -> GraphEdge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _iter_gradient_senders(
    output_nodes: list[Node], edges: dict[LeafPath, GraphEdge], start_sequence_number: int
) -> Iterator[tuple[LeafPath, Node, int]]:
    """Yield the graph nodes of one layer call that send a gradient to an input: (path, node, index)."""
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
                yield from ((path, node, index) for path in paths)
                output_nodes += [] if paths else [next_node]
